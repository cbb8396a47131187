"""The decoder of a Discrete Distribution Network (Yang, ICLR 2025): a residual block, a discrete layer, and again."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import log2
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.discrete import distances, emit


class Layer(NamedTuple):
    """What one discrete layer saw and chose in training; nothing unchosen is kept."""

    loss: Tensor  # () of the chosen candidates, with gradient
    distances: Tensor | None = None  # (b, k) of every candidate, without gradient
    nearest: Tensor | None = None  # (b,) the nearest leaf, also where chain dropout took another; the last two may be
    # None where layers are spread over processes and another one has seen them


class Carried(NamedTuple):
    """What one layer hands to the next."""

    features: Tensor  # (b, width, h, w)
    image: Tensor  # (b, channels, h, w), chosen
    leak: Tensor  # (b, channels, h, w), of the same head


class Block(nn.Module):
    """Pre-activated residual block, times sqrt(1/2); `up` doubles the resolution inside the first convolution."""

    def __init__(self, width_in: int, width: int, up: bool):
        super().__init__()
        self.up = up
        self.norm_in = nn.GroupNorm(_groups(width_in), width_in, eps=1e-6)
        self.conv_in = nn.Conv2d(width_in, width, 3, padding=1)
        self.norm_out = nn.GroupNorm(_groups(width), width, eps=1e-6)
        self.conv_out = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(width_in, width, 1) if up or width_in != width else nn.Identity()
        for conv in (self.conv_in, self.conv_out):
            nn.init.xavier_uniform_(conv.weight)
            nn.init.zeros_(conv.bias)
        with torch.no_grad():
            self.conv_out.weight.mul_(1e-5)

    def forward(self, x: Tensor) -> Tensor:  # (b, width_in, h, w)
        y = F.silu(self.norm_in(x))
        x = self.skip(x)  # a 1x1 convolution commutes with the doubling, so it runs before
        if self.up:
            y, x = (F.interpolate(z, scale_factor=2, mode="nearest") for z in (y, x))
        y = self.conv_out(F.silu(self.norm_out(self.conv_in(y))))
        return (x + y) * 0.5**0.5  # (b, width, h or 2h, w or 2w)


class Head(nn.Module):
    """The K heads of a discrete layer: weight (leaves, channels, features), as one parameter that is never split up."""

    def __init__(self, leaves: int, channels: int, features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(leaves, channels, features))
        nn.init.kaiming_uniform_(self.weight.view(-1, features), a=5**0.5)


class DDNDecoder(nn.Module):
    """Images from codes, one leaf per layer; the image grows from `start` pixels to `resolution` by doubling.

    Args:
        channels: of the images.
        resolution: of the images, in pixels; start * 2^(stages - 1).
        blocks: how many layers each stage (resolution start, 2 start, ...) has.
        widths: feature channels of each stage.
        leaves: K of each stage.
        start: pixels of the first stage.
        leak: half of the features draws a second image with the chosen head, for the next block to see the choice.
        residual: candidates are drawn on top of the previous image.
        chain_dropout: probability, per sample and layer, that training goes on with a random leaf.
        classes: number of class labels, 0 for none; the label's embedding is added where a stage begins.
        distance_fn: what candidates are chosen by, as in src.discrete.distances; None for the mean squared error.
        loss_fn: (images, targets) -> loss of the chosen candidates; None for the mean squared error, as published.

    Raises ValueError for fewer than two leaves, for stages that do not agree, and for sizes that do not double.
    """

    forward_methods = ("encode", "decode")

    def __init__(
        self,
        channels: int,
        resolution: int,
        blocks: list[int],
        widths: list[int],
        leaves: list[int],
        start: int = 1,
        leak: bool = True,
        residual: bool = True,
        chain_dropout: float = 0.05,
        classes: int = 0,
        distance_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    ):
        super().__init__()
        _check(channels, resolution, blocks, widths, leaves, start, chain_dropout)
        self.channels, self.resolution, self.start = channels, resolution, start
        self.leak, self.residual, self.chain_dropout, self.classes = leak, residual, chain_dropout, classes
        self.distance_fn, self.loss_fn = distance_fn, loss_fn or F.mse_loss
        self.blocks, self.heads, self.labels = nn.ModuleList(), nn.ModuleList(), nn.ModuleDict()
        width_in = widths[0]
        for stage, (count, width, k) in enumerate(zip(blocks, widths, leaves, strict=True)):
            if classes:
                self.labels[str(len(self.blocks))] = nn.Embedding(classes, width_in)
            for number in range(count):
                self.blocks.append(Block(width_in, width, up=stage > 0 and number == 0))
                self.heads.append(Head(k, channels, width // 2 if leak else width))
                width_in = width
        self.stage_ends = list(accumulate(blocks))  # layers up to the end of each stage
        self.register_buffer("origin", _origin(widths[0], start), persistent=False)

    @property
    def leaves(self) -> list[int]:
        """K of every layer."""
        return [len(head.weight) for head in self.heads]

    @property
    def bits(self) -> float:
        """Length of a code in bits."""
        return sum(log2(k) for k in self.leaves)

    def shard_units(self) -> list[nn.Module]:
        """The residual blocks in order."""
        return list(self.blocks)

    def kept_whole(self) -> list[nn.Parameter]:
        """The heads, since Split-and-Prune copies their rows."""
        return [head.weight for head in self.heads]

    def layers(self) -> list[list[nn.Module]]:
        """The modules of each layer: its block, its head, and the embedding of labels that it begins with."""
        number = range(len(self.blocks))
        labels = [[self.labels[str(n)]] if str(n) in self.labels else [] for n in number]
        return [[self.blocks[n], self.heads[n], *labels[n]] for n in number]

    def begin(self, batch: int) -> Carried:
        """What the first layer is handed, for so many images."""
        image = self.origin.new_zeros(batch, self.channels, self.start, self.start)
        return Carried(self.origin.expand(batch, -1, -1, -1), image, image)

    def forward(
        self,
        target: Tensor,  # (b, channels, resolution, resolution)
        labels: Tensor | None = None,  # (b,)
        dropped: Tensor | None = None,  # (b, layers) bool, where chain dropout goes on with `random`
        random: Tensor | None = None,  # (b, layers) int64 codes
    ) -> list[Layer]:
        """Training pass: every layer's loss and statistics."""
        return self.run(range(len(self.blocks)), self.begin(len(target)), target, labels, dropped, random)[1]

    def run(
        self, layers: range, carried: Carried, target: Tensor, labels=None, dropped=None, random=None
    ) -> tuple[Carried, list[Layer]]:
        """The training pass of some consecutive layers, which begin with what the one before them handed on."""
        seen: list[Layer] = []

        def choose(layer: int, features: Tensor, previous: Tensor, aim: Tensor) -> Tensor:
            found = self._distances(layer, features, previous, aim)
            nearest = found.argmin(1)
            seen.append(Layer(None, found, nearest))
            return nearest if dropped is None else torch.where(dropped[:, layer], random[:, layer], nearest)

        losses = []
        for carried, aim in self._walk(layers, carried, choose, labels, target):  # noqa: B020
            losses.append(self.loss_fn(carried.image, aim))
        return carried, [layer._replace(loss=loss) for layer, loss in zip(seen, losses, strict=True)]

    @torch.no_grad()
    def encode(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """The code of each image, int64 (b, layers): the nearest candidate of every layer in turn."""
        codes = []

        def choose(layer: int, features: Tensor, previous: Tensor, aim: Tensor) -> Tensor:
            codes.append(self._distances(layer, features, previous, aim).argmin(1))
            return codes[-1]

        deque(self._walk(range(len(self.blocks)), self.begin(len(images)), choose, labels, images), maxlen=0)
        return torch.stack(codes, 1)

    @torch.no_grad()
    def decode(self, codes: Tensor, labels: Tensor | None = None, layers: int | None = None) -> Tensor:
        """The images of codes (b, layers), or of their first `layers` layers; no other candidate is built."""
        walk = self._walk(
            range(layers or codes.shape[1]), self.begin(len(codes)), lambda layer, *_: codes[:, layer], labels
        )
        return deque(walk, maxlen=1)[0][0].image

    def _walk(
        self, layers: range, carried: Carried, choose: Callable, labels: Tensor | None, target: Tensor | None = None
    ) -> Iterator[tuple[Carried, Tensor]]:
        """Layer after layer: what it hands on, and the target at its size. `choose` names the leaf of each sample."""
        if len(self.labels) and labels is None:
            raise ValueError("this decoder is class-conditional: give it the labels (n,) of its images")
        features, image, leak = carried
        aim = None
        for layer in layers:
            block, head = self.blocks[layer], self.heads[layer]
            between = features.new_zeros(len(image), features.shape[1] - 2 * self.channels, *image.shape[2:])
            extra = [image, between, leak]
            features = features + torch.cat([x.to(features.dtype) for x in extra], 1)
            if str(layer) in self.labels:
                features = features + self.labels[str(layer)](labels)[:, :, None, None]
            features = block(features)
            size = features.shape[2:]
            if image.shape[2:] != size:
                image = F.interpolate(image, size=size, mode="bilinear", align_corners=False)
            previous = image if self.residual and layer else torch.zeros_like(image)
            if target is not None and (aim is None or aim.shape[2:] != size):
                aim = F.interpolate(target, size=size, mode="area")
            index = choose(layer, features, previous, aim)
            residual, leaked = emit(features, head.weight, index, self.leak)
            image = previous + residual
            leak = leaked if self.leak else torch.zeros_like(image)
            yield Carried(features, image, leak), aim

    def _distances(self, layer, features, previous, aim) -> Tensor:
        weight = self.heads[layer].weight
        return distances(features[:, : weight.shape[2]], weight, previous, aim, self.distance_fn)


def _groups(width: int) -> int:
    return min(32, max(1, width // 4))


def _origin(width: int, size: int) -> Tensor:
    """The fixed features a decoder starts from, (1, width, size, size): a ramp over the channels, at each place
    turned by its own phase so that places differ."""
    ramp = torch.linspace(-1, 1, width)[:, None, None]
    place = torch.linspace(0, 1, size * size + 1)[:-1].view(1, size, size)
    return ((ramp + 1 + 2 * place) % 2 - 1 if size > 1 else ramp)[None]


def _check(channels, resolution, blocks, widths, leaves, start, chain_dropout) -> None:
    if not len(blocks) == len(widths) == len(leaves) > 0:
        raise ValueError(
            f"blocks, widths and leaves need one number per stage each, but have {len(blocks)}, {len(widths)} and "
            f"{len(leaves)}"
        )
    if start * 2 ** (len(blocks) - 1) != resolution:
        sizes = ", ".join(str(start * 2**stage) for stage in range(len(blocks)))
        raise ValueError(
            f"resolution {resolution} is not reached: {len(blocks)} stages that double from start={start} have "
            f"{sizes} pixels; change start, or the number of stages in blocks, widths and leaves"
        )
    if min(leaves) < 2:
        raise ValueError(f"leaves is {list(leaves)}, but a discrete layer needs K >= 2 candidates to choose from")
    if min(blocks) < 1:
        raise ValueError(f"blocks is {list(blocks)}, but every stage needs at least one layer")
    for width in widths:
        if width < 2 * channels or width % _groups(width) or width % 2:
            raise ValueError(
                f"width {width} must be even, a multiple of its {_groups(width)} groups and >= 2 * channels"
            )
    if not 0 <= chain_dropout < 1:
        raise ValueError(f"chain_dropout is {chain_dropout}, but must be a probability in [0, 1)")
