"""What images are clustered by: a few principal components of their pixels, or of a network's features."""

import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors import SafetensorError
from torch import Tensor

from src.extractors import EffNetLite0

COMPONENTS, FITTED_ON, BATCH = 64, 20_000, 100
LARGEST = 32  # pixels on a side that are compared; larger images are averaged down
DINO_SIZE, DINO_MEAN, DINO_STD = 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Read = Callable[[slice], Tensor]  # rows -> images (n, c, h, w), uint8


class Features:
    """Images -> (n, d) float32, d <= 64: principal components, fitted once and then kept with a partition.

    Args:
        kind: pixels, efflite0 (the offline extractor), dino (DINOv2 through transformers), or chance, to compare with.
        dino: folder of DINOv2 as transformers saves it; nothing is downloaded.
        mean, components: (D,) and (d, D), once fitted.
    """

    def __init__(
        self, kind: str, dino: str | None = None, mean: np.ndarray | None = None, components: np.ndarray | None = None
    ):
        if kind not in KINDS:
            raise ValueError(f"features={kind} does not exist; there is {', '.join(KINDS)}")
        self.kind, self.dino, self.mean, self.components = kind, dino, mean, components

    @cached_property
    def _raw(self) -> Callable[[Tensor], Tensor]:
        return KINDS[self.kind](self.dino)

    @cached_property
    def id(self) -> str:
        """The kind, and for weights from a file their hash."""
        return f"dino-{_digest(self.dino)}" if self.kind == "dino" else self.kind

    @property
    def here(self) -> bool:
        """Whether they can be computed on this machine."""
        return self.kind != "dino" or Path(self.dino).is_dir()

    def fit(self, read: Read, count: int) -> "Features":
        """Find the components of up to 20,000 images, spread evenly over the `count` that `read` gives."""
        from sklearn.decomposition import PCA

        step = -(-count // FITTED_ON)
        raw = np.concatenate(list(self._batches(lambda rows: read(slice(rows.start, rows.stop, step)), count, step)))
        found = PCA(min(COMPONENTS, *raw.shape), random_state=0).fit(raw)
        self.mean, self.components = found.mean_.astype(np.float32), found.components_.astype(np.float32)
        return self

    def __call__(self, read: Read, count: int) -> np.ndarray:
        """The features of `count` images, batch by batch."""
        found = []
        for raw in self._batches(read, count):
            if raw.shape[1] != len(self.mean):
                raise ValueError(
                    f"these images give {raw.shape[1]} numbers to compare them by, those of the partition "
                    f"{len(self.mean)}: they have another resolution or other channels; make another partition"
                )
            found.append((raw - self.mean) @ self.components.T)
        return np.concatenate(found) if found else np.empty((0, len(self.components)), np.float32)

    @torch.no_grad()
    def _batches(self, read: Read, count: int, step: int = 1) -> Iterator[np.ndarray]:
        starts = range(0, count, BATCH * step)
        for start in track(starts, f"Features ({self.kind})", disable=len(starts) < 10):
            yield self._raw(read(slice(start, min(start + BATCH * step, count)))).float().cpu().numpy()


def pixels(dino: str | None) -> Callable[[Tensor], Tensor]:
    """Pixels themselves, in [-1, 1] where they are bytes."""

    def raw(images: Tensor) -> Tensor:
        images = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images
        if max(images.shape[2:]) > LARGEST:
            images = F.adaptive_avg_pool2d(images, LARGEST)
        return images.flatten(1)

    return raw


def efflite0(dino: str | None) -> Callable[[Tensor], Tensor]:
    """EfficientNet-Lite0's pooled features, of length one."""
    network, device = EffNetLite0(), _device()
    network.to(device)
    return lambda images: F.normalize(network(_colour(images, "efflite0").to(device)))


def dinov2(dino: str | None) -> Callable[[Tensor], Tensor]:
    """The mean over DINOv2's patches, of length one."""
    if dino is None or not (Path(dino) / "config.json").is_file():
        raise ValueError(
            f"dino={dino} is no folder of DINOv2 as transformers saves it; name one that has a config.json"
        )
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise ValueError("features=dino needs transformers: pip install -e '.[dino]'") from error
    try:
        network = AutoModel.from_pretrained(dino, local_files_only=True).eval().requires_grad_(False).to(_device())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"dino={dino} cannot be loaded ({str(error).splitlines()[0]})") from error
    size = DINO_SIZE // network.config.patch_size * network.config.patch_size
    first = 1 + getattr(network.config, "num_register_tokens", 0)  # patches come after the class token and registers
    mean, std = (torch.tensor(values, device=network.device)[:, None, None] for values in (DINO_MEAN, DINO_STD))

    def raw(images: Tensor) -> Tensor:
        x = _colour(images, "dino").to(network.device).float() / 255
        x = F.interpolate(x, size=(size, size), mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)
        return F.normalize(network(pixel_values=(x - mean) / std).last_hidden_state[:, first:].mean(1))

    return raw


def chance(dino: str | None) -> Callable[[Tensor], Tensor]:
    """Two numbers in [0, 1) that say nothing of an image but which one it is."""

    def raw(images: Tensor) -> Tensor:
        digests = b"".join(hashlib.blake2b(image.cpu().numpy().tobytes(), digest_size=8).digest() for image in images)
        return torch.from_numpy(np.frombuffer(digests, np.uint32).reshape(-1, 2) / 2**32)

    return raw


KINDS = {"pixels": pixels, "efflite0": efflite0, "dino": dinov2, "chance": chance}


def _colour(images: Tensor, kind: str) -> Tensor:
    if images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
        raise ValueError(f"features={kind} takes grey or colour images, which these are not; choose features=pixels")
    return images.expand(-1, 3, -1, -1)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _digest(dino: str) -> str:
    """Twelve hexadecimal digits over a saved network, wherever it lies."""
    found, folder = hashlib.sha256(), Path(dino)
    for file in sorted(p for p in folder.iterdir() if p.name == "config.json" or p.suffix in (".safetensors", ".bin")):
        with open(file, "rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:12]
