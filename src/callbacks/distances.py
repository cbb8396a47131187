"""Scores samples during training."""

from pathlib import Path

from lightning import Callback

from src.distances import Distances as Measure
from src.distances import find_extractor
from src.images import to_uint8
from src.protocols import References


class Distances(Callback):
    """Frechet and kernel distance of the validation's samples to the first training images, on all processes.

    Logged as val/fid and val/kid where InceptionV3 computed them, under the offline extractor's name otherwise.

    Args:
        reference: how many training images the real statistics are made of.
        cache: folder where they are kept.
        inception: file with the weights of FID's InceptionV3; None to look where torch keeps it, and to take the
            offline extractor where there is none.
    """

    def __init__(self, reference: int, cache: str, inception: str | None = None):
        self.reference, self.cache, self.inception = reference, Path(cache), inception
        self.measure: Measure | None = None

    def setup(self, trainer, module, stage):
        if not isinstance(trainer.datamodule, References):
            raise ValueError(
                f"{type(trainer.datamodule).__name__} offers no reference images; use ~callbacks.distances"
            )
        self.extractor = find_extractor(self.inception)

    def on_validation_start(self, trainer, module):
        if self.measure is not None:
            return
        data, rank, ranks = trainer.datamodule, trainer.global_rank, trainer.world_size
        self.count = len(data.held_out)
        self.measure = Measure(self.extractor).to(module.device)
        real = lambda: data.reference(self.reference, rank, ranks)  # noqa: E731
        self.measure.real_from(self.cache, data.identity, self.reference, real, rank)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.measure.update(to_uint8(outputs["fake"][outputs["numbers"] < self.count]), real=False)

    def on_validation_epoch_end(self, trainer, module):
        module.report({f"val/{name}": value for name, value in self.measure.compute(module.seed).items()})
