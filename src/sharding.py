"""Tensors that are spread over processes (torch's DTensor): put together, taken apart, and measured."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm


class Piece(NamedTuple):
    """What a process keeps of a tensor that its engine cuts flat: the flattened one from `start` on."""

    numbers: Tensor  # (n,), sharing the engine's memory
    start: int
    shape: torch.Size  # of the tensor


def whole(value):
    """A tensor that is spread over processes, put together; anything else as it is. All processes call it together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def saved(value):
    """The same for a file: put together in host memory, so that devices never hold all of a network that is spread."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    """This process's part of a spread tensor, sharing its memory; any other tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def like(value: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, that every process has, on the device of `other` and spread as that is.

    A meta tensor, which stands for what is filled in later, gives zeros.
    """
    if value.is_meta:
        return torch.zeros_like(other, dtype=value.dtype)
    value = value.to(other.device)
    if isinstance(other, DTensor):
        return distribute_tensor(value, other.device_mesh, other.placements, src_data_rank=None)
    return value


def spread(part: Tensor, other: Tensor) -> Tensor:
    """A part that `local` gave, as the tensor that it is a part of, spread as `other` is."""
    if not isinstance(other, DTensor):
        return part
    return DTensor.from_local(part, other.device_mesh, other.placements, shape=other.shape, stride=other.stride())


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm () over all tensors, of which some may be spread over processes."""
    tensors = list(tensors)
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    others = [t for t in tensors if not isinstance(t, DTensor)]
    norms = [whole(get_total_norm(part)) for part in (sharded, others) if part]
    return get_total_norm(norms) if len(norms) == 2 else norms[0]
