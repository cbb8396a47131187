"""Canonical checkpoints: committed whole or not at all, verified before use, and loaded by name."""

import errno
import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from src import checkpoint as canonical
from src.modules.networks.ddn_decoder import DDNDecoder


def a_state(images: int, numbers: int = 1000) -> dict:
    """Every kind of value that a checkpoint holds."""
    generator = torch.Generator().manual_seed(images)
    return {
        "weights": {"decoder.weight": torch.randn(numbers, generator=generator), "tally": torch.ones(2).double()},
        "optimizers": {"decoder": {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 2)}}},
        "callbacks": {"EMA": {"averages": {"decoder.weight": torch.arange(3.0)}}},
        "position": {"images": images, "batches": images // 8},
        "metrics": {"val/fd": 1.5},
        "config": {"name": "a", "callbacks": {"ema": None}, "numbers": [1, 2.5, True]},
    }


def written(checkpoints, *moments, numbers=1000):
    folders = [canonical.folder_of(checkpoints, images) for images in moments]
    for images, folder in zip(moments, folders, strict=True):
        canonical.write(folder, a_state(images, numbers), {"code.json": '{"commit": "é"}', "dirty.patch": ""})
    return folders


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a.dtype == b.dtype and torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 1 MiB, where root may mount one; else `open` in the module fails after as many bytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode == 0:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "open", _opening_on_a_full_disk(2**20), raising=False)
        yield folder


def _opening_on_a_full_disk(room: int):
    def opened(path, mode="r", *rest, **options):
        file = open(path, mode, *rest, **options)  # noqa: SIM115
        if "w" not in mode:
            return file

        def write(data):
            nonlocal room
            room -= len(data)
            if room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return type(file).write(file, data)

        class Small(SimpleNamespace):
            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

        return Small(write=write, flush=file.flush, fileno=file.fileno)

    return opened


def test_what_is_read_is_what_was_written(tmp_path):
    (folder,) = written(tmp_path / "checkpoints", 26112)
    assert folder.name == "000000026112"
    assert canonical.fault(folder) is None
    assert same(canonical.read(folder), a_state(26112))
    assert same(torch.load(folder / "state.pt", weights_only=True), a_state(26112))
    assert json.loads((folder / "code.json").read_text()) == {"commit": "é"}
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_manifest_names_every_file_with_size_and_hash(tmp_path):
    (folder,) = written(tmp_path, 8)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.keys() == {"state.pt", "code.json", "dirty.patch"}
    for name, entry in manifest.items():
        assert entry["size"] == (folder / name).stat().st_size
        found = subprocess.run(["sha256sum", folder / name], capture_output=True, text=True, check=True).stdout.split()
        assert entry["sha256"] == found[0]


def test_the_newest_is_the_one_with_most_images(tmp_path):
    folders = written(tmp_path, 8, 1016, 24)
    assert canonical.committed(tmp_path) == [folders[0], folders[2], folders[1]]
    assert canonical.newest(tmp_path) == (folders[1], [])


def test_there_may_be_none(tmp_path):
    assert canonical.newest(tmp_path / "nowhere") == (None, [])
    (folder,) = written(tmp_path, 8)
    (folder / "state.pt").unlink()
    found, rejected = canonical.newest(tmp_path)
    assert found is None and len(rejected) == 1


def truncate(folder):
    with open(folder / "state.pt", "r+b") as file:
        file.truncate((folder / "state.pt").stat().st_size - 1)


def flip_a_byte(folder):
    content = bytearray((folder / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "state.pt").write_bytes(content)


def flip_a_byte_of_the_stamp(folder):
    (folder / "code.json").write_text('{"commit": "è"}')


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()


def cut_the_manifest(folder):
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:40])


def lose_the_state(folder):
    (folder / "state.pt").unlink()


def empty_the_manifest(folder):
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncate, "state.pt has .* bytes instead of"),
        (flip_a_byte, "state.pt does not have the hash of its manifest"),
        (flip_a_byte_of_the_stamp, "code.json does not have the hash of its manifest"),
        (lose_the_manifest, "manifest.json.*No such file"),
        (cut_the_manifest, "manifest.json"),
        (lose_the_state, "state.pt"),
        (empty_the_manifest, "manifest.json does not name state.pt"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_one_line(tmp_path, damage, why):
    older, newer = written(tmp_path, 8, 16)
    damage(newer)
    found, rejected = canonical.newest(tmp_path)
    assert found == older
    (line,) = rejected
    assert "000000000016" in line and "\n" not in line
    assert re.search(why, line)
    with pytest.raises(ValueError, match=why):
        canonical.read(newer)


def test_a_left_over_of_a_killed_writer_is_no_checkpoint(tmp_path):
    older, newer = written(tmp_path, 8, 16)
    newer.rename(newer.with_suffix(".tmp"))
    assert canonical.newest(tmp_path) == (older, [])
    written(tmp_path, 16)  # the next one of that moment takes its place
    assert canonical.newest(tmp_path) == (newer, [])
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("room_for_state", [False, True])
def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(full_disk, room_for_state):
    (older,) = written(full_disk, 8)
    texts = {"dirty.patch": "x" * 2**21} if room_for_state else {}
    with pytest.raises(OSError, match=r"000000000016.*No space left on device"):
        canonical.write(canonical.folder_of(full_disk, 16), a_state(16, 1000 if room_for_state else 2**19), texts)
    assert list(full_disk.iterdir()) == [older]
    assert canonical.newest(full_disk) == (older, [])
    assert same(canonical.read(older), a_state(8))


@pytest.mark.parametrize("moment", [16, 8])
@pytest.mark.parametrize("call", [*(("fsync", n) for n in range(6)), ("rename", 0)])
def test_a_process_that_dies_while_it_saves_leaves_something_to_continue_from(tmp_path, monkeypatch, call, moment):
    """Also where the moment that it saves (8) is the only one that had been saved before (and may not be touched)."""
    written(tmp_path, 8)
    name, number = call
    real, seen = getattr(os, name), []

    def dying(*arguments):
        seen.append(arguments)
        if len(seen) == number + 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(canonical.os, name, dying)
    with suppress(KeyboardInterrupt) if moment == 8 else pytest.raises(KeyboardInterrupt):
        canonical.write(canonical.folder_of(tmp_path, moment), a_state(moment), {"a": "", "b": ""})
    monkeypatch.undo()
    found, rejected = canonical.newest(tmp_path)
    assert found is not None and rejected == []
    assert same(canonical.read(found), a_state(int(found.name)))


def test_the_best_is_named_and_replaced_whole(tmp_path):
    assert canonical.read_best(tmp_path) is None
    canonical.write_best(tmp_path, {"checkpoint": "000000000008", "value": 3.5})
    canonical.write_best(tmp_path, {"checkpoint": "000000000016", "value": 2.5})
    assert canonical.read_best(tmp_path) == {"checkpoint": "000000000016", "value": 2.5}
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]
    for damaged in ("", "{", "[]", "null", '{"checkpoint": 3', '{"value": 3}'):
        (tmp_path / "best.json").write_text(damaged)
        assert canonical.read_best(tmp_path) is None


def test_averages_take_the_place_of_weights(tmp_path):
    state = a_state(8)
    assert torch.equal(canonical.averaged(state)["decoder.weight"], torch.arange(3.0))
    assert torch.equal(canonical.averaged(state)["tally"], state["weights"]["tally"])
    state["callbacks"] = {}
    assert canonical.averaged(state) == state["weights"]


# Weights and optimizer state


def decoder(width=8, leaves=4, **options):
    torch.manual_seed(0)
    return DDNDecoder(1, 4, [1, 1, 1], [width] * 3, [leaves] * 3, **options)


def test_weights_round_trip(tmp_path):
    network = decoder()
    canonical.write(canonical.folder_of(tmp_path, 1), {"weights": network.state_dict()}, {})
    torch.manual_seed(1)
    other = DDNDecoder(1, 4, [1, 1, 1], [8] * 3, [4] * 3)
    canonical.load_weights(other, canonical.read(canonical.folder_of(tmp_path, 1))["weights"], "here")
    assert same(dict(other.state_dict()), dict(network.state_dict()))


def test_weights_of_another_architecture_are_refused_by_the_first_three_names_that_differ():
    network, before = decoder(), {k: v.clone() for k, v in decoder().state_dict().items()}
    with pytest.raises(ValueError) as refused:
        canonical.load_weights(network, decoder(leaves=5).state_dict(), "checkpoint runs/a")
    assert str(refused.value) == (
        "checkpoint runs/a is of another architecture: 3 names or shapes differ, first "
        "heads.0.weight (here (4, 1, 4), there (5, 1, 4)), heads.1.weight (here (4, 1, 4), there (5, 1, 4)), "
        "heads.2.weight (here (4, 1, 4), there (5, 1, 4))"
    )
    assert same(dict(network.state_dict()), before)


def test_missing_and_surplus_weights_are_refused_with_their_names():
    with_labels = decoder(classes=3).state_dict()
    with pytest.raises(ValueError, match=r"3 names .* labels\.0\.weight \(here None, there \(3, 8\)\)"):
        canonical.load_weights(decoder(), with_labels, "it")
    with pytest.raises(ValueError, match=r"labels\.0\.weight \(here \(3, 8\), there None\)"):
        canonical.load_weights(decoder(classes=3), decoder().state_dict(), "it")


def test_many_differences_are_counted_and_three_are_shown():
    with pytest.raises(ValueError) as refused:
        canonical.load_weights(decoder(), decoder(width=16).state_dict(), "it")
    assert str(refused.value).count("(here") == 3
    assert f"{len(decoder().state_dict())} names or shapes differ" in str(refused.value)


def a_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))


def steps(network, optimizer, count, first=0):
    for number in range(first, first + count):
        torch.manual_seed(number)
        optimizer.zero_grad()
        network(torch.randn(7, 3)).square().mean().backward()
        optimizer.step()


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_by_name_continues_to_the_same_bits(tmp_path, kind):
    network = a_network()
    optimizer = OPTIMIZERS[kind](network.parameters())
    steps(network, optimizer, 3)
    folder = canonical.folder_of(tmp_path, 1)
    saved = {"weights": network.state_dict(), "optimizers": canonical.optimizer_state(network, optimizer)}
    assert saved["optimizers"].keys() == {"0.weight", "0.bias", "1.weight"}
    canonical.write(folder, saved, {})
    steps(network, optimizer, 3, first=3)

    again = a_network()
    restored = OPTIMIZERS[kind](again.parameters())
    state = canonical.read(folder)
    canonical.load_weights(again, state["weights"], "it")
    canonical.load_optimizer(again, restored, state["optimizers"])
    assert same(canonical.optimizer_state(again, restored), state["optimizers"])
    steps(again, restored, 3, first=3)
    assert same(dict(again.state_dict()), dict(network.state_dict()))
    assert same(canonical.optimizer_state(again, restored), canonical.optimizer_state(network, optimizer))


def test_optimizer_state_does_not_depend_on_the_order_of_parameters_or_groups():
    network = a_network()
    optimizer = torch.optim.Adam(network.parameters())
    steps(network, optimizer, 2)
    state = canonical.optimizer_state(network, optimizer)
    again = a_network()
    groups = [{"params": [again[1].weight]}, {"params": [again[0].bias, again[0].weight]}]
    restored = torch.optim.Adam(groups)
    canonical.load_optimizer(again, restored, state)
    assert torch.equal(restored.state[again[0].bias]["exp_avg"], optimizer.state[network[0].bias]["exp_avg"])
    assert same(canonical.optimizer_state(again, restored), state)


def test_optimizer_state_of_another_network_is_refused_by_name():
    network = a_network()
    optimizer = torch.optim.Adam(network.parameters())
    steps(network, optimizer, 1)
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"another network.*1\.bias"):
        canonical.load_optimizer(
            other, torch.optim.Adam(other.parameters()), canonical.optimizer_state(network, optimizer)
        )


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_the_step_count_goes_where_the_optimizer_wants_it(fused, device):
    """A fused optimizer counts on the parameters' device, others on the CPU; `meta` stands for any accelerator."""
    network = a_network()
    optimizer = torch.optim.Adam(network.parameters())
    steps(network, optimizer, 1)
    state = canonical.optimizer_state(network, optimizer)
    there = a_network().to("meta")
    restored = torch.optim.Adam(there.parameters(), fused=fused)
    canonical.load_optimizer(there, restored, state)
    kept = restored.state[there[0].weight]
    assert kept["exp_avg"].device.type == "meta"
    assert kept["step"].device.type == device


# A run's own checkpoints


def test_a_runs_checkpoint_is_plain_and_says_everything(tiny_run):
    folder, rejected = canonical.newest(tiny_run / "checkpoints")
    assert folder.name == "000000000064" and rejected == []
    state = torch.load(folder / "state.pt", weights_only=True)
    assert state.keys() == {"weights", "optimizers", "callbacks", "position", "metrics", "config"}
    assert state["position"] == {"images": 64, "batches": 8, "data_offset": 0, "lr_scale": 1.0}
    assert state["config"]["name"] == tiny_run.name and state["config"]["model"]["decoder"]["leaves"] == [4] * 6
    assert "hydra" not in state["config"]
    moments = state["optimizers"]["decoder"]
    assert {f"decoder.{name}" for name in moments} == {n for n in state["weights"] if n != "tally"}
    assert all(float(kept["step"]) == 8 for kept in moments.values())
    stamp = json.loads((folder / "code.json").read_text())
    assert stamp.keys() >= {"commit", "overrides", "python", "packages"}
    assert any(package.startswith("torch==") for package in stamp["packages"])


def test_only_as_many_of_the_newest_stay_as_were_asked_for(tiny_run):
    assert [p.name for p in canonical.committed(tiny_run / "checkpoints")] == ["000000000048", "000000000064"]
    assert not list(tiny_run.rglob("*.tmp"))


def test_a_runs_damaged_checkpoint_is_passed_over_by_the_commands(tiny_run, tmp_path, capsys):
    from src.results import load

    copy = shutil.copytree(tiny_run, tmp_path / "run")
    truncate(copy / "checkpoints" / "000000000064")
    _, state, folder = load(str(copy), "newest")
    assert folder.name == "000000000048" and state["position"]["images"] == 48
    assert capsys.readouterr().out.count("000000000064") == 1


def test_models_are_loaded_with_their_averages(tiny_run):
    from src.results import load

    model, state, _ = load(str(tiny_run), "newest")
    averages = state["callbacks"]["EMA"]["averages"]
    assert len(averages) > 0
    for name, value in averages.items():
        assert torch.equal(model.get_parameter(name), value)
    differ = [name for name, value in averages.items() if not torch.equal(value, state["weights"][name])]
    assert len(differ) > len(averages) / 2


def test_an_unknown_checkpoint_names_those_that_exist(tiny_run):
    from src.results import load

    with pytest.raises(ValueError, match="no checkpoint '7'; there is newest, best, 000000000048, 000000000064"):
        load(str(tiny_run), "7")
    with pytest.raises(ValueError, match="no run folder"):
        load(str(tiny_run / "none"), "newest")
