"""Checkpoints that are written while training goes on, and disks that fail."""

import errno
import os
import random
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest
import torch
from conftest import TINY, compose_config, run_command, run_folder
from hydra.core.global_hydra import GlobalHydra

from src import checkpoint as canonical
from src.background import Writer, copied
from src.run import train

SAVING = [
    *TINY,
    "logger=[csv]",
    "callbacks=[budget,ema,metrics,checkpoint]",
    "batch=8",
    "schedule_kimg=0.064",
    "val_every_kimg=0.032",
    "data.val_batch=8",
    "+trainer.limit_val_batches=1",
    "callbacks.metrics.every_kimg=0.008",
    "callbacks.checkpoint.every_kimg=0.016",
    "callbacks.checkpoint.keep=9",
]


def trained(folder, *words):
    config = compose_config(folder, *SAVING, *words)
    run = run_folder()
    try:
        train(config)
    finally:
        GlobalHydra.instance().clear()
    return run


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def states(run) -> dict[str, dict]:
    read = {folder.name: canonical.read(folder) for folder in canonical.committed(run / "checkpoints")}
    return {name: {key: value for key, value in state.items() if key != "config"} for name, state in read.items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return states(trained(tmp_path_factory.mktemp("straight"), "callbacks.checkpoint.background=false"))


def test_a_slow_disk_gets_the_state_of_the_moment_and_training_does_not_wait(straight, tmp_path, monkeypatch):
    pending, sync = [], os.fsync

    def slow(descriptor):
        time.sleep(0.2)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    begin = Writer.begin

    def noted(writer, task):
        begin(writer, task)
        pending.append(writer._thread.is_alive())

    monkeypatch.setattr(Writer, "begin", noted)
    found = states(trained(tmp_path))
    assert list(found) == list(straight) and len(found) == 4 and same(found, straight)
    assert all(pending) and len(pending) == 4


def test_copies_do_not_follow_what_training_changes():
    weight = torch.ones(3)
    state = {"weights": {"a": weight}, "number": 3}
    kept = copied(state)
    weight.zero_()
    assert torch.equal(kept["weights"]["a"], torch.ones(3)) and kept["number"] == 3


def test_a_write_that_fails_is_told_and_the_next_one_is_tried(straight, tmp_path, monkeypatch, capsys):
    """A disk that is full for a while costs one checkpoint."""
    write, failed = canonical.write, []

    def full_once(folder, state, texts):
        if not failed:
            failed.append(folder.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, state, texts)

    monkeypatch.setattr(canonical, "write", full_once)
    found = states(trained(tmp_path))
    assert failed == ["000000000016"] and list(found) == list(straight)[1:]
    assert same(found["000000000064"], straight["000000000064"])
    assert "No space left on device" in capsys.readouterr().out


def mounted(folder, options: str) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("only root may mount a file system")


@contextmanager
def nearly_full(small):
    """A run's checkpoints, of 16 and 32 images, on a disk with room for four more pages."""
    older = canonical.committed(small)
    assert [folder.name for folder in older] == ["000000000016", "000000000032"]
    files = [1 + file.stat().st_size // 4096 for file in small.rglob("*")]
    kept = small.with_name("kept")
    shutil.move(small, kept)
    small.mkdir()
    mounted(small, f"size={4096 * (sum(files) + 4)}")
    try:
        shutil.copytree(kept, small, dirs_exist_ok=True)
        yield older
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_full_disk_costs_the_newest_ones_and_ends_the_run_at_its_end(tmp_path, capsys):
    """Every save fails from some moment on: training goes on to its end, and the run says why it is not finished."""
    run = trained(tmp_path, "total_kimg=0.032")
    with nearly_full(run / "checkpoints") as older:
        with pytest.raises(OSError, match=r"000000000064 could not be written .*No space left on device.*make room"):
            trained(tmp_path)
        said = capsys.readouterr().out
        assert "Continuing from checkpoint 000000000032" in said
        assert said.count("could not be written") == 2  # at 48, and at the end
        assert canonical.newest(older[-1].parent) == (older[-1], []) and not list(older[-1].parent.glob("*.tmp"))


@pytest.mark.slow
def test_a_full_disk_does_to_native_ones_of_two_processes_what_it_does_to_canonical_ones(tmp_path):
    words = [
        *SAVING,
        f"paths.runs={tmp_path}",
        "strategy=fsdp",
        "trainer.devices=2",
        "callbacks.checkpoint.native=true",
    ]
    assert run_command("train.py", *words, "total_kimg=0.032").returncode == 0
    with nearly_full(next(tmp_path.glob("*/checkpoints"))) as older:
        done = run_command("train.py", *words)
        assert done.returncode == 1
        assert "Continuing from checkpoint 000000000032" in done.stdout
        assert done.stdout.count("could not be written") == 2
        lines = [line for line in done.stderr.splitlines() if "make room" in line]
        assert lines and all("000000000064 could not be written" in line for line in lines)
        assert "Traceback" not in done.stderr
        assert canonical.newest(older[-1].parent) == (older[-1], []) and not list(older[-1].parent.glob("*.tmp"))


def test_a_folder_that_has_become_read_only_ends_the_run_in_a_sentence(tmp_path):
    run = trained(tmp_path, "total_kimg=0.032")
    places = run / "checkpoints"
    shutil.move(places, tmp_path / "kept")
    places.mkdir()
    mounted(places, "size=64m")
    try:
        shutil.copytree(tmp_path / "kept", places, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", places], check=True)
        with pytest.raises(OSError, match=r"could not be written .*Read-only file system"):
            trained(tmp_path)
        assert [folder.name for folder in canonical.committed(places)] == ["000000000016", "000000000032"]
    finally:
        subprocess.run(["umount", places], check=True)


def damaged(path, rng: random.Random, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif how == "bit":
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("how", "name", "times"), [("cut", "state.pt", 20), ("bit", "state.pt", 5), ("bit", "manifest.json", 5)]
    + [(how, name, 1) for how in ("empty", "missing") for name in ("state.pt", "manifest.json")],
)  # fmt: skip
def test_a_damaged_checkpoint_costs_its_images_and_nothing_else(straight, tmp_path, capsys, how, name, times):
    """Whatever became of the newest, the run goes on from the one before, to the same bits."""
    run, rng = trained(tmp_path, "total_kimg=0.032"), random.Random(0)
    newest = canonical.folder_of(run / "checkpoints", 32)
    whole = (newest / name).read_bytes()
    for _ in range(times):
        (newest / name).write_bytes(whole)
        damaged(newest / name, rng, how)
        found, rejected = canonical.newest(run / "checkpoints")
        assert found.name == "000000000016" and len(rejected) == 1 and "000000000032 is not used: " in rejected[0]
    capsys.readouterr()
    trained(tmp_path)
    said = capsys.readouterr().out
    assert said.count("checkpoint 000000000032 is not used: ") == 1
    assert "Continuing from checkpoint 000000000016" in said
    assert same(states(run)["000000000064"], straight["000000000064"])
