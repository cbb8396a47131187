"""DiT, the diffusion transformer (Peebles & Xie 2023, arXiv 2212.09748), with adaLN-Zero or adaLN-single.

An image is a sequence of patches. Time and label reach every block as shift, scale and gate of its two branches; the
gates start at zero, so that every block starts as the identity. With adaLN-single (PixArt-alpha, arXiv 2310.00426) one
layer makes them for all blocks, each of which adds offsets of its own.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from src.modules.networks.layers import embed_labels, label_embedding, linear, variance_scaling_

TIME_FEATURES = 256  # sines and cosines that a time becomes
SMALL = 0.02  # standard deviation with which embeddings start
PLAIN_TOKENS = 256  # up to so many, a CPU multiplies matrices of bfloat16 faster than its fused attention goes

SIZES = {  # name: width, depth, heads; S to XL are the published ones
    "mini": (128, 6, 4),
    "Ti": (192, 6, 3),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
}


def size_of(name: str) -> dict[str, int]:
    """patch, width, depth and heads of a size such as "XL/2". Raises ValueError where there is no such size."""
    size, _, patch = str(name).partition("/")
    if size not in SIZES or not patch.isdigit():
        raise ValueError(
            f"a network of size {name} does not exist; choose {', '.join(SIZES)} and a patch, such as S/4 or XL/2"
        )
    return {"patch": int(patch)} | dict(zip(("width", "depth", "heads"), SIZES[size], strict=True))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for (n, heads, l, d) each, in the way that is fastest where the tensors are."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= PLAIN_TOKENS:
        return (q * q.shape[3] ** -0.5 @ k.mT).softmax(3) @ v
    return F.scaled_dot_product_attention(q, k, v)


def sinusoids(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sines and cosines of x at width / 2 frequencies that fall from 1 towards 1 / 10000: (n,) -> (n, width / 2)."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=x.dtype, device=x.device) * (-math.log(10000) / half))
    angles = x[:, None] * frequencies
    return angles.sin(), angles.cos()


def grid_positions(width: int, rows: int, columns: int) -> Tensor:
    """Fixed positions of patches, (rows * columns, width): half the features for the column, then half for the row."""
    features = [torch.cat(sinusoids(torch.arange(n, dtype=torch.float64), width // 2), 1) for n in (columns, rows)]
    of_column, of_row = features[0].expand(rows, -1, -1), features[1][:, None].expand(-1, columns, -1)
    return torch.cat([of_column, of_row], dim=2).flatten(0, 1).float()


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm whose gain 1 + scale and bias come from the condition: (n, l, d), (n, 1, d) twice -> (n, l, d)."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class TimeEmbedding(nn.Module):
    """Times of 0 to 1000, whole or not, to vectors: fixed cosines and sines, and two linear layers."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1, self.fc2 = linear(TIME_FEATURES, width), linear(width, width)
        for layer in (self.fc1, self.fc2):
            nn.init.normal_(layer.weight, std=SMALL)

    def forward(self, t: Tensor) -> Tensor:
        dtype = self.fc1.weight.dtype
        sines, cosines = sinusoids(t.to(torch.promote_types(dtype, torch.float32)), TIME_FEATURES)
        return self.fc2(F.silu(self.fc1(torch.cat([cosines, sines], dim=1).to(dtype))))  # (n, width)


class Attention(nn.Module):
    """Self-attention of all patches with one another."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # (n, heads, l, d / heads) each; as many heads as there are here, where processes share them
        q, k, v = self.qkv(x).unflatten(2, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))  # (n, l, d)


class MLP(nn.Module):
    """Two linear layers around a GELU, in its approximation by tanh."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = linear(width, hidden), linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then an MLP, each on a modulated norm and through a gate.

    Shifts, scales and gates (n, 6 d) are made of the condition (adaLN-Zero), or are the condition itself (`single`).
    """

    def __init__(self, width: int, heads: int, hidden: int, single: bool = False):
        super().__init__()
        if single:
            self.offset = nn.Parameter(torch.zeros(6 * width))
        else:
            self.modulation = linear(width, 6 * width, scale=0)
        self.single = single
        self.attention, self.mlp = Attention(width, heads), MLP(width, hidden)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        modulation = condition + self.offset if self.single else self.modulation(condition)  # (n, 6 d)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation[:, None].chunk(6, dim=2)  # (n, 1, d)
        x = x + gate1 * self.attention(modulated(x, shift1, scale1))
        return x + gate2 * self.mlp(modulated(x, shift2, scale2))


class DiT(nn.Module):
    """Predicts noise or velocity from a noisy image: (x_t, t, label) -> an image of the same shape.

    `patch` pixels on a side become one token of `width` numbers; `depth` blocks with `heads` heads; what is not given
    of these is that of `size`. The blocks' MLP is `mlp_ratio` times as wide. `classes` labels, 0 for none; label number
    `classes` is the null class, for samples whose label is dropped or not to be used. With `learn_sigma` the output has
    twice the channels: the second half interpolates log variances, as in Nichol & Dhariwal (arXiv 2102.09672).
    `modulation` is zero or single. `checkpointing` keeps a block's input alone and computes the block again for its
    gradients, which are the same. Raises ValueError for sizes that do not fit.
    """

    forward_methods: tuple[str, ...] = ()

    def __init__(
        self,
        channels: int,
        resolution: int,
        patch: int | None = None,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        mlp_ratio: float = 4.0,
        classes: int = 0,
        learn_sigma: bool = False,
        modulation: str = "zero",
        checkpointing: bool = False,
        size: str = "S/2",
    ):
        super().__init__()
        given = {"patch": patch, "width": width, "depth": depth, "heads": heads}
        sizes = size_of(size) | {key: number for key, number in given.items() if number is not None}
        patch, width, depth, heads = (sizes[key] for key in given)
        if modulation not in ("zero", "single"):
            raise ValueError(f"modulation={modulation} does not exist; choose zero or single")
        if patch < 1 or resolution % patch:
            raise ValueError(
                f"patches of {patch} pixels do not divide an image of {resolution}: change the network's patch or "
                "data.resolution"
            )
        if heads < 1 or width % heads or width % 4:
            raise ValueError(
                f"a width of {width} with {heads} heads is impossible: choose a width that 4 and the heads divide"
            )
        self.shape, self.classes, self.learn_sigma = (channels, resolution, resolution), classes, learn_sigma
        self.heads, self.hidden = heads, int(mlp_ratio * width)
        self.patch, self.side, self.checkpointing = patch, resolution // patch, checkpointing

        self.stem = nn.Conv2d(channels, width, patch, patch)
        variance_scaling_(self.stem.weight.data.flatten(1))  # as the linear layer that it is
        nn.init.zeros_(self.stem.bias)
        self.register_buffer("positions", grid_positions(width, self.side, self.side), persistent=False)
        self.time_embedding = TimeEmbedding(width)
        self.label_embedding = label_embedding(classes + (classes > 0), width)
        if classes:
            nn.init.normal_(self.label_embedding.weight, std=SMALL)

        single = modulation == "single"
        self.modulation = linear(width, 6 * width, scale=0) if single else None  # of all blocks
        self.blocks = nn.ModuleList(Block(width, heads, self.hidden, single) for _ in range(depth))

        self.head_modulation = linear(width, 2 * width, scale=0)
        self.head = linear(width, patch**2 * channels * (1 + learn_sigma), scale=0)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """Noisy images (n, c, h, w), times of 0 to 1000 (n,), labels 0..classes (n,) -> (n, c or 2 c, h, w)."""
        return self._image(self.head(self._read(x, t, labels))).to(x.dtype)  # also under autocast

    def _read(self, x: Tensor, t: Tensor, labels: Tensor | None, token: Tensor | None = None) -> Tensor:
        """What the head reads, (n, l, d): a vector for each patch, after that of a `token` (d,) where one is given."""
        condition = self.time_embedding(t)
        label_emb = embed_labels(self.label_embedding, labels)
        condition = F.silu(condition if label_emb is None else condition + label_emb)  # (n, d)

        h = self.stem(x).flatten(2).mT + self.positions  # (n, l, d)
        if token is not None:
            h = torch.cat([token.to(h.dtype).expand(len(h), 1, -1), h], dim=1)
        of_blocks = condition if self.modulation is None else self.modulation(condition)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                h = checkpoint(block, h, of_blocks, use_reentrant=False, preserve_rng_state=False)
            else:
                h = block(h, of_blocks)
        shift, scale = self.head_modulation(condition)[:, None].chunk(2, dim=2)
        return modulated(h, shift, scale)

    def shard_units(self) -> list[nn.Module]:
        """The blocks in the order in which they run: what may be sharded or checkpointed."""
        return list(self.blocks)

    def tensor_plan(self, parts: int) -> dict[str, str]:
        """How `parts` processes share each block: by heads, and by what the MLP is wide between its layers."""
        for number, what, setting in ((self.heads, "heads", "heads"), (self.hidden, "MLP width", "mlp_ratio")):
            if number % parts:
                raise ValueError(
                    f"{parts} processes cannot share the network's {what}, {number}, equally: change strategy.tensor "
                    f"or model.network.{setting}"
                )
        plan = {"attention.qkv": "qkv", "attention.out": "rows", "mlp.fc1": "columns", "mlp.fc2": "rows"}
        return {f"blocks.{n}.{layer}": how for n in range(len(self.blocks)) for layer, how in plan.items()}

    def _image(self, tokens: Tensor) -> Tensor:
        """(n, l, pixels of a patch times channels) -> (n, c, h, w)."""
        h = tokens.unflatten(2, (self.patch, self.patch, -1)).unflatten(1, (self.side, self.side))  # (n, y, x, p, q, c)
        return h.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
