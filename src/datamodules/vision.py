"""Data sets that torchvision reads from a folder."""

from pathlib import Path

import numpy as np

from src.datamodules.base import ImageData

WHERE = {  # what torchvision looks for below its root
    "FashionMNIST": "FashionMNIST/raw/train-images-idx3-ubyte and its three siblings",
    "MNIST": "MNIST/raw/train-images-idx3-ubyte and its three siblings",
    "CIFAR10": "cifar-10-batches-py/ from cifar-10-python.tar.gz",
}


class TorchVision(ImageData):
    """torchvision's data set `name` (FashionMNIST, MNIST or CIFAR10) below `root`; its test split is held out."""

    def __init__(self, name: str, root: str, **shared):
        super().__init__(**shared)
        if name not in WHERE:
            raise ValueError(f"data.name={name} has no reader; there is {', '.join(WHERE)}")
        self.name, self.root = name, root

    def load(self):
        from torchvision import datasets

        halves = []
        for train in (True, False):
            try:
                found = getattr(datasets, self.name)(self.root, train=train, download=False)
            except (RuntimeError, OSError) as error:
                raise ValueError(
                    f"{self.name} is not in {Path(self.root).absolute()}, or not whole: put {WHERE[self.name]} "
                    f"there, or name another folder with paths.data=..."
                ) from error
            images = np.asarray(found.data)
            images = images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))
            halves.append((images, np.asarray(found.targets)))
        return tuple(halves)
