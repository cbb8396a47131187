"""Which expert each image belongs to: clusters of a data set, kept in a store as files that can be verified.

The first partition's hash is the `base` that everything trained on it refers to: images assigned later, and clusters
added later, are files of their own and leave it as it is.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from torch import Tensor

from src import partition_files as files
from src.clustering import BALANCE, costs, imbalance, nearest, two_stage
from src.features import Features

CHECKED, ROUNDING = 64, 2  # images that are assigned again on load, and how many may differ for rounding's sake


class Readable(Protocol):
    """Images in their own order."""

    def __len__(self) -> int: ...

    def read(self, rows: slice) -> Tensor:
        """uint8 (n, c, h, w) of these rows."""


class Partition:
    """Clusters of one or several data sets.

    `sets` has an entry for each data set, the first being the one that was clustered; `arrays` those of each by the
    set's identity: labels (n,) and held_out (m,), the nearest fine centroid of each training image (n,), and the
    centroids (f, d) and their clusters (f,) that came with the set.
    """

    def __init__(self, card: dict[str, Any], arrays: Mapping[str, dict[str, np.ndarray]], features: Features):
        self.card, self.arrays, self.features = card, dict(arrays), features

    @property
    def base(self) -> str:
        """The hash of the first partition: the lineage."""
        return self.card["base"]

    @property
    def clusters(self) -> int:
        """How many there are, with those added later."""
        return self.card["clusters"]

    @property
    def sizes(self) -> np.ndarray:
        """Training images of each cluster over all data sets: int64 (k,)."""
        return sum(np.bincount(a["labels"], minlength=self.clusters) for a in self.arrays.values())

    def centroids(self, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The fine centroids (f, d) and the cluster of each (f,): all, or the `count` that there were at some time."""
        came = [a for a in self.arrays.values() if "centroids" in a]
        return tuple(np.concatenate([a[key] for a in came])[:count] for key in ("centroids", "coarse"))

    def assign(self, images: Readable) -> np.ndarray:
        """The cluster of the nearest fine centroid: int16 (n,)."""
        centroids, coarse = self.centroids()
        return coarse[nearest(self.features(images.read, len(images)), centroids)]

    def of(self, identity: str, train: Readable, held_out: Readable) -> tuple[np.ndarray, np.ndarray]:
        """The clusters of a data set's training and held-out images, int16 (n,) and (m,).

        Raises ValueError where the partition does not know these images, or assigns some of them otherwise.
        """
        known = next((s for s in self.card["sets"] if s["data"] == identity), None)
        if known is None:
            raise ValueError(
                f"the partition does not know these images ({identity}; it has "
                f"{', '.join(s['data'] for s in self.card['sets'])}): set data to what was partitioned, or assign them "
                "with python prepare.py task=partition later=assign"
            )
        self._check_order(known, train, held_out)
        arrays = self.arrays[identity]
        if self.features.here:
            rows = np.unique(np.linspace(0, len(train) - 1, CHECKED).astype(int))
            centroids, _ = self.centroids(known["centroids"])
            again = nearest(self.features(lambda part: train.read(rows[part]), len(rows)), centroids)
            if (differ := int((again != arrays["fine"][rows]).sum())) > ROUNDING:
                raise ValueError(
                    f"{differ} of {len(rows)} images belong to other clusters than the partition says: the features "
                    f"({self.card['features']}) have changed; make another partition"
                )
        return arrays["labels"], arrays["held_out"]

    def check_cluster(self, cluster: int, identity: str) -> None:
        """Raise ValueError where there is no such cluster, or no image of it in this data set."""
        if not 0 <= cluster < self.clusters:
            raise ValueError(f"data.cluster={cluster} does not exist; the partition has 0 to {self.clusters - 1}")
        for name, what in (("labels", "training"), ("held_out", "held-out")):
            if cluster not in self.arrays[identity][name]:
                raise ValueError(
                    f"cluster {cluster} has no {what} images in this data set: choose another cluster, or partition "
                    "with fewer clusters or more balance"
                )

    def _check_order(self, known: dict, train: Readable, held_out: Readable) -> None:
        if (len(train), len(held_out)) != (known["images"], known["held_out"]) or order(train) != known["order"]:
            raise ValueError(
                f"the partition is of {known['images']} training and {known['held_out']} held-out images in another "
                "order than these: make another partition"
            )

    @classmethod
    def create(
        cls,
        identity: str,
        train: Readable,
        held_out: Readable,
        features: Features,
        clusters: int = 8,
        fine: int = 512,
        balance: str = "none",
        bounds: tuple[float, float] = (0.9, 1.1),
        seed: int = 0,
    ) -> "Partition":
        """Cluster the training images of a data set; sizes are within `bounds` times their mean where balanced.

        Raises ValueError where this is impossible.
        """
        if balance not in BALANCE:
            raise ValueError(f"balance={balance} does not exist; there is {', '.join(BALANCE)}")
        if not 0 <= bounds[0] <= 1 <= bounds[1]:
            raise ValueError(f"bounds={list(bounds)} must be a share of the mean up to 1, and one from 1")
        found = features.fit(train.read, len(train))(train.read, len(train))
        with Console().status(f"Clustering {len(found)} images"):
            centroids, coarse = two_stage(found, fine, clusters, seed)
            near = nearest(found, centroids)
            labels = coarse[near]
            if BALANCE[balance] is not None:
                mean = len(found) / clusters
                low, high = int(np.floor(bounds[0] * mean)), int(np.ceil(bounds[1] * mean))
                labels = BALANCE[balance](costs(found, centroids, coarse, clusters), low, high).astype(np.int16)
        if len(missing := set(range(clusters)) - set(labels.tolist())):
            raise ValueError(f"cluster {min(missing)} would have no images: choose fewer clusters, or balance=capacity")
        arrays = {"labels": labels, "fine": near, "centroids": centroids, "coarse": coarse}
        arrays |= {"mean": features.mean, "components": features.components}
        card = {"schema": files.SCHEMA, "base": "", "clusters": clusters, "features": features.id, "seed": seed}
        card |= {"kind": features.kind, "dino": features.dino, "balance": balance, "bounds": list(bounds), "sets": []}
        made = cls(card, {identity: arrays}, features)
        arrays["held_out"] = made.assign(held_out)
        card["sets"].append(made._described(identity, train, held_out, files.FIRST))
        made.card["base"] = made.card["sets"][0]["sha256"]
        return made

    def extend(self, identity: str, train: Readable, held_out: Readable, new: bool) -> None:
        """Take in another data set: its images go to the nearest centroids, or (`new`) are a cluster of their own.

        Raises ValueError for one that is known already.
        """
        if identity in self.arrays:
            raise ValueError(f"the partition knows these images ({identity}) already")
        arrays: dict[str, np.ndarray] = {}
        found = self.features(train.read, len(train))
        if new:
            fine = max(1, self.card["sets"][0]["centroids"] // self.clusters)
            arrays["centroids"], _ = two_stage(found, fine, 1, self.card["seed"])
            arrays["coarse"] = np.full(len(arrays["centroids"]), self.clusters, np.int16)
            self.card["clusters"] += 1
        self.arrays[identity] = arrays
        centroids, coarse = self.centroids()
        arrays["fine"] = nearest(found, centroids)
        arrays["labels"], arrays["held_out"] = coarse[arrays["fine"]], self.assign(held_out)
        if new:
            arrays["labels"], arrays["held_out"] = (np.full_like(arrays[k], coarse[-1]) for k in ("labels", "held_out"))
        self.card["sets"].append(self._described(identity, train, held_out, f"partition-{identity}.npz"))

    def _described(self, identity: str, train: Readable, held_out: Readable, file: str) -> dict[str, Any]:
        sizes = np.bincount(self.arrays[identity]["labels"], minlength=self.clusters)
        return {
            "data": identity,
            "images": len(train),
            "held_out": len(held_out),
            "order": order(train),
            "sizes": sizes.tolist(),
            "imbalance": imbalance(sizes),
            "centroids": len(self.centroids()[0]),
            "file": file,
            "sha256": hashlib.sha256(files.packed(self.arrays[identity])).hexdigest(),
        }

    def save(self, store: str) -> None:
        """Write the newest data set's arrays, and then the card."""
        files.write(store, self.card, self.arrays[self.card["sets"][-1]["data"]])

    @classmethod
    def load(cls, store: str) -> "Partition":
        """The partition of a store. Raises ValueError where there is none, or its files are not what its card says."""
        card, arrays = files.read(store)
        first = arrays[card["sets"][0]["data"]]
        return cls(card, arrays, Features(card["kind"], card["dino"], first["mean"], first["components"]))


def order(images: Readable) -> str:
    """A hash of the sum of each image's pixels, which tells another order and other images."""
    sums = [
        images.read(slice(i, min(i + 1024, len(images)))).double().sum((1, 2, 3)) for i in range(0, len(images), 1024)
    ]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in sums)).hexdigest()
