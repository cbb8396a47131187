"""Whether a router's probabilities can be trusted: a temperature for each noise bin, and scores of each."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from src.routing import Calibration

COLDEST, HOTTEST = 0.1, 10.0
CONFIDENCE_BINS = 15
FLOOR = 1e-6  # of a probability in a cross-entropy: where smoothing is taken out, it may be 0


def calibrated(logits: Tensor, clusters: Tensor, smoothing: float) -> Calibration:
    """The temperature of each bin at which held-out images are most likely: logits (n, bins, k), clusters (n,).

    Cross-entropy to the smoothed targets that the router was trained with is convex in 1 / T, so that bisection finds
    the T where its derivative is 0 (Guo et al. 2017, arXiv 1706.04599).
    """
    logits, targets = logits.double(), smoothed(clusters, logits.shape[2], smoothing)
    wanted = (targets[:, None] * logits).sum(2).mean(0)  # (bins,)
    low, high = (torch.full_like(wanted, 1 / t).log() for t in (HOTTEST, COLDEST))
    for _ in range(50):
        middle = (low + high) / 2
        p = (logits * middle.exp()[None, :, None]).softmax(2)
        colder = (p * logits).sum(2).mean(0) < wanted
        low, high = torch.where(colder, middle, low), torch.where(colder, high, middle)
    return Calibration(tuple((-middle).exp().tolist()), smoothing)


def smoothed(clusters: Tensor, count: int, smoothing: float) -> Tensor:
    """Targets (n, count) of which a share is spread over all clusters."""
    return F.one_hot(clusters, count).double() * (1 - smoothing) + smoothing / count


def scores(logits: Tensor, t: Tensor, clusters: Tensor, calibration: Calibration) -> list[dict[str, float]]:
    """Accuracy, cross-entropy in nats, and expected calibration error of each bin; logits (n, bins, k), t (n, bins)."""
    found = []
    for number in range(logits.shape[1]):
        p = calibration.log_probabilities(logits[:, number].double(), t[:, number]).exp()
        found.append(
            {
                "accuracy": (p.argmax(1) == clusters).double().mean().item(),
                "cross_entropy": F.nll_loss(p.clamp(min=FLOOR).log(), clusters).item(),
                "calibration_error": calibration_error(p, clusters),
            }
        )
    return found


def calibration_error(p: Tensor, clusters: Tensor) -> float:
    """The mean distance between how probable the first choice is said to be and how often it is right, in 15 bins."""
    confidence, choice = p.max(1)
    bins = (confidence * CONFIDENCE_BINS).long().clamp(max=CONFIDENCE_BINS - 1)
    excess = torch.zeros(CONFIDENCE_BINS, dtype=p.dtype, device=p.device)
    excess.index_add_(0, bins, confidence - (choice == clusters).to(p.dtype))
    return excess.abs().sum().item() / len(p)


def prior_scores(counts: list[int], clusters: Tensor) -> dict[str, float]:
    """What a router scores that says the clusters' shares of the training images, whatever it is shown."""
    p = torch.tensor(counts, dtype=torch.float64, device=clusters.device)
    p = (p / p.sum()).expand(len(clusters), -1)
    return {
        "accuracy": (p.argmax(1) == clusters).double().mean().item(),
        "cross_entropy": F.nll_loss(p.clamp(min=FLOOR).log(), clusters).item(),
    }


def draw(path, found: dict[str, Any]) -> None:
    """Accuracy, cross-entropy, calibration error and temperature over t, as fitted and (dashed) as trained."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 3.4), layout="constrained")
    middle = [(n + 0.5) / len(found["fitted"]) for n in range(len(found["fitted"]))]
    axes = figure.subplots(1, 4)
    for axis, key in zip(axes, ("accuracy", "cross_entropy", "calibration_error"), strict=False):
        axis.plot(middle, [score[key] for score in found["fitted"]], "o-", label="with its temperature")
        axis.plot(middle, [score[key] for score in found["trained"]], "--", color="C1", label="as trained")
        if key in found["prior"]:
            axis.axhline(found["prior"][key], color="grey", linestyle=":", label="clusters' shares alone")
        axis.set(title=key.replace("_", " "), xlabel="t (0: image, 1: noise)", ylim=(0, None))
        axis.legend()
    axes[3].plot(middle, found["temperatures"], "o-")
    axes[3].axhline(1, color="grey", linestyle=":")
    axes[3].set(title="temperature", xlabel="t", yscale="log")
    figure.savefig(path, format="png", dpi=110)
