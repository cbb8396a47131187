"""What a network is trained to predict, and the velocity on the common path that follows from it.

The common path is x_t = (1 - t) x_0 + t e (src.flow). Every prediction here is affine in E[x_0 | x_t], so experts of
different objectives mix exactly once each is a velocity (arXiv 2501.05450). A variance-preserving path is this one
scaled: sqrt(a) x_0 + sqrt(1 - a) e = x_t / sqrt((1 - t)^2 + t^2) where t / (1 - t) = sqrt((1 - a) / a).
"""

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from src import flow
from src.flow import TIME_SCALE

Network = Callable[[Tensor, Tensor], Tensor]  # what it is shown (n, ...) and its times (n,) -> its prediction


class Objective(Protocol):
    """A way to train a network, and to use what it has learned."""

    learn_sigma: bool  # whether a network may predict variances too; they are not used

    def task(self, x_0: Tensor, noise: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From data, noise and u ~ U[0, 1) (n,): what the network is shown, its time, and what it is to predict."""

    def velocity(self, network: Network, x: Tensor, t: Tensor) -> Tensor:
        """dx/dt of the common path at x (n, c, h, w) and times t (n,) in [0, 1]."""

    def times(self, steps: int) -> list[float]:
        """Where on the common path a sampler of so many steps stops: from noise to 0."""


class Velocity:
    """Flow matching (arXiv 2210.02747): the network predicts e - x_0."""

    learn_sigma = False

    def task(self, x_0: Tensor, noise: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return flow.path(x_0, noise, u), TIME_SCALE * u, flow.velocity(x_0, noise)

    def velocity(self, network: Network, x: Tensor, t: Tensor) -> Tensor:
        return network(x, TIME_SCALE * t)

    def times(self, steps: int) -> list[float]:
        return flow.times(steps)


class Epsilon:
    """The network predicts the noise e (arXiv 2006.11239), on the common path.

    At pure noise that says nothing of x_0. Beyond `last` the x_0 is therefore the one that the network sees at `last`
    in the same image at that time's scale.
    """

    learn_sigma = False
    first, last = 0.0, 0.99

    def task(self, x_0: Tensor, noise: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return flow.path(x_0, noise, u), TIME_SCALE * u, noise

    def velocity(self, network: Network, x: Tensor, t: Tensor) -> Tensor:
        column = t.view(-1, *[1] * (x.ndim - 1))
        unit = x / scale(column)
        noise = self._noise(network, unit, t.clamp(self.first, self.last))[:, : x.shape[1]]
        if self.first:  # below it E[e | x_t] falls in proportion to t / (1 - t), as that of every smooth density
            noise = noise * (column / (1 - column) * (1 - self.first) / self.first).clamp(max=1)
        column = column.clamp(max=self.last)
        return noise - (unit * scale(column) - column * noise) / (1 - column)

    def times(self, steps: int) -> list[float]:
        return flow.times(steps)

    def _noise(self, network: Network, unit: Tensor, t: Tensor) -> Tensor:
        return network(unit * scale(t.view(-1, *[1] * (unit.ndim - 1))), TIME_SCALE * t)


class DDPM(Epsilon):
    """The noise on DDPM's path of 1000 steps, betas from 1e-4 to 0.02: what the published DiTs predict.

    The network is shown sqrt(a_i) x_0 + sqrt(1 - a_i) e and i of 0..999, where t / (1 - t) = sqrt((1 - a_i) / a_i);
    between these times log t / (1 - t) is linear in i. They reach from t = 0.01 to 0.994, at which samplers start.
    Variances that a network learned (`learn_sigma`) are not used: DDPM's smaller one is.
    """

    learn_sigma = True
    steps = 1000

    def task(self, x_0: Tensor, noise: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        i = (u * self.steps).long().clamp(max=self.steps - 1)
        t = self._log_ratios.to(u.device)[i].sigmoid().to(torch.promote_types(u.dtype, torch.float32))
        column = t.view(-1, *[1] * (x_0.ndim - 1))
        return flow.path(x_0, noise, t) / scale(column), i.to(t.dtype), noise

    def times(self, steps: int) -> list[float]:
        """Those of `steps` equally spaced i, whole as long as there are enough, as in arXiv 2102.09672; then 0."""
        i = torch.linspace(self.steps - 1, 0, steps, dtype=torch.float64)
        i = i.round() if steps <= self.steps else i
        below = i.long().clamp(max=self.steps - 2)
        logs = torch.lerp(self._log_ratios[below], self._log_ratios[below + 1], i - below)
        return [*logs.sigmoid().tolist(), 0.0]

    @cached_property
    def _log_ratios(self) -> Tensor:
        """log t / (1 - t) of every i, float64 (1000,)."""
        alphas_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, self.steps, dtype=torch.float64), 0)
        return 0.5 * torch.log((1 - alphas_bar) / alphas_bar)

    @cached_property
    def first(self) -> float:
        return float(self._log_ratios[0].sigmoid())

    @cached_property
    def last(self) -> float:
        return float(self._log_ratios[-1].sigmoid())

    def _noise(self, network: Network, unit: Tensor, t: Tensor) -> Tensor:
        table, logs = self._log_ratios.to(t), t.logit()
        below = torch.searchsorted(table, logs).clamp(1, self.steps - 1) - 1
        i = below + (logs - table[below]) / (table[below + 1] - table[below])
        return network(unit, i.clamp(0, self.steps - 1))


def scale(t: Tensor | float) -> Tensor | float:
    """sqrt((1 - t)^2 + t^2): how much smaller x_t is than a variance-preserving mixture of the same proportions."""
    return ((1 - t) ** 2 + t**2) ** 0.5
