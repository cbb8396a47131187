"""Metrics for data whose modes are known: how many of them samples find, and how well."""

import torch
from torch import Tensor
from torchmetrics import Metric

from src.classifier import Classifier, mode_statistics, stacked_modes
from src.images import to_uint8


class PointModes(Metric):
    """modes (of 25) and share_within_3_sigma of points on a 5 x 5 grid of Gaussians around the origin.

    A mode counts as found when a point lies within 3 sigma of it. After `compute`, `picture` (3, 512, 512) shows the
    grid with a margin: real points in grey under generated ones.

    Args:
        spacing, sigma: distance of neighbouring modes, and their standard deviation.
    """

    def __init__(self, spacing: float, sigma: float):
        super().__init__()
        self.spacing, self.sigma = spacing, sigma
        self.add_state("counts", torch.zeros(27), "sum")  # points near each mode, near none, and all of them
        self.add_state("drawn", torch.zeros(2, 512, 512), "sum")
        self.picture: Tensor | None = None

    def update(self, fake: Tensor, real: Tensor) -> None:
        """Take in points (n, 2, 1, 1)."""
        self.counts += count_modes(fake.flatten(1), self.spacing, self.sigma)
        for layer, points in zip(self.drawn, (real.flatten(1), fake.flatten(1)), strict=True):
            place = ((points / (5.5 * self.spacing) + 0.5) * 512).long().clamp(0, 511)
            layer[511 - place[:, 1], place[:, 0]] = 1

    def compute(self) -> dict[str, float]:
        self.picture = torch.ones(3, 512, 512)
        self.picture[:, self.drawn[0].cpu() > 0] = 0.5
        self.picture[:, self.drawn[1].cpu() > 0] = torch.tensor([0.6, -0.8, -0.8])[:, None]
        near = self.counts[:25]
        return {"modes": float((near > 0).sum()), "share_within_3_sigma": float(near.sum() / self.counts[26])}


class StackedModes(Metric):
    """modes (of 1000) of stacked images, and kl: the divergence of their distribution from the uniform one, in nats.

    Args:
        classifier: of single channels.
    """

    picture = None

    def __init__(self, classifier: Classifier):
        super().__init__()
        self.classifier = classifier
        self.add_state("counts", torch.zeros(1000), "sum")

    def update(self, fake: Tensor, real: Tensor) -> None:
        """Take in images (n, 3, h, w) in [-1, 1]; real ones are not looked at."""
        self.counts += torch.bincount(stacked_modes(self.classifier, to_uint8(fake)), minlength=1000)

    def compute(self) -> dict[str, float]:
        found, divergence = mode_statistics(self.counts)
        return {"modes": float(found), "kl": divergence}


def count_modes(points: Tensor, spacing: float, sigma: float) -> Tensor:
    """(27,): how many of the points (n, 2) lie within 3 sigma of each of 25 modes, near none of them, and in all."""
    grid = (points / spacing).round().clamp(-2, 2)
    near = (points - grid * spacing).norm(dim=1) <= 3 * sigma
    mode = ((grid[:, 0] + 2) * 5 + grid[:, 1] + 2).long()
    counts = torch.bincount(torch.where(near, mode, 25), minlength=26).to(points.dtype)
    return torch.cat([counts, counts.new_tensor([len(points)])])
