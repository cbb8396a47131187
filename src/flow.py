"""Flow matching along straight lines between data and noise, as pure tensor functions: path, velocity, solvers.

Sources: flow matching = arXiv 2210.02747, rectified flow = arXiv 2209.03003, guidance = arXiv 2207.12598. Time t runs
from data at 0 to noise at 1, as in decentralised diffusion models (arXiv 2501.05450); other papers count the other way.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

TIME_SCALE = 1000.0  # networks are shown TIME_SCALE * t: their sinusoids are made for times of 0 to 1000

Field = Callable[[Tensor, Tensor], Tensor]  # x (n, ...) and times (n,) in [0, 1] -> dx/dt (n, ...)
Draw = Callable[[int], Tensor]  # number of a step -> standard normal noise for it, shaped like x


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


def times(steps: int, start: float = 1.0) -> list[float]:
    """Equally spaced times from `start` to 0, the ends of `steps` steps."""
    return [start * (1 - step / steps) for step in range(steps + 1)]


def euler(field: Field, x: Tensor, times: Sequence[float], draw: Draw | None = None) -> Tensor:
    """From x at times[0] to x_0 along `field`: one evaluation a step; the error falls like 1 / steps."""
    for t, s in pairwise(times):
        x = x - (t - s) * field(x, _time(x, t))
    return x


def heun(field: Field, x: Tensor, times: Sequence[float], draw: Draw | None = None) -> Tensor:
    """The same with the mean velocity of both ends of a step: two evaluations each, an error like 1 / steps^2."""
    for t, s in pairwise(times):
        first = field(x, _time(x, t))
        second = field(x - (t - s) * first, _time(x, s))
        x = x - (t - s) * (first + second) / 2
    return x


def ddim(field: Field, x: Tensor, times: Sequence[float], draw: Draw | None = None, eta: float = 0.0) -> Tensor:
    """DDIM (arXiv 2010.02502, eq. 12), on this path: x_s from the predicted x_0 and noise, with `eta` of new noise.

    Its sigma depends on signal-to-noise ratios alone, so that it is the same step on a variance-preserving path that is
    scaled to this one. `eta` = 0 is `euler` exactly; 1 draws from q(x_s | x_t, x_0), which is DDPM's ancestral sampler
    (arXiv 2006.11239, eqs. 6 and 7) of the smaller variance, over as many steps as asked for.
    """
    for step, (t, s) in enumerate(pairwise(times)):
        v = field(x, _time(x, t))
        x_0 = x - t * v
        if eta == 0 or s == 0:
            x = x - (t - s) * v if s else x_0
            continue
        sigma = eta * s * math.sqrt(1 - ((1 - t) * s / ((1 - s) * t)) ** 2)
        x = (1 - s) * x_0 + math.sqrt(s**2 - sigma**2) * (x + (1 - t) * v) + sigma * draw(step)
    return x


SOLVERS = ("euler", "heun", "ddim", "ddpm")


def solver(name: str, eta: float = 0.0) -> Callable[..., Tensor]:
    """(field, x, times, draw) -> x_0. Raises ValueError where there is none of that name, or `eta` is not its own."""
    if name not in SOLVERS:
        raise ValueError(f"model.solver is {name!r}; choose one of {', '.join(SOLVERS)}")
    if not 0 <= eta <= 1:
        raise ValueError(f"model.eta is {eta}; give a share of DDPM's noise, from 0 to 1")
    if eta and name != "ddim":
        raise ValueError(f"model.eta={eta} is for model.solver=ddim; {name} has no such choice, so set it to 0")
    return {"euler": euler, "heun": heun, "ddim": partial(ddim, eta=eta), "ddpm": partial(ddim, eta=1.0)}[name]


def _time(x: Tensor, t: float) -> Tensor:
    return torch.full((len(x),), t, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
