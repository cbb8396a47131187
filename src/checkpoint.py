"""The canonical checkpoint: plain tensors by name in a folder that is committed whole, and verified before it is used.

`checkpoints/000000026112/` holds `state.pt` (loadable with weights_only=True), the code stamp, and `manifest.json`
with the size and sha256 of each. It is written as `000000026112.tmp/`, synchronised to disk and renamed; 26,112 is the
number of images that training had seen. The state is {"weights", "optimizers", "callbacks", "position", "metrics",
"config"}: full tensors by parameter name, the same whatever engine and number of processes wrote them.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from src.sharding import like, local, saved

STATE, MANIFEST, BEST = "state.pt", "manifest.json", "best.json"


def folder_of(checkpoints: Path, images: int) -> Path:
    """Where the checkpoint after `images` images lies."""
    return checkpoints / f"{images:012d}"


def write(folder: Path, state: dict[str, Any], texts: dict[str, str]) -> None:
    """Commit a checkpoint: wholly there, or not at all. Raises OSError where it cannot be written."""
    part = folder.with_suffix(".tmp")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        entries = {}
        for name, write_into in _contents(state, texts).items():
            with open(part / name, "wb") as file:
                hashing = _Hashing(file)
                write_into(hashing)
                file.flush()
                os.fsync(file.fileno())
            entries[name] = {"size": hashing.size, "sha256": hashing.sha256.hexdigest()}
        with open(part / MANIFEST, "w") as file:
            json.dump(entries, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(part)
        if folder.exists() and fault(folder) is None:  # the same moment again: the same state, so what is there stays
            shutil.rmtree(part)
            return
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
        _sync(folder.parent)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(part, ignore_errors=True)
        why = error.__context__ if isinstance(error.__context__, OSError) else error  # torch hides it in a RuntimeError
        raise OSError(f"checkpoint {folder} could not be written ({why}); the older ones are untouched") from error


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
        return None if STATE in entries else f"{MANIFEST} does not name {STATE}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"


def committed(checkpoints: Path) -> list[Path]:
    """Every committed checkpoint folder, oldest first."""
    return sorted(p for p in checkpoints.glob("*") if p.is_dir() and p.name.isdigit())


def newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and one line for every newer one that does not."""
    rejected = []
    for folder in reversed(committed(checkpoints)):
        if (why := fault(folder)) is None:
            return folder, rejected
        rejected.append(f"checkpoint {folder.name} is not used: {why}")
    return None, rejected


def read(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU. Raises ValueError where it does not verify."""
    if (why := fault(folder)) is not None:
        raise ValueError(f"checkpoint {folder} cannot be used: {why}")
    return torch.load(folder / STATE, map_location="cpu", weights_only=True)


def read_best(checkpoints: Path) -> dict[str, Any] | None:
    """{"checkpoint": folder name, "value": of the metric, ...} of the best checkpoint so far."""
    path = checkpoints / BEST
    return json.loads(path.read_text()) if path.exists() else None


def write_best(checkpoints: Path, best: dict[str, Any]) -> None:
    """Name the best checkpoint; the file is replaced whole."""
    part = checkpoints / f"{BEST}.part"
    part.write_text(json.dumps(best, indent=1))
    os.replace(part, checkpoints / BEST)


def averaged(state: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that samples are drawn with: moving averages where the run kept them."""
    return state["weights"] | state["callbacks"].get("EMA", {}).get("averages", {})


def optimizer_state(network: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state by parameter name, whole; its options come from the configuration."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    return {
        names[p]: {key: saved(value) for key, value in optimizer.state[p].items()}
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


def _contents(state: dict, texts: dict[str, str]) -> dict:
    contents = {name: lambda file, text=text: file.write(text.encode()) for name, text in texts.items()}
    return {STATE: lambda file: torch.save(state, file)} | contents


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
