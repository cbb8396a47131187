"""What finished runs are good for: drawing from them, and taking their weights elsewhere."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from src import checkpoint as canonical
from src.images import grid, write_png
from src.noise import Noise
from src.partitioning import partition
from src.run import build_model


def sample(config: DictConfig) -> None:
    """Draw images from a run: one picture of them all, and a file for each where `files` is set."""
    model, state, source = load(config.run, config.checkpoint)
    known = OmegaConf.create(state["config"])
    if known.data.channels not in (1, 3):
        raise ValueError(f"{known.name} draws points, not images; look at them with evaluate.py run={config.run}")
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


def prepare(config: DictConfig) -> None:
    """The one-off tasks."""
    if config.task not in TASKS:
        raise ValueError(f"task={config.task} does not exist; there is {' and '.join(TASKS)}")
    TASKS[config.task](config)


def consolidate(config: DictConfig) -> None:
    """Make a native checkpoint of a run (or all) canonical: whole tensors, which every engine and command reads."""
    for name in checkpoint_names(config.run) if config.checkpoint == "all" else [config.checkpoint]:
        folder = find(config.run, name)
        print(f"{folder} is canonical {'now' if canonical.consolidate(folder) else 'already'}", flush=True)


def export(config: DictConfig) -> None:
    """The averaged weights of a run as safetensors, with a config.json beside them."""
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


TASKS = {"export": export, "consolidate": consolidate, "partition": partition}


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

    `which` is as in `find`. Raises ValueError where there is no such thing, or a native one.
    """
    folder = find(run, which)
    state = canonical.read(folder)
    model = build_model(OmegaConf.create(state["config"]))
    canonical.load_weights(model, canonical.averaged(state), f"checkpoint {folder}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), state, folder


def find(run: str | None, which: str) -> Path:
    """A run's checkpoint: `which` is newest, best, or its name. Raises ValueError where there is no such thing."""
    checkpoints = _run_folder(run) / "checkpoints"
    names = {p.name: p for p in canonical.committed(checkpoints)}
    if which == "newest":
        folder, rejected = canonical.newest(checkpoints)
        print("".join(f"{line}\n" for line in rejected), end="")
    else:
        best = canonical.read_best(checkpoints) if which == "best" else None
        folder = names.get(best["checkpoint"] if best else which)
    if folder is None:
        raise ValueError(f"{run} has no checkpoint '{which}'; there is {', '.join(['newest', 'best', *names])}")
    return folder


def checkpoint_names(run: str | None) -> list[str]:
    """The names of a run's checkpoints, oldest first. Raises ValueError where there is none."""
    found = []
    for path in canonical.committed(_run_folder(run) / "checkpoints"):
        if (why := canonical.fault(path)) is None:
            found.append(path.name)
        else:
            print(f"checkpoint {path.name} is not used: {why}")
    if not found:
        raise ValueError(f"{run} has no checkpoint that can be used")
    return found


def _run_folder(run: str | None) -> Path:
    if run is None or not Path(run).is_dir():
        runs = sorted(p.parent.as_posix() for p in Path("runs").glob("*/checkpoints"))
        hint = f"there is {', '.join(runs)}" if runs else "train one with `make train`"
        raise ValueError(f"run={run} is no run folder; {hint}")
    return Path(run)
