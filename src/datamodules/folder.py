"""A folder of images, decoded once and kept as one array."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.progress import track

from src.datamodules.base import ImageData
from src.datamodules.embedded import split
from src.files import replacing
from src.image_files import image_files, listing, read_image


class Folder(ImageData):
    """All images below `path`, cropped to a centred square and resized; folders directly below it are the labels.

    Args:
        path: the folder.
        held_out: how many images are never trained on, chosen by the names' digests, so alike on every machine.
        unreadable: "error" ends with the name of a damaged file, "skip" names it and goes on without it.
        cache: folder for the decoded array, so that restarts and other processes need not decode again.
    """

    def __init__(self, path: str | None, held_out: int, cache: str, unreadable: str = "error", **shared):
        super().__init__(**shared)
        if path is None:
            raise ValueError("data.path is not set; name the folder of images with data.path=...")
        if unreadable not in ("error", "skip"):
            raise ValueError(f"data.unreadable={unreadable} is unknown; it may be error or skip")
        self.path, self.count_held_out, self.cache, self.unreadable = Path(path), held_out, Path(cache), unreadable

    def prepare_data(self) -> None:
        """Decode into the cache, where it is not there yet; runs on one process of a machine."""
        files = image_files(self.path)
        array = self._array(files)
        if array.exists():
            return
        images, kept = [], []
        for file, image in zip(files, self._decoded(files), strict=True):
            if image is not None:
                images.append(image)
                kept.append(file)
        if not images:
            raise ValueError(f"none of the {len(files)} images in {self.path} can be read")
        labels = sorted({self._label(file) for file in kept})
        with replacing(array, shared=True) as part, open(part, "wb") as out:
            np.save(out, np.stack(images))
            np.save(out, np.array([labels.index(self._label(file)) for file in kept]))

    def load(self):
        with open(self._array(image_files(self.path)), "rb") as file:
            images, labels = np.load(file), np.load(file)
        return split(images, labels, self.count_held_out)

    def _array(self, files: list[Path]) -> Path:
        facts = f"{listing(files, self.path)}\n{self.channels} {self.resolution} {self.padding} {self.unreadable}"
        return self.cache / f"folder-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.npy"

    def _decoded(self, files: list[Path]) -> Iterator[np.ndarray | None]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield from track(pool.map(self._decode, files), f"Decoding {self.path}", total=len(files))

    def _decode(self, file: Path) -> np.ndarray | None:
        try:
            return read_image(file, self.channels, self.resolution - 2 * self.padding)
        except ValueError as error:
            if self.unreadable == "skip":
                print(f"skipped {error}")
                return None
            raise ValueError(f"{error}; mend or remove it, or set data.unreadable=skip to go on without it") from error

    def _label(self, file: Path) -> str:
        parts = file.relative_to(self.path).parts
        return parts[0] if len(parts) > 1 else ""
