"""Logs what training steps return, averaged since the last time."""

import torch
from lightning import Callback
from torch import Tensor

from src.schedule import due


class Metrics(Callback):
    """Averages the values of every step over `every_kimg` and over all processes, on the device, and reports them.

    A value with an entry per layer becomes one metric per layer: train/loss_layer/00, /01, ... What only some steps
    return (a lazy penalty) is averaged over those. Sums are part of the checkpoint, so that a stop changes no average.
    """

    def __init__(self, every_kimg: float):
        self.every_kimg = every_kimg
        self.sums: dict[str, Tensor] = {}
        self.steps: dict[str, int] = {}

    def on_fit_start(self, trainer, module):
        self._mean = lambda tensor: trainer.strategy.reduce(tensor, reduce_op="mean")
        self._device = module.device

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for key, value in outputs.items():
            self.steps[key] = self.steps.get(key, 0) + 1
            self.sums[key] = self.sums[key] + value if key in self.sums else value.detach().clone().float()
        if not due(module.images_seen, module.images_per_batch, self.every_kimg):
            return
        module.require_finite()
        values = torch.cat([value.reshape(-1) / self.steps[key] for key, value in self.sums.items()])
        values = iter(self._mean(values).tolist())
        report = {}
        for key, value in self.sums.items():
            names = [f"{key}/{layer:02d}" for layer in range(len(value))] if value.dim() else [key]
            report |= {name: next(values) for name in names}
        for name, optimizer in module.named_optimizers().items():
            report[f"train/lr_{name}"] = optimizer.param_groups[0]["lr"]
        module.report(report)
        self.sums, self.steps = {}, {}

    def state_dict(self) -> dict:
        return {"sums": {key: self._mean(value.clone()) for key, value in self.sums.items()}, "steps": dict(self.steps)}

    def load_state_dict(self, state: dict) -> None:
        self.sums = {key: value.to(self._device) for key, value in state["sums"].items()}
        self.steps = dict(state["steps"])
