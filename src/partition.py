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
    set's identity: labels (n,) and held_out (m,), hashes of these images' pixels (n,) and (m,), the nearest fine
    centroid of each training image (n,), and the centroids (f, d) and their clusters (f,) that came with the set.
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
        """Training images of each cluster over all data sets, those in several counted once: int64 (k,)."""
        found, seen = np.zeros(self.clusters, np.int64), np.empty(0, np.uint64)
        for arrays in reversed(self.arrays.values()):  # the newest label is an image's
            fresh = ~np.isin(arrays["hashes"], seen)
            found += np.bincount(arrays["labels"][fresh], minlength=self.clusters)
            seen = np.concatenate([seen, arrays["hashes"]])
        return found

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
        if not (isinstance(cluster, int) and 0 <= cluster < self.clusters):
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
        if len(bounds) != 2 or not 0 <= bounds[0] <= 1 <= bounds[1]:
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
        arrays |= {"hashes": pixel_hashes(train), "held_out_hashes": pixel_hashes(held_out)}
        card["sets"].append(made._described(identity, train, held_out, files.FIRST))
        made.card["base"] = made.card["sets"][0]["sha256"]
        return made

    def extend(self, identity: str, train: Readable, held_out: Readable, new: bool) -> None:
        """Take in another data set: its images go to the nearest centroids, or (`new`) are a cluster of their own.

        Images that the partition has already keep the cluster whose expert learned them when others are assigned.
        Raises ValueError for one that is known already.
        """
        if identity in self.arrays:
            raise ValueError(f"the partition knows these images ({identity}) already")
        arrays = {"hashes": pixel_hashes(train), "held_out_hashes": pixel_hashes(held_out)}
        known = self._known()
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
        for labels, hashes in (("labels", "hashes"), ("held_out", "held_out_hashes")):
            if new:
                arrays[labels] = np.full_like(arrays[labels], coarse[-1])
            else:
                near = zip(arrays[hashes].tolist(), arrays[labels].tolist(), strict=True)
                arrays[labels] = np.array([known.get(image, label) for image, label in near], np.int16)
        self.card["sets"].append(self._described(identity, train, held_out, f"partition-{identity}.npz"))

    def _known(self) -> dict[int, int]:
        """Hash -> cluster of every image that is in the partition; the newest, where it is in several data sets."""
        found: dict[int, int] = {}
        for arrays in self.arrays.values():
            for labels, hashes in (("held_out", "held_out_hashes"), ("labels", "hashes")):
                found.update(zip(arrays[hashes].tolist(), arrays[labels].tolist(), strict=True))
        return found

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
    def load(cls, store: str, dino: str | None = None) -> "Partition":
        """The partition of a store; `dino`: where DINOv2 lies on this machine, if not where it lay on the first.

        Raises ValueError where there is none, or its files are not what its card says.
        """
        card, arrays = files.read(store)
        first = arrays[card["sets"][0]["data"]]
        features = Features(card["kind"], dino or card["dino"], first["mean"], first["components"])
        if dino and features.id != card["features"]:
            raise ValueError(f"dino={dino} is not what {store} was partitioned by, {card['features']}")
        return cls(card, arrays, features)


def order(images: Readable) -> str:
    """A hash of the sum of each image's pixels, which tells another order and other images."""
    sums = [
        images.read(slice(i, min(i + 1024, len(images)))).double().sum((1, 2, 3)) for i in range(0, len(images), 1024)
    ]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in sums)).hexdigest()


def pixel_hashes(images: Readable) -> np.ndarray:
    """A hash of each image's pixels, by which it is known in other data sets: uint64 (n,)."""
    parts = (images.read(slice(i, min(i + 1024, len(images)))) for i in range(0, len(images), 1024))
    found = [hashlib.blake2b(image.numpy().tobytes(), digest_size=8).digest() for part in parts for image in part]
    return np.array([int.from_bytes(digest) for digest in found], np.uint64)
