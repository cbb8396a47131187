"""Logs what training steps return, averaged since the last time."""

import torch
from lightning import Callback
from torch import Tensor

from src.schedule import due


class Metrics(Callback):
    """Averages the values of every step over `every_kimg` and over all processes, on the device, and reports them.

    A value with an entry per layer becomes one metric per layer: train/loss_layer/00, /01, ...
    """

    def __init__(self, every_kimg: float):
        self.every_kimg = every_kimg
        self.sums: dict[str, Tensor] = {}
        self.steps = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
        for key, value in outputs.items():
            self.sums[key] = self.sums[key] + value if key in self.sums else value.detach().clone().float()
        if not due(module.images_seen, module.images_per_batch, self.every_kimg):
            return
        module.require_finite()
        values = torch.cat([value.reshape(-1) for value in self.sums.values()]) / self.steps
        values = iter(trainer.strategy.reduce(values, reduce_op="mean").tolist())
        report = {}
        for key, value in self.sums.items():
            names = [f"{key}/{layer:02d}" for layer in range(len(value))] if value.dim() else [key]
            report |= {name: next(values) for name in names}
        for name, optimizer in module.named_optimizers().items():
            report[f"train/lr_{name}"] = optimizer.param_groups[0]["lr"]
        module.report(report)
        self.sums, self.steps = {}, 0
