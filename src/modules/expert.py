"""One expert: flow matching (Lipman et al., ICLR 2023) with one network; of all images, an ensemble's monolith."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from src.flow import SOLVERS, TIME_SCALE, guided, path, velocity
from src.images import at_least_float32
from src.modules.base import Module
from src.noise import Noise
from src.protocols import Batch


class Expert(Module):
    """Learns the velocity of the straight path from data to noise, and follows it back.

    Args:
        network: (x_t, 1000 t, labels) -> the velocity at x_t.
        optimizer: from parameters to an optimizer.
        label_dropout: share of training samples whose label becomes the null class, where the network has classes.
        solver: of the sampler, euler (one evaluation of the network a step) or heun (two).
        steps: of the sampler.
        guidance: scale of classifier-free guidance, which evaluates the network twice as often; 1 for none.
        seed, micro_batch, schedule, clip_norm: as in Module.
    """

    averaged = ("network",)

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[..., Optimizer],
        label_dropout: float = 0.0,
        solver: str = "euler",
        steps: int = 50,
        guidance: float = 1.0,
        **shared,
    ):
        super().__init__(**shared)
        if not 0 <= label_dropout < 1:
            raise ValueError(f"model.label_dropout is {label_dropout}; give a share of the samples, from 0 to below 1")
        if solver not in SOLVERS:
            raise ValueError(f"model.solver is {solver!r}; choose one of {', '.join(SOLVERS)}")
        if steps < 1:
            raise ValueError(f"model.steps is {steps}; set it to 1 or more")
        if guidance != 1 and not (network.classes and label_dropout):
            raise ValueError(
                f"model.guidance={guidance} needs a network that knows labels and their absence: set "
                "model.network.classes and model.label_dropout above 0, or model.guidance=1"
            )
        if getattr(network, "learn_sigma", False):
            raise ValueError("flow matching predicts velocities alone; set model.network.learn_sigma=false")
        self.network, self.optimizer_makers = network, {"network": optimizer}
        self.label_dropout, self.solver, self.steps, self.guidance = label_dropout, solver, steps, guidance

    def parallel_networks(self) -> dict[str, nn.Module]:
        return {"network": self.network}

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        return self.turn("network", batch, self._loss)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return {"real": batch.images, "fake": self.sample(self.noise(batch), batch.labels), "numbers": batch.numbers}

    @torch.no_grad()
    def sample(self, noise: Noise, labels: Tensor | None = None) -> Tensor:
        """From x_1 ~ N(0, I) along the velocity to x_0, clipped to [-1, 1]: (n, c, h, w)."""
        with torch.autocast(self.device.type, enabled=False):
            x = noise.normal("sample/x", *self.network.shape)
            return SOLVERS[self.solver](lambda x, t: self.velocity(x, t, labels), x, self.steps).clamp(-1, 1)

    def velocity(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """dx/dt at images x (n, c, h, w) and times t (n,) in [0, 1], with guidance where it is set."""
        if self.guidance == 1 or labels is None:
            return self.network(x, TIME_SCALE * t, labels)
        labels = torch.cat([labels, torch.full_like(labels, self.network.classes)])
        both = self.network(torch.cat([x, x]), TIME_SCALE * torch.cat([t, t]), labels)
        return guided(*both.chunk(2), self.guidance)

    def _loss(self, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean squared error of the velocity at t ~ U[0, 1), conditional flow matching."""
        noise = self.noise(part)
        t, x_1 = noise.uniform("train/t"), noise.normal("train/x", *part.images.shape[1:])
        labels = self._with_dropout(part.labels, noise)
        found = self.network(path(part.images, x_1, t), TIME_SCALE * t, labels)
        loss = F.mse_loss(at_least_float32(found), velocity(part.images, x_1))
        return loss, {"train/loss": loss}

    def _with_dropout(self, labels: Tensor, noise: Noise) -> Tensor:
        """Labels of which a share is the null class."""
        if not (self.network.classes and self.label_dropout):
            return labels
        return labels.masked_fill(noise.uniform("train/label_dropout") < self.label_dropout, self.network.classes)
