"""What several test files share: configurations composed as the commands compose them, commands, and one tiny run."""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from src.config import CONF, ROOT

torch.set_num_threads(1)

# The published method with a network of six layers and four leaves each, which trains hundreds of images a second on
# one thread; everything that a recipe might choose otherwise is fixed.
TINY = [
    "model.decoder.blocks=[1,1,1,1,1,1]",
    "model.decoder.widths=[8,8,8,8,8,8]",
    "model.decoder.leaves=[4,4,4,4,4,4]",
    "model.decoder.chain_dropout=0.05",
    "model.decoder.classes=0",
    "model.decoder.loss_fn=null",
    "model.optimizer.lr=1e-3",
    "model.schedule.warmup_kimg=0.5",
    "model.halflife_kimg=1",
    "model.min_evidence=2",
    "trainer.precision=32-true",
]


def compose_config(folder: Path, *overrides: str, command: str = "train") -> DictConfig:
    """The configuration of `command` with these overrides, as its `main` gets it; everything it writes is in folder."""
    GlobalHydra.instance().clear()
    if command == "train":
        own = {"paths.runs": folder / "runs", "paths.cache": folder / "cache", "paths.data": folder / "data"}
        overrides = [*(f"{key}={path}" for key, path in own.items()), *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(command, list(overrides), return_hydra_config=True)
    known = HydraConfig.instance()
    known.set_config(config)  # keeps a copy
    OmegaConf.set_readonly(known.cfg, False)
    OmegaConf.set_readonly(known.cfg.hydra, False)
    known.cfg.hydra.runtime.output_dir = config.hydra.run.dir
    config = deepcopy(config)
    with open_dict(config):
        del config["hydra"]
    OmegaConf.resolve(config)
    OmegaConf.set_readonly(config, True)
    return config


def run_folder() -> Path:
    """The folder of the run that was composed last."""
    return Path(HydraConfig.get().runtime.output_dir)


def run_command(*words: str, timeout: float = 600, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """A command of the project in a process of its own, on one thread and without a network."""
    return subprocess.run(command_line(*words), **_as_text(environment), cwd=cwd, timeout=timeout)


def start_command(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen:
    """The same, running; in a session of its own, so that its workers can be ended with it."""
    return subprocess.Popen(command_line(*words), **_as_text(environment), cwd=cwd, start_new_session=True)


def command_line(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def _as_text(environment: dict[str, str]) -> dict:
    quiet = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "COLUMNS": "200"}
    kept = {k: v for k, v in os.environ.items() if k not in ("FEWSTEP_TRACEBACK", "HYDRA_FULL_ERROR")}
    return dict(env=kept | quiet | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="session")
def compose_in():
    """compose_config for fixtures and tests that choose the folder."""
    return compose_config


@pytest.fixture
def composed(tmp_path):
    """composed(*overrides, command="train") -> the configuration; what it writes goes below tmp_path."""
    yield lambda *overrides, command="train": compose_config(tmp_path, *overrides, command=command)
    GlobalHydra.instance().clear()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """The folder of a tiny run that was trained to its end in this process: 8 batches of 8, two validations."""
    from src.run import train

    config = compose_config(
        tmp_path_factory.mktemp("tiny"),
        "logger=[csv]",
        "callbacks=[budget,ema,metrics,pictures,checkpoint]",
        *TINY,
        "batch=8",
        "schedule_kimg=0.064",
        "val_every_kimg=0.032",
        "data.val_batch=8",
        "+trainer.limit_val_batches=1",
        "callbacks.metrics.every_kimg=0.016",
        "callbacks.pictures.count=8",
        "callbacks.checkpoint.every_kimg=0.016",
        "callbacks.checkpoint.keep=2",
    )
    folder = run_folder()
    train(config)
    return folder
