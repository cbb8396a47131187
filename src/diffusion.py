"""The few-step Gaussian diffusion of denoising diffusion GANs, as pure tensor functions.

Sources: DDGAN = arXiv 2112.07804, DDPM = arXiv 2006.11239, Score SDE = arXiv 2011.13456. The papers count transitions
from 1 to T; here `t` in 0..T-1 is the index of the cleaner image, so that a pair is (x_t, x_{t+1}) and x_0 is data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

FIRST_TIME = 1e-3  # the continuous time of the schedule's first node; alpha_bar there is divided out


def vp_variance(time: Tensor, beta_min: float, beta_max: float) -> Tensor:
    """Marginal variance of the variance-preserving SDE at continuous times in (0, 1], Score SDE eq. 33."""
    return -torch.expm1(-0.5 * time**2 * (beta_max - beta_min) - time * beta_min)


def geometric_variance(time: Tensor, beta_min: float, beta_max: float) -> Tensor:
    """Marginal variance that grows geometrically from beta_min at time 0 to beta_max at time 1."""
    return beta_min * (beta_max / beta_min) ** time


VARIANCES: dict[str, Callable[[Tensor, float, float], Tensor]] = {"vp": vp_variance, "geometric": geometric_variance}


@dataclass(frozen=True)
class Diffusion:
    """T noising steps and their exact posteriors; tables are float64, images keep at least float32.

    `steps` is T; `beta_min` and `beta_max` belong to the `schedule` ("vp" or "geometric"). Every random tensor is an
    argument, so nothing here touches a random generator. Raises ValueError for a schedule that is no diffusion.
    """

    steps: int = 4
    beta_min: float = 0.1
    beta_max: float = 20.0
    schedule: str = "vp"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"diffusion.steps is {self.steps}; set it to 1 or more")
        if self.schedule not in VARIANCES:
            raise ValueError(f"diffusion.schedule is {self.schedule!r}; choose one of {', '.join(VARIANCES)}")
        if not 0 < self.beta_min < self.beta_max:
            raise ValueError(
                f"diffusion needs 0 < beta_min < beta_max, got beta_min={self.beta_min} and beta_max={self.beta_max}"
            )
        if self.schedule == "geometric" and self.beta_max >= 1:
            raise ValueError(
                f"the geometric schedule reaches variance beta_max={self.beta_max}, which must stay below 1: "
                "set diffusion.beta_max to 0.999 or less, or diffusion.schedule=vp"
            )

    @cached_property
    def alphas_bar(self) -> Tensor:
        """prod(1 - beta) up to each index, 1 at index 0 since x_0 is data; float64, (T + 1,)."""
        time = torch.linspace(0, 1, self.steps + 1, dtype=torch.float64) * (1 - FIRST_TIME) + FIRST_TIME
        alphas_bar = 1 - VARIANCES[self.schedule](time, self.beta_min, self.beta_max)
        return alphas_bar / alphas_bar[0]

    @cached_property
    def betas(self) -> Tensor:
        """Variance of each transition x_t -> x_{t+1}, DDGAN eq. 1; float64, (T,), indexed by t."""
        return 1 - self.alphas_bar[1:] / self.alphas_bar[:-1]

    @cached_property
    def posterior_variance(self) -> Tensor:
        """Variance of q(x_t | x_{t+1}, x_0), DDPM eq. 7; float64, (T,), zero at t = 0."""
        return self.betas * (1 - self.alphas_bar[:-1]) / (1 - self.alphas_bar[1:])

    @cached_property
    def posterior_log_variance(self) -> Tensor:
        """Log of the posterior variance, clipped at 1e-20 because it is zero at t = 0; float64, (T,)."""
        return self.posterior_variance.clamp(min=1e-20).log()

    @cached_property
    def posterior_coefficients(self) -> Tensor:
        """Weights of x_0 and x_{t+1} in the mean of q(x_t | x_{t+1}, x_0), DDPM eq. 7; float64, (2, T)."""
        alphas_bar, alphas_bar_next = self.alphas_bar[:-1], self.alphas_bar[1:]
        of_x_0 = alphas_bar.sqrt() * self.betas / (1 - alphas_bar_next)
        of_x_next = (1 - self.betas).sqrt() * (1 - alphas_bar) / (1 - alphas_bar_next)
        return torch.stack([of_x_0, of_x_next])

    def q_sample(self, x_0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t ~ q(x_t | x_0), DDPM eq. 4, for t (n,) in 0..T and standard normal noise shaped like x_0."""
        assert noise.shape == x_0.shape, (noise.shape, x_0.shape)
        return self._at("scale", t, x_0) * x_0 + self._at("sigma", t, x_0) * noise

    def q_step(self, x_t: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_{t+1} ~ q(x_{t+1} | x_t), DDGAN eq. 1, for t (n,) in 0..T-1 and noise shaped like x_t."""
        assert noise.shape == x_t.shape, (noise.shape, x_t.shape)
        return self._at("step_scale", t, x_t) * x_t + self._at("step_sigma", t, x_t) * noise

    def q_pair(self, x_0: Tensor, t: Tensor, noise: Tensor, noise_next: Tensor) -> tuple[Tensor, Tensor]:
        """(x_t, x_{t+1}) ~ q(x_t | x_0) q(x_{t+1} | x_t): what the discriminator sees as real, DDGAN eq. 6."""
        x_t = self.q_sample(x_0, t, noise)
        return x_t, self.q_step(x_t, t, noise_next)

    def posterior(self, x_0: Tensor, x_next: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, c, h, w) and clipped log variance (n, 1, 1, 1) of q(x_t | x_{t+1}, x_0), DDPM eqs. 6 and 7."""
        assert x_0.shape == x_next.shape, (x_0.shape, x_next.shape)
        mean = self._at("of_x_0", t, x_0) * x_0 + self._at("of_x_next", t, x_0) * x_next
        return mean, self._at("posterior_log_variance", t, x_0)

    def posterior_sample(self, x_0_hat: Tensor, x_next: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """One sampling step x_{t+1} -> x_t through the predicted x_0, DDGAN eq. 8; free of noise at t = 0."""
        assert noise.shape == x_next.shape, (noise.shape, x_next.shape)
        mean, log_variance = self.posterior(x_0_hat, x_next, t)
        std = (0.5 * log_variance).exp() * (t > 0).view(log_variance.shape)
        return mean + std * noise

    @cached_property
    def _tables(self) -> dict[str, Tensor]:
        of_x_0, of_x_next = self.posterior_coefficients
        return {
            "scale": self.alphas_bar.sqrt(),
            "sigma": (1 - self.alphas_bar).sqrt(),
            "step_scale": (1 - self.betas).sqrt(),
            "step_sigma": self.betas.sqrt(),
            "of_x_0": of_x_0,
            "of_x_next": of_x_next,
            "posterior_log_variance": self.posterior_log_variance,
        }

    @cached_property
    def _copies(self) -> dict[tuple[str, torch.dtype, torch.device], Tensor]:
        return {}

    def _at(self, name: str, t: Tensor, x: Tensor) -> Tensor:
        """Entry t of a table, shaped to scale x; one copy per device and dtype, so that no step waits for the host."""
        key = (name, torch.promote_types(x.dtype, torch.float32), x.device)
        if key not in self._copies:
            self._copies[key] = self._tables[name].to(key[1]).to(key[2])
        return self._copies[key][t].view(-1, *[1] * (x.ndim - 1))
