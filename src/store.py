"""Networks published through files: a folder of any file system or object store is all that two machines share.

`<store>/experts/3/000000064000.safetensors` are the weights after 64,000 images, `000000064000.json` beside it is
their card: what they are, and the sha256 that they have to have. Weights are complete before the card appears, both
appear under their names at once, and readers take the newest card whose weights have its hash. Nothing is pickled.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec
import safetensors.torch
import torch
from fsspec.implementations.local import LocalFileSystem
from hydra.errors import HydraException
from hydra.utils import instantiate
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

WEIGHTS, CARD, PART = ".safetensors", ".json", ".part"
BUILT = ("src.modules.networks.", "src.objectives.")  # all that a card may ask for


def publish(
    store: str, kind: str, images: int, tensors: Mapping[str, Tensor], card: Mapping[str, Any], keep: int = 2
) -> dict[str, Any]:
    """Commit weights and their card to `<store>/<kind>/`; the card as written, with kind, images, sha256 and size.

    `store` is a folder or any URL of fsspec's, `kind` such as "experts/3" or "router", `images` how many training had
    seen. The same moment again replaces what is there; of older ones `keep` - 1 stay. Raises OSError where it cannot
    be written.
    """
    files, folder = _place(store, kind)
    data = safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    known = {"kind": kind, "images": images, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    card, name = dict(card) | known, f"{folder}/{images:012d}"
    text = json.dumps(card, indent=1)
    files.makedirs(folder, exist_ok=True)
    _write(files, name + WEIGHTS, data)
    _write(files, name + CARD, text.encode())
    for old in _cards(files, folder)[keep:]:
        for path in (old, old.removesuffix(CARD) + WEIGHTS):  # the card first: no card is without weights
            if files.exists(path):
                files.rm(path)
    return json.loads(text)


def newest(store: str, kind: str, needs: Sequence[str] = ()) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest card with what it `needs` whose weights have its hash; and why every newer one is not used, a line."""
    files, folder = _place(store, kind)
    rejected = []
    for path in _cards(files, folder):
        try:
            card = json.loads(files.cat_file(path))
            if (card["kind"], f"{card['images']:012d}{CARD}") != (kind, path.rpartition("/")[2]):
                raise ValueError(f"it is that of {card['kind']} after {card['images']} images")
            for key in needs:
                card[key]
            _require_intact(files, path.removesuffix(CARD) + WEIGHTS, card)
            return card, rejected
        except (OSError, ValueError, KeyError, TypeError) as error:
            told = f"it lacks {error}" if isinstance(error, KeyError) else error
            rejected.append(f"{kind}/{path.rpartition('/')[2]} is not used: {told}")
    return None, rejected


def load(store: str, card: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a card, on the CPU; those of a local file are mapped, so that they take memory only as read.

    Never write into them. What is mapped stays readable when the file is replaced or deleted, but not when it is cut
    short in place: copy it where that could happen. Raises ValueError or OSError for weights that the card's hash does
    not fit.
    """
    files, folder = _place(store, card["kind"])
    path = f"{folder}/{card['images']:012d}{WEIGHTS}"
    _require_intact(files, path, card)
    try:
        if not isinstance(files, LocalFileSystem):
            return safetensors.torch.load(files.cat_file(path))
        with safe_open(path, framework="pt") as mapped:
            return {name: mapped.get_tensor(name) for name in mapped.keys()}  # noqa: SIM118  it is no dict
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of weights ({error})") from error


def kinds(store: str, group: str) -> list[str]:
    """What is published below a group: "experts" -> ["experts/0", "experts/1", ...], in the order of their numbers."""
    files, folder = _place(store, group)
    found = [p.rstrip("/").rpartition("/")[2] for p in files.ls(folder, detail=False)] if files.exists(folder) else []
    return [f"{group}/{name}" for name in sorted(found, key=lambda name: (not name.isdigit(), name.zfill(9)))]


def state(store: str, kind: str) -> str:
    """What changes whenever a file of this kind does, without reading it; "" where there is none."""
    files, folder = _place(store, kind)
    if not files.exists(folder):
        return ""
    files.invalidate_cache(folder)
    return str(sorted(str(sorted(file.items(), key=str)) for file in files.ls(folder, detail=True)))


def built(node: Mapping[str, Any]) -> Any:
    """The network or objective that a card describes. Raises ValueError for anything else, or what is unknown here."""
    _require_ours(node)
    try:
        return instantiate(dict(node))
    except (HydraException, TypeError) as error:
        raise ValueError(f"a card describes what this version cannot build ({error.__cause__ or error})") from error


def network_of(store: str, card: Mapping[str, Any]) -> nn.Module:
    """A card's network with its weights, in memory of its own. Raises ValueError where they do not fit one another."""
    with torch.random.fork_rng(devices=[]):  # weights are drawn to be replaced
        network = built(card["network"])
    try:
        network.load_state_dict(load(store, card))
    except RuntimeError as error:
        raise ValueError(f"{card['kind']}: the weights are not of the card's network ({error})") from error
    return network.eval()


def put(store: str, name: str, data: bytes) -> None:
    """Write a file of a store, which appears whole or not at all."""
    files, path = _place(store, name)
    files.makedirs(path.rpartition("/")[0], exist_ok=True)
    _write(files, path, data)


def get(store: str, name: str) -> bytes:
    """A file of a store. Raises FileNotFoundError or another OSError."""
    files, path = _place(store, name)
    return files.cat_file(path)


def _place(store: str, kind: str) -> tuple[fsspec.AbstractFileSystem, str]:
    files, root = fsspec.core.url_to_fs(store)
    return files, f"{root.rstrip('/')}/{kind}"


def _cards(files, folder: str) -> list[str]:
    """The paths of the cards in a folder, newest first."""
    if not files.exists(folder):
        return []
    files.invalidate_cache(folder)
    return sorted((p for p in files.ls(folder, detail=False) if p.endswith(CARD)), reverse=True)


def _write(files, path: str, data: bytes) -> None:
    with files.open(path + PART, "wb") as file:
        file.write(data)
        if isinstance(files, LocalFileSystem):
            file.flush()
            os.fsync(file.fileno())
    if isinstance(files, LocalFileSystem):
        os.replace(path + PART, path)
    else:
        files.mv(path + PART, path)


def _require_intact(files, path: str, card: Mapping[str, Any]) -> None:
    if (size := files.size(path)) != card["size"]:
        raise ValueError(f"{path} has {size} bytes instead of {card['size']}")
    with files.open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != card["sha256"]:
        raise ValueError(f"{path} does not have the hash of its card")


def _require_ours(node: Any) -> None:
    """Cards come from other machines: what they name is built only if it is a network or an objective of ours."""
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if target is not None and not str(target).startswith(BUILT):
            raise ValueError(f"a card asks for {target}, which is no network and no objective of this project")
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            _require_ours(child)
    elif isinstance(node, str) and "${" in node:
        raise ValueError(f"a card holds {node!r}, which is no plain value")
