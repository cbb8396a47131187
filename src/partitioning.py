"""`python prepare.py task=partition`: clusters of a data set for as many experts, and a sheet of examples of each."""

from pathlib import Path

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from src.features import Features
from src.images import grid, png
from src.partition import Partition
from src.partition_files import CARD, exists
from src.store import put

LIMIT, EXAMPLES = 0.15, 16
LATER = {None: "", "assign": "assigned", "new": "a cluster of their own"}


def partition(config: DictConfig) -> None:
    """Make the partition of a store, or extend it by the images of another data set.

    Raises ValueError for impossible settings, or where a store has another partition.
    """
    data = _data(config)
    if config.later is not None:
        made = Partition.load(config.store, config.dino)
        made.extend(data.identity, data.train, data.held_out, new=config.later == "new")
    else:
        features = Features(config.features, config.dino)
        options = {key: config[key] for key in ("clusters", "fine", "balance", "seed")} | {
            "bounds": tuple(config.bounds)
        }
        made = Partition.create(data.identity, data.train, data.held_out, features, **options)
        _check_imbalance(made, config)
        if exists(config.store) and (other := Partition.load(config.store).base) != made.base:
            raise ValueError(
                f"{config.store} has another partition ({other[:12]}), which experts may be trained on: choose another "
                "store, or later=assign or later=new to extend it"
            )
    known, name = made.card["sets"][-1], HydraConfig.get().runtime.choices.data
    labels = made.arrays[data.identity]["labels"]
    if config.later is not None or not exists(config.store):
        made.save(config.store)
    picture = Path(known["file"]).with_suffix(".png").name
    if data.channels in (1, 3):
        put(config.store, picture, png(sheet(data, labels, made.clusters)))
    _, coarse = made.centroids()
    moved = np.mean(coarse[made.arrays[data.identity]["fine"]] != labels)
    sizes = ", ".join(f"{k}: {size}" for k, size in enumerate(known["sizes"]))
    print(
        f"{known['images']} images in {made.clusters} clusters, {known['held_out']} held-out ones beside them\n"
        f"Sizes      {sizes}\n"
        f"Imbalance  {known['imbalance']:.3f}; {100 * moved:.1f} % of the images are not in the nearest cluster\n"
        f"Partition  {config.store}/{CARD} and {known['file']} (lineage {made.base[:12]})\n"
        + (f"Examples   {config.store}/{picture}\n" if data.channels in (1, 3) else "")
        + f"Next       python train.py experiment=paris_expert expert=0 data={name} store={config.store}"
    )


def sheet(data, labels: np.ndarray, clusters: int) -> Tensor:
    """A row of up to 16 training images, evenly spaced, for each cluster: one picture (c, H, W) in [-1, 1]."""
    rows = []
    for cluster in range(clusters):
        of_it = np.flatnonzero(labels == cluster)
        chosen = of_it[np.unique(np.linspace(0, len(of_it) - 1, EXAMPLES).astype(int))] if len(of_it) else of_it
        images = data.as_seen(data.train.read(chosen))
        blank = torch.ones(EXAMPLES - len(images), *images.shape[1:])
        rows += [images, blank]
    return grid(torch.cat(rows), columns=EXAMPLES)


def _data(config: DictConfig):
    """The data set that is named, whole."""
    if config.get("data") is None:
        raise ValueError("task=partition needs the images: name them with data=..., such as data=fashion10k")
    if config.later not in LATER:
        raise ValueError(f"later={config.later} does not exist; choose assign or new, or leave it out")
    if config.imbalance not in ("warn", "error"):
        raise ValueError(f"imbalance={config.imbalance} does not exist; choose warn or error")
    data = instantiate(config.data)
    if data.partition is not None:
        raise ValueError("data.partition is what task=partition makes; leave it out")
    data.prepare_data()
    data.setup()
    return data


def _check_imbalance(made: Partition, config: DictConfig) -> None:
    found = made.card["sets"][0]["imbalance"]
    if found <= LIMIT:
        return
    told = (
        f"a cluster's size is {100 * found:.0f} % off the mean, more than {100 * LIMIT:.0f} %: "
        "balance=capacity or balance=sinkhorn bounds it, at the price of clusters that overlap more"
    )
    if config.imbalance == "error":
        raise ValueError(told)
    print(f"Warning: {told}")
