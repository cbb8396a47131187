"""Fully connected networks for points instead of images: the toy problems of DDGAN (arXiv 2112.07804)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _MLP(nn.Module):
    """Linear layers with leaky ReLUs on numbers and their sines and cosines at `frequencies` octaves (Tancik et al.
    2020); after the first layer each time step adds an offset that it learns."""

    forward_methods: tuple[str, ...] = ()

    def __init__(self, inputs: int, outputs: int, steps: int, width: int, depth: int, frequencies: int):
        super().__init__()
        self.register_buffer("octaves", torch.pi / 8 * 2.0 ** torch.arange(frequencies), persistent=False)
        self.time_embedding = nn.Embedding(steps, width)
        self.stem = nn.Linear(inputs * (1 + 2 * frequencies), width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, outputs)

    def run(self, x: Tensor, t: Tensor) -> Tensor:
        waves = (x[:, :, None] * self.octaves.to(x.dtype)).flatten(1)
        h = F.leaky_relu(self.stem(torch.cat([x, waves.sin(), waves.cos()], 1)) + self.time_embedding(t), 0.2)
        for layer in self.layers:
            h = F.leaky_relu(layer(h), 0.2)
        return self.head(h)

    def shard_units(self) -> list[nn.Module]:
        """The hidden layers in order."""
        return list(self.layers)


class PointGenerator(_MLP):
    """G(x_{t+1}, t, z) -> x_0 for points of `channels` numbers, as images (n, channels, 1, 1); unbounded.

    It adds to x_{t+1}, so that from the start every mode is the nearest one of some inputs.
    """

    def __init__(
        self, channels: int, steps: int, z_dim: int = 2, width: int = 256, depth: int = 3, frequencies: int = 2
    ):
        super().__init__(channels + z_dim, channels, steps, width, depth, frequencies)
        self.z_dim, self.shape = z_dim, (channels, 1, 1)

    def forward(self, x: Tensor, t: Tensor, z: Tensor, labels: Tensor | None = None) -> Tensor:
        return x + self.run(torch.cat([x.flatten(1), z], 1), t).view_as(x)


class PointDiscriminator(_MLP):
    """D(x_t, t, x_{t+1}) -> logits (n,), for points as images (n, channels, 1, 1)."""

    def __init__(self, channels: int, steps: int, width: int = 256, depth: int = 3, frequencies: int = 2):
        super().__init__(2 * channels, 1, steps, width, depth, frequencies)

    def forward(self, x_t: Tensor, t: Tensor, x_next: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.run(torch.cat([x_t.flatten(1), x_next.flatten(1)], 1), t).squeeze(1)
