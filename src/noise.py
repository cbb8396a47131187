"""Stateless noise: (seed, purpose, sample number, shape) -> bits, whatever the batch split, order or world size."""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """Draws for the samples `numbers` under one seed; one generator per sample, on the CPU, then moved to `device`.

    Nothing random has to be saved: a draw depends on its name alone, so a resumed run, another batch split and another
    number of processes see the same bits. The global generators are never touched.
    """

    seed: int
    numbers: Tensor  # (n,) int64 sample numbers
    device: torch.device | str = "cpu"

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Standard normal draws, float32 (n, *shape)."""
        return self._draw(Tensor.normal_, purpose, shape)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Uniform draws in [0, 1), float32 (n, *shape)."""
        return self._draw(Tensor.uniform_, purpose, shape)

    def _draw(self, fill, purpose: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator()
        values = torch.empty(len(self.numbers), *shape)
        for value, number in zip(values, self.numbers.tolist(), strict=True):
            generator.manual_seed(_hash(self.seed, purpose, number))
            fill(value, generator=generator)
        return values.to(self.device, non_blocking=True)


def order(seed: int, passing: int, count: int) -> Tensor:
    """The order in which pass number `passing` visits a data set of `count` images, int64 (count,)."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(_hash(seed, "order", passing)))


def _hash(seed: int, purpose: str, number: int) -> int:
    return int.from_bytes(blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest(), "little") >> 1
