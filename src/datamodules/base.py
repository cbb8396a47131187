"""Images in memory, in an order that depends on nothing but the seed and the number of images seen."""

import copy
import hashlib
import signal
from collections.abc import Iterator

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from src.engine import engine_of
from src.noise import Noise, order
from src.partition import Partition
from src.protocols import Batch


class Images(Dataset):
    """uint8 images (n, c, h, w) with labels (n,); `padding` black pixels are added on every side when they are read."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, seed: int | None, padding: int = 0):
        self.images, self.labels, self.seed, self.padding = images, labels, seed, padding
        self.clusters: np.ndarray | None = None  # (n,), where they are partitioned
        self.rows: np.ndarray | None = None  # of `images`, where these are a part of them
        self._passes: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, cluster: int) -> "Images":
        """Those of one cluster, as an index into the same memory."""
        part = copy.copy(self)
        part.rows, part._passes = np.flatnonzero(self.clusters == cluster), {}
        part.labels, part.clusters = self.labels[part.rows], self.clusters[part.rows]
        return part

    def __getitem__(self, numbers: range) -> Batch:
        """The batch of these sample numbers, which go on through one pass over the data after the other."""
        rows = np.array([self._row(number) for number in numbers])
        labels = torch.from_numpy(self.labels[rows].astype(np.int64))
        clusters = None if self.clusters is None else torch.from_numpy(self.clusters[rows].astype(np.int64))
        return Batch(self.read(rows), labels, numbers.start, clusters)

    def read(self, rows: np.ndarray | slice) -> Tensor:
        """The images of these rows: uint8 (n, c, h, w), padded."""
        return self._pixels(rows if self.rows is None else self.rows[rows])

    def _pixels(self, rows: np.ndarray | slice) -> Tensor:
        images = torch.from_numpy(np.ascontiguousarray(self.images[rows]))
        return torch.nn.functional.pad(images, (self.padding,) * 4) if self.padding else images

    def _row(self, number: int) -> int:
        passing, place = divmod(number, len(self))
        if self.seed is None:
            return place
        if passing not in self._passes:
            self._passes = {passing: order(self.seed, passing, len(self))} | dict(list(self._passes.items())[:1])
        return int(self._passes[passing][place])


class Shares(Sampler):
    """This process's contiguous share of one global batch after the other, from number `start`; endless by default.

    Shares are multiples of `unit`, which divides the batch; they differ by one where processes are no divisor.
    """

    def __init__(self, start: int, batch: int, rank: int, ranks: int, batches: int | None = None, unit: int = 1):
        self.start, self.batch, self.batches = start, batch, batches
        self.begin, self.end = (unit * (batch // unit * place // ranks) for place in (rank, rank + 1))

    def __iter__(self) -> Iterator[range]:
        number = 0
        while self.batches is None or number < self.batches:
            first = self.start + number * self.batch
            yield range(first + self.begin, first + self.end)
            number += 1


class Evaluated(Shares):
    """As many equal batches on every process as cover `count` images."""

    def __init__(self, count: int, batch: int, rank: int, ranks: int):
        super().__init__(0, batch * ranks, rank, ranks, -(-count // (batch * ranks)))

    def __len__(self) -> int:
        return self.batches


class ImageData(LightningDataModule):
    """Training and held-out images of one kind of source, which says in `load` where they come from.

    Args:
        channels, resolution, classes: of the images as the networks see them (classes = 0: no labels).
        batch: images per step over all processes.
        seed: of the order and the flips.
        padding: pixels of black added on every side of the stored images.
        flip: mirror each training image left to right with probability 1/2.
        val_batch: images per process when samples are drawn and scored.
        workers: loader processes; any number gives the same images.
        partition: store of a partition (a folder, or a URL of fsspec's) that knows these images; batches then tell the
            cluster of each.
        cluster: the only one whose images are trained on and held out; None for all.
        share_unit: processes that cannot share a batch equally have shares that are multiples of it, and gradients are
            weighted accordingly; None where such numbers of processes are refused.
    """

    normalisation = "uint8 / 127.5 - 1"  # from stored images to those that networks see

    def __init__(
        self,
        channels: int,
        resolution: int,
        classes: int,
        batch: int,
        seed: int,
        padding: int = 0,
        flip: bool = False,
        val_batch: int = 100,
        workers: int = 0,
        partition: str | None = None,
        cluster: int | None = None,
        share_unit: int | None = None,
    ):
        super().__init__()
        if cluster is not None and partition is None:
            raise ValueError(f"data.cluster={cluster} is of no partition; set data.partition to the store of one")
        if share_unit is not None and (share_unit < 1 or batch % share_unit):
            raise ValueError(f"data.share_unit={share_unit} does not divide batch={batch}; choose a divisor, or null")
        self.channels, self.resolution, self.classes, self.padding = channels, resolution, classes, padding
        self.batch, self.seed, self.flip, self.val_batch, self.workers = batch, seed, flip, val_batch, workers
        self.partition, self.cluster, self.share_unit = partition, cluster, share_unit
        self.position = 0  # sample number of the next training image
        self.train: Images | None = None
        self.base: str | None = None  # of the partition's lineage

    def load(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Training and held-out (images uint8 (n, c, h, w), labels (n,)); ValueError names what cannot be read."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        if self.train is not None:
            return
        train, held_out = self.load()
        self.train = Images(*train, self.seed, self.padding)
        self.held_out = Images(*held_out, None, self.padding)
        for images in (self.train, self.held_out):
            self._check(images)
            self._check_labels(images)
        sample = self.train.images[:: 1 + (self.train.images.nbytes >> 30)]  # all of them below a gigabyte
        facts = f"{self.train.images.shape} {self.padding} {hashlib.sha256(np.ascontiguousarray(sample)).hexdigest()}"
        self.identity = hashlib.sha256(facts.encode()).hexdigest()[:12]
        self._divide()

    def clustered(self) -> tuple[str, Images, Images]:
        """The images that a partition is made of: their identity, those to train on and those held out."""
        return self.identity, self.train, self.held_out

    def _divide(self) -> None:
        """Take in the clusters, and leave those images alone that are of `cluster`, where these are asked for."""
        self.all_held_out = self.held_out
        if self.partition is None:
            return
        known = Partition.load(self.partition)
        self.base = known.base
        self.train.clusters, self.held_out.clusters = known.of(*self.clustered())
        if self.cluster is None:
            return
        known.check_cluster(self.cluster, self.identity)
        self.train, self.held_out = self.train.only(self.cluster), self.held_out.only(self.cluster)
        self.identity = hashlib.sha256(f"{self.identity} {known.base} {self.cluster}".encode()).hexdigest()[:12]

    def check_split(self, ranks: int, micro_batch: int | None = None) -> None:
        """Raise ValueError where `ranks` processes cannot share the batch, or micro-batches a share, equally."""
        if self.batch % ranks:
            if self.share_unit is None:
                raise ValueError(
                    f"batch={self.batch} does not divide among {ranks} processes; choose a multiple of {ranks}, or "
                    f"data.share_unit=1 for shares that differ"
                )
            if self.batch // self.share_unit < ranks or micro_batch:
                raise ValueError(
                    f"{ranks} processes cannot share batch={self.batch} in parts of data.share_unit={self.share_unit}"
                    + (
                        f" and micro_batch={micro_batch}; set that to null"
                        if micro_batch
                        else "; start fewer processes"
                    )
                )
            return
        share = self.batch // ranks
        if micro_batch and share % micro_batch:
            raise ValueError(
                f"micro_batch={micro_batch} does not divide the {share} images that each process has of batch="
                f"{self.batch}; choose a divisor of {share}"
            )

    def train_dataloader(self) -> DataLoader:
        rank, ranks = engine_of(self.trainer).share(self.trainer)
        self.check_split(ranks)
        return self._loader(self.train, Shares(self.position, self.batch, rank, ranks, unit=self._unit(ranks)))

    def _unit(self, ranks: int) -> int:
        return self.share_unit if self.share_unit and self.batch % ranks else 1

    def val_dataloader(self) -> DataLoader:
        rank, ranks = engine_of(self.trainer).share(self.trainer)
        return self._loader(self.held_out, Evaluated(len(self.held_out), self.val_batch, rank, ranks))

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        images = self.as_seen(batch.images)
        if self.flip and self.trainer.training:
            mirrored = Noise(self.seed, batch.numbers, images.device).uniform("flip", 1, 1, 1) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
        return batch._replace(images=images)

    def as_seen(self, images: Tensor) -> Tensor:
        """Stored images as the networks see them: uint8 to [-1, 1]."""
        return images.float() / 127.5 - 1

    def reference(self, count: int, rank: int, ranks: int) -> Iterator[Tensor]:
        """This rank's part of the first `count` training images: uint8 (n, c, h, w)."""
        count = min(count, len(self.train))
        mine = range(count * rank // ranks, count * (rank + 1) // ranks)
        for start in range(mine.start, mine.stop, self.val_batch):
            yield self.train.read(slice(start, min(start + self.val_batch, mine.stop)))

    def _loader(self, images: Images, shares: Shares) -> DataLoader:
        return DataLoader(
            images,
            sampler=shares,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.workers,
            worker_init_fn=_heedless,
            generator=torch.Generator(),  # its seed for workers would come from the global one
            pin_memory=torch.cuda.is_available(),
        )

    def _check_labels(self, images: Images) -> None:
        if self.classes and (found := int(images.labels.max()) + 1) > self.classes:
            raise ValueError(
                f"the images have {found} classes, but data.classes={self.classes}; set data.classes={found}"
            )

    def _check(self, images: Images) -> None:
        if len(images) == 0:
            raise ValueError("the data set is empty, or data.held_out leaves no images to train on")
        shape = (self.channels, self.resolution - 2 * self.padding, self.resolution - 2 * self.padding)
        if images.images.shape[1:] != shape:
            c, h, w = images.images.shape[1:]
            raise ValueError(
                f"the images are {c} x {h} x {w}, but data.channels={self.channels}, data.resolution={self.resolution} "
                f"and data.padding={self.padding} ask for {shape[0]} x {shape[1]} x {shape[2]}"
            )


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _heedless(worker: int) -> None:
    """A loader process does not end with a warning that went to all processes, as SLURM's and a terminal's do: the
    trainer needs it until it has saved. What the trainer no longer needs and is stuck goes ten minutes later."""
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(600))
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
