"""Time-conditional discriminators of DDGAN (arXiv 2112.07804): is x_t a plausible denoising of x_{t+1}?"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.modules.networks.layers import (
    NEAR_ZERO,
    TimeEmbedding,
    conv,
    embed_labels,
    fir_downsample,
    label_embedding,
    linear,
    minibatch_std,
    rescaled_sum,
)

leaky_relu = partial(F.leaky_relu, negative_slope=0.2)


class DownBlock(nn.Module):
    """Residual block without normalisation that halves the image after its first convolution, if `down`."""

    def __init__(self, inputs: int, outputs: int, t_width: int, down: bool):
        super().__init__()
        self.down = fir_downsample if down else nn.Identity()
        self.conv1 = conv(inputs, outputs, 3)
        self.time = linear(t_width, outputs)
        self.conv2 = conv(outputs, outputs, 3, scale=NEAR_ZERO)
        self.skip = conv(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor, t_emb: Tensor) -> Tensor:
        h = self.conv1(leaky_relu(x)) + self.time(t_emb)[:, :, None, None]
        h = self.conv2(self.down(leaky_relu(h)))
        return rescaled_sum(self.skip(self.down(x)), h)


class Discriminator(nn.Module):
    """D(x_t, t, x_{t+1}) -> logits, DDGAN eq. 5; the body of the two sizes below.

    `plan` lists (output channels, halves the image) of each block. With `classes`, the features are also projected on
    the label's row (arXiv 1802.05637). Raises ValueError for a resolution that the blocks cannot halve.
    """

    forward_methods: tuple[str, ...] = ()

    def __init__(
        self,
        channels: int,
        resolution: int,
        stem: int,
        plan: Sequence[tuple[int, bool]],
        time_width: int,
        group: int,
        classes: int,
        head_scale: float,
    ):
        super().__init__()
        factor = 2 ** sum(down for _, down in plan)
        if resolution % factor:
            raise ValueError(
                f"{type(self).__name__} needs a resolution that {factor} divides, not {resolution}: "
                "change data.resolution or choose the other discriminator"
            )
        if group < 1:
            raise ValueError(f"the discriminator's group is {group}; set it to 1 or more samples")
        self.group = group
        self.time_embedding = TimeEmbedding(time_width, time_width, leaky_relu)
        self.stem = conv(2 * channels, stem, 1)
        inputs = [stem, *(outputs for outputs, _ in plan)]
        self.blocks = nn.ModuleList(
            DownBlock(c, outputs, time_width, down) for c, (outputs, down) in zip(inputs, plan, strict=False)
        )
        features = inputs[-1]
        self.head = conv(features + 1, features, 3, scale=head_scale)
        self.logit = linear(features, 1)
        self.label_embedding = label_embedding(classes, features)

    def forward(self, x_t: Tensor, t: Tensor, x_next: Tensor, labels: Tensor | None = None) -> Tensor:
        """The pair, each (n, c, h, w), integer times (n,) of x_t and labels (n,) -> logits (n,), high for real."""
        t_emb = leaky_relu(self.time_embedding(t))  # (n, time_width)
        h = self.stem(torch.cat([x_t, x_next], dim=1))
        for block in self.blocks:
            h = block(h, t_emb)
        h = leaky_relu(self.head(minibatch_std(h, self.group))).sum(dim=(2, 3))  # (n, features)
        logits = self.logit(h).squeeze(1)  # (n,)
        label_emb = embed_labels(self.label_embedding, labels)
        return logits if label_emb is None else logits + (label_emb * h).sum(dim=1)

    def shard_units(self) -> list[nn.Module]:
        """The residual blocks in the order in which they run: what may be sharded or checkpointed."""
        return list(self.blocks)


class SmallDiscriminator(Discriminator):
    """Four blocks for images of about 32 pixels: three halvings, 2 to 8 times `width` channels."""

    def __init__(
        self,
        channels: int,
        resolution: int,
        width: int = 64,
        time_width: int = 256,
        group: int = 4,
        classes: int = 0,
    ):
        plan = [(2 * width, False), (4 * width, True), (8 * width, True), (8 * width, True)]
        super().__init__(channels, resolution, 2 * width, plan, time_width, group, classes, head_scale=NEAR_ZERO)


class LargeDiscriminator(Discriminator):
    """Six blocks for images of about 256 pixels: six halvings, 2 to 8 times `width` channels."""

    def __init__(
        self,
        channels: int,
        resolution: int,
        width: int = 64,
        time_width: int = 256,
        group: int = 4,
        classes: int = 0,
    ):
        plan = [(4 * width, True), *[(8 * width, True)] * 5]
        super().__init__(channels, resolution, 2 * width, plan, time_width, group, classes, head_scale=1.0)
