"""What becomes of runs that are compared: ranked by a metric, their seeds put together."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.compare.runs import Run, find
from src.compare.settings import differing, matching, nearest, shown, value_of

FACTS = {  # column -> its heading, the most telling first
    "best": "best",
    "newest": "newest",
    "kimg": "kimg",
    "images_per_sec": "images/s",
    "cost": "cost",
    "device_hours": "device-hours",
    "hours": "hours",
}
ROUNDED = ("images_per_sec", "cost", "device_hours", "hours")
SUMMED = ("device_hours", "cost")  # over the seeds of a setting; of the others the mean


@dataclass
class Row:
    """One run, or the seeds of one setting; numbers are means with their deviation, but for sums."""

    runs: list[Run]
    settings: dict[str, Any]  # of those that differ
    numbers: dict[str, float | None]
    deviations: dict[str, float]
    rank: int = 0  # of its setting

    def cell(self, column: str) -> str:
        """What a table shows."""
        if column in self.settings:
            return shown(self.settings[column])
        value = self.numbers.get(column)
        number = "–" if value is None else f"{value:.3g}" if column in ROUNDED else f"{value:.4g}"
        return f"{number} ± {self.deviations[column]:.2g}" if column in self.deviations else number


@dataclass
class Comparison:
    """What the tables and the page are made of."""

    runs: list[Row]  # one each
    groups: list[Row]  # one for each setting, its seeds put together
    keys: list[str]  # the settings that differ, but for the seed
    columns: list[str]
    metric: str | None
    lower: bool
    notes: list[str]  # sentences

    def shown_keys(self, single: bool) -> list[str]:
        """The settings in a table of single runs, or of settings."""
        seeds = single and any("seed" in row.settings for row in self.runs)
        return ["seed"] * seeds + self.keys


def comparison(config: DictConfig) -> Comparison:
    """Read the runs, choose what ranks them, and put the seeds of each setting together."""
    if config.best not in ("min", "max"):
        raise ValueError(f"best={config.best} must be min, or max where a higher {config.metric or 'value'} is better")
    runs = find(OmegaConf.to_object(config.runs) if OmegaConf.is_config(config.runs) else config.runs)
    runs = matching(runs, OmegaConf.to_object(config.where) if config.where else {})
    lower, notes = config.best == "min", []
    metric = _metric(runs, config.metric, notes)
    if silent := [run.name for run in runs if not run.log]:
        notes.append(f"without metrics yet: {', '.join(silent)}; they have not logged, or not to metrics.csv")
    keys = differing(runs)
    rows = [_row([run], keys, metric, lower, config.price_per_device_hour) for run in runs]
    own = [key for key in keys if key != "seed"]
    seeds: dict[str, list[Run]] = {}
    for run in runs:
        seeds.setdefault(json.dumps([value_of(run, key) for key in own]), []).append(run)
    groups = [_row(group, own, metric, lower, config.price_per_device_hour) for group in seeds.values()]
    if config.price_per_device_hour is not None and all(run.device_hours is None for run in runs):
        notes.append("no run has a time.json, of which its cost could be told")
    columns = [column for column in FACTS if any(row.numbers.get(column) is not None for row in rows)]
    for ordered in (rows, groups):
        _sort(ordered, config.sort, lower, dict.fromkeys([*columns, *keys, "best", "name"]))
    for rank, row in enumerate(groups):
        for other in (row, *(single for single in rows if single.runs[0] in row.runs)):
            other.rank = rank
    return Comparison(rows, groups, own, columns, metric, lower, notes)


def _metric(runs: list[Run], asked: str | None, notes: list[str]) -> str | None:
    """What ranks the runs, with a note where some do not have it. Raises ValueError for one that no run logged."""
    logged = {name: sum(name in run.log for run in runs) for name in dict.fromkeys(n for run in runs for n in run.log)}
    if asked is not None and asked not in logged and logged:
        raise ValueError(f"metric={asked} was logged by none of these runs; {nearest(asked, logged)}")
    preferred = [asked] if asked else list(dict.fromkeys(m for run in runs for m in run.settings.get("metric") or []))
    metric = max(preferred, key=lambda name: logged.get(name, 0), default=None)  # the first of the most common
    others = [name for name in logged if name.startswith("val/") and name != metric] or list(logged)
    if not logged.get(metric, 0):
        wanted = " or ".join(preferred) or "a metric that ranks them"
        notes += [f"none of the runs logged {wanted}; metric={others[0]} would rank them"] if logged else []
        return None
    if without := [run for run in runs if run.log and metric not in run.log]:
        also = [name for name in others if any(name in run.log for run in without)]
        instead = f"; they logged {', '.join(also[:4])}, which metric= may name instead" if also else ""
        names = ", ".join(run.name for run in without)
        notes.append(
            f"only {logged[metric]} of {len(runs)} runs are ranked by {metric}, which {names} did not log{instead}"
        )
    return metric


def _row(runs: list[Run], keys: list[str], metric: str | None, lower: bool, price: float | None) -> Row:
    values: dict[str, list[float]] = {
        "best": [found[0] for run in runs if (found := run.best(metric, lower))],
        "newest": [value for run in runs if (value := run.newest(metric)) is not None],
        "kimg": [run.kimg for run in runs],
        "images_per_sec": [value for run in runs if (value := run.images_per_sec) is not None],
        "hours": [run.hours for run in runs if run.hours is not None],
        "device_hours": [run.device_hours for run in runs if run.device_hours is not None],
    }
    values["cost"] = [] if price is None else [price * hours for hours in values["device_hours"]]
    numbers = {k: (sum(v) if k in SUMMED else mean(v)) if v else None for k, v in values.items()}
    deviations = {k: stdev(v) for k, v in values.items() if len(v) > 1 and k in ("best", "newest")}
    return Row(runs, {key: value_of(runs[0], key) for key in keys}, numbers, deviations)


def _sort(rows: list[Row], by: str, lower: bool, known: Iterable[str]) -> None:
    """In place; runs without a value come last."""
    downwards, name = by.startswith("-"), by.removeprefix("-")
    if name not in known:
        raise ValueError(f"sort={by} is no column; {nearest(name, known)}")
    if name in ("best", "newest"):
        downwards ^= not lower

    def value(row: Row) -> Any:
        return row.runs[0].name if name == "name" else row.numbers.get(name, row.settings.get(name))

    def place(row: Row) -> tuple:
        number = isinstance(value(row), (int, float))
        return (not number, value(row) if number else 0.0, shown(value(row)))

    there = sorted((row for row in rows if value(row) is not None), key=place, reverse=downwards)
    rows[:] = there + [row for row in rows if value(row) is None]
