"""The metrics log: one append-only file that survives interruptions."""

import os
from pathlib import Path

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

HEADER = "batch,kimg,metric,value\n"


class MetricsLog(Logger):
    """Appends to <folder>/metrics.csv: a row per metric and time, so that new metrics need no new columns.

    pandas.read_csv(...).pivot(index="kimg", columns="metric", values="value") makes the wide table of it.
    """

    def __init__(self, folder: str):
        super().__init__()
        self.path = Path(folder) / "metrics.csv"

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

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs):
        """The configuration lies in every checkpoint."""

    @rank_zero_only
    def rewind(self, batch: int) -> None:
        """Cut rows after this batch, and a last one that was not written to its end."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
        part = self.path.with_suffix(".part")
        part.write_text(HEADER + "".join(line for line in kept if int(line.split(",")[0]) <= batch))
        os.replace(part, self.path)
