"""Pictures for people: samples of fixed numbers, and whatever else the model shows."""

from pathlib import Path

import torch
from lightning import Callback

from src.images import grid, write_png
from src.protocols import Pictures as Shows


class Pictures(Callback):
    """After each validation writes pictures/samples_<images seen>.png, and a file for each of the model's own pictures.

    Args:
        folder: of the run.
        count: samples in the grid; always those of the sample numbers 0, 1, ..., so that grids compare.
    """

    def __init__(self, folder: str, count: int = 64):
        self.folder, self.count = Path(folder) / "pictures", count

    def on_validation_start(self, trainer, module):
        self.samples = None

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        mine = outputs["numbers"] < self.count
        if self.samples is None:
            self.samples = outputs["fake"].new_zeros(self.count, *outputs["fake"].shape[1:])
        self.samples[outputs["numbers"][mine].to(self.samples.device)] = outputs["fake"][mine.to(self.samples.device)]

    def on_validation_epoch_end(self, trainer, module):
        samples = trainer.strategy.reduce(self.samples, reduce_op="sum")  # each process holds the rest as zeros
        shown = {"samples": grid(samples)} | (dict(module.pictures()) if isinstance(module, Shows) else {})
        if not trainer.is_global_zero:
            return
        for name, picture in shown.items():
            write_png(self.folder / f"{name}_{module.images_seen:012d}.png", picture)
            for logger in trainer.loggers:
                if hasattr(logger, "log_image"):
                    rgb = torch.cat([picture] * 3)[:3] if len(picture) == 1 else picture
                    logger.log_image(key=f"pictures/{name}", images=[rgb / 2 + 0.5], step=module.batches_seen)
