"""Looks for what goes wrong without an error: processes that drift apart, and parameters that nothing reaches."""

import torch
import torch.distributed as dist
from lightning import Callback

from src.engine import engine_of


class Consistency(Callback):
    """After every batch all processes have the same weights, and after the first every parameter has had a gradient.

    Weights are compared by a checksum of each parameter that all keep whole. A parameter without an optimizer state
    never had a gradient; which ones those are is printed once, where the engine keeps that state by parameter.

    Raises ValueError with the first parameter that differs between processes.
    """

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        networks, engine = module.parallel_networks(), engine_of(trainer)
        named = {f"{name}.{key}": p for name, net in networks.items() for key, p in net.named_parameters()}
        if trainer.world_size > 1:
            self._compare({name: p for name, p in named.items() if engine.alike(p)})
        if batch_idx == 0 and trainer.is_global_zero:
            seen = {p for optimizer in module.named_optimizers().values() for p in optimizer.optimizer.state}
            unreached = [name for name, p in named.items() if p not in seen and engine.trains(p)]
            if unreached and len(unreached) < len(named):
                print(f"no gradient reached {len(unreached)} parameters: {', '.join(unreached[:5])}", flush=True)

    @torch.no_grad()
    def _compare(self, whole: dict[str, torch.Tensor]) -> None:
        if not whole:
            return
        sums = torch.stack([p.double().sum() for p in whole.values()])
        least, most = sums.clone(), sums.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if (differ := ((least != most) & ~sums.isnan()).nonzero().flatten()).numel():
            name = list(whole)[int(differ[0])]
            raise ValueError(
                f"{len(differ)} parameters differ between processes, first {name}; something in a turn depends on the "
                f"process: take random numbers from self.noise(batch), and leave backward passes to Module.turn"
            )
