"""What lies in run folders: settings, metrics, time and pictures. Imports no torch, so that answers come at once."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from glob import glob
from math import isclose, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import src.config  # noqa: F401  knows the resolvers that settings use
from src.compare.settings import CHOSEN, flat

ASIDE = ("name", "paths", "logger")  # where things are written says nothing about a run
Series = list[tuple[float, float]]  # (kimg, value)


@dataclass
class Run:
    """One run folder."""

    folder: Path
    settings: dict[str, Any]  # group choices, and every setting by its dotted name
    own: set[str]  # those that are no copy of another setting
    log: dict[str, Series] = field(default_factory=dict)
    pictures: dict[str, dict[int, Path]] = field(default_factory=dict)  # name -> images seen -> file
    hours: float | None = None
    device_hours: float | None = None
    finished: bool = False

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def kimg(self) -> float:
        """How far it got."""
        return max((series[-1][0] for series in self.log.values()), default=0.0)

    @property
    def images_per_sec(self) -> float | None:
        return median(v for _, v in self.log["time/images_per_sec"]) if "time/images_per_sec" in self.log else None

    def newest(self, metric: str | None) -> float | None:
        """The last value that was logged."""
        return self.log[metric][-1][1] if metric in self.log else None

    def best(self, metric: str | None, lower: bool = True) -> tuple[float, float] | None:
        """(value, kimg) of the best one that is a number."""
        found = [(value, kimg) for kimg, value in self.log.get(metric, []) if isfinite(value)]
        return min(found, key=lambda point: (point[0] if lower else -point[0], point[1])) if found else None

    def value_at(self, metric: str | None, images: int) -> float | None:
        """What was logged when this many images had been seen."""
        found = (value for kimg, value in self.log.get(metric, []) if isclose(kimg * 1000, images, rel_tol=1e-5))
        return next(found, None)

    def marked(self, value: float) -> bool:
        """Whether training marked the checkpoint with this value as its best."""
        path = self.folder / "checkpoints" / "best.json"
        return path.exists() and isclose(json.loads(path.read_text())["value"], value, rel_tol=1e-6)


def find(patterns: str | Iterable[str]) -> list[Run]:
    """The runs in these folders, by name; a sweep's folder stands for its runs. Raises ValueError for none."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    folders: dict[Path, None] = {}
    for place in sorted(Path(match) for pattern in patterns for match in glob(str(pattern), recursive=True)):
        inside = _of_sweep(place) if (place / "sweep.json").exists() else [place]
        folders |= {folder.resolve(): None for folder in inside if (folder / ".hydra" / "config.yaml").exists()}
    if not folders:
        raise ValueError(
            f"runs={','.join(map(str, patterns))} matches no run folder; name others, such as runs='runs/*'"
        )
    return sorted((read(folder) for folder in folders), key=lambda run: run.name)


def read(folder: Path) -> Run:
    """What lies in a run folder; a run that has only begun has no metrics, pictures or times yet."""
    settings, own = _settings(folder)
    run = Run(folder, settings, own, read_metrics(folder / "metrics.csv"))
    for path in sorted((folder / "pictures").glob("*_[0-9]*.png")):
        name, _, images = path.stem.rpartition("_")
        if images.isdigit():
            run.pictures.setdefault(name, {})[int(images)] = path
    if (path := folder / "time.json").exists():
        times = json.loads(path.read_text())
        run.hours, run.device_hours = times["hours"], times["device_hours"]
    if (path := folder / "result.json").exists():
        run.finished = json.loads(path.read_text())["kimg"] >= settings.get("total_kimg", 0)
    return run


def read_metrics(path: Path) -> dict[str, Series]:
    """metric -> [(kimg, value), ...], but for those of single layers; a row that is being written is left out."""
    found: dict[str, Series] = {}
    if path.exists():
        for line in path.read_text().splitlines(keepends=True)[1:]:
            _, kimg, metric, value = line.split(",") if line.endswith("\n") else ("", "", "", "")
            if kimg and not re.search(r"/\d+$", metric):
                found.setdefault(metric, []).append((float(kimg), float(value)))
    return found


def _of_sweep(folder: Path) -> list[Path]:
    """The run folders of a sweep, also where all of it was moved."""
    listed = [Path(run["folder"]) for run in json.loads((folder / "sweep.json").read_text())]
    return [path if path.exists() else folder.parents[1] / path.name for path in listed]


def _settings(folder: Path) -> tuple[dict[str, Any], set[str]]:
    """Settings as they were composed, resolved; and the names of those that are no copy of another."""
    hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
    text = (folder / ".hydra" / "config.yaml").read_text()
    config = OmegaConf.create(re.sub(r"\$\{hydra:([\w.]+)\}", lambda m: _of_hydra(hydra, m[1]), text))
    found = {group: choice for group, choice in hydra.runtime.choices.items() if group in CHOSEN}
    own = set()
    for key, raw in flat(OmegaConf.to_container(config, resolve=False)):
        if key.split(".")[0] in ASIDE:
            continue
        copied = "${" in str(raw)
        own |= set() if copied else {key}
        found[key] = _resolved(config, key, raw) if copied else raw
    return found, own


def _of_hydra(hydra: DictConfig, key: str) -> str:
    value = OmegaConf.select(hydra, key)
    return "null" if value is None else str(value)


def _resolved(config: DictConfig, key: str, raw: Any) -> Any:
    try:
        value = OmegaConf.select(config, key)
    except OmegaConfBaseException:  # such as a variable of the environment that is not set here
        return raw
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
