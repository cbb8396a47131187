"""The Discrete Distribution Layer and Split-and-Prune (Yang, "Discrete Distribution Networks", ICLR 2025) on tensors.

A layer holds K heads W_k, each a 1x1 convolution without bias from features f to an image. Its K candidates are
previous + W_k f, and the one nearest to the target is passed on. Only that one is ever built with a gradient.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LEAVES_AT_A_TIME = 64  # candidates built at once where they have to be built
STRIP = 64  # rows of a Gram matrix made at once
PART, MIN_PLACES = 2**21, 128  # numbers centred at once, in no fewer places of the image
TABLE, MIN_BATCH = 2**19, 8  # numbers in a table of products of heads, and the samples from which it pays


@torch.no_grad()
def distances(
    features: Tensor,  # (b, c, h, w)
    weight: Tensor,  # (k, channels, c)
    previous: Tensor,  # (b, channels, h, w)
    target: Tensor,  # (b, channels, h, w)
    distance_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Distance of each of the k candidates `previous + weight f` to the target: (b, k), at least float32.

    Without `distance_fn` the mean squared error over the image, by the identity
    |e - W f|^2 = |e|^2 - 2 <W, e f^T> + <W^T W, f f^T> with e = target - previous where h*w >= c (no candidate is
    built, so the cost hardly depends on k), by candidate images otherwise. `distance_fn(candidates (b, m, channels, h,
    w), target (b, 1, channels, h, w)) -> (b, m)` may be any other distance; it sees m candidates at a time.
    """
    with torch.autocast(features.device.type, enabled=False):
        features, weight, residual = (_full(x) for x in (features, weight, target - previous))
        if distance_fn is not None:
            return _by_candidates(features, weight, previous, target, distance_fn)
        if features[0, 0].numel() >= features.shape[1]:
            return _by_gram(features.flatten(2), weight, residual.flatten(2))
        return _by_candidates(features, weight, None, residual, _mean_squared_error)


def _by_gram(f: Tensor, weight: Tensor, e: Tensor) -> Tensor:  # (b, c, n), (k, channels, c), (b, channels, n)
    n, channels = e.shape[2], weight.shape[1]
    f_mean, e_mean = f.mean(2), e.mean(2)  # constant parts apart: large ones would cancel badly in float32
    drawn = (f_mean @ weight.flatten(0, 1).T).unflatten(1, weight.shape[:2])  # (b, k, channels)
    constant = (e_mean[:, None] - drawn).square().sum(2)
    square, cross, strips = _moments(f, e, f_mean, e_mean)
    varying = square[:, None] - 2 * cross.flatten(1) @ weight.flatten(1).T  # (b, k)
    for start, strip in strips.items():
        varying += _quadratic(strip, weight[:, :, start : start + STRIP], weight[:, :, start:])
    return (constant + varying / n) / channels


def _moments(f: Tensor, e: Tensor, f_mean: Tensor, e_mean: Tensor) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """|e|^2 (b,), e f^T (b, channels, c) and f f^T, all without the means, summed over parts of the image.

    The parts stay in a processor's cache and bound the memory of the centred copies. f f^T is symmetric, so only strips
    of its upper half are made, {first row: (b, up to STRIP rows, columns from there on)}, twice off the diagonal.
    """
    b, c, _ = f.shape
    square = cross = 0
    strips = dict.fromkeys(range(0, c, STRIP), 0)
    places = max(MIN_PLACES, PART // (b * c))
    for f_part, e_part in zip(f.split(places, 2), e.split(places, 2), strict=True):
        f_part, e_part = f_part - f_mean[:, :, None], e_part - e_mean[:, :, None]
        square += e_part.square().sum((1, 2))
        cross += e_part @ f_part.mT
        for start in strips:
            strips[start] += f_part[:, start : start + STRIP] @ f_part[:, start:].mT
    for strip in strips.values():
        strip[:, :, STRIP:] *= 2
    return square, cross, strips


def _quadratic(strip: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """<left^T right, strip> of each sample and leaf, (b, k), in the cheaper order.

    strip (b, s, t); left (k, channels, s) and right (k, channels, t) are the columns of the heads it belongs to. The
    product with every head costs 2 k channels s t operations a sample; a table of left^T right costs as much once, and
    2 k s t a sample.
    """
    if len(strip) < MIN_BATCH:
        products = torch.bmm(right.flatten(0, 1).expand(len(strip), -1, -1), strip.mT)  # (b, k * channels, s)
        return products.mul_(left.flatten(0, 1)).unflatten(1, left.shape[:2]).sum((2, 3))
    leaves = max(1, TABLE // strip[0].numel())
    parts = zip(left.split(leaves), right.split(leaves), strict=True)
    return torch.cat([(a.mT @ b).flatten(1) @ strip.flatten(1).T for a, b in parts]).T


def _by_candidates(features, weight, previous, target, distance_fn) -> Tensor:
    size = features.shape[2:]
    found = []
    for part in weight.split(LEAVES_AT_A_TIME):
        candidates = (part.flatten(0, 1) @ features.flatten(2)).unflatten(1, part.shape[:2]).unflatten(3, size)
        found.append(distance_fn(candidates if previous is None else candidates + previous[:, None], target[:, None]))
    return torch.cat(found, 1)


def absolute_error(candidates: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error, a `distance_fn`: (b, m, channels, h, w), (b, 1, channels, h, w) -> (b, m)."""
    return (candidates - target).abs().mean((2, 3, 4))


def charbonnier(images: Tensor, target: Tensor, softness: float = 0.05) -> Tensor:
    """Mean of sqrt(d^2 + softness^2) - softness over all pixels, a `loss_fn` (Charbonnier et al. 1994): absolute for
    large differences, so that an edge is drawn in one place instead of being blurred over several."""
    return ((images - target).square() + softness**2).sqrt().mean() - softness


def _mean_squared_error(candidates: Tensor, target: Tensor) -> Tensor:
    return (candidates - target).square().mean((2, 3, 4))


def _full(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def emit(features: Tensor, weight: Tensor, index: Tensor, leak: bool = False) -> tuple[Tensor, Tensor | None]:
    """What the chosen head of each sample makes of its features: the image's residual, and the leak.

    features (b, c, h, w), or (b, 2c, h, w) with a leak: the first half draws the residual, the second half the leak,
    which tells the next block which head was taken; weight (k, channels, c); index (b,) -> two (b, channels, h, w).
    One gathered product; no gradient reaches a head that was not chosen.
    """
    _, channels, c = weight.shape
    with torch.autocast(features.device.type, enabled=False):
        features, weight = _full(features), _full(weight)
        chosen = F.embedding(index, weight.flatten(1)).view(-1, 1, channels, c)
        parts = chosen @ features.unflatten(1, (-1, c)).flatten(3)  # (b, 1 or 2, channels, h * w)
        residual, *rest = parts.unflatten(3, features.shape[2:]).unbind(1)
    return residual, rest[0] if leak else None


def decide(tally: Tensor, leaves: Tensor, min_evidence: float = 0) -> tuple[Tensor, Tensor]:
    """Split-and-Prune's decision for every layer: (source, target) leaf, (layers,) each; equal where nothing is done.

    tally float64 (2, layers, k): counts of choices and accumulated loss; leaves (layers,): how many of the k belong to
    each layer; min_evidence: choices per leaf that a layer must have seen. With shares p and P = 1/K the most chosen
    leaf i replaces the least chosen j (among unused ones that with the largest loss) where |p_i/2 - P|*2 + p_j < p_i -
    p_j or p_j < P/2: the paper's Algorithm 1, whose bounds are 2P and P/2, and the p_i - p_j > P of the author's code.
    """
    (counts, loss), leaves = tally, leaves[:, None]
    valid = torch.arange(counts.shape[1], device=counts.device) < leaves
    unused = valid & (counts == 0)
    source = counts.masked_fill(~valid, -1).argmax(1, keepdim=True)
    target = counts.masked_fill(~valid, torch.inf).argmin(1, keepdim=True)
    target = torch.where(unused.any(1, keepdim=True), loss.masked_fill(~unused, -1).argmax(1, keepdim=True), target)
    total = counts.sum(1, keepdim=True)
    shares = counts / total.clamp(min=1)
    p_i, p_j, even = shares.gather(1, source), shares.gather(1, target), 1 / leaves.double()
    due = ((p_i / 2 - even).abs() * 2 + p_j < p_i - p_j) | (p_j < even / 2)
    due &= total >= min_evidence * leaves
    return source[:, 0], torch.where(due, target, source)[:, 0]


def split_tally(tally: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The tally after the decision: the pruned leaf's choices go to the others in proportion, the twins share equally.

    Counts are conserved. The target inherits the source's accumulated loss, as it has inherited its weights.
    """
    (counts, loss), source, target = tally, source[:, None], target[:, None]
    total, pruned = counts.sum(1, keepdim=True), counts.gather(1, target)
    halved = counts * (total / (total - pruned).clamp(min=1e-300))
    half = halved.gather(1, source) / 2
    halved = halved.scatter(1, source, half).scatter(1, target, half)
    done = source != target
    loss = torch.where(done, loss.scatter(1, target, loss.gather(1, source)), loss)
    return torch.stack([torch.where(done, halved, counts), loss])


@torch.no_grad()
def copy_row(tensor: Tensor, source: Tensor, target: Tensor) -> None:
    """tensor[target] = tensor[source] in place, with device indices (0-d): no synchronisation with the host."""
    tensor.index_copy_(0, target.view(1), tensor.index_select(0, source.view(1)))
