"""The metrics log: one append-only file that survives interruptions, and beside it how long the run took."""

import json
import time
from pathlib import Path

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import distributed

from src.files import replacing

HEADER = "batch,kimg,metric,value\n"


class MetricsLog(Logger):
    """Appends to <folder>/metrics.csv: a row per metric and time, so that new metrics need no new columns.

    pandas.read_csv(...).pivot(index="kimg", columns="metric", values="value") makes the wide table of it. time.json
    holds the hours over all starts of the run, validation and lost work included, and those hours times the processes
    that each start had: what the run cost.
    """

    def __init__(self, folder: str):
        super().__init__()
        self.path, self.clock = Path(folder) / "metrics.csv", Path(folder) / "time.json"
        self.began, self.processes = time.monotonic(), 1
        self.before: dict[str, float] | None = None  # what earlier starts took

    name = "csv"
    version = ""

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        kimg = f"{metrics['progress/kimg']:g}" if "progress/kimg" in metrics else ""
        fresh = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(HEADER if fresh else "")
            file.writelines(f"{step},{kimg},{k},{v!r}\n" for k, v in metrics.items() if k != "progress/kimg")
        self._keep_time()

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs):
        """The configuration lies in every checkpoint."""

    @rank_zero_only
    def finalize(self, status):
        if self.before is not None:  # something was logged
            self._keep_time()

    @rank_zero_only
    def rewind(self, batch: int) -> None:
        """Cut rows after this batch, and a last one that was not written to its end."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
        with replacing(self.path) as part:
            part.write_text(HEADER + "".join(line for line in kept if int(line.split(",")[0]) <= batch))

    def _keep_time(self) -> None:
        if self.before is None:
            try:
                self.before = json.loads(self.clock.read_text())
            except (OSError, ValueError):
                self.before = {}
        if distributed.is_available() and distributed.is_initialized():
            self.processes = distributed.get_world_size()
        hours = (time.monotonic() - self.began) / 3600
        total = {"hours": hours, "device_hours": hours * self.processes, "starts": 1}
        with replacing(self.clock) as part:
            part.write_text(json.dumps({key: value + self.before.get(key, 0) for key, value in total.items()}))
