"""How many of the 25 Gaussians a model finds, and a picture of where its points lie."""

from pathlib import Path

import torch
from lightning import Callback
from torch import Tensor

from src.images import write_png


class Modes(Callback):
    """Reports val/modes (of 25) and val/share_within_3_sigma of the validation's points, and draws them.

    A mode counts as found when a point within 3 sigma of it exists. The picture shows the grid with a margin, real
    points in light grey under generated ones.

    Args:
        folder: of the run.
        spacing, sigma: distance of neighbouring modes, and their standard deviation.
    """

    def __init__(self, folder: str, spacing: float = 2.0, sigma: float = 0.05):
        self.folder, self.spacing, self.sigma = Path(folder) / "pictures", spacing, sigma

    def on_validation_start(self, trainer, module):
        self.counts = torch.zeros(27, device=module.device)  # points near each mode, near none, and all of them
        self.canvas = torch.zeros(2, 512, 512, device=module.device)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        kept = (outputs["numbers"] < len(trainer.datamodule.held_out)).to(outputs["fake"].device)
        points = outputs["fake"][kept].flatten(1)
        self.counts += count_modes(points, self.spacing, self.sigma)
        for layer, drawn in zip(self.canvas, (outputs["real"][kept].flatten(1), points), strict=True):
            place = ((drawn / (5.5 * self.spacing) + 0.5) * 512).long().clamp(0, 511)
            layer[511 - place[:, 1], place[:, 0]] = 1

    def on_validation_epoch_end(self, trainer, module):
        counts = trainer.strategy.reduce(self.counts, reduce_op="sum")
        canvas = trainer.strategy.reduce(self.canvas, reduce_op="sum").clamp(max=1)
        found, near = (counts[:25] > 0).sum(), counts[:25].sum() / counts[26]
        module.report({"val/modes": found.float(), "val/share_within_3_sigma": near})
        if trainer.is_global_zero:
            picture = torch.ones(3, 512, 512)
            picture[:, canvas[0].cpu() > 0] = 0.5
            picture[:, canvas[1].cpu() > 0] = torch.tensor([0.6, -0.8, -0.8])[:, None]
            write_png(self.folder / f"points_{module.images_seen:012d}.png", picture)


def count_modes(points: Tensor, spacing: float, sigma: float) -> Tensor:
    """(27,): how many of the points (n, 2) lie within 3 sigma of each of 25 modes, near none of them, and in all."""
    grid = (points / spacing).round().clamp(-2, 2)
    near = (points - grid * spacing).norm(dim=1) <= 3 * sigma
    mode = ((grid[:, 0] + 2) * 5 + grid[:, 1] + 2).long()
    counts = torch.bincount(torch.where(near, mode, 25), minlength=26).to(points.dtype)
    return torch.cat([counts, counts.new_tensor([len(points)])])
