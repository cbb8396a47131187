"""The latents of another data set's images, encoded once."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from src.datamodules.base import ImageData, Images
from src.files import replacing
from src.latents import Autoencoder


class Latents(ImageData):
    """What `autoencoder` makes of the images of `source`, float32, kept in the folder `cache`.

    Distances and scores compare decoded samples with the images of `source`, not with what their latents decode to; a
    partition is one of these images too. Raises ValueError for mirrored images, since their latents are not mirrored
    latents, and for sizes that do not fit.
    """

    def __init__(self, source: ImageData, autoencoder: Autoencoder, cache: str, **shared):
        super().__init__(**shared)
        self.source, self.autoencoder, self.cache = source, autoencoder, Path(cache)
        if self.flip or source.flip:
            raise ValueError("latents of mirrored images are not mirrored latents; set data.flip=false")

    @property
    def normalisation(self) -> str:
        """From stored to noised images."""
        return f"{self.source.normalisation}, encoded"

    @property
    def vae(self) -> dict[str, str | float]:
        """For the contract."""
        return {"id": self.autoencoder.identity, "factor": self.autoencoder.factor}

    def prepare_data(self) -> None:
        """Encode into the cache, where it is not there yet; runs on one process of a machine."""
        self.source.prepare_data()
        self.source.setup()
        expected = (self.autoencoder.network.config.latent_channels, self.source.resolution // self.autoencoder.shrinks)
        if expected != (self.channels, self.resolution) or self.autoencoder.network.config.in_channels != 3:
            raise ValueError(
                f"the latents of images of {self.source.resolution} pixels are {expected[0]} x {expected[1]} x "
                f"{expected[1]}; set data.channels={expected[0]} and data.resolution={expected[1]}"
            )
        if self.source.channels != 3:
            raise ValueError(f"autoencoders take colour images, not {self.source.channels} channels; choose other data")
        for name, images in self._sources().items():
            if not (path := self._file(name)).exists():
                with replacing(path, shared=True) as part, open(part, "wb") as out:
                    np.save(out, np.concatenate(list(self._encoded(images, f"Encoding the {name} images"))))

    def load(self):
        self.source.setup()
        return tuple(
            (np.load(self._file(name), mmap_mode="c"), images.labels) for name, images in self._sources().items()
        )

    def as_seen(self, images: Tensor) -> Tensor:
        return images.float()

    def reference(self, count: int, rank: int, ranks: int) -> Iterator[Tensor]:
        return self.source.reference(count, rank, ranks)

    def clustered(self) -> tuple[str, Images, Images]:
        return self.source.identity, self.source.train, self.source.held_out

    def _sources(self) -> dict[str, Images]:
        return {"training": self.source.train, "held-out": self.source.held_out}

    def _file(self, name: str) -> Path:
        facts = f"{self.source.identity} {name} {len(self._sources()[name])} {self.vae}"
        return self.cache / f"latents-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.npy"

    def _encoded(self, images: Images, told: str) -> Iterator[np.ndarray]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for start in track(range(0, len(images), 16), told):
            part = images.read(slice(start, start + 16)).to(device)
            yield self.autoencoder.encode(self.source.as_seen(part)).cpu().numpy()
