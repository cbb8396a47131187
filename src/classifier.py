"""A small classifier of grey images, trained in a minute and cached: it tells the modes of stacked images."""

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from src.files import replacing
from src.noise import order


class Classifier(nn.Module):
    """uint8 images (n, 1, h, w), h and w multiples of 4 -> logits (n, classes)."""

    def __init__(self, resolution: int, classes: int):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(4 * resolution**2, 128), nn.ReLU(), nn.Linear(128, classes)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.float() / 127.5 - 1)


def trained_classifier(images: Tensor, labels: Tensor, cache: Path, passes: int = 6, seed: int = 0) -> Classifier:
    """A classifier of images uint8 (n, 1, h, w) with labels (n,), from the cache or trained into it."""
    facts = f"{tuple(images.shape)} {passes} {seed} {labels.tolist()} "
    facts += hashlib.sha256(images[::50].numpy().tobytes()).hexdigest()
    path = cache / f"classifier-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Classifier(images.shape[2], int(labels.max()) + 1)
    if path.exists():
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return network.eval().requires_grad_(False)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    rows = torch.cat([order(seed, passing, len(images)) for passing in range(passes)])
    with torch.enable_grad():
        for row in track(rows.split(64), "Training the classifier of modes"):
            optimizer.zero_grad()
            F.cross_entropy(network(images[row]), labels[row]).backward()
            optimizer.step()
    with replacing(path, shared=True) as part:
        torch.save(network.state_dict(), part)
    return network.eval().requires_grad_(False)


@torch.no_grad()
def stacked_modes(network: Classifier, images: Tensor, classes: int = 10) -> Tensor:
    """Mode of each stacked image uint8 (n, 3, h, w): the number that the classes of its channels spell, int64 (n,)."""
    digits = network(images.flatten(0, 1)[:, None]).argmax(1).view(-1, 3)  # (n, 3)
    return (digits * digits.new_tensor([classes**2, classes, 1])).sum(1)


def mode_statistics(counts: Tensor) -> tuple[int, float]:
    """Modes found, and KL(generated || uniform) in nats, of the counts of every mode (modes,)."""
    shares = counts.double() / counts.sum()
    found = shares[shares > 0]
    return len(found), float((found * (found * len(counts)).log()).sum())
