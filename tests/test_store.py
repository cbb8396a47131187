"""The store: whole or not at all, the newest that its card fits, and nothing built but networks; and the contract."""

import hashlib
import json
import os
import pickle
from copy import deepcopy

import pytest
import torch

from src import store as stores
from src.contract import contract, require_same
from src.modules.networks.dit import DiT

DIT = dict(channels=1, resolution=8, patch=4, width=16, depth=1, heads=2)
NETWORK = {"_target_": "src.modules.networks.dit.DiT", **DIT}


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    """A folder, and a file system that is none."""
    return str(tmp_path / "store") if request.param == "folder" else f"memory://{tmp_path.name}"


def tensors(value: float):
    return {"a": torch.full((3, 5), value), "b.c": torch.arange(4).float().mul(value).bfloat16()}


def test_what_is_published_is_read(store):
    card = stores.publish(store, "experts/3", 64000, tensors(2.0), {"k": 3, "n_k": 40})
    assert (card["kind"], card["images"], card["k"], card["n_k"]) == ("experts/3", 64000, 3, 40)
    found, rejected = stores.newest(store, "experts/3")
    assert found == card and rejected == []
    loaded = stores.load(store, found)
    assert loaded.keys() == tensors(2.0).keys()
    for name, value in tensors(2.0).items():
        assert torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype
    stores.publish(store, "experts/12", 1, tensors(1.0), {})
    assert stores.kinds(store, "experts") == ["experts/3", "experts/12"]
    assert stores.newest(store, "router") == (None, []) and stores.kinds(store, "heads") == []


def test_files_have_the_names_that_their_readers_expect_and_no_part_stays(tmp_path):
    stores.publish(str(tmp_path), "router", 8, tensors(1.0), {})
    assert sorted(p.name for p in (tmp_path / "router").iterdir()) == [
        "000000000008.json",
        "000000000008.safetensors",
    ]


def test_the_newest_of_them_is_taken_and_old_ones_go(store):
    for images in (10, 1000, 200):
        stores.publish(store, "router", images, tensors(float(images)), {}, keep=2)
    assert stores.newest(store, "router")[0]["images"] == 1000
    files, folder = stores._place(store, "router")
    assert sorted(p.rpartition("/")[2].partition(".")[0] for p in files.ls(folder, detail=False)) == [
        f"{n:012d}" for n in (200, 200, 1000, 1000)
    ]
    stores.publish(store, "router", 1000, tensors(7.0), {})  # the same moment again
    card, rejected = stores.newest(store, "router")
    assert rejected == [] and stores.load(store, card)["a"][0, 0] == 7


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def changed(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "why"), [(cut, "bytes instead of"), (changed, "hash of its card"), (lambda path: path.unlink(), "No such")]
)
def test_weights_that_are_not_those_of_their_card_are_passed_over(tmp_path, harm, why):
    for images in (1, 2, 3):
        card = stores.publish(str(tmp_path), "experts/0", images, tensors(float(images)), {}, keep=9)
    for images in (2, 3):
        harm(tmp_path / "experts" / "0" / f"{images:012d}.safetensors")
    found, rejected = stores.newest(str(tmp_path), "experts/0")
    assert found["images"] == 1 and len(rejected) == 2
    assert all(why in line for line in rejected) and rejected[0].startswith("experts/0/000000000003.json is not used: ")
    with pytest.raises((ValueError, OSError), match=why):
        stores.load(str(tmp_path), card)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "list indices"),
        ('{"kind": "router", "images": 2, "size": 3}', "instead of 3"),
        ('{"kind": "../router", "images": 2, "size": 3}', "it is that of ../router after 2 images"),
        ("", "Expecting"),
    ],
)
def test_a_card_that_is_none_is_passed_over(tmp_path, text, why):
    card = stores.publish(str(tmp_path), "router", 1, tensors(1.0), {})
    stores.publish(str(tmp_path), "router", 2, tensors(2.0), {})
    (tmp_path / "router" / "000000000002.json").write_text(text)
    found, (line,) = stores.newest(str(tmp_path), "router")
    assert found == card and why in line


def test_a_card_without_a_hash_is_passed_over(tmp_path):
    card = stores.publish(str(tmp_path), "router", 1, tensors(1.0), {})
    path = tmp_path / "router" / "000000000001.json"
    path.write_text(json.dumps({key: value for key, value in card.items() if key != "sha256"}))
    assert stores.newest(str(tmp_path), "router") == (
        None,
        ["router/000000000001.json is not used: it lacks 'sha256'"],
    )


def test_a_publisher_that_is_killed_leaves_the_older_one(tmp_path):
    """It dies before each of the two renames in turn."""
    stores.publish(str(tmp_path), "router", 1, tensors(1.0), {})
    for renames in (0, 1):
        if not (child := os.fork()):
            _die_after(renames)
            stores.publish(str(tmp_path), "router", 2, tensors(2.0), {})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        card, rejected = stores.newest(str(tmp_path), "router")
        assert (card["images"], rejected) == (1, [])
    stores.publish(str(tmp_path), "router", 2, tensors(2.0), {})
    assert stores.newest(str(tmp_path), "router")[0]["images"] == 2


def _die_after(renames: int) -> None:
    """End this process instead of the rename after so many."""
    left, replace = iter(range(renames)), os.replace
    os.replace = lambda *paths: os._exit(9) if next(left, None) is None else replace(*paths)


def test_mapped_weights_outlive_their_file_and_take_no_memory_of_their_own(tmp_path):
    big = {"a": torch.ones(1 << 22)}
    card = stores.publish(str(tmp_path), "router", 1, big, {})
    before = _anonymous_kb()
    loaded = stores.load(str(tmp_path), card)
    assert _anonymous_kb() - before < 4096  # of 16 MB
    stores.publish(str(tmp_path), "router", 1, {"a": torch.zeros(1 << 22)}, {})
    (tmp_path / "router" / "000000000001.safetensors").unlink()
    assert loaded["a"].sum() == 1 << 22


def _anonymous_kb() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def test_a_network_comes_back_from_its_card(store):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = DiT(**DIT)
        torch.nn.init.normal_(network.head.weight)
    card = stores.publish(store, "experts/0", 1, network.state_dict(), {"network": NETWORK})
    found = stores.network_of(store, card)
    x, t = torch.ones(2, 1, 8, 8), torch.tensor([10.0, 900.0])
    assert torch.equal(found(x, t), network(x, t)) and not found.training
    wider = card | {"network": NETWORK | {"width": 32}}
    with pytest.raises(ValueError, match="experts/0: the weights are not of the card's network"):
        stores.network_of(store, wider)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"_target_": "os.system", "command": "touch harm"}, "asks for os.system"),
        ({**NETWORK, "width": {"_target_": "os.getpid"}}, "asks for os.getpid"),
        ({**NETWORK, "width": [{"_target_": "src.run.train"}]}, "asks for src.run.train"),
        ({**NETWORK, "width": "${oc.env:HOME}"}, "no plain value"),
    ],
)
def test_a_card_has_nothing_built_but_networks_and_objectives(node, why):
    with pytest.raises(ValueError, match=why):
        stores.built(node)
    assert type(stores.built({"_target_": "src.objectives.Epsilon"})).__name__ == "Epsilon"


def test_a_pickle_is_never_loaded(tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    data = pickle.dumps(Harm())
    card = stores.publish(str(tmp_path), "router", 1, tensors(1.0), {})
    path = tmp_path / "router" / "000000000001.safetensors"
    path.write_bytes(data)
    forged = card | {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    with pytest.raises(ValueError, match="is no file of weights"):
        stores.load(str(tmp_path), forged)
    assert not (tmp_path / "harm").exists()


# The contract

MINE = dict(shape=(1, 32, 32), classes=10, normalisation="uint8 / 127.5 - 1", partition="abc")


def test_experts_of_one_contract_may_be_mixed_also_after_a_card_has_carried_it():
    mine = contract(**MINE)
    require_same(mine, json.loads(json.dumps(contract(**MINE))), "experts/3")
    assert len(mine["sha256"]) == 64


@pytest.mark.parametrize(
    ("other", "entry"),
    [
        (dict(shape=(3, 32, 32)), "shape = \\[3, 32, 32\\]"),
        (dict(classes=0), "classes = 0"),
        (dict(normalisation="uint8 / 255"), "normalisation = 'uint8 / 255'"),
        (dict(partition="abd"), "partition = 'abd'"),
        (dict(vae={"id": "x", "factor": 0.18215}), "vae = .*0.18215"),
    ],
)
def test_the_entry_that_differs_is_named(other, entry):
    mine, theirs = contract(**MINE), contract(**MINE | other)
    assert mine["sha256"] != theirs["sha256"]
    with pytest.raises(ValueError, match=f"^experts/3 cannot be mixed with the others: its contract says {entry}"):
        require_same(mine, theirs, "experts/3")


def test_another_path_or_a_forged_hash_is_told():
    mine = contract(**MINE)
    for key, value in {"path": "t = 0 at the noise", "time_scale": 1.0, "prediction": "noise"}.items():
        theirs = deepcopy(mine) | {key: value}
        with pytest.raises(ValueError, match=f"its contract says {key}"):
            require_same(mine, theirs, "experts/1")
    with pytest.raises(ValueError, match="hash of its contract"):
        require_same(mine, mine | {"sha256": "0" * 64}, "experts/1")
