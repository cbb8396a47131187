"""Plain Discrete Distribution Layers that build every candidate, with the interface of `src.discrete`, to compare with.

Both are exact and differ from `src.discrete` only in cost, so that benchmarks measure cost alone and tests can hold all
three to the same values.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from src import discrete


class DiscreteLayer(Protocol):
    """The two calls that the decoder makes in every layer, with the signatures of `src.discrete`."""

    def distances(self, features, weight, previous, target, distance_fn=None) -> Tensor: ...

    def emit(self, features, weight, index, leak=False) -> tuple[Tensor, Tensor | None]: ...


class ReferenceLayer:
    """All K candidates with a gradient, the chosen one taken by indexing: backward runs densely over all K heads."""

    def __init__(self):
        self.candidates = self.previous = None  # from `distances` until `emit`

    def distances(self, features, weight, previous, target, distance_fn=None) -> Tensor:
        self.previous = previous
        self.candidates = _candidates(features, weight) + previous[:, None]  # (b, k, channels, h, w)
        with torch.no_grad():
            return (distance_fn or _mean_squared_error)(self.candidates, target[:, None])

    def emit(self, features, weight, index, leak=False) -> tuple[Tensor, Tensor | None]:
        c = weight.shape[2]
        rows = torch.arange(len(index), device=index.device)
        if self.candidates is None:  # generation: the codes are given, and all candidates are built nevertheless
            residual = _candidates(features[:, :c], weight)[rows, index]
        else:
            residual = self.candidates[rows, index] - self.previous
        self.candidates = self.previous = None
        return residual, _draw(features[:, c:], weight[index]) if leak else None


class GatherLayer:
    """All K candidates without a gradient; only the chosen head is drawn with one."""

    def distances(self, features, weight, previous, target, distance_fn=None) -> Tensor:
        with torch.no_grad():
            candidates = _candidates(features, weight) + previous[:, None]
            return (distance_fn or _mean_squared_error)(candidates, target[:, None])

    def emit(self, features, weight, index, leak=False) -> tuple[Tensor, Tensor | None]:
        c, chosen = weight.shape[2], weight[index]
        return _draw(features[:, :c], chosen), _draw(features[:, c:], chosen) if leak else None


class OurLayer:
    """`src.discrete` as it is."""

    distances = staticmethod(discrete.distances)
    emit = staticmethod(discrete.emit)


VARIANTS: dict[str, type[DiscreteLayer]] = {"reference": ReferenceLayer, "gather": GatherLayer, "ours": OurLayer}


def layer_loss(layer: DiscreteLayer, features, weight, previous, target, leak: bool = False):
    """Choice and loss of one layer: (loss, image, leak, distances, index), the loss with a gradient."""
    found = layer.distances(features[:, : weight.shape[2]], weight, previous, target)
    index = found.argmin(1)
    residual, leaked = layer.emit(features, weight, index, leak)
    image = previous + residual
    return (image - target).square().mean(), image, leaked, found, index


def _candidates(features: Tensor, weight: Tensor) -> Tensor:  # (b, c, h, w), (k, channels, c)
    k, channels, c = weight.shape
    return F.conv2d(features, weight.reshape(k * channels, c, 1, 1)).unflatten(1, (k, channels))


def _draw(features: Tensor, chosen: Tensor) -> Tensor:  # (b, c, h, w), (b, channels, c) -> (b, channels, h, w)
    return (chosen @ features.flatten(2)).unflatten(2, features.shape[2:])


def _mean_squared_error(candidates: Tensor, target: Tensor) -> Tensor:
    return (candidates - target).square().mean((2, 3, 4))
