"""The router: which cluster's expert a noisy image belongs to, learned by cross-entropy (arXiv 2501.05450)."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from src.flow import TIME_SCALE, path
from src.images import at_least_float32
from src.modules.base import Module
from src.noise import Noise
from src.protocols import Batch
from src.routing import Calibration

OPENS_AT = 0.3  # a curriculum begins with times up to here


class Router(Module):
    """Learns p(cluster | x_t, t, label), whose minimiser of cross-entropy at every t is what mixes experts exactly.

    Needs images and their clusters only, so that it trains beside the experts. Batches are uniform over the data.

    Args:
        network: (noisy images, their times, labels, dropout) -> logits.
        optimizer: from parameters to an optimizer.
        label_dropout: share of training samples whose label becomes the null class, where the network has classes.
        smoothing: share of each target that is spread over all clusters; it is taken out again when samples are drawn.
        dropout: share of what the head reads that is left out in training.
        curriculum_kimg: over so many thousand images the times grow from [0, 0.3] to [0, 1]; 0 for all of them always.
        new: of an added expert, its cluster: the network then has two outputs and tells it from all earlier ones.
        bins: of t, each with a temperature of its own.
        seed, micro_batch, schedule, clip_norm: as in Module.
    """

    averaged = ("network",)

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[..., Optimizer],
        label_dropout: float = 0.0,
        smoothing: float = 0.0,
        dropout: float = 0.0,
        curriculum_kimg: float = 0.0,
        new: int | None = None,
        bins: int = 10,
        **shared,
    ):
        super().__init__(**shared)
        shares = {"label_dropout": label_dropout, "smoothing": smoothing, "dropout": dropout}
        for name, share in shares.items():
            if not 0 <= share < 1:
                raise ValueError(f"model.{name} is {share}; give a share, from 0 to below 1")
        if new is not None and network.clusters != 2:
            raise ValueError(f"model.new={new} tells one cluster from the others; set model.network.clusters=2")
        if bins < 1:
            raise ValueError(f"model.bins is {bins}; set it to 1 or more")
        self.network, self.optimizer_makers = network, {"network": optimizer}
        self.label_dropout, self.smoothing, self.dropout = label_dropout, smoothing, dropout
        self.curriculum_kimg, self.new, self.bins = curriculum_kimg, new, bins
        self.calibration = Calibration((1.0,) * bins, smoothing)

    def setup(self, stage: str | None = None) -> None:
        self.counts = self._counts()

    def parallel_networks(self) -> dict[str, nn.Module]:
        return {"network": self.network}

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        return self.turn("network", batch, self._loss)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Logits (n, bins, k) of each image at a time in every bin, with these times, and its cluster."""
        noise, logits = self.noise(batch), []
        t = (noise.uniform("val/t", self.bins) + torch.arange(self.bins, device=self.device)) / self.bins
        for number in range(self.bins):
            x_1 = noise.normal(f"val/x/{number}", *batch.images.shape[1:])
            labels = batch.labels if self.network.classes else None
            shown = path(batch.images, x_1, t[:, number])
            logits.append(at_least_float32(self.network(shown, TIME_SCALE * t[:, number], labels)))
        found = {"logits": torch.stack(logits, 1), "t": t, "clusters": self._targets(batch)}
        return found | {"numbers": batch.numbers}

    def card(self) -> dict:
        """What an ensemble has to know besides the network (Described)."""
        temperatures, smoothing = self.calibration.temperatures, self.calibration.smoothing
        calibration = {"temperatures": [float(t) for t in temperatures], "smoothing": smoothing}
        return {"k": self.new, "counts": self.counts, "calibration": calibration}

    def _loss(self, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        noise = self.noise(part)
        opened = min(1.0, self.images_seen / (1000 * self.curriculum_kimg)) if self.curriculum_kimg else 1.0
        t = noise.uniform("train/t") * (OPENS_AT + (1 - OPENS_AT) * opened)
        shown = path(part.images, noise.normal("train/x", *part.images.shape[1:]), t)
        logits = self.network(shown, TIME_SCALE * t, self._labels(part.labels, noise), self._kept(noise))
        targets, logits = self._targets(part), at_least_float32(logits)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
        return loss, {"train/loss": loss, "train/accuracy": (logits.argmax(1) == targets).float().mean()}

    def _targets(self, batch: Batch) -> Tensor:
        return batch.clusters if self.new is None else (batch.clusters == self.new).long()

    def _labels(self, labels: Tensor, noise: Noise) -> Tensor | None:
        """Labels of which a share is the null class; None where the network has none."""
        if not self.network.classes:
            return None
        if not self.label_dropout:
            return labels
        return labels.masked_fill(noise.uniform("train/label_dropout") < self.label_dropout, self.network.classes)

    def _kept(self, noise: Noise) -> Tensor | None:
        if not self.dropout:
            return None
        return (noise.uniform("train/dropout", self.network.width) >= self.dropout) / (1 - self.dropout)

    def _counts(self) -> list[int]:
        """Images of each cluster, or of the old ones and the new one. Raises ValueError for data that does not fit."""
        clusters, known = self.trainer.datamodule.train.clusters, self.network.clusters
        if clusters is None:
            raise ValueError("a router learns the clusters of a partition; set data.partition to the store of one")
        if self.new is not None:
            clusters = (clusters == self.new).astype(np.int64)
        counts = np.bincount(clusters, minlength=known).tolist()
        if len(counts) != known:
            raise ValueError(f"the partition has {len(counts)} clusters; set model.network.clusters={len(counts)}")
        if 0 in counts:
            raise ValueError(
                f"no image is of cluster {counts.index(0)} of {known}: set model.network.clusters to their number in "
                "these images, or add those of the others"
            )
        return counts
