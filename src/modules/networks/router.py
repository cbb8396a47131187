"""The router of decentralised diffusion: a small diffusion transformer with a class token (arXiv 2501.05450)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.modules.networks.dit import SMALL, DiT
from src.modules.networks.layers import linear


class RouterDiT(DiT):
    """Which cluster a noisy image comes from: (x_t, t, label) -> logits (n, clusters).

    It sees what a denoiser sees, through the same blocks; one more token, which is learned, gathers what the head
    reads. With `cosine` logits are cosines with learned prototypes, divided by the number given: InfoNCE against them.

    Args:
        clusters: how many there are.
        cosine: temperature of cosine logits; None for linear ones.
        options: as of DiT.
    """

    def __init__(self, channels: int, resolution: int, clusters: int, cosine: float | None = None, **options):
        super().__init__(channels, resolution, **options)
        if clusters < 2:
            raise ValueError(f"model.network.clusters is {clusters}; a router chooses among at least 2")
        if cosine is not None and cosine <= 0:
            raise ValueError(f"model.network.cosine is {cosine}; give a temperature above 0, such as 0.07, or null")
        self.clusters, self.cosine, self.width = clusters, cosine, self.stem.out_channels
        self.token = nn.Parameter(torch.empty(self.width))
        nn.init.normal_(self.token, std=SMALL)
        self.head = linear(self.width, clusters)
        nn.init.normal_(self.head.weight, std=SMALL)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
        """Noisy images (n, c, h, w), times of 0 to 1000 (n,), labels 0..classes (n,) -> logits (n, clusters).

        `kept` (n, width) multiplies what the head reads: dropout, drawn by the caller.
        """
        read = self._read(x, t, labels, self.token)[:, 0]  # (n, d)
        if kept is not None:
            read = read * kept.to(read.dtype)
        if self.cosine is None:
            return self.head(read)
        return F.normalize(read, dim=1) @ F.normalize(self.head.weight, dim=1).mT / self.cosine
