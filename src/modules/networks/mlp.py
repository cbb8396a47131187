"""Fully connected networks for points instead of images: the toy problems of DDGAN (arXiv 2112.07804)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.modules.networks.layers import TimeEmbedding


class _Residual(nn.Module):
    """x + W_2 silu(W_1 silu(x) + condition)."""

    def __init__(self, width: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.outer(F.silu(self.inner(F.silu(x)) + condition))


class _MLP(nn.Module):
    """Residual blocks on points and their sines and cosines at `frequencies` octaves, which make modes of a hundredth
    of the range visible (Tancik et al. 2020)."""

    forward_methods: tuple[str, ...] = ()

    def __init__(self, points: int, others: int, outputs: int, width: int, depth: int, frequencies: int):
        super().__init__()
        inputs = points * (1 + 2 * frequencies) + others
        self.register_buffer("octaves", torch.pi / 4 * 2.0 ** torch.arange(frequencies), persistent=False)
        self.time_embedding = TimeEmbedding(width, width, F.silu)
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(_Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, outputs)

    def run(self, points: Tensor, others: list[Tensor], t: Tensor) -> Tensor:
        waves = (points[:, :, None] * self.octaves.to(points.dtype)).flatten(1)
        t_emb, h = self.time_embedding(t), self.stem(torch.cat([points, waves.sin(), waves.cos(), *others], 1))
        for block in self.blocks:
            h = block(h, t_emb)
        return self.head(F.silu(h))

    def shard_units(self) -> list[nn.Module]:
        """The residual blocks in order."""
        return list(self.blocks)


class PointGenerator(_MLP):
    """G(x_{t+1}, t, z) -> x_0 for points of `channels` numbers, as images (n, channels, 1, 1); unbounded."""

    def __init__(self, channels: int, z_dim: int = 2, width: int = 256, depth: int = 3, frequencies: int = 0):
        super().__init__(channels, z_dim, channels, width, depth, frequencies)
        self.z_dim, self.shape = z_dim, (channels, 1, 1)

    def forward(self, x: Tensor, t: Tensor, z: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.run(x.flatten(1), [z], t).view_as(x)


class PointDiscriminator(_MLP):
    """D(x_t, t, x_{t+1}) -> logits (n,), for points as images (n, channels, 1, 1)."""

    def __init__(self, channels: int, width: int = 256, depth: int = 3, frequencies: int = 5):
        super().__init__(2 * channels, 0, 1, width, depth, frequencies)

    def forward(self, x_t: Tensor, t: Tensor, x_next: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.run(torch.cat([x_t.flatten(1), x_next.flatten(1)], 1), [], t).squeeze(1)
