"""Ends training at its budget."""

from lightning import Callback


class Budget(Callback):
    """Stops after the batch that reaches `total_kimg` thousand images seen; a last validation follows."""

    def __init__(self, total_kimg: float):
        self.total_kimg = total_kimg

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = module.images_seen >= self.total_kimg * 1000
