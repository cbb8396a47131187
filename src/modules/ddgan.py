"""Denoising Diffusion GANs (Xiao et al., ICLR 2022): a generator and a discriminator that take turns on noisy pairs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from src.diffusion import Diffusion
from src.images import at_least_float32
from src.modules.base import Module
from src.modules.networks.reference_names import published_state
from src.noise import Noise
from src.protocols import Batch, CriticPenalty


class DDGAN(Module):
    """Learns x_{t+1} -> x_t in few large steps, each a conditional GAN.

    Args:
        generator: G(x_{t+1}, t, z, labels) -> x_0.
        discriminator: D(x_t, t, x_{t+1}, labels) -> logits.
        diffusion: the schedule and its posterior.
        optimizer_generator, optimizer_discriminator: from parameters to an optimizer.
        reuse_generator: one forward pass of the generator serves both turns of a micro-batch: cheaper, and another
            algorithm than the paper's, since both networks then see the same t, pairs and z.
        seed, micro_batch, schedule, clip_norm: as in Module.
    """

    averaged = ("generator",)

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        diffusion: Diffusion,
        optimizer_generator: Callable[..., Optimizer],
        optimizer_discriminator: Callable[..., Optimizer],
        reuse_generator: bool = False,
        **shared,
    ):
        super().__init__(**shared)
        self.generator, self.discriminator, self.diffusion = generator, discriminator, diffusion
        self.optimizer_makers = {"discriminator": optimizer_discriminator, "generator": optimizer_generator}
        self.reuse_generator = reuse_generator

    def parallel_networks(self) -> dict[str, nn.Module]:
        return {"discriminator": self.discriminator, "generator": self.generator}

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        """The discriminator's turn, then the generator's, each on times, pairs and latents of its own."""
        self._kept = {}
        penalised = any(isinstance(c, CriticPenalty) and c.due for c in self.trainer.callbacks)
        logged = self.turn("discriminator", batch, self._discriminator_loss, twice=penalised)
        return logged | self.turn("generator", batch, self._generator_loss)

    def published_state(self, path: str) -> dict:
        """A published checkpoint as a canonical state: `netG_*.pth` to draw with, or `content.pth` to go on from.

        The first holds the averaged generator alone; weights of the discriminator then stay as initialised. Nothing but
        tensors, plain containers and argparse.Namespace is unpickled. Raises ValueError for another architecture.
        """
        return published_state(path, self.generator, self.discriminator, self.state_dict())

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return {"real": batch.images, "fake": self.sample(self.noise(batch), batch.labels), "numbers": batch.numbers}

    @torch.no_grad()
    def sample(self, noise: Noise, labels: Tensor | None = None) -> Tensor:
        """From x_T ~ N(0, I) down to x_0 in [-1, 1] (n, c, h, w), each step with a latent of its own."""
        with torch.autocast(self.device.type, enabled=False):
            x = noise.normal("sample/x", *self.generator.shape)
            for step in reversed(range(self.diffusion.steps)):
                t = torch.full((len(x),), step, device=x.device)
                e = noise.normal(f"sample/{step}/posterior", *self.generator.shape)
                x = self._fake(x, t, e, noise, f"sample/{step}", labels)
        return x

    def _discriminator_loss(self, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Eq. 5 with the non-saturating loss, plus whatever critic penalty is due on the real x_t."""
        noise = self.noise(part)
        t, x_t, x_next, e = self._pair(part.images, noise, "discriminator")
        if self.reuse_generator:
            self.generator.requires_grad_(True)  # its graph is for its own turn: nothing flows into it in this one
            self._kept[part.first] = t, x_next, self._fake(x_next, t, e, noise, "discriminator", part.labels)
            self.generator.requires_grad_(False)
            x_fake = self._kept[part.first][2].detach()
        else:
            with torch.no_grad():
                x_fake = self._fake(x_next, t, e, noise, "discriminator", part.labels)
        seen: list[Tensor] = []

        def critic(x: Tensor) -> Tensor:
            seen.append(at_least_float32(self.discriminator(x, t, x_next, part.labels)))
            return seen[-1]

        terms = {}
        for callback in self.trainer.callbacks:
            if isinstance(callback, CriticPenalty) and (term := callback.critic_penalty(critic, x_t)) is not None:
                terms["train/r1"] = term
        real = seen[0] if seen else critic(x_t)  # a penalty's forward pass serves the loss as well
        terms["train/loss_real"] = F.softplus(-real).mean()
        terms["train/loss_fake"] = F.softplus(critic(x_fake)).mean()
        logged = {**terms, "train/logit_real": real.mean(), "train/logit_fake": seen[-1].mean()}
        loss = sum(terms.values())
        return loss, logged | {"train/loss_discriminator": terms["train/loss_real"] + terms["train/loss_fake"]}

    def _generator_loss(self, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if self.reuse_generator:
            t, x_next, x_fake = self._kept.pop(part.first)
        else:
            noise = self.noise(part)
            t, _, x_next, e = self._pair(part.images, noise, "generator")
            x_fake = self._fake(x_next, t, e, noise, "generator", part.labels)
        loss = F.softplus(-at_least_float32(self.discriminator(x_fake, t, x_next, part.labels))).mean()
        return loss, {"train/loss_generator": loss}

    def _pair(self, images: Tensor, noise: Noise, turn: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """t ~ U{0..T-1} (n,), (x_t, x_{t+1}) ~ q, and noise for the posterior; all in one draw, for many small ones."""
        t = (noise.uniform(f"{turn}/t") * self.diffusion.steps).long()
        e_t, e_next, e = noise.normal(f"{turn}/x", 3, *images.shape[1:]).unbind(1)
        return t, *self.diffusion.q_pair(images, t, e_t, e_next), e

    def _fake(self, x_next: Tensor, t: Tensor, e: Tensor, noise: Noise, purpose: str, labels: Tensor | None) -> Tensor:
        """x_t through the generator's x_0 and the posterior with noise e, eq. 8."""
        x_0 = self.generator(x_next, t, noise.normal(f"{purpose}/z", self.generator.z_dim), labels)
        return self.diffusion.posterior_sample(x_0, x_next, t, e)
