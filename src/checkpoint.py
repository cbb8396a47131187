"""The canonical checkpoint: plain tensors by name in a folder that is committed whole, and verified before it is used.

`checkpoints/000000026112/` holds `state.pt` (loadable with weights_only=True), the code stamp, and `manifest.json`
with the size and sha256 of each. It is written as `000000026112.tmp/`, synchronised to disk and renamed; 26,112 is the
number of images that training had seen. The state is {"weights", "optimizers", "callbacks", "position", "metrics",
"config"}: full tensors by parameter name, the same whatever engine and number of processes wrote them. What a roll-back
changes of it stands in a file of its own beside it, see `amend`.

Native checkpoints (`src/native.py`) are committed and verified as these are.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from src.files import replacing, sync
from src.sharding import like, local, saved

STATE, MANIFEST, BEST, NATIVE = "state.pt", "manifest.json", "best.json", "native"
NATIVE_STATE, AMENDED = f"{NATIVE}/{STATE}", "amended"


def folder_of(checkpoints: Path, images: int) -> Path:
    """Where the checkpoint after `images` images lies."""
    return checkpoints / f"{images:012d}"


def begin(folder: Path) -> None:
    """An empty folder beside the one where a checkpoint will be. Raises OSError where it cannot be made."""
    with coming(folder) as part:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)


def write(folder: Path, state: dict[str, Any], texts: dict[str, str]) -> None:
    """Commit a checkpoint: wholly there, or not at all. Raises OSError where it cannot be written.

    A state that `write_parts` gave makes a native checkpoint.
    """
    native = state.get("native", {})
    if not native:
        begin(folder)
    with coming(folder) as part:
        entries = {NATIVE_STATE if native else STATE: written(part / (NATIVE_STATE if native else STATE), state)}
        entries |= {name: written(part / name, text) for name, text in texts.items()}
        for name in native.get("files", []):
            with open(part / name, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            entries[name] = {"size": (part / name).stat().st_size, "sha256": sha256}
        written(part / MANIFEST, json.dumps(entries, indent=1))
        if native:
            sync(part / NATIVE)
        sync(part)
        if folder.exists() and fault(folder) is None:  # the same moment again: the same state, so what is there stays
            shutil.rmtree(part)
            return
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
        sync(folder.parent)


def fault(folder: Path) -> str | None:
    """Why this checkpoint cannot be trusted, or None if every file has the size and hash of its manifest."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
        for name, entry in entries.items():
            if (size := (folder / name).stat().st_size) != entry["size"]:
                return f"{name} has {size} bytes instead of {entry['size']}"
            with open(folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"{name} does not have the hash of its manifest"
        return None if entries.keys() & {STATE, NATIVE_STATE} else f"{MANIFEST} does not name {STATE}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"


def committed(checkpoints: Path) -> list[Path]:
    """Every committed checkpoint folder, oldest first."""
    return sorted(p for p in checkpoints.glob("*") if p.is_dir() and p.name.isdigit())


def newest(checkpoints: Path, until: float = math.inf) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, of those up to `until` images; and a line for every newer that does not."""
    rejected = []
    for folder in (folder for folder in reversed(committed(checkpoints)) if int(folder.name) <= until):
        if (why := fault(folder)) is None:
            return folder, rejected
        rejected.append(f"checkpoint {folder.name} is not used: {why}")
    return None, rejected


def read(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU. Raises ValueError where it does not verify, or is native."""
    require_intact(folder)
    return state_of(folder)


def state_of(folder: Path, native: str | None = None) -> dict[str, Any]:
    """The state of a checkpoint that verifies; a native one, which needs `read_parts` as well, only of this format.

    Raises ValueError where it is of another.
    """
    state = torch.load(_state_file(folder), map_location="cpu", weights_only=True)
    if "native" in state and state["native"]["format"] != native:
        raise ValueError(
            f"checkpoint {folder} is in the native format of {state['native']['format']}; make it canonical first: "
            f"python prepare.py task=consolidate run={folder.parent.parent} checkpoint={folder.name}"
        )
    for name in _amendments(folder):
        for part, values in json.loads((folder / name).read_text()).items():
            state[part] |= values
    return state


def amend(folder: Path, changes: dict[str, dict[str, Any]]) -> None:
    """Change entries of a checkpoint's state that JSON can hold: part of the state -> name -> new value.

    Earlier changes are forgotten. The manifest is replaced last: until then the checkpoint is the one that it was.
    Raises OSError where it cannot be written.
    """
    entries, before = json.loads((folder / MANIFEST).read_text()), _amendments(folder)
    name = next(n for n in (f"{AMENDED}_{k}.json" for k in range(len(before) + 1)) if n not in before)
    others = {key: entry for key, entry in entries.items() if key not in before}
    entries = {name: written(folder / name, json.dumps(changes, indent=1))} | others
    with replacing(folder / MANIFEST) as part:
        written(part, json.dumps(entries, indent=1))
    sync(folder)
    for old in before:
        (folder / old).unlink(missing_ok=True)


def read_best(checkpoints: Path) -> dict[str, Any] | None:
    """{"checkpoint": folder name, "value": of the metric, ...} of the best checkpoint so far; None where the file is
    missing or damaged."""
    try:
        best = json.loads((checkpoints / BEST).read_text())
        return best if {"checkpoint", "value"} <= best.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def write_best(checkpoints: Path, best: dict[str, Any]) -> None:
    """Name the best checkpoint; the file is replaced whole."""
    with replacing(checkpoints / BEST) as part:
        written(part, json.dumps(best, indent=1))
    sync(checkpoints)


def averaged(state: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that samples are drawn with: moving averages where the run kept them."""
    return state["weights"] | state["callbacks"].get("EMA", {}).get("averages", {})


def optimizer_state(network: nn.Module, optimizer: Optimizer, given: Callable = saved) -> dict[str, Any]:
    """An optimizer's state by parameter name, each value as `given`; its options come from the configuration."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    return {
        names[p]: {key: given(value) for key, value in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
    }


@torch.no_grad()
def load_optimizer(network: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put back what `optimizer_state` took. Raises ValueError for a state of other parameters."""
    parameters = dict(network.named_parameters())
    if parameters.keys() != state.keys():
        differ = sorted(parameters.keys() ^ state.keys())[:3]
        raise ValueError(f"the checkpoint's optimizer state is of another network; first names that differ: {differ}")
    on_device = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    counting = {parameter for group in on_device for parameter in group["params"]}  # their step lies with the parameter
    for name, values in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            k: like(v.clone(), parameter if v.dim() else local(parameter))
            if torch.is_tensor(v) and (v.dim() or parameter in counting)
            else (v.clone() if torch.is_tensor(v) else v)
            for k, v in values.items()
        }


def load_weights(module: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Load weights by name. Raises ValueError naming the first three keys or shapes that differ."""
    require_alike({name: tuple(value.shape) for name, value in module.state_dict().items()}, weights, where)
    module.load_state_dict({name: like(weights[name], value) for name, value in module.state_dict().items()})


def require_alike(mine: dict[str, tuple], weights: dict[str, Tensor], where: str) -> None:
    """Raise ValueError naming the first three keys or shapes in which the weights differ from `mine`."""
    theirs = {name: tuple(value.shape) for name, value in weights.items()}
    if differ := [n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n)]:
        shown = ", ".join(f"{n} (here {mine.get(n)}, there {theirs.get(n)})" for n in differ[:3])
        raise ValueError(f"{where} is of another architecture: {len(differ)} names or shapes differ, first {shown}")


class _Hashing:
    """A file that knows the size and hash of what went through it."""

    def __init__(self, file):
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        self.size += memoryview(data).nbytes
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def written(path: Path, content: dict | str) -> dict[str, Any]:
    """Write a state or a text, to the disk; its entry in the manifest."""
    with open(path, "wb") as file:
        hashing = _Hashing(file)
        if isinstance(content, str):
            hashing.write(content.encode())
        else:
            torch.save(content, hashing)
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.sha256.hexdigest()}


@contextmanager
def coming(folder: Path) -> Iterator[Path]:
    """What becomes of a checkpoint until it is committed; removed where it cannot be written."""
    part = folder.with_suffix(".tmp")
    try:
        yield part
    except (OSError, RuntimeError, CheckpointException) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise OSError(
            f"checkpoint {folder} could not be written ({cause(error)}); the older ones are untouched; make room "
            f"there, or make it writable"
        ) from error


def cause(error: BaseException) -> BaseException:
    """What went wrong in the first place."""
    if isinstance(error, CheckpointException):  # of several processes
        error = next(iter(error.failures.values()))[0]
    return error.__context__ if isinstance(error.__context__, OSError) else error  # torch hides it in a RuntimeError


def require_intact(folder: Path) -> None:
    """Raise ValueError where a checkpoint does not verify."""
    if (why := fault(folder)) is not None:
        raise ValueError(f"checkpoint {folder} cannot be used: {why}")


def _amendments(folder: Path) -> list[str]:
    return [name for name in json.loads((folder / MANIFEST).read_text()) if name.startswith(f"{AMENDED}_")]


def _state_file(folder: Path) -> Path:
    return folder / (STATE if STATE in json.loads((folder / MANIFEST).read_text()) else NATIVE_STATE)
