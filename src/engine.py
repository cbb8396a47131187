"""What an engine does in a turn and with whole tensors; here for one process, and for what keeps its tensors whole.

Strategies that spread a network over processes bring an engine of their own (`strategy.engine`); modules and callbacks
know this interface alone. Tensors that torch spreads (DTensor) are put together and taken apart here.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


class Engine:
    """One process, or several with a whole copy each."""

    def hold(self, network: nn.Module) -> AbstractContextManager:
        """Around all forward and backward passes of a turn; at its end gradients are those of the global batch."""
        return nullcontext()

    def quiet(self, network: nn.Module) -> AbstractContextManager:
        """Around a micro-batch that is not the last: nothing is communicated."""
        return nullcontext()

    def backward(self, module, network: nn.Module, loss: Tensor, last: bool) -> None:
        """Gradients of one micro-batch; `last` of a turn."""
        module.manual_backward(loss)

    def step(self, network: nn.Module, optimizer: Optimizer, clip_norm: float | None) -> Tensor:
        """One step with gradients scaled down to `clip_norm`, which are then forgotten; returns their norm (), before."""
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        norm = total_norm(gradients)
        if clip_norm is not None:
            torch._foreach_mul_([local(g) for g in gradients], (clip_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # no gradient outlives its turn
        return norm

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Every weight and buffer of the module, whole. All processes call it together."""
        return {name: whole(value) for name, value in module.state_dict().items()}

    def load_weights(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        """Put back what `weights` gave; every process has all of it."""
        module.load_state_dict({name: like(weights[name], value) for name, value in module.state_dict().items()})

    def optimizer_state(self, network: nn.Module, optimizer: Optimizer) -> dict[str, dict]:
        """An optimizer's state by parameter name, whole; its options come from the configuration."""
        names = {parameter: name for name, parameter in network.named_parameters()}
        return {
            names[p]: {key: whole(value) for key, value in optimizer.state[p].items()}
            for group in optimizer.param_groups
            for p in group["params"]
        }

    def load_optimizer(self, network: nn.Module, optimizer: Optimizer, state: dict[str, dict]) -> None:
        """Put back what `optimizer_state` gave, for parameters of the same names."""
        on_device = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
        counting = {parameter for group in on_device for parameter in group["params"]}  # their step lies beside them
        for name, parameter in network.named_parameters():
            optimizer.state[parameter] = {
                key: like(value, parameter) if torch.is_tensor(value) and (value.dim() or parameter in counting) else value
                for key, value in state[name].items()
            }


def whole(value):
    """A tensor that is spread over processes, put together; anything else as it is. All processes call it together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    """This process's part of a spread tensor, sharing its memory; any other tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def like(value, other):
    """A whole tensor, on the device of `other`, and spread as it is where the shapes agree."""
    if not (torch.is_tensor(value) and torch.is_tensor(other)):
        return value
    value = value.to(other.device)
    if isinstance(other, DTensor) and value.shape == other.shape:
        return distribute_tensor(value, other.device_mesh, other.placements, src_data_rank=None)
    return value


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm () over tensors, of which some may be spread over processes."""
    spread = [t for t in tensors if isinstance(t, DTensor)]
    others = [t for t in tensors if not isinstance(t, DTensor)]
    norms = [whole(get_total_norm(part)) for part in (spread, others) if part]
    return get_total_norm(norms) if len(norms) != 1 else norms[0]
