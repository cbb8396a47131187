"""Native checkpoints, for networks that no process can hold whole.

What an engine keeps in parts is written part by part, by torch.distributed.checkpoint, into `native/` of a checkpoint's
folder. The rest is `native/state.pt`, a state with meta tensors in their places, and "native": the engine's format.
`consolidate` makes a canonical checkpoint of it. To read a native one trusts whoever wrote it, since its index is a
pickle.
"""

import json
import os
import shutil
import warnings
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from src.checkpoint import MANIFEST, NATIVE, NATIVE_STATE, STATE, cause, coming, require_intact, written
from src.files import sync
from src.sharding import Piece


def write_parts(folder: Path, state: dict[str, Any], native: str) -> dict[str, Any]:
    """Write what this process keeps of a state; what is left of the state is for `write`, with the format in "native".

    All processes call it together, after one of them called `begin`, and the files of all have to be in one file
    system. Raises OSError, in all of them, where one could not write.
    """
    left, parts = _without_parts(state)
    with coming(folder) as part, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process")
        saved = dcp.save(parts, checkpoint_id=part / NATIVE)
    names = {info.relative_path for info in saved.storage_data.values()}
    return left | {
        "native": {"format": native, "files": [f"{NATIVE}/{name}" for name in (".metadata", *sorted(names))]}
    }


def read_parts(folder: Path, state: dict[str, Any], kept: dict[str, Any]) -> None:
    """Fill the parts that this process keeps, in `kept`, from a native checkpoint with this state.

    Raises ValueError where they cannot be read.
    """
    there = _missing(state)
    parts = _without_parts(kept)[1]
    _load(folder, {name: part for name, part in parts.items() if name.partition("@")[0] in there})


def consolidate(folder: Path) -> bool:
    """Make a native checkpoint the canonical one of the same moment; False where it is canonical already.

    One process is enough, with memory for all of it. The manifest is replaced last: until then the checkpoint is the
    native one, from then on the canonical. Raises ValueError where it does not verify, OSError where there is no room.
    """
    require_intact(folder)
    entries = json.loads((folder / MANIFEST).read_text())
    if changed := NATIVE_STATE in entries:
        state = torch.load(folder / NATIVE_STATE, map_location="cpu", weights_only=True)
        del state["native"]
        stored = dcp.FileSystemReader(folder / NATIVE).read_metadata().state_dict_metadata
        parts = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in stored.items()}
        _load(folder, parts)
        state = _put_together(state, parts)
        others = {name: entry for name, entry in entries.items() if not name.startswith(f"{NATIVE}/")}
        try:
            entries = {STATE: written(folder / f"{STATE}.part", state)} | others
            written(folder / f"{MANIFEST}.part", json.dumps(entries, indent=1))
            for name in (STATE, MANIFEST):
                os.replace(folder / f"{name}.part", folder / name)
            sync(folder)
        except (OSError, RuntimeError) as error:
            (folder / f"{STATE}.part").unlink(missing_ok=True)
            raise OSError(f"the canonical state of {folder} could not be written ({cause(error)})") from error
    shutil.rmtree(folder / NATIVE, ignore_errors=True)
    return changed


def _without_parts(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state with meta tensors in the place of those in parts, and these parts: path, or path@start, -> tensor."""
    parts = {}

    def left(value, path=""):
        if isinstance(value, dict):
            return {key: left(child, f"{path}/{key}") for key, child in value.items()}
        if isinstance(value, DTensor):
            name, part = path, value
        elif isinstance(value, Piece):
            name, part = f"{path}@{value.start}", value.numbers
        else:
            return value
        if part.numel():  # of a small tensor, some processes keep nothing
            parts[name] = part
        return torch.empty(value.shape, dtype=part.dtype, device="meta")

    return left(state), parts


def _missing(state, path: str = "") -> dict[str, Tensor]:
    """The meta tensors of a state by path."""
    if isinstance(state, dict):
        return {name: v for key, child in state.items() for name, v in _missing(child, f"{path}/{key}").items()}
    return {path: state} if torch.is_tensor(state) and state.is_meta else {}


def _put_together(state, parts: dict[str, Tensor]):
    """A state with what is missing made of all parts, which are used up."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    while parts:
        name, part = parts.popitem()
        path, _, start = name.partition("@")
        pieces.setdefault(path, []).append((int(start or 0), part.flatten()))

    def whole(value, path=""):
        if isinstance(value, dict):
            return {key: whole(child, f"{path}/{key}") for key, child in value.items()}
        if not torch.is_tensor(value) or not value.is_meta:
            return value
        found = [piece for _, piece in sorted(pieces.pop(path), key=itemgetter(0))]
        return (found[0] if len(found) == 1 else torch.cat(found)).view(value.shape)

    return whole(state)


def _load(folder: Path, parts: dict[str, Tensor]) -> None:
    """Fill tensors from a native checkpoint; every process reads what it needs by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        try:
            dcp.load(parts, checkpoint_id=folder / NATIVE, no_dist=True)
        except CheckpointException as error:
            raise ValueError(f"checkpoint {folder} cannot be used: {cause(error)}") from error
