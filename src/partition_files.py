"""A partition's files: arrays, and `partition.json`, written last, which says what they are and their hashes."""

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from src.clustering import imbalance
from src.store import get, put

CARD, FIRST = "partition.json", "partition.npz"
SCHEMA = 2

Arrays = dict[str, np.ndarray]


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An .npz; equal arrays are equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, **{key: arrays[key] for key in sorted(arrays)})  # has no clock in it
    return buffer.getvalue()


def write(store: str, card: dict[str, Any], arrays: Arrays) -> None:
    """The arrays of the newest data set of a card, and then the card; each appears whole or not at all."""
    put(store, card["sets"][-1]["file"], packed(arrays))
    put(store, CARD, json.dumps(card, indent=1).encode())


def read(store: str) -> tuple[dict[str, Any], dict[str, Arrays]]:
    """The card of a store, and the arrays of each of its data sets.

    Raises ValueError where there is none, or where files are not what the card says.
    """
    try:
        card = json.loads(get(store, CARD))
    except FileNotFoundError as error:
        raise ValueError(
            f"{store} has no {CARD}; make one with python prepare.py task=partition data=... store={store}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{store}/{CARD} cannot be read ({error}); make another partition") from error
    if card.get("schema") != SCHEMA:
        raise ValueError(f"{store}/{CARD} is of schema {card.get('schema')}, not {SCHEMA}; make another partition")
    try:
        if card["base"] != card["sets"][0]["sha256"]:
            raise ValueError(f"{store}/{CARD} has a base that is not the hash of {FIRST}; make another partition")
        if card["clusters"] != max(len(known["sizes"]) for known in card["sets"]):
            raise ValueError(f"{store}/{CARD} has other clusters than its sizes say; make another partition")
        for key in ("kind", "dino", "features", "seed"):
            card[key]
        return card, {known["data"]: _checked(store, known) for known in card["sets"]}
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{store}/{CARD} is not whole: it lacks {error}; make another partition") from error


def exists(store: str) -> bool:
    """Whether a store has a partition."""
    try:
        return bool(get(store, CARD))
    except FileNotFoundError:
        return False


def _checked(store: str, known: dict[str, Any]) -> Arrays:
    name = f"{store}/{known['file']}"
    try:
        data = get(store, known["file"])
    except FileNotFoundError as error:
        raise ValueError(f"{name} is missing; make another partition") from error
    if hashlib.sha256(data).hexdigest() != known["sha256"]:
        raise ValueError(f"{name} does not have the hash of {CARD}: it is damaged or another's; make another partition")
    with np.load(io.BytesIO(data)) as file:
        arrays = dict(file)
    sizes = np.bincount(arrays["labels"], minlength=len(known["sizes"]))
    whole = len(arrays["labels"]) == len(arrays["fine"]) == known["images"]
    if not whole or sizes.tolist() != known["sizes"] or abs(imbalance(sizes) - known["imbalance"]) > 1e-9:
        raise ValueError(f"{name} has other sizes than {CARD} says; make another partition")
    return arrays
