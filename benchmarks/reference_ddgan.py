"""A DDGAN step as the published program spends it, with our weights and names, to compare with.

Same mathematics as `src.modules.ddgan`, other costs: FIR by padding and convolving single channels, attention by
einsum, a graph through the generator in the discriminator's turn, three backward passes there, an optimizer that loops
over parameters, and averages that are stacked anew at each step. Benchmarks measure the cost, tests compare results.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.diffusion import Diffusion
from src.modules.networks.discriminators import DownBlock
from src.modules.networks.layers import fir_downsample, fir_upsample
from src.modules.networks.ncsnpp import Attention, ResidualBlock, ResidualPyramid
from src.noise import Noise

SQRT2 = 2**0.5
RESAMPLE = {
    fir_upsample: lambda x: fir(x, (2, 1), up=2),
    fir_downsample: lambda x: fir(x, (1, 1), down=2),
}


def fir(x: Tensor, pad: tuple[int, int], up: int = 1, down: int = 1) -> Tensor:
    """Insert zeros, pad, convolve every channel as an image of its own, and leave pixels out."""
    b, c, h, w = x.shape
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=x.dtype, device=x.device)
    kernel = torch.outer(taps, taps) / taps.sum() ** 2 * up**2
    x = x.reshape(-1, h, 1, w, 1)
    x = F.pad(x, (0, up - 1, 0, 0, 0, up - 1)).reshape(-1, 1, h * up, w * up)
    x = F.pad(x, (pad[0], pad[1], pad[0], pad[1]))
    x = F.conv2d(x, kernel.flip(0, 1)[None, None])  # (b c, 1, ...)
    return x[:, :, ::down, ::down].reshape(b, c, -(-x.shape[2] // down), -(-x.shape[3] // down))


def as_published(network: nn.Module) -> nn.Module:
    """The network, whose blocks now compute as the published ones do; its parameters stay."""
    for module in network.modules():
        if isinstance(module, ResidualBlock):
            module.forward = partial(_residual, module, RESAMPLE.get(module.resample))
        elif isinstance(module, Attention):
            module.forward = partial(_attention, module)
        elif isinstance(module, ResidualPyramid):
            module.forward = partial(_pyramid, module)
        elif isinstance(module, DownBlock):
            module.forward = partial(_down_block, module, RESAMPLE.get(module.down))
    return network


def _adaptive_norm(norm: nn.Module, x: Tensor, z_emb: Tensor) -> Tensor:
    gain, bias = norm.style(z_emb)[:, :, None, None].chunk(2, dim=1)
    return gain * norm.norm(x) + bias


def _residual(block: ResidualBlock, resample: Callable | None, x: Tensor, t_emb: Tensor, z_emb: Tensor) -> Tensor:
    h = F.silu(_adaptive_norm(block.norm1, x, z_emb))
    if resample is not None:
        h, x = resample(h), resample(x)
    h = block.conv1(h)
    h = h + block.time(t_emb)[:, :, None, None]
    h = block.conv2(F.silu(_adaptive_norm(block.norm2, h, z_emb)))
    return (block.skip(x) + h) / SQRT2


def _attention(block: Attention, x: Tensor) -> Tensor:
    b, c, height, width = x.shape

    def mix(layer: nn.Conv2d, h: Tensor) -> Tensor:
        """A 1x1 convolution as a product with a matrix (inputs, outputs), channels last and back."""
        y = torch.einsum("bhwi,io->bhwo", h.permute(0, 2, 3, 1), layer.weight[:, :, 0, 0].t()) + layer.bias
        return y.permute(0, 3, 1, 2)

    h = block.norm(x)
    q, k, v = (mix(layer, h) for layer in (block.q, block.k, block.v))
    weights = torch.einsum("bchw,bcij->bhwij", q, k) * c**-0.5
    weights = F.softmax(weights.reshape(b, height, width, height * width), dim=-1)
    weights = weights.reshape(b, height, width, height, width)
    h = torch.einsum("bhwij,bcij->bchw", weights, v)
    return (x + mix(block.out, h)) / SQRT2


def _pyramid(block: ResidualPyramid, pyramid: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = (block.conv(fir(pyramid, (2, 2))) + h) / SQRT2
    return h, h


def _down_block(block: DownBlock, down: Callable | None, x: Tensor, t_emb: Tensor) -> Tensor:
    h = block.conv1(F.leaky_relu(x, 0.2))
    h = F.leaky_relu(h + block.time(t_emb)[:, :, None, None], 0.2)
    if down is not None:
        h, x = down(h), down(x)
    return (block.conv2(h) + block.skip(x)) / SQRT2


class StackedAverages:
    """Moving averages of parameters that are stacked by shape, updated and cut apart again at each step."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float):
        self.parameters, self.decay = list(parameters), decay
        self.averages = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            by_shape.setdefault(tuple(parameter.shape), []).append(number)
        for numbers in by_shape.values():
            average = torch.stack([self.averages[n] for n in numbers])
            average.mul_(self.decay).add_(torch.stack([self.parameters[n] for n in numbers]), alpha=1 - self.decay)
            for number, value in zip(numbers, average, strict=True):
                self.averages[number] = value


class PublishedStep:
    """Both turns on one batch, from the noise that `src.modules.ddgan` draws, so that both move weights alike."""

    def __init__(self, generator, discriminator, diffusion: Diffusion, gamma: float, decay: float, rates: dict):
        self.generator, self.discriminator = as_published(generator), as_published(discriminator)
        self.diffusion, self.gamma = diffusion, gamma
        options = {"betas": (0.5, 0.9), "foreach": False, "fused": False}
        self.of_generator = torch.optim.Adam(generator.parameters(), rates["generator"], **options)
        self.of_discriminator = torch.optim.Adam(discriminator.parameters(), rates["discriminator"], **options)
        self.averages = StackedAverages(generator.parameters(), decay)

    def __call__(self, images: Tensor, noise: Noise, with_r1: bool) -> None:
        self.discriminator.requires_grad_(True)
        self.discriminator.zero_grad()
        t, x_t, x_next, draw = self._pair(images, noise, "discriminator")
        x_t.requires_grad_(True)
        real = self.discriminator(x_t, t, x_next)
        F.softplus(-real).mean().backward(retain_graph=True)
        if with_r1:
            (gradient,) = torch.autograd.grad(real.sum(), x_t, create_graph=True)
            (self.gamma / 2 * gradient.flatten(1).norm(2, dim=1).square().mean()).backward()
        fake = self._fake(x_next, t, draw, noise, "discriminator")
        F.softplus(self.discriminator(fake, t, x_next)).mean().backward()
        self.of_discriminator.step()

        self.discriminator.requires_grad_(False)
        self.generator.zero_grad()
        t, _, x_next, draw = self._pair(images, noise, "generator")
        fake = self._fake(x_next, t, draw, noise, "generator")
        F.softplus(-self.discriminator(fake, t, x_next)).mean().backward()
        self.of_generator.step()
        self.averages.update()

    @torch.no_grad()
    def sample(self, noise: Noise) -> Tensor:
        """Images from x_T down to x_0."""
        x = noise.normal("sample/x", *self.generator.shape)
        for step in reversed(range(self.diffusion.steps)):
            draw = noise.normal(f"sample/{step}/posterior", *self.generator.shape)
            x = self._fake(x, torch.full((len(x),), step), draw, noise, f"sample/{step}")
        return x

    def _pair(self, images, noise, turn):
        t = (noise.uniform(f"{turn}/t") * self.diffusion.steps).long()
        of_t, of_next, draw = noise.normal(f"{turn}/x", 3, *images.shape[1:]).unbind(1)
        return t, *self.diffusion.q_pair(images, t, of_t, of_next), draw

    def _fake(self, x_next, t, draw, noise, purpose):
        x_0 = self.generator(x_next, t, noise.normal(f"{purpose}/z", self.generator.z_dim))
        return self.diffusion.posterior_sample(x_0, x_next, t, draw)
