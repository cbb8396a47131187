"""Every layer of a transformer's blocks computed by several processes, each its share; and copies of such groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from src.protocols import TensorSplit
from src.sharding import local
from src.strategies.ddp import AtTheEnd, ManualDDP


class TensorParallel(ManualDDP):
    """Splits the layers that a network names in its `tensor_plan`; whatever else it has is whole in every process.

    Neighbouring processes share one copy of a network, and see the same images; gradients are averaged over copies.

    Args:
        tensor: how many processes share a copy; there are as many copies as that number fits into all processes.
        options: of ManualDDP.
    """

    def __init__(self, tensor: int, **options):
        super().__init__(**options)
        if type(tensor) is not int or tensor < 1:
            raise ValueError(f"strategy.tensor={tensor} must be a whole number: of processes that share a network")
        self.per_copy, self.engine = tensor, _Shares(self)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        shape = (self.world_size // self.per_copy, self.per_copy)
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "tensor"))["tensor"]
        for name, network in self.lightning_module.parallel_networks().items():
            if not isinstance(network, TensorSplit):
                raise ValueError(
                    f"the {name} cannot be split by strategy=tensor_parallel, since {type(network).__name__} has no "
                    f"tensor_plan(); use strategy=fsdp"
                )
            for layer, how in network.tensor_plan(self.per_copy).items():
                network.set_submodule(layer, SPLITS[how](network.get_submodule(layer), mesh))


class _Shares(AtTheEnd):
    @contextmanager
    def hold(self, network: nn.Module, twice: bool) -> Iterator[None]:
        if twice:  # it would come out wrong, without an error
            raise ValueError(
                "an exact gradient penalty cannot be had under strategy=tensor_parallel; use strategy=fsdp"
            )
        yield
        self.strategy.average(local(p.grad) for p in network.parameters() if p.grad is not None)


class _Columns(nn.Module):
    """A linear layer of which this process computes a share of the outputs: (..., inputs) -> (..., outputs / parts)."""

    share: Placement = Shard(0)

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        self.weight, self.bias = (_shared(p, mesh, self.share) for p in (layer.weight, layer.bias))

    def forward(self, x: Tensor) -> Tensor:
        x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)  # its gradient is summed over all shares
        return F.linear(x.to_local(grad_placements=[Partial()]), local(self.weight), local(self.bias))


class _QueriesKeysValues(_Columns):
    """The same where outputs are queries, keys and values: the same heads of each, so three stretches of the rows."""

    share = _StridedShard(0, split_factor=3)


class _Rows(nn.Module):
    """A linear layer of which this process has a share of the inputs: (..., inputs / parts) -> (..., outputs)."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        self.weight, self.bias = _shared(layer.weight, mesh, Shard(1)), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        part = DTensor.from_local(F.linear(x, local(self.weight)), self.mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local() + self.bias


SPLITS = {"columns": _Columns, "qkv": _QueriesKeysValues, "rows": _Rows}


def _shared(parameter: nn.Parameter, mesh: DeviceMesh, share: Placement) -> nn.Parameter:
    """This process's share of a parameter that all have whole; what it does not keep is freed."""
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, [share], src_data_rank=None))
