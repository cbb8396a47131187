"""How many of the 1000 modes of stacked images a model finds."""

from pathlib import Path

import torch
from lightning import Callback

from src.classifier import mode_statistics, stacked_modes, trained_classifier
from src.images import to_uint8


class StackedModes(Callback):
    """Reports val/modes (of 1000) and val/kl (of the generated modes against uniform) of the validation's samples.

    The classifier that tells modes is trained in a minute on the grey images, once, and kept in `cache`.
    """

    def __init__(self, cache: str):
        self.cache = Path(cache)

    def on_validation_start(self, trainer, module):
        images, labels = trainer.datamodule.grey()
        self.network = trained_classifier(images, labels, self.cache).to(module.device)
        self.counts = torch.zeros(1000, device=module.device)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        fake = outputs["fake"][outputs["numbers"] < len(trainer.datamodule.held_out)]
        self.counts += torch.bincount(stacked_modes(self.network, to_uint8(fake)), minlength=1000)

    def on_validation_epoch_end(self, trainer, module):
        found, divergence = mode_statistics(trainer.strategy.reduce(self.counts, reduce_op="sum"))
        module.report({"val/modes": float(found), "val/kl": divergence})
