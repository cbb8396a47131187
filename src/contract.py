"""What experts must have in common for their velocities to be mixed: the entries, their hash, and who differs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from src.flow import TIME_SCALE

PATH = "x_t = (1 - t) x_0 + t e, t = 0 at the data"
SHA = "sha256"


def contract(
    shape: Sequence[int], classes: int, normalisation: str, partition: str | None, vae: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The entries of a contract, with the sha256 over them.

    A mixture is one of velocities on one path; experts may predict anything that converts to it, so their objectives
    are in their cards and not here.

    Args:
        shape: (c, h, w) of what is noised.
        classes: of the labels, 0 for none; or which label is what.
        normalisation: from stored to noised images, such as "uint8 / 127.5 - 1".
        partition: the base of the partition's lineage, which added clusters and later assignments leave as it is.
        vae: its id and factor, where the images are latents.
    """
    entries = {
        "path": PATH,
        "prediction": "velocity e - x_0",
        "time_scale": TIME_SCALE,
        "normalisation": normalisation,
        "shape": list(shape),
        "vae": dict(vae) if vae else None,
        "classes": classes,
        "partition": partition,
    }
    return entries | {SHA: hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()}


def require_same(mine: Mapping[str, Any], theirs: Mapping[str, Any], who: str) -> None:
    """Raise ValueError naming the first entry in which the contract of `who` differs."""
    for key in [key for key in [*mine, *theirs] if key != SHA]:
        if mine.get(key) != theirs.get(key):
            raise ValueError(
                f"{who} cannot be mixed with the others: its contract says {key} = {theirs.get(key)!r}, theirs says "
                f"{mine.get(key)!r}"
            )
    entries = {key: value for key, value in theirs.items() if key != SHA}
    if hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest() != theirs.get(SHA):
        raise ValueError(f"{who} cannot be trusted: the hash of its contract is not that of the contract's entries")


def contract_of(data) -> dict[str, Any]:
    """The contract of what is trained on this data."""
    shape = data.channels, data.resolution, data.resolution
    return contract(shape, data.classes, data.normalisation, data.base, getattr(data, "vae", None))
