"""What models, callbacks, data and strategies promise one another."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from src.noise import Noise

if TYPE_CHECKING:
    from torchmetrics import Metric


class Batch(NamedTuple):
    """This process's share of one global batch, or a micro-batch of it: contiguous sample numbers from `first`."""

    images: Tensor  # (n, c, h, w): uint8 from the loader, float in [-1, 1] once on the device
    labels: Tensor  # (n,) int64
    first: int  # sample number of the first image; a Python number, so that noise needs nothing from the device
    clusters: Tensor | None = None  # (n,) int64, where the data is partitioned

    @property
    def numbers(self) -> Tensor:
        """Sample numbers, int64 (n,), on the CPU."""
        return torch.arange(self.first, self.first + len(self.images))

    def narrow(self, start: int, stop: int) -> "Batch":
        """The samples start..stop of these."""
        clusters = None if self.clusters is None else self.clusters[start:stop]
        return Batch(self.images[start:stop], self.labels[start:stop], self.first + start, clusters)


@runtime_checkable
class Generative(Protocol):
    """A model that makes images; its validation_step returns {"real", "fake": (n, c, h, w) in [-1, 1], "numbers"}."""

    averaged: tuple[str, ...]  # networks worth averaging

    def sample(self, noise: Noise, labels: Tensor | None = None) -> Tensor:
        """One image (c, h, w) in [-1, 1] per sample of `noise`."""


@runtime_checkable
class Pictures(Protocol):
    """A model with more to show than samples."""

    def pictures(self) -> Mapping[str, Tensor]:
        """Name -> picture (c, h, w) in [-1, 1]; called on every rank, during validation."""


@runtime_checkable
class Reports(Protocol):
    """A model with something to tell once it has drawn images."""

    def account(self) -> str:
        """For people, in a line or a few."""


@runtime_checkable
class Parallel(Protocol):
    """What a strategy needs of a module; modules never see wrappers."""

    def parallel_networks(self) -> Mapping[str, nn.Module]:
        """The networks in the order of their optimizers."""

    def only(self, name: str) -> None:
        """Freeze every network but this one, for a turn."""


@runtime_checkable
class ShardUnits(Protocol):
    """A network that can be sharded, checkpointed or put on pipeline stages block by block."""

    forward_methods: tuple[str, ...]  # besides forward

    def shard_units(self) -> list[nn.Module]:
        """The blocks in order."""


@runtime_checkable
class Layered(Protocol):
    """A network whose layers can run on several processes, each a range of them; forward(images, labels, ...) runs
    them all and gives a named tuple for each: its `loss`, and tensors with an entry per image, None where unknown."""

    def layers(self) -> list[list[nn.Module]]:
        """The modules of each layer; together they have all parameters."""

    def begin(self, batch: int) -> tuple[Tensor, ...]:
        """What the first layer is handed, for so many images; every layer hands on as much."""

    def run(
        self, layers: range, carried: tuple[Tensor, ...], images: Tensor, *inputs: Tensor
    ) -> tuple[tuple[Tensor, ...], list]:
        """Some consecutive layers: what they hand on, and their entries."""


@runtime_checkable
class TensorSplit(Protocol):
    """A network of whose layers several processes can each compute a share."""

    def tensor_plan(self, parts: int) -> Mapping[str, str]:
        """Name of a linear layer -> its split: "columns" (each process has a share of the outputs), "qkv" (the same
        share of queries, keys and values), or "rows" (a share of the inputs; outputs are summed).

        Raises ValueError where `parts` equal shares are impossible.
        """


@runtime_checkable
class KeptWhole(Protocol):
    """A network of which some parameters are never spread over processes, since their rows are copied."""

    def kept_whole(self) -> list[nn.Parameter]:
        """These parameters."""


@runtime_checkable
class CriticPenalty(Protocol):
    """A callback that adds a loss term in a critic's turn; it is handed the critic as a function."""

    due: bool  # in the batch at hand

    def critic_penalty(self, critic: Callable[[Tensor], Tensor], real: Tensor) -> Tensor | None:
        """The term for this micro-batch of real images, or None where none is due."""


@runtime_checkable
class KeepsWeights(Protocol):
    """A callback that keeps copies of weights, and so has to follow when rows of a parameter are copied."""

    def rows_copied(self, parameter: nn.Parameter, source: Tensor, target: Tensor) -> None:
        """parameter[target] = parameter[source] has happened; 0-d indices on the device, equal where nothing was."""


@runtime_checkable
class RollsBack(Protocol):
    """A callback that takes a run back to a good checkpoint.

    What owns the checkpoints asks it after all other callbacks, on all processes. It hands it go_back(trainer, module,
    until, lr_factor, states), which restores the newest checkpoint that verifies, of those up to `until` images, with
    new data, learning rates times `lr_factor`, and these states of callbacks, by class name; it becomes the newest, and
    its folder is returned, or None where there is no such checkpoint.
    """

    def after_batch(self, trainer, module, go_back: Callable[..., Path | None]) -> bool:
        """Whether the run went back, at a batch's end."""

    def after_validation(self, trainer, module, best: dict | None, go_back: Callable[..., Path | None]) -> bool:
        """Whether the run went back, at a validation's end; `best` is what the first process knows of the best."""


@runtime_checkable
class Described(Protocol):
    """A module whose network's card, in a store, says more than the configuration does."""

    def card(self) -> Mapping:
        """Entries of the card that JSON can hold."""


@runtime_checkable
class MeasuresErrors(Protocol):
    """A module whose predictions are scored image by image."""

    def error(self, batch: Batch) -> Tensor:
        """One error for each image, (n,), with noise that depends on sample numbers alone."""


@runtime_checkable
class StartsFrom(Protocol):
    """A module that can begin with weights of a store."""

    def start_from(self, start: str) -> bool:
        """Take the weights that `start` names, such as STORE/experts/3; False where it names something else."""


@runtime_checkable
class KnowsRun(Protocol):
    """A callback or logger that keeps what the run is."""

    def about_run(self, config: dict, stamp: dict[str, str]) -> None:
        """The configuration as a plain dict, and files that say which code runs: name -> text."""


@runtime_checkable
class Rewinds(Protocol):
    """A logger whose records are cut back when a run continues from a checkpoint."""

    def rewind(self, batch: int) -> None:
        """Forget everything logged after this batch number."""


@runtime_checkable
class References(Protocol):
    """Data that real statistics can be made of."""

    identity: str  # of the images: names the cached statistics

    def reference(self, count: int, rank: int, ranks: int) -> Iterator[Tensor]:
        """This rank's part of the first `count` training images: uint8 (n, c, h, w)."""


@runtime_checkable
class KnownModes(Protocol):
    """Data whose modes are known, so that those which a model misses can be counted."""

    def modes(self, cache: Path) -> "Metric":
        """Its metric: update(fake, real), compute() -> name -> value, and a `picture` (c, h, w) or None after that."""
