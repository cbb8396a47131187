"""Moving averages of the weights, which samples and distances are drawn with."""

import torch
from lightning import Callback
from torch import Tensor, nn

from src.discrete import copy_row
from src.engine import engine_of


class EMA(Callback):
    """fp32 averages of the networks that the model names in `averaged`, swapped in during validation.

    Each process averages its part of the parameters; they are put together for a checkpoint.

    Args:
        halflife_kimg: after how many images a weight counts half.
        decay: instead of it, the plain factor per step, as papers give it.
        power: instead of both, gamma of the power function profile (Karras et al. 2024, EDM2, eq. 8):
            the factor is (1 - 1/t)^(gamma + 1) at step t.
        rampup: with a half-life, at most this share of the images seen, so that early averages forget the start.

    They are swapped in from the first validation hook (on_validation_start) to the last (on_validation_end); other
    callbacks act between those, so that their order does not matter.
    """

    def __init__(
        self,
        halflife_kimg: float | None = None,
        decay: float | None = None,
        power: float | None = None,
        rampup: float | None = 0.05,
    ):
        given = [name for name, value in dict(halflife_kimg=halflife_kimg, decay=decay, power=power).items() if value]
        if len(given) != 1:
            raise ValueError(
                f"callbacks.ema needs exactly one of halflife_kimg, decay and power, but has {given or 'none'}"
            )
        if decay and not 0 < decay < 1:
            raise ValueError(f"callbacks.ema.decay={decay} must lie between 0 and 1")
        if halflife_kimg and halflife_kimg < 0:
            raise ValueError(f"callbacks.ema.halflife_kimg={halflife_kimg} must be greater than 0")
        if power and power <= -1:
            raise ValueError(f"callbacks.ema.power={power} must be greater than -1")
        self.halflife_kimg, self.decay, self.power, self.rampup = halflife_kimg, decay, power, rampup
        self.averages: dict[str, Tensor] = {}
        self.swapped = False

    def setup(self, trainer, module, stage):
        if not getattr(module, "averaged", ()):
            raise ValueError(f"{type(module).__name__} does not say which networks are averaged; use ~callbacks.ema")

    def on_fit_start(self, trainer, module):
        networks, self._engine = module.parallel_networks(), engine_of(trainer)
        self._parameters = {
            f"{name}.{key}": p for name in module.averaged for key, p in networks[name].named_parameters()
        }
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self.averages = {name: self._engine.part(p).float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        weight = 1 - self.factor(module.images_seen, module.images_per_batch)
        current = [self._engine.part(p).float() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self.averages.values()), current, weight)

    def factor(self, images: int, batch: int) -> float:
        """What the old averages are multiplied by at the step that ends at `images` images seen."""
        if self.decay is not None:
            return self.decay
        if self.power is not None:
            return (1 - 1 / (images / batch)) ** (self.power + 1)
        halflife = self.halflife_kimg * 1000
        if self.rampup is not None:
            halflife = min(halflife, images * self.rampup)
        return 0.5 ** (batch / max(halflife, 1e-8))

    @torch.no_grad()
    def rows_copied(self, parameter: nn.Parameter, source: Tensor, target: Tensor) -> None:
        """Averages follow Split-and-Prune (KeepsWeights)."""
        if (name := self._names.get(parameter)) is not None:
            copy_row(self.averages[name], source, target)

    def on_validation_start(self, trainer, module):
        self._swap(module, into=True)

    def on_validation_end(self, trainer, module):
        self._swap(module, into=False)

    @torch.no_grad()
    def _swap(self, module, into: bool) -> None:
        if into:
            self._weights = {name: self._engine.part(p).clone() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            self._engine.part(parameter).copy_((self.averages if into else self._weights)[name])
        for name in module.averaged:
            self._engine.parts_written(module.parallel_networks()[name])
        if not into:
            del self._weights
        self.swapped = into

    def state_dict(self) -> dict:
        assert not self.swapped, "averages may not be saved while they are swapped in"
        together = self._engine.together
        return {"averages": {name: together(self._parameters[name], part) for name, part in self.averages.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        for name, value in state["averages"].items():
            self.averages[name].copy_(self._engine.apart(self._parameters[name], value))
