"""The gradient penalty on real images that keeps a GAN's critic smooth."""

from collections.abc import Callable

import torch
from lightning import Callback
from torch import Tensor

from src.images import at_least_float32


class LazyR1(Callback):
    """Exact R1 (Mescheder et al. 2018) every `interval` batches, the first included: gamma/2 E |grad_x D(x)|^2.

    In float32 also under autocast. Differences along random directions instead of the gradient are not offered: for
    critics with LeakyReLU they estimate the penalty's gradient badly.

    Args:
        gamma: weight.
        interval: in batches; 1 for always.
        scale_by_interval: multiply by `interval`, so that the average weight stays gamma/2, as StyleGAN2 does and DDGAN
            does not.
    """

    def __init__(self, gamma: float, interval: int = 1, scale_by_interval: bool = False):
        if gamma <= 0 or interval < 1:
            raise ValueError(f"callbacks.r1 needs gamma > 0 and interval >= 1, but has {gamma} and {interval}")
        self.weight = gamma / 2 * (interval if scale_by_interval else 1)
        self.interval = interval
        self.due = False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.due = module.batches_seen % self.interval == 0

    def critic_penalty(self, critic: Callable[[Tensor], Tensor], real: Tensor) -> Tensor | None:
        """The penalty on real images (n, ...), as a scalar with a graph to the critic's weights; None where not due."""
        if not self.due:
            return None
        with torch.autocast(real.device.type, enabled=False):
            real = at_least_float32(real.detach()).requires_grad_(True)
            (gradient,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
            return self.weight * gradient.square().flatten(1).sum(1).mean()
