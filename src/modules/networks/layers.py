"""Layers that the DDGAN generator and discriminators share: initialisation, FIR resampling, time, minibatch statistics.

Sources: DDPM's initialisation and time embedding (arXiv 2006.11239), the FIR resampling and the minibatch standard
deviation of StyleGAN2 (arXiv 1912.04958), Fourier features (arXiv 2006.10739).
"""

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEAR_ZERO = 1e-10  # init scale of a layer that should start as nothing and yet receive gradients


def variance_scaling_(weight: Tensor, scale: float = 1.0) -> Tensor:
    """Fill with uniform values of variance scale / mean(fan_in, fan_out), DDPM's default initialisation, in place."""
    receptive = math.prod(weight.shape[2:])
    fan_average = receptive * (weight.shape[0] + weight.shape[1]) / 2
    limit = math.sqrt(3 * scale / fan_average)
    return nn.init.uniform_(weight, -limit, limit)


def conv(inputs: int, outputs: int, kernel: int, scale: float = 1.0, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    """A convolution with DDPM's initialisation that keeps the image's size (`stride` 1) or leaves padding to a blur."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0, bias=bias)
    variance_scaling_(layer.weight, scale)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """A linear layer with DDPM's initialisation."""
    layer = nn.Linear(inputs, outputs)
    variance_scaling_(layer.weight, scale)
    nn.init.zeros_(layer.bias)
    return layer


def label_embedding(classes: int, width: int) -> nn.Embedding | None:
    """A row per class, initialised like a linear layer on one-hot labels; None, hence no parameters, for no classes."""
    if classes < 0:
        raise ValueError(f"classes is {classes}; set it to the number of labels, or to 0 for a network without labels")
    if classes == 0:
        return None
    embedding = nn.Embedding(classes, width)
    variance_scaling_(embedding.weight)
    return embedding


def embed_labels(embedding: nn.Embedding | None, labels: Tensor | None) -> Tensor | None:
    """Rows (n, width) of a class-conditional network; None for one without classes, which ignores labels."""
    if embedding is None:
        return None
    if labels is None:
        raise ValueError("this network was built with classes > 0: pass labels (n,), or build it with classes=0")
    return embedding(labels)


def group_norm(channels: int, affine: bool = True) -> nn.GroupNorm:
    """Group norm of min(channels / 4, 32) groups, or of the largest smaller number that divides the channels."""
    groups = next(g for g in range(max(min(channels // 4, 32), 1), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels, eps=1e-6, affine=affine)


def rescaled_sum(x: Tensor, y: Tensor) -> Tensor:
    """(x + y) / sqrt(2): a residual sum that keeps the variance."""
    return (x + y) * math.sqrt(0.5)


def fir_kernel(channels: int, gain: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The depthwise kernel [1, 3, 3, 1] x [1, 3, 3, 1] of sum `gain`, (c, 1, 4, 4), computed on the device itself."""
    taps = 4 - 2 * (torch.arange(4, dtype=torch.float32, device=device) - 1.5).abs()  # 1, 3, 3, 1
    kernel = torch.outer(taps, taps) * (gain / 64)  # exact in bfloat16 too
    return kernel.to(dtype).expand(channels, 1, 4, 4).contiguous()


@cache
def kept_fir_kernel(channels: int, gain: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One copy in a process, not in a module or a state dict; a kernel first made while sampling serves training."""
    with torch.inference_mode(False):
        return fir_kernel(channels, gain, dtype, device)


def fir_kernel_like(x: Tensor, gain: float) -> Tensor:
    """The kernel for images `x`: kept in eager mode, a few fused operations inside a compiled graph."""
    make = fir_kernel if torch.compiler.is_compiling() else kept_fir_kernel
    return make(x.shape[1], gain, x.dtype, x.device)


class Fir(torch.autograd.Function):
    """A depthwise convolution with the kernel of sum `gain`, or its adjoint, whose derivatives are one of both again.

    PyTorch's own second derivative, which gradient penalties take, visits each channel by itself for the gradient of a
    kernel that needs none. And a CPU computes at least in float32: its adjoint in bfloat16 takes twenty times longer.
    """

    @staticmethod
    def forward(x: Tensor, gain: float, stride: int, padding: int, adjoint: bool) -> Tensor:
        convolve, options = F.conv_transpose2d if adjoint else F.conv2d, {"stride": stride, "padding": padding}
        if x.device.type != "cpu":
            return convolve(x, fir_kernel_like(x, gain), groups=x.shape[1], **options)
        with torch.autocast("cpu", enabled=False):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return convolve(wide, fir_kernel_like(wide, gain), groups=x.shape[1], **options).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        _, gain, stride, padding, adjoint = inputs
        ctx.adjoint = gain, stride, padding, not adjoint

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Fir.apply(gradient, *ctx.adjoint), None, None, None, None


def fir_downsample(x: Tensor) -> Tensor:
    """Blur with [1, 3, 3, 1] and keep every second pixel: (n, c, h, w) -> (n, c, h / 2, w / 2), for even h and w."""
    return Fir.apply(x, 1.0, 2, 1, False)


def fir_upsample(x: Tensor) -> Tensor:
    """Insert zeros and blur with gain 4: (n, c, h, w) -> (n, c, 2 h, 2 w), the mean brightness unchanged."""
    return Fir.apply(x, 4.0, 2, 1, True)


def fir_blur(x: Tensor) -> Tensor:
    """The blur before an unpadded 3x3 convolution of stride 2: (n, c, h, w) -> (n, c, h + 1, w + 1)."""
    return Fir.apply(x, 1.0, 1, 2, False)


def positional_features(t: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of t at geometrically falling frequencies (DDPM): (n,) floats -> (n, width)."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=t.dtype, device=t.device) * -(math.log(10000) / (half - 1)))
    angles = t[:, None] * frequencies  # (n, width / 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def fourier_features(t: Tensor, width: int, scale: float = 16.0) -> Tensor:
    """Sines, then cosines, of log(1 + t) at Gaussian frequencies: (n,) floats -> (n, 2 width).

    The frequencies are the quantiles of |N(0, scale^2)| instead of draws, so they need no state and no seed; log(1 + t)
    instead of log(t) is finite at t = 0.
    """
    quantiles = (torch.arange(width, dtype=t.dtype, device=t.device) + 0.5) / width
    frequencies = scale * math.sqrt(2) * torch.erfinv(quantiles)
    angles = 2 * math.pi * torch.log1p(t)[:, None] * frequencies  # (n, width)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class TimeEmbedding(nn.Module):
    """Integer times to vectors: fixed sinusoids of `features` frequencies and two linear layers of `width`."""

    def __init__(self, features: int, width: int, activation: Callable[[Tensor], Tensor], kind: str = "positional"):
        super().__init__()
        if kind not in ("positional", "fourier"):
            raise ValueError(f"embedding is {kind!r}; choose positional or fourier")
        if features < 4 or features % 2:
            raise ValueError(f"a time embedding of {features} features is impossible; use an even width of 4 or more")
        self.kind, self.features, self.activation = kind, features, activation
        self.fc1 = linear(features if kind == "positional" else 2 * features, width)
        self.fc2 = linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        dtype = self.fc1.weight.dtype
        t = t.to(torch.promote_types(dtype, torch.float32))  # times and angles lose too much in bfloat16
        features = (positional_features if self.kind == "positional" else fourier_features)(t, self.features)
        return self.fc2(self.activation(self.fc1(features.to(dtype))))  # (n, width)


def minibatch_std(x: Tensor, group: int) -> Tensor:
    """Append one channel: the standard deviation over a group of samples, averaged over features and pixels.

    Groups are `group` consecutive samples, or the whole batch where it is smaller: (n, c, h, w) -> (n, c + 1, h, w).
    Raises ValueError for a larger batch that the group does not divide. Source: StyleGAN2 (arXiv 1912.04958).
    """
    n, _, h, w = x.shape
    size = min(group, n)
    if n % size:
        raise ValueError(
            f"the minibatch standard deviation takes groups of {group} samples, which do not divide a batch of {n}: "
            f"use a multiple of {group}, at most {group} samples, or another discriminator group"
        )
    grouped = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(0, (n // size, size))  # (g, s, c, h, w)
    std = (grouped.var(dim=1, correction=0) + 1e-8).sqrt().mean(dim=(1, 2, 3))  # (g,)
    std = std.to(x.dtype).repeat_interleave(size, output_size=n)  # (n,)
    return torch.cat([x, std[:, None, None, None].expand(n, 1, h, w)], dim=1)
