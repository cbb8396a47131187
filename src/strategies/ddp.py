"""A whole copy of every network in every process, gradients averaged: while they are computed, or at the turn's end."""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from src.engine import Engine

Levels = tuple[dist.ProcessGroup, dist.ProcessGroup]  # within a node, and between nodes
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class DDP(DDPStrategy):
    """torch's DistributedDataParallel around the module; gradients travel in buckets during the backward pass.

    Args:
        compression: of gradients on their way, "fp16" or "bf16"; None for none.
        connection: timeout_minutes, main_address and main_port, as in `connected`.
        options: of DDPStrategy and DistributedDataParallel (bucket_cap_mb, gradient_as_bucket_view,
            process_group_backend, ...).
    """

    def __init__(self, compression: str | None = None, connection: dict | None = None, **options):
        if compression not in (None, *HOOKS):
            raise ValueError(f"strategy.compression={compression} is unknown; it may be {', '.join(HOOKS)} or null")
        super().__init__(**connected(**(connection or {})), **options)
        self.compression, self.engine = compression, _Buckets(self)

    def configure_ddp(self) -> None:
        if len(self.lightning_module.parallel_networks()) > 1:  # of which one trains at a time
            self._ddp_kwargs["find_unused_parameters"] = True
        super().configure_ddp()
        if self.compression is not None:
            self.model.register_comm_hook(None, HOOKS[self.compression])


class _Buckets(Engine):
    def __init__(self, strategy: DDP):
        self.strategy = strategy

    def quiet(self, network: nn.Module) -> AbstractContextManager:
        return self.strategy.model.no_sync()


class ManualDDP(DDPStrategy):
    """Gradients are averaged once, when a turn's last backward pass is over: right whatever the passes did.

    Args:
        two_level: sum within each node first, then between nodes, each process a part: for slow links between nodes.
        connection: timeout_minutes, main_address and main_port, as in `connected`.
        options: of DDPStrategy.
    """

    def __init__(self, two_level: bool = False, connection: dict | None = None, **options):
        super().__init__(**connected(**(connection or {})), **options)
        self.two_level, self.engine = two_level, AtTheEnd(self)
        self._levels: Levels | None = None

    def configure_ddp(self) -> None:
        """No wrapper: networks are built alike everywhere, from the seed."""
        if self.two_level:
            self._levels = node_groups(self.world_size, self.num_processes, self._timeout)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """The mean of each tensor over all processes, in place; all processes have the same tensors."""
        by_kind: dict[tuple, list[Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for bucket in (bucket for group in by_kind.values() for bucket in _portions(group)):
            flat = _flatten_dense_tensors(bucket).div_(self.world_size)
            all_reduce(flat, self._levels)
            for tensor, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                tensor.copy_(mean)


class AtTheEnd(Engine):
    """Averages what the strategy has not averaged yet, at a turn's end."""

    def __init__(self, strategy: ManualDDP):
        self.strategy = strategy

    @contextmanager
    def hold(self, network: nn.Module, twice: bool) -> Iterator[None]:
        yield
        self.strategy.average(p.grad for p in network.parameters() if p.grad is not None)


def _portions(tensors: list[Tensor], numbers: int = 2**23) -> Iterator[list[Tensor]]:
    """The tensors in groups of about so many numbers, so that few travel at once and little is copied at a time."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        bucket.append(tensor)
        held += tensor.numel()
        if held >= numbers:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def connected(timeout_minutes: float = 30, main_address: str | None = None, main_port: int | None = None) -> dict:
    """How processes find one another: what is set in the environment wins over the address and port given here.

    After `timeout_minutes` a process that waits for another gives up.
    """
    for name, value in (("MASTER_ADDR", main_address), ("MASTER_PORT", main_port)):
        if value is not None:
            os.environ.setdefault(name, str(value))
    return {"timeout": timedelta(minutes=timeout_minutes)}


def node_groups(world_size: int, per_node: int, timeout: timedelta | None = None) -> Levels:
    """This process's node, and the processes at its place in every node. All processes call it together."""
    rank, nodes = dist.get_rank(), range(0, world_size, per_node)
    within = [dist.new_group(list(range(first, first + per_node)), timeout) for first in nodes]
    between = [dist.new_group(list(range(place, world_size, per_node)), timeout) for place in range(per_node)]
    return within[rank // per_node], between[rank % per_node]


def all_reduce(flat: Tensor, levels: Levels | None = None) -> None:
    """The sum over all processes, in place; with `levels`, scattered within a node, summed between, and gathered."""
    if levels is None:
        dist.all_reduce(flat)
        return
    within, between = levels
    size = dist.get_world_size(within)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
    part = torch.empty_like(padded[: len(padded) // size])
    dist.reduce_scatter_tensor(part, padded, group=within)
    dist.all_reduce(part, group=between)
    dist.all_gather_into_tensor(padded, part, group=within)
    flat.copy_(padded[: len(flat)])
