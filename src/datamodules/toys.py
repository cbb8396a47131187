"""Toy data with known answers: 25 Gaussians in the plane, and triples of grey images as colour images."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from src.classifier import trained_classifier
from src.datamodules.base import ImageData, Images
from src.datamodules.embedded import Embedded
from src.modes import PointModes, StackedModes

SPACING, SIGMA = 2.0, 0.05  # the usual grid; much wider than the noise, so that few steps can tell its modes apart


class Gaussians(ImageData):
    """Points of a 5 x 5 grid of Gaussians, as images (n, 2, 1, 1) of float32 in [-4.2, 4.2]; the label is the mode."""

    normalisation = "none"

    def __init__(self, count: int, held_out: int, **shared):
        super().__init__(**shared)
        self.count, self.count_held_out = count, held_out

    def load(self):
        draw = np.random.default_rng(self.seed)
        labels = draw.integers(0, 25, self.count + self.count_held_out)
        centres = (np.stack([labels // 5, labels % 5], 1) - 2) * SPACING
        points = (centres + SIGMA * draw.standard_normal(centres.shape)).astype(np.float32)[:, :, None, None]
        return (points[: self.count], labels[: self.count]), (points[self.count :], labels[self.count :])

    def as_seen(self, images: Tensor) -> Tensor:
        return images

    def modes(self, cache: Path) -> PointModes:
        """Modes found of 25, and the share of points within 3 sigma of one."""
        return PointModes(SPACING, SIGMA)


class Triples(Images):
    """Three grey images as the channels of one; the label is the number that their three labels spell."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, seed: int | None, count: int, draw: np.random.Generator):
        super().__init__(images, labels, seed)
        self.three = draw.integers(0, len(images), (count, 3))  # rows of grey images
        self.grey, self.images = images, np.broadcast_to(images[:1], (count, 3, *images.shape[2:]))
        self.labels = (labels[self.three].astype(np.int64) * [100, 10, 1]).sum(1)

    def _pixels(self, rows: np.ndarray | slice) -> Tensor:
        return torch.from_numpy(self.grey[self.three[rows], 0])


class Stacked(Embedded):
    """`count` random triples of the embedded grey set `name`, padded: 1000 modes, all equally likely.

    `count_held_out` more triples are made of the grey images that are held out.
    """

    def __init__(self, count: int, count_held_out: int, **shared):
        super().__init__(**shared)
        self.triples = count, count_held_out

    def setup(self, stage: str | None = None) -> None:
        if self.train is not None:
            return
        edge = (self.padding, self.padding)
        grey = [(np.pad(x, ((0, 0), (0, 0), edge, edge)), y) for x, y in self.load()]
        draw = np.random.default_rng(self.seed)
        self.train = Triples(*grey[0], self.seed, self.triples[0], draw)
        self.held_out = Triples(*grey[1], None, self.triples[1], draw)
        self.identity = f"stacked-{self.name}-{self.triples}-{self.count_held_out}-{self.seed}"
        self._divide()

    def modes(self, cache: Path) -> StackedModes:
        """Modes found of 1000, by a classifier that is trained in a minute on the grey images and kept in the cache."""
        images, labels = self.load()[0]
        edge = (self.padding, self.padding)
        padded = np.pad(images, ((0, 0), (0, 0), edge, edge))
        grey = torch.from_numpy(padded), torch.from_numpy(labels.astype(np.int64))
        return StackedModes(trained_classifier(*grey, cache))
