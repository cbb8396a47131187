"""What an engine does in a turn and with whole states; here for tensors that are kept whole, or spread as DTensors.

A strategy with ways of its own brings its engine along (`strategy.engine`). Modules and callbacks know this interface
alone: nothing else in the tree knows which engine runs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from src import checkpoint as canonical
from src.sharding import like, local, saved, spread, total_norm


class Engine:
    """One process, or several that average their gradients during the backward pass."""

    native: str | None = None  # the format of checkpoints that leave tensors in parts; None where it has no parts
    leaving_parts = False

    def share(self, trainer) -> tuple[int, int]:
        """Which share of every batch this process has, and of how many: its own, unless processes split a network."""
        return trainer.global_rank, trainer.world_size

    def hold(self, network: nn.Module, twice: bool) -> AbstractContextManager:
        """Around all forward and backward passes of a turn; at its end gradients are those of the global batch.

        `twice`: the loss holds gradients of the network itself, as R1 does.
        """
        return nullcontext()

    def quiet(self, network: nn.Module) -> AbstractContextManager:
        """Around every micro-batch of a turn but the last: gradients need not be communicated yet."""
        return nullcontext()

    def add_gradients(self, module, network: nn.Module, loss: Tensor, last: bool) -> None:
        """Those of one micro-batch; `last` of its turn."""
        module.manual_backward(loss)

    def step(self, network: nn.Module, optimizer: Optimizer, clip_norm: float | None) -> Tensor:
        """One step, with gradients scaled down to `clip_norm` and forgotten afterwards; the norm () that they had."""
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        norm = self.norm(gradients)
        if clip_norm is not None:
            torch._foreach_mul_([local(g) for g in gradients], (clip_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm () of all gradients of a network."""
        return total_norm(gradients)

    def moments(self, optimizer: Optimizer, parameter: nn.Parameter) -> dict:
        """The optimizer's state of a parameter that is kept whole."""
        return optimizer.state[parameter]

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Within it, what `weights`, `optimizer_state` and `together` give is not put together: it holds what this
        process keeps (a DTensor or a Piece), sharing its memory."""
        self.leaving_parts = True
        try:
            yield
        finally:
            self.leaving_parts = False

    def parts_read(self, module: nn.Module) -> None:
        """What `in_parts` gave has been filled with other values."""

    def given(self, value):
        """A value for a file: whole, or as it is `in_parts`."""
        return value if self.leaving_parts else saved(value)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Every weight and buffer by name, whole; all processes call it together."""
        return {name: self.given(value) for name, value in module.state_dict().items()}

    def load_weights(self, module: nn.Module, weights: dict[str, Tensor], where: str) -> None:
        """Put back what `weights` gave; every process has all of it."""
        canonical.load_weights(module, weights, where)

    def optimizer_state(self, network: nn.Module, optimizer: Optimizer) -> dict[str, dict]:
        """An optimizer's state by parameter name, whole; all processes call it together."""
        return canonical.optimizer_state(network, optimizer, self.given)

    def load_optimizer(self, network: nn.Module, optimizer: Optimizer, state: dict[str, dict]) -> None:
        """Put back what `optimizer_state` gave; every process has all of it."""
        canonical.load_optimizer(network, optimizer, state)

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether this process trains the parameter, or a part of it."""
        return True

    def alike(self, parameter: nn.Parameter) -> bool:
        """Whether every process has all of the parameter after every step, and the same."""
        return not isinstance(parameter, DTensor)

    def part(self, parameter: nn.Parameter) -> Tensor:
        """What this process keeps of a parameter, sharing its memory; averages are made of these."""
        return local(parameter.detach())

    def parts_written(self, network: nn.Module) -> None:
        """What `part` gave has been written to: whole copies that are kept elsewhere are out of date."""

    def together(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Such parts of all processes, as one tensor for a file; all processes call it together."""
        return self.given(spread(part, parameter))

    def apart(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """The part that this process keeps of a whole value."""
        return local(like(value, parameter))


WHOLE = Engine()


def engine_of(trainer) -> Engine:
    """The engine that the trainer's strategy brings along, or the plain one."""
    return getattr(getattr(trainer, "strategy", None), "engine", WHOLE)
