"""The ensemble: experts that never met, mixed by a router while images are drawn (arXiv 2501.05450; Paris 2025)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src import flow
from src import store as stores
from src.experts import Experts, Gone
from src.flow import guided
from src.gate import Gate
from src.latents import Autoencoder
from src.noise import Noise
from src.routing import Full, Oracle, Strategy, dead_mass, drawn, mixed, noise_bin

BINS = 10  # of t, in which experts are counted


class Paris:
    """Draws along u = sum_k p(k | x_t, t, label) u_k, of the experts that a store has, as long as it has enough.

    Experts may differ in size, objective and precision; what they must have in common is their contract. An expert
    that is missing, late or damaged is left out: the others' weights are renormalised, which is exact for the data that
    remains. Experts with a head (added later) come after the router's.

    Args:
        store: of the router and the experts: a folder, or any URL of fsspec's.
        strategy: of src.routing: which experts are asked.
        router: its folder in the store.
        solver, steps, eta: as of Expert.
        guidance: scale of classifier-free guidance, of the mixtures with and without label; 1 for none.
        max_dead_mass: the share of the data whose experts may be missing.
        devices: that experts are spread over; None for the best one there is.
        decoder: makes images of what is drawn, where that are latents.
        in_memory, check_seconds: as of Experts.

    Raises ValueError for a store without a router, an expert of another contract, or too few experts.
    """

    averaged: tuple[str, ...] = ()

    def __init__(
        self,
        store: str,
        strategy: Strategy,
        router: str = "router",
        solver: str = "euler",
        steps: int = 50,
        eta: float = 0.0,
        guidance: float = 1.0,
        max_dead_mass: float = 0.5,
        devices: Sequence[str] | None = None,
        decoder: Autoencoder | None = None,
        in_memory: int = 8,
        check_seconds: float = 1.0,
    ):
        if steps < 1:
            raise ValueError(f"model.steps is {steps}; set it to 1 or more")
        if not 0 <= max_dead_mass <= 1:
            raise ValueError(f"max_dead_mass={max_dead_mass} must be a share from 0 to 1")
        devices = list(devices or ["cuda" if torch.cuda.is_available() else "cpu"])
        self.store, self.device, self.strategy = store, torch.device(devices[0]), strategy
        self.steps, self.guidance, self.max_dead_mass, self.decoder = steps, guidance, max_dead_mass, decoder
        self.follow = flow.solver(solver, eta)
        self.gate = Gate(store, router, self.device)
        self.contract, self.counts = self.gate.contract, self.gate.counts
        self.shape = tuple(self.contract["shape"])
        self.channels = 3 if decoder else self.shape[0]  # of the images
        if bool(self.contract["vae"]) != (decoder is not None):
            raise ValueError("model.decoder is for experts of latents, and they need it")
        if decoder and (its := {"id": decoder.identity, "factor": decoder.factor}) != self.contract["vae"]:
            raise ValueError(f"model.decoder is {its}, but the experts' latents are of {self.contract['vae']}")
        known = {f"experts/{k}" for k in range(len(self.counts))}
        for stray in (kind for kind in stores.kinds(store, "experts") if kind not in known):
            print(f"{stray} has no head and is not asked; train it: python train.py experiment=paris_head")
        self.experts = Experts(store, self.contract, len(self.counts), devices, in_memory, check_seconds)
        self._require_enough(self.experts.living)
        self.classes = max(card["network"].get("classes", 0) for card in self.experts.cards if card)
        if guidance != 1:
            self.experts.require_guidance()
        self.asked, self.drawn = [0.0] * BINS, [0] * BINS  # experts and samples, by time

    @torch.no_grad()
    def sample(self, noise: Noise, labels: Tensor | None = None) -> Tensor:
        """From x_1 ~ N(0, I) along the mixture to x_0, as images clipped to [-1, 1]: (n, c, h, w).

        Raises ValueError where too many experts have gone, or one has come that cannot be mixed with the others.
        """
        known: dict[str, Any] = {"step": 0, "cluster": None}

        def field(x: Tensor, t: Tensor) -> Tensor:
            draw = partial(noise.uniform, f"sample/expert/{known['step']}")
            if isinstance(self.strategy, Oracle) and known["cluster"] is None:
                p = self.weights(x, t, labels, strategy=Full())
                known["cluster"] = drawn(p, noise.uniform("sample/cluster"))
            known["step"] += 1
            return self.velocity(x, t, labels, draw, known["cluster"])

        x = noise.normal("sample/x", *self.shape)
        step_noise = lambda n: noise.normal(f"sample/step/{n}", *self.shape)  # noqa: E731
        x = self.follow(field, x, flow.times(self.steps), step_noise)
        return self.decoder.decode(x) if self.decoder else x.clamp(-1, 1)

    def velocity(self, x: Tensor, t: Tensor, labels: Tensor | None = None, draw=None, cluster=None) -> Tensor:
        """dx/dt at x (n, c, h, w) and times t (n,) in [0, 1]: mixed first, guided after; `draw` and `cluster` as of
        src.routing.weights."""
        if self.guidance == 1 or labels is None:
            return self._mixture(x, t, labels, draw, cluster)
        labels = torch.cat([labels, torch.full_like(labels, self.classes)])
        twice = lambda v: v if v is None else torch.cat([v, v])  # noqa: E731
        found = self._mixture(twice(x), twice(t), labels, draw and (lambda: twice(draw())), twice(cluster))
        return guided(*found.chunk(2), self.guidance)

    def weights(self, x: Tensor, t: Tensor, labels: Tensor | None = None, strategy=None, draw=None, cluster=None):
        """What each expert counts for each sample, (n, experts), as src.routing.weights gives it."""
        living = self.experts.living
        self._require_enough(living)
        return self.gate.weights(x, t, labels, strategy or self.strategy, living, draw, cluster)

    def account(self) -> str:
        """Experts asked per step and image, over all times and by time (Reports)."""
        means = [asked / count for asked, count in zip(self.asked, self.drawn, strict=True) if count]
        named = [f"experts/{k}" for k, lives in enumerate(self.experts.living) if not lives]
        told = f"{sum(self.asked) / max(1, sum(self.drawn)):.2f} of {len(self.counts)} experts a step"
        told += f" (from t = 0 to 1: {' '.join(f'{mean:.1f}' for mean in means)})"
        return told + (f", without {', '.join(named)}" if named else "")

    def _mixture(self, x: Tensor, t: Tensor, labels: Tensor | None, draw, cluster) -> Tensor:
        while True:
            w = self.weights(x, t, labels, draw=draw, cluster=cluster)

            def ask(k: int, rows: Tensor) -> Tensor:
                return self.experts.ask(k, x[rows], t[rows], None if labels is None else labels[rows])

            try:
                found = mixed(w, ask)
            except Gone:  # told; the others know what to do
                continue
            number = int(noise_bin(t[:1], BINS))
            self.asked[number] += int((w > 0).sum())
            self.drawn[number] += len(w)
            return found

    def _require_enough(self, living: list[bool]) -> None:
        if not any(living) or (dead := dead_mass(self.counts, living)) > self.max_dead_mass:
            missing = ", ".join(str(k) for k, lives in enumerate(living) if not lives)
            share = f"{100 * dead:.0f} %" if any(living) else "all"
            raise ValueError(
                f"experts {missing} are missing, and with them {share} of the data, more than max_dead_mass="
                f"{self.max_dead_mass} allows; train or restore them, or raise max_dead_mass"
            )
