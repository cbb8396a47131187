"""One expert: flow matching or noise prediction with one network; of all images, an ensemble's monolith."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from src import checkpoint as canonical
from src import store as stores
from src.flow import guided, path, velocity
from src.flow import solver as solver_of
from src.images import at_least_float32
from src.latents import Autoencoder
from src.modules.base import Module
from src.modules.networks.reference_names import published_dit
from src.noise import Noise
from src.objectives import Objective, Velocity, scale
from src.protocols import Batch


class Expert(Module):
    """Learns what carries noise to data along the common path (src.flow), and follows it.

    Args:
        network: (noisy images, their times, labels) -> what the objective asks for.
        optimizer: from parameters to an optimizer.
        objective: of src.objectives; flow matching if None.
        decoder: makes images of what is drawn, where that are latents.
        label_dropout: share of training samples whose label becomes the null class, where the network has classes.
        solver: of the sampler: euler, ddim, ddpm (one evaluation of the network a step) or heun (two).
        steps: of the sampler.
        eta: of ddim, the share of DDPM's noise in its steps.
        guidance: scale of classifier-free guidance, which evaluates the network twice as often; 1 for none.
        seed, micro_batch, schedule, clip_norm: as in Module.
    """

    averaged = ("network",)

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[..., Optimizer],
        objective: Objective | None = None,
        decoder: Autoencoder | None = None,
        label_dropout: float = 0.0,
        solver: str = "euler",
        steps: int = 50,
        eta: float = 0.0,
        guidance: float = 1.0,
        **shared,
    ):
        super().__init__(**shared)
        if not 0 <= label_dropout < 1:
            raise ValueError(f"model.label_dropout is {label_dropout}; give a share of the samples, from 0 to below 1")
        if steps < 1:
            raise ValueError(f"model.steps is {steps}; set it to 1 or more")
        if guidance != 1 and not (network.classes and label_dropout):
            raise ValueError(
                f"model.guidance={guidance} needs a network that knows labels and their absence: set "
                "model.network.classes and model.label_dropout above 0, or model.guidance=1"
            )
        self.objective = objective or Velocity()
        if getattr(network, "learn_sigma", False) and not self.objective.learn_sigma:
            raise ValueError(
                f"{type(self.objective).__name__} has no use for variances; set model.network.learn_sigma=false, or "
                "model.objective to src.objectives.DDPM for a published DiT"
            )
        self.network, self.optimizer_makers = network, {"network": optimizer}
        self.label_dropout, self.guidance, self.steps = label_dropout, guidance, steps
        self.images_before = 0  # that published weights had seen, with which the run began
        self.follow, self.decoder = solver_of(solver, eta), decoder

    def parallel_networks(self) -> dict[str, nn.Module]:
        return {"network": self.network}

    def start_from(self, start: str) -> bool:
        """Begin with the newest network of STORE/experts/3, or of another kind (StartsFrom).

        Raises ValueError where there is none, or one of another size or objective.
        """
        if start.endswith((".pt", ".pth")):
            return False
        place, _, name = start.rstrip("/").rpartition("/")
        store, _, group = place.rpartition("/")
        card, rejected = stores.newest(store, f"{group}/{name}")
        print("".join(f"{line}\n" for line in rejected), end="")
        if card is None:
            raise ValueError(f"start={start} has nothing published that can be used; give STORE/experts/NUMBER")
        if card["objective"]["_target_"].rpartition(".")[2] != type(self.objective).__name__:
            raise ValueError(
                f"{start} was trained otherwise; set model.objective={{_target_: {card['objective']['_target_']}}}"
            )
        canonical.load_weights(self.network, stores.load(store, card), start)
        self.images_before = card["images"]
        print(f"Begins with {start} after {card['images']} images")
        return True

    def published_state(self, path: str) -> dict:
        """A published DiT (its objective is DDPM) as a checkpoint to draw from."""
        weights = {f"network.{name}": value for name, value in published_dit(path, self.network).items()}
        state = {"optimizers": {}, "callbacks": {}, "metrics": {}, "position": {"images": 0, "batches": 0}}
        return state | {"weights": self.state_dict() | weights}

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        return self.turn("network", batch, self._loss)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        fake = self.sample(self.noise(batch), batch.labels)
        real = self.decoder.decode(batch.images) if self.decoder else batch.images
        return {"real": real, "fake": fake, "numbers": batch.numbers}

    @torch.no_grad()
    def sample(self, noise: Noise, labels: Tensor | None = None) -> Tensor:
        """From x_1 ~ N(0, I) along the velocity to x_0, as images clipped to [-1, 1]: (n, c, h, w)."""
        shape, times = self.network.shape, self.objective.times(self.steps)
        with torch.autocast(self.device.type, enabled=False):
            x = noise.normal("sample/x", *shape) * scale(times[0])

            def field(x: Tensor, t: Tensor) -> Tensor:
                return self.velocity(x, t, labels)

            return self._shown(self.follow(field, x, times, lambda n: noise.normal(f"sample/step/{n}", *shape)))

    def velocity(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """dx/dt at images x (n, c, h, w) and times t (n,) in [0, 1], with guidance where it is set."""

        def network(shown: Tensor, time: Tensor) -> Tensor:
            if self.guidance == 1 or labels is None:
                return self.network(shown, time, labels)
            both = torch.cat([labels, torch.full_like(labels, self.network.classes)])
            found = self.network(torch.cat([shown, shown]), torch.cat([time, time]), both)
            return guided(*found.chunk(2), self.guidance)

        return self.objective.velocity(network, x, t)

    def error(self, batch: Batch) -> Tensor:
        """Squared error of the velocity for each image, (n,), at t ~ U[0, 1) and noise of the batch's numbers.

        It compares experts of all objectives with one another.
        """
        noise = self.noise(batch)
        t, x_1 = noise.uniform("error/t"), noise.normal("error/x", *batch.images.shape[1:])
        found = self.velocity(path(batch.images, x_1, t), t, batch.labels)
        return (found - velocity(batch.images, x_1)).square().flatten(1).mean(1)

    def _shown(self, x: Tensor) -> Tensor:
        return self.decoder.decode(x) if self.decoder else x.clamp(-1, 1)

    def _loss(self, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean squared error of the prediction at u ~ U[0, 1)."""
        noise = self.noise(part)
        u, x_1 = noise.uniform("train/t"), noise.normal("train/x", *part.images.shape[1:])
        labels = self._with_dropout(part.labels, noise)
        shown, time, target = self.objective.task(part.images, x_1, u)
        found = self.network(shown, time, labels)[:, : target.shape[1]]
        loss = F.mse_loss(at_least_float32(found), target)
        return loss, {"train/loss": loss}

    def _with_dropout(self, labels: Tensor, noise: Noise) -> Tensor:
        """Labels of which a share is the null class."""
        if not (self.network.classes and self.label_dropout):
            return labels
        return labels.masked_fill(noise.uniform("train/label_dropout") < self.label_dropout, self.network.classes)
