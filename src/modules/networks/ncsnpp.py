"""NCSN++ as a generator: the U-Net of score-based models (arXiv 2011.13456), with a latent z in every norm.

DDGAN (arXiv 2112.07804) makes it multimodal: z, mapped by an MLP, sets gain and bias of each adaptive
group norm, so that one noisy image has many clean predictions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.modules.networks.layers import (
    NEAR_ZERO,
    TimeEmbedding,
    conv,
    embed_labels,
    fir_blur,
    fir_downsample,
    fir_upsample,
    group_norm,
    label_embedding,
    linear,
    rescaled_sum,
)


class ZMapping(nn.Module):
    """The latent z, pixel-normalised, through a first linear layer and `layers` more (StyleGAN's mapping)."""

    def __init__(self, z_dim: int, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList([linear(z_dim, width), *(linear(width, width) for _ in range(layers))])

    def forward(self, z: Tensor) -> Tensor:
        z = z * torch.rsqrt(z.square().mean(dim=1, keepdim=True) + 1e-8)
        for layer in self.layers:
            z = F.silu(layer(z))
        return z  # (n, width)


class AdaptiveGroupNorm(nn.Module):
    """Group norm whose gain and bias are linear in the z embedding, starting at 1 and 0."""

    def __init__(self, channels: int, z_width: int):
        super().__init__()
        self.norm = group_norm(channels, affine=False)
        self.style = linear(z_width, 2 * channels)
        nn.init.ones_(self.style.bias[:channels])

    def forward(self, x: Tensor, z_emb: Tensor) -> Tensor:
        gain, bias = self.style(z_emb)[:, :, None, None].chunk(2, dim=1)  # (n, c, 1, 1) each
        return gain * self.norm(x) + bias


class ResidualBlock(nn.Module):
    """BigGAN's residual block with FIR resampling before its first convolution; output rescaled by 1 / sqrt(2)."""

    def __init__(self, inputs: int, outputs: int, t_width: int, z_width: int, resample: str = ""):
        super().__init__()
        assert resample in ("", "up", "down"), resample
        self.resample = {"": nn.Identity(), "up": fir_upsample, "down": fir_downsample}[resample]
        self.norm1 = AdaptiveGroupNorm(inputs, z_width)
        self.conv1 = conv(inputs, outputs, 3)
        self.time = linear(t_width, outputs)
        self.norm2 = AdaptiveGroupNorm(outputs, z_width)
        self.conv2 = conv(outputs, outputs, 3, scale=NEAR_ZERO)
        self.skip = conv(inputs, outputs, 1) if inputs != outputs or resample else nn.Identity()

    def forward(self, x: Tensor, t_emb: Tensor, z_emb: Tensor) -> Tensor:
        h = self.resample(F.silu(self.norm1(x, z_emb)))
        h = self.conv1(h) + self.time(t_emb)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h, z_emb)))
        return rescaled_sum(self.skip(self.resample(x)), h)


class Attention(nn.Module):
    """Single-head self-attention over pixels, as a residual block rescaled by 1 / sqrt(2)."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = group_norm(channels)
        self.q, self.k, self.v = (conv(channels, channels, 1, scale=0.1) for _ in range(3))
        self.out = conv(channels, channels, 1, scale=NEAR_ZERO)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2).mT.unsqueeze(1) for layer in (self.q, self.k, self.v))  # (n, 1, h w, c)
        h = F.scaled_dot_product_attention(q, k, v).squeeze(1).mT.unflatten(2, x.shape[2:])  # (n, c, h, w)
        return rescaled_sum(x, self.out(h))


class ResidualPyramid(nn.Module):
    """Carries the input down beside the network: blur, convolve to half size, add; the sum is the next pyramid."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = conv(inputs, outputs, 3, stride=2)

    def forward(self, pyramid: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = rescaled_sum(self.conv(fir_blur(pyramid)), h)
        return h, h


class SkipPyramid(nn.Module):
    """Shows each level the image itself at that size, through a 1x1 convolution added to the features."""

    def __init__(self, image_channels: int, outputs: int):
        super().__init__()
        self.conv = conv(image_channels, outputs, 1)

    def forward(self, pyramid: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        pyramid = fir_downsample(pyramid)
        return self.conv(pyramid) + h, pyramid


class DownLevel(nn.Module):
    """Blocks of one resolution, each with its attention; then, but for the last level, the way to half the size."""

    def __init__(
        self,
        blocks: Sequence[ResidualBlock],
        attentions: Sequence[nn.Module],
        downsample: ResidualBlock | None,
        pyramid: nn.Module | None,
    ):
        super().__init__()
        self.blocks, self.attentions = nn.ModuleList(blocks), nn.ModuleList(attentions)
        self.downsample, self.pyramid = downsample, pyramid

    def forward(self, h: Tensor, pyramid: Tensor, t_emb: Tensor, z_emb: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        skips = []
        for block, attention in zip(self.blocks, self.attentions, strict=True):
            h = attention(block(h, t_emb, z_emb))
            skips.append(h)
        if self.downsample is not None:
            h = self.downsample(h, t_emb, z_emb)
            if self.pyramid is not None:
                h, pyramid = self.pyramid(pyramid, h)
            skips.append(h)
        return h, pyramid, skips


class UpLevel(nn.Module):
    """Blocks of one resolution that take back the skips, one attention after them; then the way to twice the size."""

    def __init__(self, blocks: Sequence[ResidualBlock], attention: nn.Module, upsample: ResidualBlock | None):
        super().__init__()
        self.blocks, self.attention, self.upsample = nn.ModuleList(blocks), attention, upsample

    def forward(self, h: Tensor, skips: list[Tensor], t_emb: Tensor, z_emb: Tensor) -> Tensor:
        for block, skip in zip(self.blocks, skips, strict=True):
            h = block(torch.cat([h, skip], dim=1), t_emb, z_emb)
        h = self.attention(h)
        return h if self.upsample is None else self.upsample(h, t_emb, z_emb)


class NCSNpp(nn.Module):
    """Predicts the clean image from a noisy one: G(x_{t+1}, t, z) -> x_0 in [-1, 1], DDGAN eq. 8.

    `width` times each of `multipliers` gives a level's channels, and each level after the first halves the image;
    `blocks` residual blocks a level, `attention` at these resolutions and in the middle; `z_layers` layers after the
    first of the z mapping; `progressive_input` residual, input_skip or none; `embedding` positional or fourier;
    `classes` labels, 0 for none. Raises ValueError for sizes that do not fit one another.
    """

    forward_methods: tuple[str, ...] = ()

    def __init__(
        self,
        channels: int,
        resolution: int,
        width: int = 128,
        multipliers: Sequence[int] = (1, 2, 2, 2),
        blocks: int = 2,
        attention: Sequence[int] = (16,),
        z_dim: int = 100,
        z_width: int = 256,
        z_layers: int = 4,
        progressive_input: str = "residual",
        embedding: str = "positional",
        classes: int = 0,
    ):
        super().__init__()
        resolutions = check_sizes(resolution, multipliers, attention)
        pyramids = {"residual": ResidualPyramid, "input_skip": SkipPyramid, "none": None}
        if progressive_input not in pyramids:
            raise ValueError(f"progressive_input is {progressive_input!r}; choose one of {', '.join(pyramids)}")
        pyramid_type = pyramids[progressive_input]
        widths = [width * multiplier for multiplier in multipliers]
        t_width, last = 4 * width, len(widths) - 1
        self.z_dim, self.shape, self.classes = z_dim, (channels, resolution, resolution), classes

        def residual(inputs: int, outputs: int, resample: str = "") -> ResidualBlock:
            return ResidualBlock(inputs, outputs, t_width, z_width, resample)

        def attend(level: int) -> nn.Module:
            return Attention(widths[level]) if resolutions[level] in attention else nn.Identity()

        self.time_embedding = TimeEmbedding(width, t_width, F.silu, embedding)
        self.z_mapping = ZMapping(z_dim, z_width, z_layers)
        self.label_embedding = label_embedding(classes, z_width)
        self.stem = conv(channels, width, 3)

        self.down = nn.ModuleList()
        skips = [width]  # channels of every skip, in the order in which the down path leaves them
        pyramid_channels = channels
        for level, c in enumerate(widths):
            level_blocks = [residual(skips[-1] if i == 0 else c, c) for i in range(blocks)]
            downsample = pyramid = None
            if level < last:
                downsample = residual(c, c, "down")
                pyramid = pyramid_type(pyramid_channels, c) if pyramid_type else None
                pyramid_channels = c if pyramid_type is ResidualPyramid else channels
            self.down.append(DownLevel(level_blocks, [attend(level) for _ in range(blocks)], downsample, pyramid))
            skips += [c] * (blocks + (level < last))

        self.middle_in = residual(widths[-1], widths[-1])
        self.middle_attention = Attention(widths[-1])
        self.middle_out = residual(widths[-1], widths[-1])

        self.up = nn.ModuleList()
        inputs = widths[-1]
        for level, c in reversed(list(enumerate(widths))):
            level_blocks = [residual((inputs if i == 0 else c) + skips.pop(), c) for i in range(blocks + 1)]
            self.up.append(UpLevel(level_blocks, attend(level), residual(c, c, "up") if level > 0 else None))
            inputs = c

        self.head_norm = group_norm(widths[0])
        self.head = conv(widths[0], channels, 3, scale=NEAR_ZERO)

    def forward(self, x: Tensor, t: Tensor, z: Tensor, labels: Tensor | None = None) -> Tensor:
        """Noisy images (n, c, h, w), integer times (n,), z (n, z_dim), labels (n,) -> clean images (n, c, h, w)."""
        t_emb = F.silu(self.time_embedding(t))  # (n, 4 width)
        z_emb = self.z_mapping(z)  # (n, z_width)
        label_emb = embed_labels(self.label_embedding, labels)
        if label_emb is not None:
            z_emb = z_emb + label_emb

        h, pyramid = self.stem(x), x
        skips = [h]
        for level in self.down:
            h, pyramid, level_skips = level(h, pyramid, t_emb, z_emb)
            skips += level_skips
        h = self.middle_attention(self.middle_in(h, t_emb, z_emb))
        h = self.middle_out(h, t_emb, z_emb)
        for level in self.up:
            h = level(h, [skips.pop() for _ in level.blocks], t_emb, z_emb)

        h = self.head(F.silu(self.head_norm(h)))
        return torch.tanh(h.to(x.dtype))  # in the input's precision, also under autocast

    def layers_in_order(self) -> list[nn.Module]:
        """Every layer and block that sees the image or the time, in the order in which they run."""
        layers = [self.time_embedding.fc1, self.time_embedding.fc2, self.stem]
        for level in self.down:
            for block, attention in zip(level.blocks, level.attentions, strict=True):
                layers += [block, attention]
            layers += [level.downsample, level.pyramid]
        layers += [self.middle_in, self.middle_attention, self.middle_out]
        for level in self.up:
            layers += [*level.blocks, level.attention, level.upsample]
        layers += [self.head_norm, self.head]
        return [layer for layer in layers if layer is not None and not isinstance(layer, nn.Identity)]

    def shard_units(self) -> list[nn.Module]:
        """The residual and attention blocks in the order in which they run: what may be sharded or checkpointed."""
        return [layer for layer in self.layers_in_order() if isinstance(layer, ResidualBlock | Attention)]


def check_sizes(resolution: int, multipliers: Sequence[int], attention: Sequence[int]) -> list[int]:
    """The resolution of each level; raises ValueError where they are not whole or lack one that attention asks for."""
    if not multipliers:
        raise ValueError("the generator has no levels: set multipliers to one number per level, such as [1,2,2,2]")
    factor = 2 ** (len(multipliers) - 1)
    if resolution % factor:
        raise ValueError(
            f"{len(multipliers)} levels need a resolution that {factor} divides, not {resolution}: "
            "change data.resolution or shorten the generator's multipliers"
        )
    resolutions = [resolution >> level for level in range(len(multipliers))]
    never = [size for size in attention if size not in resolutions]
    if never:
        raise ValueError(
            f"attention at {never} never happens: the levels of this generator are {resolutions}; set attention to "
            "some of them, or to [] for attention in the middle only"
        )
    return resolutions
