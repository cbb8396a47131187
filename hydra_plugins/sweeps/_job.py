"""A job of a sweep is a run like any other: here is what it is told, where it lies, and what became of it."""

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

OF_THE_SWEEP = re.compile(r"[+~]*hydra([./](launcher|sweeper)|\.(sweep|mode))\b")


@dataclass(eq=False)
class Job:
    """A run of a sweep.

    States: waiting, running, finished, was finished (before the sweep came to it), failed, pruned, stopped (with the
    sweep; the same command goes on).
    """

    overrides: list[str]
    name: str
    folder: Path
    config: DictConfig
    state: str = "waiting"
    measured: str = "metric"  # the name of the value
    value: float | None = None
    seconds: float = 0.0
    code: int | None = None
    trial: Any = None  # what the sweeper knows it by

    @property
    def log(self) -> Path:
        """What the job's processes print, one attempt after the other."""
        return self.folder / "log.txt"

    def command(self) -> list[str]:
        """The run as a command; what is meant for Hydra itself goes along, except for what makes it a sweep."""
        of_hydra = [o for o in self.config.hydra.overrides.hydra if not OF_THE_SWEEP.match(o)]
        launcher = self.config.hydra.launcher  # of which a single run needs what its own agent does
        if launcher.get("max_restarts") is not None:
            of_hydra += [f"++hydra.launcher.{key}={launcher[key]}" for key in ("max_restarts", "grace_seconds")]
        return [sys.executable, os.path.abspath(sys.argv[0]), *self.overrides, *of_hydra, "hydra.mode=RUN"]

    def result(self) -> dict | None:
        """What the run has left as its result, if it has reached its budget."""
        try:
            found = json.loads((self.folder / "result.json").read_text())
        except (OSError, ValueError):
            return None
        return found if found["kimg"] * 1000 >= self.config.total_kimg * 1000 else None

    def measure(self) -> None:
        """Take the value: the first of config.metric in the result, or else in the run's log."""
        metrics = {key: rows[-1][1] for key in self.config.metric if (rows := self.logged(key))}
        metrics |= (self.result() or {}).get("metrics", {})
        for key in self.config.metric:
            if key in metrics:
                self.measured, self.value = key, metrics[key]
                return

    def logged(self, metric: str) -> list[tuple[int, float]]:
        """(images seen, value) of every row that metrics.csv has of a metric, also while the run writes it."""
        found = []
        if (path := self.folder / "metrics.csv").exists():
            for line in path.read_text().splitlines(keepends=True)[1:]:
                cells = line.split(",")
                if line.endswith("\n") and len(cells) == 4 and cells[2] == metric and cells[1]:
                    found.append((round(float(cells[1]) * 1000), float(cells[3])))
        return found

    def how_it_failed(self, lines: int = 6) -> str:
        """Its exit code, where its log is, and how that ends."""
        code = f"killed by {signal.Signals(-self.code).name}" if (self.code or 0) < 0 else f"exit code {self.code}"
        said = ""
        if self.log.exists():
            with open(self.log, "rb") as file:
                file.seek(max(0, os.path.getsize(self.log) - 8192))
                said = file.read().decode(errors="replace")
        said = [line[:200] for line in said.rpartition("\n$ ")[2].splitlines()[1:] if line.strip()][-lines:]
        if not said:
            return f"{self.name}: {code}, before it printed anything"
        return "\n".join([f"{self.name}: {code}; {self.log} ends with", *(f"  | {line}" for line in said)])


def settings(job: Job, jobs: Sequence[Job]) -> str:
    """The overrides of this job that not all jobs have."""
    common = set.intersection(*(set(other.overrides) for other in jobs))
    return shlex.join(o for o in job.overrides if o not in common)


def table(jobs: Sequence[Job]) -> str:
    """Every job in a line: its run, what is special about it, its metric, its seconds and its state."""
    measured = next((job.measured for job in jobs if job.value is not None), "metric")
    rows = [("run", "settings", measured, "seconds", "state")]
    for job in jobs:
        value = "" if job.value is None else f"{job.value:.5g}"
        rows.append((job.name, settings(job, jobs), value, f"{job.seconds:.0f}", job.state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
