"""How many of the data's known modes a model finds."""

from pathlib import Path

from lightning import Callback

from src.images import write_png
from src.protocols import KnownModes


class Modes(Callback):
    """Reports as val/... what the data's own metric says of the validation's samples, and writes its picture.

    Args:
        folder: of the run.
        cache: folder for whatever the metric has to prepare once.
    """

    def __init__(self, folder: str, cache: str):
        self.folder, self.cache, self.metric = Path(folder) / "pictures", Path(cache), None

    def setup(self, trainer, module, stage):
        if not isinstance(trainer.datamodule, KnownModes):
            raise ValueError(f"the modes of {type(trainer.datamodule).__name__} are not known; use ~callbacks.modes")

    def on_validation_start(self, trainer, module):
        if self.metric is None:
            self.metric = trainer.datamodule.modes(self.cache).to(module.device)
        self.metric.reset()

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        kept = outputs["numbers"] < len(trainer.datamodule.held_out)
        self.metric.update(outputs["fake"][kept], outputs["real"][kept])

    def on_validation_epoch_end(self, trainer, module):
        module.report({f"val/{name}": value for name, value in self.metric.compute().items()})
        if self.metric.picture is not None and trainer.is_global_zero:
            write_png(self.folder / f"modes_{module.images_seen:012d}.png", self.metric.picture)
