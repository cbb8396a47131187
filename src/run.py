"""From a configuration to live objects: build, resume, run, and say what came of it."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from src import checkpoint as canonical
from src.config import code_stamp, plain
from src.distances import Distances, find_extractor
from src.images import grid, to_uint8, write_png
from src.noise import Noise
from src.protocols import KnowsRun
from src.report import summary

PRECISIONS = ("32-true", "bf16-mixed")


def build_model(config: DictConfig):
    """The module that `config.model` names, initialised from config.seed; the global generators stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return instantiate(config.model)


def train(config: DictConfig) -> None:
    """Train, or go on training, the run that this configuration names.

    Raises ValueError for what the user can mend, before any training starts.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    _quieten()
    _check(config)
    with _locked(folder):
        done, _ = canonical.newest(folder / "checkpoints")
        if done is not None and int(done.name) >= config.total_kimg * 1000:
            print(f"{config.name} is finished; raise total_kimg to go on\n{summary(folder)}")
            return
        data = instantiate(config.data)
        data.prepare_data()
        data.setup()
        model = build_model(config)
        begins = config.start is not None and done is None and _is_main()
        if begins and not _imported(config, model, folder / "checkpoints"):
            return
        trainer = _trainer(config)
        data.check_split(trainer.world_size, config.micro_batch)
        if _is_main():
            print(f"{config.name}: {model.describe()}, {len(data.train)} training images", flush=True)
        trainer.fit(model, data)
        if trainer.is_global_zero:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
            result = {"name": config.name, "kimg": model.images_seen / 1000, "metrics": metrics}
            (folder / "result.json").write_text(json.dumps(result, indent=1))
            print(summary(folder), flush=True)


def sample(config: DictConfig) -> None:
    """Draw images from a run: one picture of them all, and a file for each where `files` is set."""
    model, state, source = load(config.run, config.checkpoint)
    known = OmegaConf.create(state["config"])
    labels = config.label
    if labels is not None and not any(getattr(net, "classes", 0) for net in model.parallel_networks().values()):
        raise ValueError(f"label={labels} cannot be asked for: {known.name} was trained without labels")
    if labels is not None and not 0 <= labels < known.data.classes:
        raise ValueError(f"label={labels} is none of the {known.data.classes} classes of {known.name}")
    numbers = torch.arange(config.first, config.first + config.num)
    folder = Path(config.out or Path(config.run) / "samples")
    images = torch.cat(list(draw(model, config.seed, numbers, config.batch, labels, known.data.classes)))
    picture = folder / f"{source.name}_s{config.seed}_{config.first}-{config.first + config.num - 1}.png"
    write_png(picture, grid(images, columns=max(1, round(config.num**0.5))))
    if config.files:
        for number, image in zip(numbers.tolist(), images, strict=True):
            write_png(folder / "images" / f"{number:06d}.png", image)
    print(f"{config.num} samples of {source}: {picture}")


def evaluate(config: DictConfig) -> None:
    """Distances of a run's samples, and of its held-out images, to its training images; into evaluation.json."""
    _quieten()
    model, state, source = load(config.run, config.checkpoint)
    known = OmegaConf.create(state["config"])
    data = instantiate(known.data)
    data.prepare_data()
    data.setup()
    held_out = min(len(data.held_out), config.num)
    extractor = find_extractor(config.inception)
    measure = Distances(extractor).to(model.device)
    print(f"Features by {extractor.name}: {config.num} samples against the first {config.reference} training images")

    def real() -> Iterator[Tensor]:
        parts = list(data.reference(config.reference, 0, 1))
        yield from track(parts, "Real images")

    measure.real_from(Path(config.cache), data.identity, config.reference, real, rank=0)
    for start in range(0, held_out, config.batch):
        rows = slice(start, min(start + config.batch, held_out))
        measure.update(data.held_out.read(rows).to(model.device), real=False)
    found = {"held_out": measure.compute(), "held_out_images": held_out}
    numbers = torch.arange(config.num)
    for images in draw(model, config.seed, numbers, config.batch, None, known.data.classes):
        measure.update(to_uint8(images), real=False)
    found |= {"samples": measure.compute(), "sample_images": config.num, "reference_images": config.reference}
    found |= {"extractor": extractor.name, "checkpoint": source.name, "seed": config.seed}
    path = Path(config.run) / "evaluation.json"
    path.write_text(json.dumps(found, indent=1))
    for name, value in found["samples"].items():
        print(f"{name:14} {value:.4g}   ({held_out} held-out images: {found['held_out'][name]:.4g})")
    print(f"Written to {path}")


def prepare(config: DictConfig) -> None:
    """The one-off tasks; today `export`."""
    if config.task != "export":
        raise ValueError(f"task={config.task} does not exist; there is export")
    model, state, source = load(config.run, config.checkpoint)
    folder = Path(config.out or Path(config.run) / "export")
    folder.mkdir(parents=True, exist_ok=True)
    weights, described = folder / "model.safetensors", folder / "config.json"
    kept = {k: v.contiguous() for k, v in model.state_dict().items() if v.dtype != torch.float64}
    for path, write in (
        (weights, lambda part: save_file(kept, part)),
        (described, lambda part: part.write_text(json.dumps(state["config"], indent=1))),
    ):
        part = path.with_suffix(".part")
        write(part)
        os.replace(part, path)
    print(f"Exported {source}: {weights} and {described}")


def draw(model, seed: int, numbers: Tensor, batch: int, label: int | None, classes: int) -> Iterator[Tensor]:
    """Samples of these numbers in [-1, 1], batch by batch; of class `label`, or of classes drawn with each number."""
    for part in track(numbers.split(batch), "Sampling", disable=len(numbers) <= batch):
        noise = Noise(seed, part, model.device)
        labels = None
        if classes:
            labels = (noise.uniform("label") * classes).long() if label is None else torch.full_like(part, label)
            labels = labels.to(model.device)
        yield model.sample(noise, labels)


def load(run: str | None, which: str) -> tuple[Any, dict[str, Any], Path]:
    """A run's model with its averaged weights on the best device, the checkpoint's state, and its folder.

    `which` is newest, best, or the name of a checkpoint folder. Raises ValueError where there is no such thing.
    """
    if run is None or not Path(run).is_dir():
        runs = sorted(p.parent.as_posix() for p in Path("runs").glob("*/checkpoints"))
        hint = f"there is {', '.join(runs)}" if runs else "train one with `make train`"
        raise ValueError(f"run={run} is no run folder; {hint}")
    checkpoints = Path(run) / "checkpoints"
    names = {p.name: p for p in canonical.committed(checkpoints)}
    if which == "newest":
        folder, rejected = canonical.newest(checkpoints)
        print("".join(f"{line}\n" for line in rejected), end="")
    else:
        best = canonical.read_best(checkpoints) if which == "best" else None
        folder = names.get(best["checkpoint"] if best else which)
    if folder is None:
        raise ValueError(f"{run} has no checkpoint '{which}'; there is {', '.join(['newest', 'best', *names])}")
    state = canonical.read(folder)
    model = build_model(OmegaConf.create(state["config"]))
    canonical.load_weights(model, canonical.averaged(state), f"checkpoint {folder}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), state, folder


def _imported(config: DictConfig, model, checkpoints: Path) -> bool:
    """Make a published checkpoint the first of this run; whether training can go on from it."""
    if not hasattr(model, "published_state"):
        raise ValueError(f"start={config.start}: there are no published checkpoints for {type(model).__name__}")
    state = model.published_state(config.start) | {"config": plain(config)}
    canonical.load_weights(model, state["weights"], config.start)
    folder = canonical.folder_of(checkpoints, state["position"]["images"])
    canonical.write(folder, state, code_stamp(list(HydraConfig.get().overrides.task)))
    if state["optimizers"]:
        return True
    print(f"{config.start} holds a generator alone; draw with it: python sample.py run={checkpoints.parent}")
    return False


def _trainer(config: DictConfig):
    # a recipe's settings of a callback that was not chosen are no callback
    callbacks = [instantiate(c) for c in (config.callbacks or {}).values() if "_target_" in c]
    loggers = [instantiate(c) for c in (config.logger or {}).values()]
    known, stamp = plain(config), code_stamp(list(HydraConfig.get().overrides.task))
    for keeper in callbacks + loggers:
        if isinstance(keeper, KnowsRun):
            keeper.about_run(known, stamp)
    return instantiate(
        config.trainer,
        callbacks=callbacks,
        logger=loggers or False,
        strategy=instantiate(config.strategy),
        enable_checkpointing="checkpoint" in (config.callbacks or {}),
    )


def _check(config: DictConfig) -> None:
    for key in ("batch", "seed", "micro_batch"):
        if config[key] is not None and type(config[key]) is not int:
            raise ValueError(f"{key}={config[key]} must be a whole number")
    if config.trainer.precision not in PRECISIONS:
        raise ValueError(
            f"trainer.precision={config.trainer.precision} is not supported, since networks that take turns cannot "
            f"share one loss scale; choose {' or '.join(PRECISIONS)}"
        )
    if config.total_kimg > config.schedule_kimg:
        raise ValueError(
            f"total_kimg={config.total_kimg} goes beyond schedule_kimg={config.schedule_kimg}, where the learning "
            f"rate's schedule ends; raise schedule_kimg, which makes another run of it"
        )
    for key in ("batch", "total_kimg", "val_every_kimg"):
        if config[key] <= 0:
            raise ValueError(f"{key}={config[key]} must be greater than 0")


def _quieten() -> None:
    """What the libraries say about themselves is not for people who train a model."""
    import lightning  # noqa: F401  sets its loggers' levels when it is imported

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(treespec|save all extracted features|does not have many workers).*")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No second process writes into the folder; the lock goes with the process, however it ends."""
    if not _is_main():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"another process is writing to {folder}; wait for it, or change the seed or a setting"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _is_main() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID"))
