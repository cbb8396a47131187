"""How the processes of a run find one another, and how they exchange sums."""

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

Levels = tuple[dist.ProcessGroup, dist.ProcessGroup]  # within a node, and between nodes


class Connected(DDPStrategy):
    """Lightning's strategy of many processes, with the connection as a setting.

    Args:
        connection: timeout_minutes, after which a process gives up waiting for another; main_address and main_port of
            the first process, over which MASTER_ADDR and MASTER_PORT of the environment win; init_method of
            torch.distributed.init_process_group, such as file:///shared/place or tcp://host:port, instead of them, but
            under an elastic agent, which has a meeting point for every start.
        options: of DDPStrategy.

    Raises ValueError where not all processes come together.
    """

    def __init__(self, connection: dict | None = None, **options):
        given = {"timeout_minutes": 30, "main_address": None, "main_port": None, "init_method": None}
        given |= connection or {}
        for name, value in (("MASTER_ADDR", given["main_address"]), ("MASTER_PORT", given["main_port"])):
            if value is not None:
                os.environ.setdefault(name, str(value))
        super().__init__(timeout=timedelta(minutes=given["timeout_minutes"]), **options)
        self.init_method = None if dist.is_torchelastic_launched() else given["init_method"]

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        try:
            if self.init_method is not None and not dist.is_initialized():
                dist.init_process_group(
                    self._get_process_group_backend(),
                    init_method=self.init_method,
                    rank=self.global_rank,
                    world_size=self.world_size,
                    timeout=self._timeout,
                )
            super().setup_distributed()
            atexit.register(_leave)
        except dist.DistError as error:
            where = self.init_method or f"{self.cluster_environment.main_address}:{self.cluster_environment.main_port}"
            raise ValueError(
                f"process {self.global_rank} waited for {self.world_size} processes at {where}, but not all came "
                f"({' '.join(str(error).split())[:200]}); start every node with the same trainer.devices and "
                f"trainer.num_nodes, and the address of the first"
            ) from error


def _leave() -> None:
    """At the end; else threads of gloo's may still run when the interpreter takes down what they use."""
    if dist.is_initialized():
        dist.destroy_process_group()


def node_groups(world_size: int, per_node: int, timeout: timedelta | None = None) -> Levels:
    """This process's node, and the processes at its place in every node. All processes call it together."""
    rank, nodes = dist.get_rank(), range(0, world_size, per_node)
    within = [dist.new_group(list(range(first, first + per_node)), timeout) for first in nodes]
    between = [dist.new_group(list(range(place, world_size, per_node)), timeout) for place in range(per_node)]
    return within[rank // per_node], between[rank % per_node]


def all_reduce(flat: Tensor, levels: Levels | None = None, group: dist.ProcessGroup | None = None) -> None:
    """The sum over all processes or a group of them, in place; with `levels`, scattered within a node, summed between
    nodes, and gathered."""
    if levels is None:
        dist.all_reduce(flat, group=group)
        return
    within, between = levels
    size = dist.get_world_size(within)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
    part = torch.empty_like(padded[: len(padded) // size])
    dist.reduce_scatter_tensor(part, padded, group=within)
    dist.all_reduce(part, group=between)
    dist.all_gather_into_tensor(padded, part, group=within)
    flat.copy_(padded[: len(flat)])
