"""Discrete Distribution Networks (Yang, ICLR 2025): training with Split-and-Prune, codes, samples of random codes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from src.discrete import copy_row, decide, split_tally
from src.engine import engine_of
from src.images import grid
from src.modules.base import Module
from src.modules.networks.ddn_decoder import DDNDecoder
from src.noise import Noise
from src.protocols import Batch, KeepsWeights


class DDN(Module):
    """Trains a decoder whose layers each choose one of K candidates; the choices are an image's code.

    Args:
        decoder: the network.
        optimizer: from parameters to an optimizer.
        halflife_kimg: after how many images a choice counts half in Split-and-Prune; None: never, as in the paper.
        min_evidence: choices per leaf that a layer must have seen before its first split.
        diversity_noise: in every `diversity_every`th batch, the probability, per sample and layer, that training goes
            on with a random leaf, beside chain dropout's; 0 for never.
        seed, micro_batch, schedule, clip_norm: as in Module.
    """

    averaged = ("decoder",)

    def __init__(
        self,
        decoder: DDNDecoder,
        optimizer: Callable[..., Optimizer],
        halflife_kimg: float | None = None,
        min_evidence: float = 16,
        diversity_noise: float = 0.0,
        diversity_every: int = 500,
        **shared,
    ):
        super().__init__(**shared)
        if halflife_kimg is not None and halflife_kimg <= 0:
            raise ValueError(f"model.halflife_kimg is {halflife_kimg}; give thousands of images > 0, or null for never")
        if not 0 <= diversity_noise < 1:
            raise ValueError(f"model.diversity_noise is {diversity_noise}, but must be a probability in [0, 1)")
        if diversity_every < 1:
            raise ValueError(f"model.diversity_every is {diversity_every}, but must be at least 1 batch")
        self.decoder, self.optimizer_makers = decoder, {"decoder": optimizer}
        self.halflife_kimg, self.min_evidence = halflife_kimg, min_evidence
        self.diversity_noise, self.diversity_every = diversity_noise, diversity_every
        leaves = torch.tensor(decoder.leaves)
        self.register_buffer("leaves", leaves, persistent=False)  # (layers,)
        self.register_buffer("tally", torch.zeros(2, len(leaves), max(decoder.leaves), dtype=torch.float64))
        self.held_out: tuple[Tensor, Tensor] | None = None  # images and labels that are reconstructed for a look

    def parallel_networks(self) -> dict[str, nn.Module]:
        return {"decoder": self.decoder}

    def describe(self) -> str:
        """Layers, bits of a code and parameters, for people."""
        return f"{len(self.leaves)} layers, codes of {self.decoder.bits:.0f} bits, {super().describe()}"

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        chosen = torch.zeros_like(self.tally)
        logged = self.turn("decoder", batch, lambda part: self._loss(part, chosen))
        return logged | self._split_and_prune(self.summed(chosen))

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        if batch_idx == 0:
            self.held_out = batch.images[:32], batch.labels[:32]
        return {"real": batch.images, "fake": self.sample(self.noise(batch), batch.labels), "numbers": batch.numbers}

    @torch.no_grad()
    def sample(self, noise: Noise, labels: Tensor | None = None) -> Tensor:
        """Images of codes drawn uniformly: (n, c, h, w); only the drawn leaf of each layer is built."""
        return self.decode(self._random_codes(noise, "codes"), labels)

    def encode(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """The code of each image in [-1, 1]: int64 (n, layers)."""
        with torch.autocast(self.device.type, enabled=False):
            return self.decoder.encode(images, labels)

    def decode(self, codes: Tensor, labels: Tensor | None = None, layers: int | None = None) -> Tensor:
        """The images of codes (n, layers): (n, c, h, w); those of the first `layers` layers are smaller."""
        with torch.autocast(self.device.type, enabled=False):
            return self.decoder.decode(codes, labels, layers)

    def pictures(self) -> dict[str, Tensor]:
        """Held-out images with their reconstructions below them, and the tree of the first levels."""
        images, labels = self.held_out
        rebuilt = self.decode(self.encode(images, labels), labels)
        rows = [half for pair in zip(images.split(16), rebuilt.split(16), strict=True) for half in pair]
        return {"reconstructions": grid(torch.cat(rows), columns=16), "tree": self._tree()}

    def _loss(self, part: Batch, chosen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over the layers of each one's error; adds this micro-batch's choices and losses to `chosen`."""
        noise, layers = self.noise(part), len(self.leaves)
        dropped = noise.uniform("chain_dropout", layers) < self.decoder.chain_dropout
        if self.diversity_noise and (self.batches_seen + 1) % self.diversity_every == 0:
            dropped |= noise.uniform("diversity_noise", layers) < self.diversity_noise
        losses = []
        found = self.decoder(part.images, part.labels, dropped, self._random_codes(noise, "chain_dropout_codes"))
        for number, layer in enumerate(found):
            losses.append(layer.loss)
            if layer.nearest is None:  # another process has seen this layer
                continue
            counts, errors = chosen[0, number], chosen[1, number]
            counts.index_add_(0, layer.nearest, torch.ones_like(layer.nearest, dtype=counts.dtype))
            errors[: layer.distances.shape[1]] += layer.distances.sum(0)
        losses = torch.stack(losses)
        return losses.mean(), {"train/loss": losses.mean(), "train/loss_layer": losses}

    @torch.no_grad()
    def _split_and_prune(self, chosen: Tensor) -> dict[str, Tensor]:
        """One decision per layer, from all processes' choices; weights, optimizer state and averages follow."""
        counts = chosen[0].sum(1)[0]
        if self.halflife_kimg is not None:
            self.tally *= 0.5 ** (counts / (1000 * self.halflife_kimg))
        self.tally += chosen
        source, target = decide(self.tally, self.leaves, self.min_evidence)
        engine, optimizer = engine_of(self.trainer), self.named_optimizers()["decoder"].optimizer
        keepers = [c for c in self.trainer.callbacks if isinstance(c, KeepsWeights)]
        for layer, head in enumerate(self.decoder.heads):
            moments = engine.moments(optimizer, head.weight).values()
            for tensor in (head.weight, *(v for v in moments if torch.is_tensor(v) and v.dim())):
                copy_row(tensor, source[layer], target[layer])
            for keeper in keepers:
                keeper.rows_copied(head.weight, source[layer], target[layer])
        self.tally.copy_(split_tally(self.tally, source, target))
        return self._statistics(chosen) | {"train/splits": (source != target).sum().float()}

    def _statistics(self, chosen: Tensor) -> dict[str, Tensor]:
        """How evenly leaves are used, averaged over the layers; from the tally, so smoothed by its half-life."""
        shares = self.tally[0] / self.tally[0].sum(1, keepdim=True)
        entropy = -(shares * shares.clamp(min=1e-12).log()).sum(1)
        possible = self.leaves.minimum(chosen[0].sum(1))
        return {
            "train/used_leaves": ((shares > 0).sum(1) / self.leaves).mean().float(),
            "train/perplexity": entropy.exp().mean().float(),
            "train/choice_kl": (self.leaves.log() - entropy).mean().float(),
            "train/selection_rate": ((chosen[0] > 0).sum(1) / possible).mean().float(),
        }

    def _random_codes(self, noise: Noise, purpose: str) -> Tensor:
        uniform = noise.uniform(purpose, len(self.leaves))
        return (uniform * self.leaves).long()

    def _tree(self, levels: int = 4, cell: int = 64) -> Tensor:
        """A binary tree of the first stages: siblings differ in the codes of one stage, and the bottom row shows the
        whole images that grow from each branch when all later codes are the same."""
        levels = min(levels, len(self.decoder.stage_ends))
        leaves = torch.arange(2**levels)
        labels = self.held_out[1][:1].expand(len(leaves))  # of one class, where the model has classes
        codes = self._random_codes(Noise(self.seed, torch.zeros_like(leaves), self.device), "tree")
        first, rows = 0, []
        for level, end in enumerate(self.decoder.stage_ends[:levels]):
            nodes = leaves >> (levels - level - 1)  # the branch that each leaf belongs to
            codes[:, first:end] = self._random_codes(Noise(self.seed, nodes, self.device), f"tree/{level}")[
                :, first:end
            ]
            apart = 2 ** (levels - level - 1)
            rows.append(_row(self.decode(codes[::apart], labels[::apart], layers=end), cell, apart))
            first = end
        return torch.cat([*rows, _row(self.decode(codes, labels), cell, 1)], 1)


def _row(images: Tensor, cell: int, columns: int) -> Tensor:
    """Images side by side, each in the middle of as many columns of the picture."""
    large = nn.functional.interpolate(images, size=(cell - 4, cell - 4), mode="nearest")
    side = (columns * cell - (cell - 4)) // 2
    padded = nn.functional.pad(large, (side, columns * cell - (cell - 4) - side, 2, 2), value=1.0)
    return torch.cat(list(padded), 2)
