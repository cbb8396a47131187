"""A whole copy of every network in every process, gradients averaged: while they are computed, or at the turn's end."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from src.engine import Engine
from src.strategies.connection import Connected, Levels, all_reduce, node_groups

NEVER_COUNTED = 2**40  # added to sample numbers, which then lie beyond every count
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class DDP(Connected):
    """torch's DistributedDataParallel around the module; gradients travel in buckets during the backward pass.

    Args:
        compression: of gradients on their way, "fp16" or "bf16"; None for none.
        options: of Connected, DDPStrategy and DistributedDataParallel (bucket_cap_mb, gradient_as_bucket_view,
            process_group_backend, ...).
    """

    def __init__(self, compression: str | None = None, **options):
        if compression not in (None, *HOOKS):
            raise ValueError(f"strategy.compression={compression} is unknown; it may be {', '.join(HOOKS)} or null")
        super().__init__(**options)
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


class ManualDDP(Connected):
    """Gradients are averaged once, when a turn's last backward pass is over: right whatever the passes did.

    Args:
        two_level: sum within each node first, then between nodes, each process a part: for slow links between nodes.
        options: of Connected.
    """

    def __init__(self, two_level: bool = False, **options):
        super().__init__(**options)
        self.two_level, self.engine = two_level, AtTheEnd(self)
        self._levels: Levels | None = None
        self.per_copy = 1  # neighbouring processes that hold one copy of the networks between them
        self.peers: dist.ProcessGroup | None = None  # those with the same part of each copy; None: all processes

    def configure_ddp(self) -> None:
        """No wrapper: networks are built alike everywhere, from the seed."""
        if self.two_level and self.per_copy > 1:
            raise ValueError("strategy.two_level=true is for whole copies of the networks; set it to false")
        if self.two_level:
            self._levels = node_groups(self.world_size, self.num_processes, self._timeout)
        if self.per_copy > 1:
            groups = [list(range(place, self.world_size, self.per_copy)) for place in range(self.per_copy)]
            self.peers = [dist.new_group(group, self._timeout) for group in groups][self.global_rank % self.per_copy]

    def validation_step(self, *args, **kwargs):
        """Of processes that draw the same images, only the first has numbers that metrics and pictures count."""
        outputs = super().validation_step(*args, **kwargs)
        if self.global_rank % self.per_copy:
            outputs = outputs | {"numbers": outputs["numbers"] + NEVER_COUNTED}
        return outputs

    def average(self, tensors: Iterable[Tensor]) -> None:
        """The mean of each tensor over all copies, in place; all processes (of one place) have the same tensors."""
        by_kind: dict[tuple, list[Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for bucket in (bucket for group in by_kind.values() for bucket in _portions(group)):
            flat = _flatten_dense_tensors(bucket).div_(self.world_size // self.per_copy)
            all_reduce(flat, self._levels, self.peers)
            for tensor, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                tensor.copy_(mean)


class AtTheEnd(Engine):
    """Averages what the strategy has not averaged yet, at a turn's end."""

    def __init__(self, strategy: ManualDDP):
        self.strategy = strategy

    def share(self, trainer) -> tuple[int, int]:
        """Raises ValueError where the processes do not make up whole copies."""
        per_copy, processes = self.strategy.per_copy, trainer.world_size
        if processes % per_copy:
            raise ValueError(
                f"a network is split over {per_copy} processes, which does not divide the {processes} that there are; "
                f"change trainer.devices, or the strategy's number"
            )
        return trainer.global_rank // per_copy, processes // per_copy

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
