"""What every method's module shares: turns, micro-batches, time counted in images, and logging against it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from src.checkpoint import committed
from src.engine import engine_of
from src.noise import Noise
from src.protocols import Batch, KeptWhole, RollsBack
from src.schedule import Schedule


class Module(LightningModule):
    """A method that trains its networks in turns.

    Args:
        seed: of all noise.
        micro_batch: images per forward pass and process; None for the whole share at once.
        schedule: of every learning rate, by images seen; constant if None.
        clip_norm: gradients of a turn are scaled down to this norm; None for never.
    """

    averaged: tuple[str, ...] = ()
    optimizer_makers: Mapping[str, Callable[..., Optimizer]]  # network name -> from parameters to its optimizer

    def __init__(
        self,
        seed: int,
        micro_batch: int | None = None,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.seed, self.micro_batch, self.clip_norm = seed, micro_batch, clip_norm
        self.schedule = schedule or Schedule()
        self.images_seen = 0  # by all processes; the clock of everything
        self.batches_seen = 0
        self.data_offset = 0  # sample numbers that roll-backs have skipped
        self.lr_scale = 1.0  # what roll-backs multiply every learning rate by
        self.register_buffer("first_bad", torch.tensor(-1), persistent=False)  # first batch of a gradient not finite

    @property
    def images_per_batch(self) -> int:
        """Images of one global batch."""
        return self.trainer.datamodule.batch

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        """All turns of one batch; what to log, as scalars or as vectors with an entry per layer."""
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        logged = self.learn(batch)
        self.images_seen += self.images_per_batch
        self.batches_seen += 1
        return logged

    def parallel_networks(self) -> Mapping[str, nn.Module]:
        """The networks in the order of their optimizers."""
        raise NotImplementedError

    def configure_optimizers(self) -> list[Optimizer]:
        optimizers = [self.optimizer_makers[name](_groups(net)) for name, net in self.parallel_networks().items()]
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["initial_lr"] = group["lr"]
        return optimizers

    def describe(self) -> str:
        """What is trained, for people."""
        sizes = {name: sum(p.numel() for p in net.parameters()) for name, net in self.parallel_networks().items()}
        return ", ".join(f"{name} {size / 1e6:.2f} M parameters" for name, size in sizes.items())

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Network name -> its optimizer."""
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        return dict(zip(self.parallel_networks(), optimizers, strict=True))

    def only(self, name: str) -> None:
        """Freeze every network but this one, for a turn."""
        for other, network in self.parallel_networks().items():
            network.requires_grad_(other == name)

    def turn(
        self,
        name: str,
        batch: Batch,
        loss: Callable[[Batch], tuple[Tensor, dict[str, Tensor]]],
        twice: bool = False,
    ) -> dict[str, Tensor]:
        """Train network `name` on a batch, micro-batch by micro-batch, with one step at the end.

        `loss(micro_batch)` gives the loss and what to log; `twice` where it holds gradients of the network itself.
        Returns the logged values, averaged over the micro-batches, with the gradient's norm. Where the engine can,
        gradients are communicated on the last micro-batch only. Engines average over processes, so what a process finds
        is weighted by its share of the batch, where shares differ.
        """
        self.only(name)
        network, engine = self.parallel_networks()[name], engine_of(self.trainer)
        assert [n for n, net in self.parallel_networks().items() if any(p.requires_grad for p in net.parameters())] == [
            name
        ], "exactly one network trains in a turn"
        optimizer = self.named_optimizers()[name]
        for group in optimizer.param_groups:
            group["lr"] = self.schedule.rate(group["initial_lr"], self.images_seen) * self.lr_scale
        parts = list(self._micro_batches(batch))
        weight = len(batch.images) * engine.share(self.trainer)[1] / self.images_per_batch / len(parts)
        logged: dict[str, Tensor] = {}
        with engine.hold(network, twice):
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                with nullcontext() if last else engine.quiet(network):
                    value, found = loss(part)
                    engine.add_gradients(self, network, value * weight, last)
                for key, value in found.items():
                    logged[key] = logged.get(key, 0) + value.detach() * weight
        logged[f"train/grad_norm_{name}"] = norm = engine.step(network, optimizer, self.clip_norm)
        bad = ~norm.isfinite() & (self.first_bad < 0)
        self.first_bad = torch.where(bad, self.batches_seen, self.first_bad)
        return logged

    def require_finite(self) -> bool:
        """Whether all gradients have been finite; waits for the device, so not for every batch.

        Raises ValueError where one has not been, unless a callback takes the run back.
        """
        if (batch := int(self.first_bad)) < 0:
            return True
        if any(isinstance(c, RollsBack) for c in self.trainer.callbacks):
            return False
        saved = committed(Path(self.trainer.default_root_dir) / "checkpoints")
        good = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        raise ValueError(
            f"the gradient of batch {batch} ({batch * self.images_per_batch / 1000:g} kimg) is not finite; {good}; "
            f"lower a learning rate or set model.clip_norm"
        )

    def summed(self, tensor: Tensor) -> Tensor:
        """The tensor summed over all processes, in place where there are several."""
        return self.trainer.strategy.reduce(tensor, reduce_op="sum")

    def noise(self, batch: Batch) -> Noise:
        """The noise of a batch's samples."""
        return Noise(self.seed, batch.numbers, self.device)

    def report(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Log metrics at this point of the run: to every logger, and for what monitors them."""
        clock = {"progress/kimg": self.images_seen / 1000}
        for logger in self.loggers:  # not by self.log, which would repeat a metric until its next value
            logger.log_metrics({k: float(v) for k, v in (metrics | clock).items()}, step=self.batches_seen)
        self.log_dict(metrics, logger=False, batch_size=1)  # for callbacks that monitor

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        size = self.micro_batch or len(batch.images)
        for start in range(0, len(batch.images), size):
            yield batch.narrow(start, start + size)


def _groups(network: nn.Module) -> list[dict]:
    """The parameters in groups of one kind each, as optimizers need them: spread over processes or not, and apart from
    those that could be spread the ones that are kept whole."""
    whole = {id(p) for p in network.kept_whole()} if isinstance(network, KeptWhole) else set()
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in network.parameters():
        kinds.setdefault((id(parameter) in whole, isinstance(parameter, DTensor)), []).append(parameter)
    return [{"params": kinds[kind]} for kind in sorted(kinds)]
