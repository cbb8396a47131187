"""What finished runs are good for: drawing from them, and taking their weights elsewhere."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from src import checkpoint as canonical
from src import native
from src.files import replacing
from src.image_files import image_files, read_image
from src.images import coloured, grid, write_png
from src.noise import Noise
from src.partitioning import partition
from src.protocols import Generative, Reports
from src.run import build_model, locked


class Source(NamedTuple):
    """What a command draws from: a run, or an ensemble of published experts."""

    model: Any
    name: str  # for people
    mark: str  # of its files
    folder: Path
    data: DictConfig | None  # its images
    channels: int
    classes: int  # of labels that can be asked for; 0 where there are none
    kimg: float  # that its networks have seen


def opened(config: DictConfig, checkpoint: str) -> Source:
    """The model that sample.py and evaluate.py were asked for. Raises ValueError where there is none."""
    if config.get("ensemble") is not None:
        if config.run is not None or checkpoint == "all":
            raise ValueError("an ensemble is made of published experts: leave run= and checkpoint= out")
        model, name = instantiate(config.model), Path(config.folder).name
        kimg = sum(card["images"] for card in model.experts.cards if card) / 1000
        data = config.get("data")
        return Source(model, name, name, Path(config.folder), data, model.channels, model.classes, kimg)
    model, state, source = load(config.run, checkpoint)
    known = OmegaConf.create(state["config"])
    if not isinstance(model, Generative):
        raise ValueError(f"{known.name} draws no images: it is the router of an ensemble, experiment=paris")
    asks = any(getattr(net, "classes", 0) for net in model.parallel_networks().values())
    data, kimg = known.data, state["position"]["images"] / 1000
    classes = data.classes if asks else 0
    return Source(model, known.name, source.name, Path(config.run), data, data.channels, classes, kimg)


def sample(config: DictConfig) -> None:
    """Draw images: one picture of them all, and a file for each where `files` is set."""
    for key, least in (("num", 1), ("batch", 1), ("first", 0)):
        if config[key] < least:
            raise ValueError(f"{key}={config[key]} must be at least {least}")
    if config.label is not None and not isinstance(config.label, int):
        raise ValueError(f"label={config.label} must be the number of a class")
    source = opened(config, config.checkpoint)
    if source.channels not in (1, 3):
        raise ValueError(f"{source.name} draws points, not images; look at them with evaluate.py run={config.run}")
    if config.label is not None and not source.classes:
        raise ValueError(f"label={config.label} cannot be asked for: {source.name} was trained without labels")
    if config.label is not None and not 0 <= config.label < source.classes:
        raise ValueError(f"label={config.label} is none of the {source.classes} classes of {source.name}")
    numbers, began = torch.arange(config.first, config.first + config.num), time.monotonic()
    images = torch.cat(list(draw(source.model, config.seed, numbers, config.batch, config.label, source.classes)))
    seconds = (time.monotonic() - began) / config.num
    if config.colours is not None:
        images = coloured(images, *_colours(config.colours, images))
    folder = Path(config.out or source.folder / "samples")
    picture = folder / f"{source.mark}_s{config.seed}_{config.first}-{config.first + config.num - 1}.png"
    write_png(picture, grid(images, columns=max(1, round(config.num**0.5))))
    if config.files:
        for number, image in zip(numbers.tolist(), images, strict=True):
            write_png(folder / "images" / f"{number:06d}.png", image)
    if isinstance(source.model, Reports):
        print(source.model.account())
    print(f"{config.num} samples of {source.name}, {seconds:.3g} s each: {picture}")


def _colours(folder: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel over the images in a folder, in the size of the samples."""
    if not (files := image_files(Path(folder))):
        raise ValueError(f"colours={folder} is no folder of images")
    read = np.stack([read_image(file, like.shape[1], like.shape[2]) for file in files])
    pixels = torch.from_numpy(read).float() / 127.5 - 1
    return pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))


def prepare(config: DictConfig) -> None:
    """The one-off tasks."""
    if config.task not in TASKS:
        raise ValueError(f"task={config.task} does not exist; there is {' and '.join(TASKS)}")
    TASKS[config.task](config)


def consolidate(config: DictConfig) -> None:
    """Make a native checkpoint of a run (or all) canonical: whole tensors, which every engine and command reads."""
    names = checkpoint_names(config.run) if config.checkpoint == "all" else [config.checkpoint]
    with locked(Path(config.run)):
        for folder in (find(config.run, name) for name in names):
            print(f"{folder} is canonical {'now' if native.consolidate(folder) else 'already'}", flush=True)


def export(config: DictConfig) -> None:
    """The averaged weights of a run as safetensors, with a config.json beside them."""
    model, state, source = load(config.run, config.checkpoint)
    folder = Path(config.out or Path(config.run) / "export")
    weights, described = folder / "model.safetensors", folder / "config.json"
    kept = {k: v.contiguous() for k, v in model.state_dict().items() if v.dtype != torch.float64}
    for path, write in (
        (weights, lambda part: save_file(kept, part)),
        (described, lambda part: part.write_text(json.dumps(state["config"], indent=1))),
    ):
        with replacing(path) as part:
            write(part)
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
