"""The progress bar."""

import sys
import time

from lightning import Callback
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar(Callback):
    """Images seen of the budget, speed and the newest metrics; a line every `every_seconds` where there is no terminal.

    Args:
        total_kimg: the budget.
        shown: keys of metrics to show, where they are logged.
    """

    def __init__(self, total_kimg: float, shown: list[str], every_seconds: float = 30):
        self.total_kimg, self.shown, self.every_seconds = total_kimg, list(shown), every_seconds
        self.bar: Progress | None = None

    def on_train_start(self, trainer, module):
        self.printed = time.monotonic()
        if not trainer.is_global_zero or not sys.stdout.isatty():
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.1f}/{task.total:g} kimg"),
        )
        columns += (TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[metrics]}"))
        self.bar = Progress(*columns)
        done = module.images_seen / 1000
        self.task = self.bar.add_task("Training", total=self.total_kimg, completed=done, metrics="")
        self.bar.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        kimg, now = module.images_seen / 1000, time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=kimg, metrics=self._metrics(trainer))
        elif trainer.is_global_zero and now - self.printed > self.every_seconds:
            self.printed = now
            print(f"{kimg:.1f}/{self.total_kimg:g} kimg  {self._metrics(trainer)}", flush=True)

    def on_validation_start(self, trainer, module):
        self.describe("Scoring ")

    def on_validation_end(self, trainer, module):
        self.describe("Training")

    def describe(self, text: str) -> None:
        """What is being done at present."""
        if self.bar is not None:
            self.bar.update(self.task, description=text, refresh=True)

    def teardown(self, trainer, module, stage):
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _metrics(self, trainer) -> str:
        known = trainer.callback_metrics
        return "  ".join(f"{key.split('/')[-1]} {known[key]:.4g}" for key in self.shown if key in known)
