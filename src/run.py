"""Training: from a configuration to live objects, a run that goes on where it stopped, and what came of it."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import LightningEnvironment
from omegaconf import DictConfig

from src import checkpoint as canonical
from src import elastic
from src.config import code_stamp, plain
from src.engine import engine_of
from src.files import replacing
from src.protocols import KnowsRun, StartsFrom
from src.report import summary

PRECISIONS = ("32-true", "bf16-mixed")
UNLOCKED = 120  # seconds: a process that was killed may leave loader processes with the lock, or on a lost node a lease


def build_model(config: DictConfig):
    """The module that `config.model` names, initialised from config.seed; the global generators stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return instantiate(config.model)


def train(config: DictConfig) -> None:
    """Train, or go on training, the run that this configuration names; where the launcher restarts processes, as the
    agent that starts them and does so.

    Raises ValueError for what the user can mend, before any training starts.
    """
    folder, overrides = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    quieten()
    _check(config)
    launcher = HydraConfig.get().launcher
    supervising = launcher.get("max_restarts") is not None and not elastic.under_agent()
    with locked(folder, wait=UNLOCKED if elastic.under_agent() else 15 if supervising else 0):
        done, _ = canonical.newest(folder / "checkpoints")
        if done is not None and int(done.name) >= config.total_kimg * 1000:
            if _is_main() and not (folder / "result.json").exists():  # killed just before it was written
                _write_result(folder, config.name, int(done.name), canonical.read(done)["metrics"])
            if _is_main():
                print(f"{config.name} is finished; raise total_kimg to go on\n{summary(folder, overrides)}")
            return
        data = instantiate(config.data)
        data.prepare_data()
        data.setup()
        model = build_model(config)
        if config.start is not None and done is None and not _begun(config, model, folder / "checkpoints"):
            return
        trainer = _trainer(config, supervising)
        data.check_split(engine_of(trainer).share(trainer)[1], config.micro_batch)
        if not supervising:
            if _is_main():
                if config.trainer.precision.startswith("bf16") and _emulates_bf16(trainer):
                    print("this CPU only emulates bfloat16, which is slow: trainer.precision=32-true is faster on it")
                images = f"{len(data.train)} training images{elastic.restarts()}"
                print(f"{config.name}: {model.describe()}, {images}", flush=True)
            trainer.fit(model, data)
            if trainer.is_global_zero:
                metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
                _write_result(folder, config.name, model.images_seen, metrics)
                print(summary(folder, overrides), flush=True)
            return
        count, nodes = trainer.num_devices, trainer.num_nodes
    del data, model, trainer  # which have shown that nothing is amiss
    elastic.supervise(count, nodes, launcher.max_restarts, launcher.grace_seconds, config.name)


def _emulates_bf16(trainer) -> bool:
    """Whether training runs on a CPU that is known to have no instructions for products of bfloat16."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    there = known.get("avx512_bf16") or known.get("amx_bf16")
    return trainer.strategy.root_device.type == "cpu" and known.get("architecture") == "x86_64" and not there


def _write_result(folder: Path, name: str, images: int, metrics: dict[str, float]) -> None:
    with replacing(folder / "result.json") as part:
        part.write_text(json.dumps({"name": name, "kimg": images / 1000, "metrics": metrics}, indent=1))


def _begun(config: DictConfig, model, checkpoints: Path) -> bool:
    """Begin with published weights; whether there is something to train.

    Those of a store are a model's first weights; others' checkpoints become the first of this run.
    """
    if isinstance(model, StartsFrom) and model.start_from(config.start):
        return True
    if not _is_main():
        return True
    if not hasattr(model, "published_state"):
        raise ValueError(f"start={config.start}: there are no published checkpoints for {type(model).__name__}")
    state = model.published_state(config.start) | {"config": plain(config)}
    canonical.load_weights(model, state["weights"], config.start)
    folder = canonical.folder_of(checkpoints, state["position"]["images"])
    canonical.write(folder, state, code_stamp(list(HydraConfig.get().overrides.task)))
    if state["optimizers"]:
        return True
    print(f"{config.start} holds weights alone; draw with them: python sample.py run={checkpoints.parent}")
    return False


def _trainer(config: DictConfig, supervising: bool = False):
    # a recipe's settings of a callback that was not chosen are no callback
    callbacks = [instantiate(c) for c in (config.get("callbacks") or {}).values() if "_target_" in c]
    loggers = [instantiate(c) for c in (config.get("logger") or {}).values()]
    known, stamp = plain(config), code_stamp(list(HydraConfig.get().overrides.task))
    for keeper in callbacks + loggers:
        if isinstance(keeper, KnowsRun):
            keeper.about_run(known, stamp)
    devices, nodes = elastic.processes(config.trainer.devices, config.trainer.num_nodes)
    # an agent is one task of SLURM's, whatever the number of its processes
    more = {"plugins": [LightningEnvironment()]} if supervising else {}
    return instantiate(
        config.trainer,
        devices=devices,
        num_nodes=nodes,
        callbacks=callbacks,
        logger=loggers or False,
        strategy=instantiate(config.strategy),
        enable_checkpointing="checkpoint" in (config.get("callbacks") or {}),
        **more,
    )


def _check(config: DictConfig) -> None:
    if config.get("ensemble") is not None:
        raise ValueError(
            "an ensemble is drawn from, not trained: python sample.py experiment=paris; what it is made of trains with "
            "experiment=paris_expert and experiment=paris_router"
        )
    for key in ("batch", "seed", "micro_batch"):
        if config[key] is not None and type(config[key]) is not int:
            raise ValueError(f"{key}={config[key]} must be a whole number")
    if config.trainer.precision not in PRECISIONS:
        raise ValueError(
            f"trainer.precision={config.trainer.precision} is not supported, since networks that take turns cannot "
            f"share one loss scale; choose {' or '.join(PRECISIONS)}"
        )
    devices, nodes = elastic.processes(config.trainer.devices, config.trainer.num_nodes)
    several = nodes != 1 or devices not in (1, "1", "auto", [0])
    if several and HydraConfig.get().runtime.choices.strategy == "single":
        asking = f"trainer.devices={devices} asks for" if not elastic.under_agent() else "torch's agent has started"
        raise ValueError(
            f"{asking} several processes, but strategy=single is one; choose strategy=ddp, or another of those in "
            f"conf/strategy"
        )
    if config.total_kimg > config.schedule_kimg:
        raise ValueError(
            f"total_kimg={config.total_kimg} goes beyond schedule_kimg={config.schedule_kimg}, where the learning "
            f"rate's schedule ends; raise schedule_kimg, which makes another run of it"
        )
    for key in ("batch", "total_kimg", "val_every_kimg"):
        if config[key] <= 0:
            raise ValueError(f"{key}={config[key]} must be greater than 0")


def quieten() -> None:
    """What the libraries say about themselves is not for people who train a model."""
    import lightning  # noqa: F401  sets its loggers' levels when it is imported

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for said in (
        "treespec",
        "save all extracted features",
        "does not have many workers",
        "Grad strides do not",
        "It is recommended",
    ):
        warnings.filterwarnings("ignore", message=f".*{said}")


@contextmanager
def locked(folder: Path, wait: float = 0) -> Iterator[None]:
    """No second process writes into the folder; the lock goes with the process, however it ends, and with the loader
    processes that it leaves behind, for a few seconds: `wait` so long."""
    if not _is_main():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise ValueError(
            f"another process is writing to {folder}; wait for it, or change the seed or a setting"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _is_main() -> bool:
    names = ("RANK",) if elastic.under_agent() else ("LOCAL_RANK", "RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)
