"""Image sets that are shipped inside the project, with their licences beside them (src/data/)."""

from pathlib import Path

import numpy as np

from src.datamodules.base import ImageData

FOLDER = Path(__file__).parent.parent / "data"


class Embedded(ImageData):
    """The set `name` of src/data/; its last `held_out` images are never trained on."""

    def __init__(self, name: str, held_out: int, **shared):
        super().__init__(**shared)
        self.name, self.count_held_out = name, held_out

    def load(self):
        with np.load(FOLDER / f"{self.name}.npz") as file:
            images, labels = file["images"], file["labels"]
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        return split(images, labels, self.count_held_out)


def split(images: np.ndarray, labels: np.ndarray, held_out: int):
    """The last `held_out` images apart. Raises ValueError where nothing would be left on either side."""
    if not 0 < held_out < len(images):
        raise ValueError(f"data.held_out={held_out} must lie between 1 and {len(images) - 1}, for {len(images)} images")
    return (images[:-held_out], labels[:-held_out]), (images[-held_out:], labels[-held_out:])
