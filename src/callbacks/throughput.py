"""Speed and memory."""

import resource
import sys
import time

import torch
from lightning import Callback

from src.schedule import due


class Throughput(Callback):
    """Reports images per second over all processes, seconds per thousand images, and peak memory, every `every_kimg`.

    Time spent in validation is not counted.
    """

    def __init__(self, every_kimg: float):
        self.every_kimg = every_kimg

    def on_train_start(self, trainer, module):
        self._begin(module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        images = module.images_seen - self.images
        if images < 0:  # the run went back
            return self._begin(module)
        if not due(module.images_seen, module.images_per_batch, self.every_kimg) or not images:
            return
        seconds = time.perf_counter() - self.started
        report = {
            "time/images_per_sec": images / seconds,
            "time/sec_per_kimg": 1000 * seconds / images,
            "memory/peak_rss_mb": peak_rss_mb(),
        }
        if module.device.type == "cuda":
            report["memory/peak_device_mb"] = torch.cuda.max_memory_allocated(module.device) / 2**20
        module.report(report)
        self._begin(module)

    def on_validation_start(self, trainer, module):
        self.paused = time.perf_counter()

    def on_validation_end(self, trainer, module):
        self.started += time.perf_counter() - self.paused

    def _begin(self, module) -> None:
        self.started, self.images = time.perf_counter(), module.images_seen


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
