"""Every parameter, gradient and optimizer state in parts, one per process (ZeRO 3): torch's FSDP2 (`fully_shard`)."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from src.protocols import KeptWhole, ShardUnits
from src.strategies.ddp import AtTheEnd, ManualDDP


class FSDP(ManualDDP):
    """Shards the networks block by block; what a network keeps whole is averaged as under ddp_manual.

    Args:
        replicas: how many copies there are of the whole, each spread over an equal share of the processes (HSDP); 1:
            one copy spread over all of them.
        options: of ManualDDP.
    """

    def __init__(self, replicas: int = 1, **options):
        super().__init__(**options)
        if replicas < 1:
            raise ValueError(f"strategy.replicas={replicas} must be at least 1")
        self.replicas, self.engine = replicas, _Shards(self)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.world_size % self.replicas:
            raise ValueError(
                f"strategy.replicas={self.replicas} does not divide the {self.world_size} processes; choose a divisor"
            )
        shape, names = (self.world_size,), ("shard",)
        if self.replicas > 1:
            shape, names = (self.replicas, self.world_size // self.replicas), ("replicate", "shard")
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        for name, network in self.lightning_module.parallel_networks().items():
            if not isinstance(network, ShardUnits):
                raise ValueError(
                    f"the {name} does not say what may be sharded; give {type(network).__name__} shard_units() and "
                    f"forward_methods"
                )
            whole = set(network.kept_whole()) if isinstance(network, KeptWhole) else set()
            for unit in (*network.shard_units(), network):
                fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
            for method in network.forward_methods:
                register_fsdp_forward_method(network, method)


class _Shards(AtTheEnd):
    native = "fsdp"

    @contextmanager
    def hold(self, network: nn.Module, twice: bool) -> Iterator[None]:
        """A graph of gradients needs parameters whole until its own backward pass, longer than FSDP2 would keep them.

        Setting them free again by hand is a must: the next forward pass would see them as they were.
        """
        sharded = [m for m in network.modules() if isinstance(m, FSDPModule)]
        if twice:
            network.set_reshard_after_forward(False)
            network.set_reshard_after_backward(False)
        yield
        if twice:
            network.set_reshard_after_forward(True)
            network.set_reshard_after_backward(True)
            for module in sharded:
                module.reshard()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        self.strategy.average(g for g in gradients if not isinstance(g, DTensor))

    @contextmanager
    def quiet(self, network: nn.Module) -> Iterator[None]:
        network.set_requires_gradient_sync(False)
        yield
        network.set_requires_gradient_sync(True)
