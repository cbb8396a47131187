"""Whom a noisy image is sent to, as pure tensor functions: calibrated probabilities of experts, and weights from them.

The velocity of all data is sum_k p(k | x_t, t, c) u_k with the probability that x_t came from cluster k (decentralised
diffusion models, arXiv 2501.05450, eqs. 9 to 15). Exact, and tested so: without some clusters' experts, weights
renormalised over the living ones give the velocity of the data that remains; and an expert that is added needs a
classifier r of new against old alone, p'(new) = r and p'(k) = (1 - r) p(k).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Draw = Callable[[], Tensor]  # one uniform number in [0, 1) for each sample: (n,)


@dataclass(frozen=True)
class Calibration:
    """How a router's logits become probabilities: a temperature for each of equally wide bins of t, and the share of
    uniform labels that it was trained with (label smoothing), which is taken out again."""

    temperatures: Sequence[float] = (1.0,)
    smoothing: float = 0.0

    def log_probabilities(self, logits: Tensor, t: Tensor) -> Tensor:
        """Logits (n, k) at times t (n,) in [0, 1] -> log p(k): softmax(logits / T) is q = (1 - a) p + a / k, so that
        p = (q - a / k) / (1 - a), where that is above 0."""
        temperatures = torch.tensor(self.temperatures, dtype=logits.dtype, device=logits.device)
        log_q = F.log_softmax(logits / temperatures[noise_bin(t, len(temperatures))][:, None], dim=1)
        if not self.smoothing:
            return log_q
        p = (log_q.exp() - self.smoothing / logits.shape[1]) / (1 - self.smoothing)
        return F.log_softmax(p.clamp(min=torch.finfo(p.dtype).tiny).log(), dim=1)


def weights(
    logits: Tensor,
    t: Tensor,
    strategy: "Strategy",
    calibration: Calibration | None = None,
    added: Sequence[Tensor] = (),
    living: Tensor | None = None,
    draw: Draw | None = None,
    cluster: Tensor | None = None,
) -> Tensor:
    """What each expert's velocity counts for each sample: (n, experts), at least 0, with a sum of 1.

    Args:
        logits: of the router, (n, k).
        t: times in [0, 1], (n,).
        strategy: which experts are asked.
        calibration: of the router; as it is if None.
        added: log p(old), log p(new) of the heads of experts k, k + 1, ... that were added later, (n, 2) each.
        living: which of the k + len(added) experts there are, bool; all if None.
        draw: for strategies that draw an expert.
        cluster: the expert that each sample belongs to, int64 (n,), for the strategy that is told.
    """
    log_p = (calibration or Calibration()).log_probabilities(logits, t)
    for head in added:
        log_p = torch.cat([log_p + head[:, :1], head[:, 1:]], dim=1)
    if living is not None:
        log_p = log_p.masked_fill(~living, -torch.inf)
    return strategy(log_p.softmax(1), t, draw, cluster)


def dead_mass(counts: Sequence[float], living: Sequence[bool]) -> float:
    """The share of the data that belongs to experts which are not there."""
    dead = sum(count for count, lives in zip(counts, living, strict=True) if not lives)
    return dead / sum(counts)


def mixed(w: Tensor, ask: Callable[[int, Tensor], Tensor]) -> Tensor:
    """sum_k w[:, k] u_k (n, ...): one call ask(k, rows) -> u_k of these samples, for each expert with any weight."""
    total = None
    for k in (w > 0).any(0).nonzero().flatten().tolist():
        rows = w[:, k].nonzero().flatten()
        found = ask(k, rows)
        if total is None:
            total = found.new_zeros(len(w), *found.shape[1:])
        total.index_add_(0, rows, found * w[rows, k].to(found.dtype).view(-1, *[1] * (found.ndim - 1)))
    assert total is not None, "some expert has weight"
    return total


def noise_bin(t: Tensor, bins: int) -> Tensor:
    """Which of so many equally wide bins each time in [0, 1] lies in, int64 (n,)."""
    return (t * bins).long().clamp(0, bins - 1)


Strategy = Callable[[Tensor, Tensor, Draw | None, Tensor | None], Tensor]  # p (n, k), t, draw, cluster -> weights


class Full:
    """Every expert: the exact mixture."""

    def __call__(self, p: Tensor, t: Tensor, draw: Draw | None = None, cluster: Tensor | None = None) -> Tensor:
        return p


@dataclass(frozen=True)
class TopK:
    """The k most probable ones. It starves small clusters where the router can only guess."""

    k: int

    def __post_init__(self):
        _check_count(self.k, "k")

    def __call__(self, p: Tensor, t: Tensor, draw: Draw | None = None, cluster: Tensor | None = None) -> Tensor:
        return _renormalised(p, _rank(p) < self.k)


@dataclass(frozen=True)
class Threshold:
    """Those of at least probability tau, or the most probable one where there is none.

    How many these are adapts itself: all at high noise, one at low. Keep tau below the smallest cluster's share of the
    data, which is cut at high noise otherwise.
    """

    tau: float = 0.05

    def __post_init__(self):
        if not 0 <= self.tau <= 1:
            raise ValueError(f"ensemble.tau is {self.tau}; give a probability, from 0 to 1")

    def __call__(self, p: Tensor, t: Tensor, draw: Draw | None = None, cluster: Tensor | None = None) -> Tensor:
        return _renormalised(p, (p >= self.tau) | (_rank(p) == 0))


class Sample:
    """One expert for each sample and step, drawn with its probability."""

    def __call__(self, p: Tensor, t: Tensor, draw: Draw | None = None, cluster: Tensor | None = None) -> Tensor:
        return _one(p, drawn(p, draw()))


class Oracle:
    """The expert of the sample's own cluster, which somebody knows; the probabilities, where that one is not there.

    An ensemble that draws images takes for it the expert that it draws at the first step, and keeps it.
    """

    def __call__(self, p: Tensor, t: Tensor, draw: Draw | None = None, cluster: Tensor | None = None) -> Tensor:
        mine = _one(p, cluster)
        return torch.where((p * mine).sum(1, keepdim=True) > 0, mine, p)


@dataclass(frozen=True)
class Schedule:
    """The `counts[i]` most probable ones at times t of at least `times[i]`, which fall to 0."""

    times: Sequence[float]
    counts: Sequence[int]

    def __post_init__(self):
        falling = all(a > b for a, b in zip(self.times, self.times[1:], strict=False))
        if len(self.times) != len(self.counts) or not falling or not self.times or self.times[-1] != 0:
            raise ValueError(
                f"ensemble.times={list(self.times)} and ensemble.counts={list(self.counts)} must be as many, and times "
                "fall to 0, such as [0.8,0.5,0] and [8,2,1]"
            )
        for count in self.counts:
            _check_count(count, "counts")

    def __call__(self, p: Tensor, t: Tensor, draw: Draw | None = None, cluster: Tensor | None = None) -> Tensor:
        k = torch.full_like(t, self.counts[-1])
        for time, count in list(zip(self.times, self.counts, strict=True))[-2::-1]:
            k = k.masked_fill(t >= time, count)
        return _renormalised(p, _rank(p) < k[:, None])


@dataclass(frozen=True)
class Confidence:
    """The k most probable ones where the first is at least `confident`, and `raised` ones below.

    At high noise the probabilities are the clusters' shares of the data, so that with several experts the rule cannot
    hold there, however good the router: it raises k in all of these steps.
    """

    confident: float = 0.7
    k: int = 2
    raised: int = 4

    def __post_init__(self):
        if not 0 <= self.confident <= 1:
            raise ValueError(f"ensemble.confident is {self.confident}; give a probability, from 0 to 1")
        for name in ("k", "raised"):
            _check_count(getattr(self, name), name)

    def __call__(self, p: Tensor, t: Tensor, draw: Draw | None = None, cluster: Tensor | None = None) -> Tensor:
        k = torch.where(p.amax(1) >= self.confident, self.k, self.raised)
        return _renormalised(p, _rank(p) < k[:, None])


def drawn(p: Tensor, uniform: Tensor) -> Tensor:
    """The expert whose part of [0, 1) each uniform number lies in: (n, k) and (n,) -> int64 (n,)."""
    below = (p.cumsum(1) <= uniform[:, None].to(p)).sum(1)
    last = p.shape[1] - 1 - (p.flip(1) > 0).int().argmax(1)  # rounding may leave the sum below 1
    return torch.minimum(below, last)


def _one(p: Tensor, k: Tensor) -> Tensor:
    return F.one_hot(k, p.shape[1]).to(p.dtype)


def _rank(p: Tensor) -> Tensor:
    """0 for the most probable expert of each sample, 1 for the next ...; of equals the first."""
    return p.sort(dim=1, descending=True, stable=True).indices.argsort(1)


def _renormalised(p: Tensor, chosen: Tensor) -> Tensor:
    kept = p * chosen
    return kept / kept.sum(1, keepdim=True)


def _check_count(count: int, name: str) -> None:
    if count < 1:
        raise ValueError(f"ensemble.{name} is {count}; ask at least 1 expert")
