"""Flow matching along straight lines between data and noise, as pure tensor functions: path, velocity, solvers.

Sources: flow matching = arXiv 2210.02747, rectified flow = arXiv 2209.03003, guidance = arXiv 2207.12598. Time t runs
from data at 0 to noise at 1, as in decentralised diffusion models (arXiv 2501.05450); other papers count the other way.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TIME_SCALE = 1000.0  # networks are shown TIME_SCALE * t: their sinusoids are made for times of 0 to 1000

Field = Callable[[Tensor, Tensor], Tensor]  # x (n, ...) and times (n,) in [0, 1] -> dx/dt (n, ...)


def path(x_0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x_0 + t noise, for times t (n,) in [0, 1] and noise shaped like x_0 (n, ...)."""
    assert noise.shape == x_0.shape, (noise.shape, x_0.shape)
    t = t.view(-1, *[1] * (x_0.ndim - 1))
    return (1 - t) * x_0 + t * noise


def velocity(x_0: Tensor, noise: Tensor) -> Tensor:
    """dx_t / dt of the path, the same at all its times; its mean given x_t is the field that carries noise to data."""
    assert noise.shape == x_0.shape, (noise.shape, x_0.shape)
    return noise - x_0


def guided(conditional: Tensor, unconditional: Tensor, scale: float, channels: int | None = None) -> Tensor:
    """Away from the unconditional prediction, `scale` times as far as the conditional one: 1 is no guidance.

    Only the first `channels` channels are guided, where given; the others are the conditional prediction's.
    """
    moved = unconditional + scale * (conditional - unconditional)
    return moved if channels is None else torch.cat([moved[:, :channels], conditional[:, channels:]], dim=1)


def euler(field: Field, x: Tensor, steps: int) -> Tensor:
    """From x_1 to x_0 along `field` in equal steps, one evaluation each; the error falls like 1 / steps."""
    for step in range(steps):
        x = x - field(x, _time(x, 1 - step / steps)) / steps
    return x


def heun(field: Field, x: Tensor, steps: int) -> Tensor:
    """The same with the mean velocity of both ends of a step: two evaluations each, an error like 1 / steps^2."""
    for step in range(steps):
        first = field(x, _time(x, 1 - step / steps))
        second = field(x - first / steps, _time(x, 1 - (step + 1) / steps))
        x = x - (first + second) / (2 * steps)
    return x


SOLVERS: dict[str, Callable[[Field, Tensor, int], Tensor]] = {"euler": euler, "heun": heun}


def _time(x: Tensor, t: float) -> Tensor:
    return torch.full((len(x),), t, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
