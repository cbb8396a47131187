"""Scores of finished runs: distances, precision and recall, known modes, and how they went over the checkpoints."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.progress import track
from torch import Tensor

from src.distances import Distances, find_extractor, read_statistics, scores
from src.extractors import Extractor
from src.files import replacing
from src.image_files import image_files, listing, read_image
from src.images import to_uint8, write_png
from src.protocols import KnownModes
from src.results import checkpoint_names, draw, opened
from src.run import quieten


def evaluate(config: DictConfig) -> None:
    """Scores of a run's samples, and of its held-out images as a yardstick, into the run's metrics.json.

    Samples go from the averaged weights to the features as numbers, never through an image file. `checkpoint=all`
    scores every checkpoint, draws the curves and names the best.
    """
    quieten()
    for key, least in (("num", 4), ("reference", 4), ("batch", 1)):
        if config[key] < least:
            raise ValueError(f"{key}={config[key]} is too few; scores need {key} >= {least}")
    every = config.checkpoint == "all" and config.get("ensemble") is None
    names = checkpoint_names(config.run) if every else [config.checkpoint]
    source = opened(config, names[0])
    if source.data is None:
        raise ValueError("name the images that samples are compared with: data=..., such as data=fashion10k")
    data = instantiate(source.data)
    data.prepare_data()
    data.setup()
    data = getattr(data, "source", data)  # samples of latents are compared with the images that these are of
    if config.get("ensemble") is not None and data.channels != source.channels:
        raise ValueError(
            f"{source.name} draws images of {source.channels} channels, and data's have {data.channels}: set data to "
            "what it was trained on"
        )
    held_out = data.held_out.read(slice(0, config.num))
    shown = data.as_seen(held_out[:10000]) if isinstance(data, KnownModes) else None
    modes = data.modes(Path(config.cache)).to(source.model.device) if isinstance(data, KnownModes) else None
    extractor, real, facts = None, None, {}
    if data.channels in (1, 3):
        extractor = find_extractor(config.inception, "inception").to(source.model.device)
        real, facts = _real(config, data, extractor)
        print(f"Features by {extractor.name}, against {facts['real']}", flush=True)

    def seen(stored: Tensor) -> Tensor:
        return data.as_seen(stored.to(source.model.device))

    @torch.no_grad()
    def judged(batches: Iterable[Tensor]) -> dict[str, float]:
        features, found = [], {}
        for images in batches:
            if extractor is not None:
                features.append(extractor(to_uint8(images)).float().cpu())
            if modes is not None:
                modes.update(images, shown.to(images.device))
        if modes is not None:
            found |= modes.compute()
            modes.reset()
        return found | (scores(torch.cat(features), real, extractor) if features else {})

    found: dict[str, Any] = {"run": source.name, **facts, "sample_images": config.num, "seed": config.seed}
    parts = track(held_out.split(config.batch), "Held-out images", disable=len(held_out) <= config.batch)
    found |= {"held_out_images": len(held_out), "held_out": judged(map(seen, parts))}
    found["checkpoints"] = {}
    for name in names:
        if name != names[0]:
            source = opened(config, name)
        images = draw(source.model, config.seed, torch.arange(config.num), config.batch, None, source.classes)
        found["checkpoints"][source.mark] = {"kimg": source.kimg} | judged(images)
        print(_told(source.mark, found["checkpoints"][source.mark], found["held_out"]), flush=True)
    metric, sign = (extractor.metric("fid"), 1) if extractor is not None else ("share_within_3_sigma", -1)
    best = min(found["checkpoints"], key=lambda name: sign * found["checkpoints"][name][metric])
    found["best"] = {"checkpoint": best, "metric": metric, "value": found["checkpoints"][best][metric]}
    _write(source.folder / "metrics.json", lambda part: part.write_text(json.dumps(found, indent=1)))
    written = {"scores": source.folder / "metrics.json"}
    if modes is not None and modes.picture is not None:
        written["modes"] = source.folder / "pictures" / f"evaluated_{source.mark}.png"
        write_png(written["modes"], modes.picture)
    if len(names) > 1:
        written["curves"] = source.folder / "pictures" / "evaluation.png"
        _write(written["curves"], lambda part: _draw_curves(found, part))
        print(f"best by {metric}: {best} with {found['best']['value']:.4g}")
    print("".join(f"{what:7} {path}\n" for what, path in written.items()), end="")


def _real(config: DictConfig, data, extractor: Extractor) -> tuple[Tensor | dict[str, np.ndarray], dict[str, Any]]:
    """Features of the real images, or their statistics where the user gives those, and what they are made of."""
    facts = {"extractor": extractor.name}
    where = None if config.real is None else Path(config.real)
    if where is not None and where.is_file():
        return read_statistics(where, extractor), facts | {"real": str(where)}
    measure = Distances(extractor).to(next(extractor.parameters()).device)
    if where is None:
        count, identity = config.reference, data.identity
        facts["real"] = f"the first {min(count, len(data.train))} training images"
        images, size = partial(data.reference, count, 0, 1), data.val_batch
    else:
        if not where.exists():
            raise ValueError(f"real={where} is neither a folder nor a file")
        files = image_files(where)
        count, facts["real"] = len(files), f"the {len(files)} images in {where}"
        facts_read = f"{listing(files, where)}\n{data.channels} {data.resolution}"
        identity = hashlib.sha256(facts_read.encode()).hexdigest()
        images, size = partial(_read, files, data.channels, data.resolution, config.batch), config.batch
    shown = lambda: track(images(), "Real images", total=-(-count // size))  # noqa: E731
    measure.real_from(Path(config.cache), identity, count, shown, rank=0)
    return measure.real_state()["features"], facts


def _read(files: list[Path], channels: int, size: int, batch: int) -> Iterator[Tensor]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(files), batch):
            read = pool.map(lambda file: read_image(file, channels, size), files[start : start + batch])
            yield torch.from_numpy(np.stack(list(read)))


def _told(name: str, found: dict[str, float], held_out: dict[str, float]) -> str:
    width = max(len(key) for key in held_out)
    told = [f"{name}, {found['kimg']:g} kimg"]
    told += [f"  {key:{width}} {found[key]:<8.4g} (held-out images: {held_out[key]:.4g})" for key in held_out]
    return "\n".join(told)


def _draw_curves(found: dict[str, Any], path: Path) -> None:
    """One small plot per score over thousands of images, with the held-out images' score and the best checkpoint."""
    from matplotlib.figure import Figure

    points = list(found["checkpoints"].values())
    figure = Figure(figsize=(4 * len(found["held_out"]), 3.2), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(found["held_out"]), squeeze=False)[0], found["held_out"], strict=True):
        axes.plot([p["kimg"] for p in points], [p[key] for p in points], "o-", label="samples")
        axes.axhline(found["held_out"][key], color="grey", linestyle="--", label="held-out images")
        if key == found["best"]["metric"]:
            best = found["checkpoints"][found["best"]["checkpoint"]]
            axes.plot([best["kimg"]], [best[key]], "*", markersize=14, label="best")
        axes.set(title=key, xlabel="kimg")
        axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _write(path: Path, write) -> None:
    with replacing(path) as part:
        write(part)
