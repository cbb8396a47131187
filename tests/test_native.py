"""Native checkpoints: written part by part, committed whole or not at all, and made canonical without a difference."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from test_checkpoint import same
from test_strategies import launch, needs_deepspeed, run_of, tensors

from src import checkpoint as canonical
from src.callbacks.checkpoint import Checkpoint
from src.engine import WHOLE
from src.native import consolidate, read_parts, write_parts
from src.results import load, prepare
from src.sharding import Piece

FORMAT = "an engine on 2 processes"
WHOLE_MOMENT = torch.arange(12.0).view(3, 4)


def a_state(images: int) -> dict:
    """As canonical checkpoints hold it: tensors that will be in parts, and what will not."""
    return {
        "weights": {
            "net.weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(images)),
            "tally": torch.ones(2),
        },
        "optimizers": {"net": {"weight": {"step": torch.tensor(3.0), "exp_avg": WHOLE_MOMENT * images}}},
        "callbacks": {"EMA": {"averages": {"net.weight": torch.ones(3, 4).double()}}},
    }


def cut(tree, names=("net.weight", "exp_avg")):
    """The same, its tensors of these names cut flat."""
    if isinstance(tree, dict):
        return {k: Piece(v.flatten(), 0, v.shape) if k in names else cut(v, names) for k, v in tree.items()}
    return tree


def write_native(checkpoints, images: int) -> None:
    folder = canonical.folder_of(checkpoints, images)
    canonical.begin(folder)
    state = write_parts(folder, cut(a_state(images)), FORMAT)
    canonical.write(folder, state | {"position": {"images": images}}, {"code.json": "{}"})


def consolidated(folder) -> dict:
    consolidate(folder)
    return canonical.read(folder)


def killed(number: int, calls: tuple[str, ...], work) -> bool:
    """Whether `work`, in a process of its own, was killed with SIGKILL before its `number`-th of these calls of os."""

    def dying():
        made = []

        def counting(real):
            def counted(*arguments, **options):
                if len(made) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                made.append(real)
                return real(*arguments, **options)

            return counted

        for name in calls:
            setattr(os, name, counting(getattr(os, name)))
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=dying)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_the_manifest_names_every_file_and_small_things_lie_beside_the_parts(tmp_path):
    write_native(tmp_path, 8)
    folder = canonical.folder_of(tmp_path, 8)
    entries = json.loads((folder / "manifest.json").read_text())
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert entries.keys() == files - {"manifest.json"}
    assert files == {"manifest.json", "code.json", "native/state.pt", "native/.metadata", "native/__0_0.distcp"}
    assert canonical.newest(tmp_path) == (folder, [])
    state = canonical.state_of(folder, FORMAT)
    assert state["weights"]["net.weight"].is_meta and state["weights"]["net.weight"].shape == (3, 4)
    assert torch.equal(state["weights"]["tally"], torch.ones(2))


@pytest.mark.parametrize("name", ["native/__0_0.distcp", "native/.metadata", "native/state.pt"])
def test_a_damaged_part_is_noticed(tmp_path, name):
    write_native(tmp_path, 8)
    path = canonical.folder_of(tmp_path, 8) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found, (line,) = canonical.newest(tmp_path)
    assert found is None and f"{name} does not have the hash" in line
    with pytest.raises(ValueError, match="does not have the hash"):
        consolidate(path.parents[1])


def test_parts_are_read_into_what_is_there(tmp_path):
    write_native(tmp_path, 8)
    folder, now = canonical.folder_of(tmp_path, 8), cut(a_state(16))
    now["callbacks"] = {"Other": {"average": Piece(torch.full((2,), 7.0), 0, torch.Size([2]))}}  # not saved: as it is
    read_parts(folder, canonical.state_of(folder, FORMAT), now)
    assert torch.equal(now["weights"]["net.weight"].numbers, a_state(8)["weights"]["net.weight"].flatten())
    assert torch.equal(now["optimizers"]["net"]["weight"]["exp_avg"].numbers, WHOLE_MOMENT.flatten() * 8)
    assert now["callbacks"]["Other"]["average"].numbers.tolist() == [7, 7]


def test_consolidated_it_is_the_canonical_checkpoint(tmp_path):
    write_native(tmp_path / "native", 8)
    folder = canonical.folder_of(tmp_path / "native", 8)
    assert consolidate(folder)
    assert same(canonical.read(folder), a_state(8) | {"position": {"images": 8}})
    assert {path.name for path in folder.iterdir()} == {"state.pt", "code.json", "manifest.json"}
    assert canonical.fault(folder) is None
    assert not consolidate(folder)


@pytest.mark.parametrize("number", range(11))
def test_a_process_that_is_killed_while_it_saves_leaves_a_checkpoint(tmp_path, number):
    write_native(tmp_path, 8)
    died = killed(number, ("fsync", "rename"), lambda: write_native(tmp_path, 16))
    assert died == (number < 10), "the last number is that of all calls"
    found, rejected = canonical.newest(tmp_path)
    images = 8 if number < 9 else 16  # after the rename only the folder above is synchronised
    assert (found.name, rejected) == (f"{images:012d}", [])
    assert same(consolidated(found), a_state(images) | {"position": {"images": images}})
    write_native(tmp_path, 16)  # and can be written over what was left
    assert canonical.newest(tmp_path)[0].name == "000000000016"


@pytest.mark.parametrize("number", range(10))
def test_a_process_that_is_killed_while_it_consolidates_leaves_the_checkpoint(tmp_path, number):
    write_native(tmp_path, 8)
    folder = canonical.folder_of(tmp_path, 8)
    died = killed(number, ("fsync", "replace", "unlink", "rmdir"), lambda: consolidate(folder))
    assert died == (number < 9), "the last number is that of all calls"
    assert canonical.fault(folder) is None
    assert same(consolidated(folder), a_state(8) | {"position": {"images": 8}})
    assert {path.name for path in folder.iterdir()} == {"state.pt", "code.json", "manifest.json"}


def test_a_disk_that_is_full_leaves_the_older_one(tmp_path):
    write_native(tmp_path, 8)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match=r"000000000016 could not be written \(.*File too large.*older ones are unt"):
            write_native(tmp_path, 16)
        with pytest.raises(OSError, match=r"the canonical state of .* could not be written"):
            consolidate(canonical.folder_of(tmp_path, 8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_cannot_read_a_native_checkpoint_says_what_to_do(tmp_path, composed):
    write_native(tmp_path / "a" / "checkpoints", 8)
    said = (
        rf"checkpoint .*000000000008 is in the native format of {FORMAT}; make it canonical first: python prepare.py "
    )
    said += rf"task=consolidate run={tmp_path / 'a'} checkpoint=000000000008$"
    with pytest.raises(ValueError, match=said):
        load(str(tmp_path / "a"), "newest")
    for reader in (None, "fsdp"):
        with pytest.raises(ValueError, match=said):
            canonical.state_of(tmp_path / "a" / "checkpoints" / "000000000008", reader)
    with pytest.raises(ValueError, match="task=wash does not exist; there is export and consolidate"):
        prepare(composed("task=wash", command="prepare"))
    with FileLock(tmp_path / "a" / "lock"), pytest.raises(ValueError, match="another process is writing to"):
        prepare(composed("task=consolidate", f"run={tmp_path / 'a'}", command="prepare"))


def test_an_engine_without_parts_refuses_to_write_them():
    trainer = SimpleNamespace(strategy=SimpleNamespace(engine=WHOLE))
    with pytest.raises(ValueError, match=r"native=true is for engines that keep tensors in parts .* set it to false"):
        Checkpoint("a", 1, native=True).setup(trainer, None, "fit")


# Two processes

MIDDLE, LAST = "000000000016", "000000000024"
EVERY = "callbacks.checkpoint.every_kimg=0.016"
NATIVE = f"{EVERY},callbacks.checkpoint.native=true"
DOUBLE, SINGLE = [("ddgan", "fsdp"), ("ddn", "fsdp")], [("expert", "deepspeed_zero3"), ("ddn", "deepspeed_zero1")]
RUNS = [pytest.param(m, s, marks=[needs_deepspeed] if (m, s) in SINGLE else []) for m, s in DOUBLE + SINGLE]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """both(strategy): canonical runs, and native ones that were interrupted in the middle and repeated."""
    kept = {}

    def run(strategy):
        group = SINGLE if strategy.startswith("deepspeed") else DOUBLE
        if group[0] not in kept:
            folder = kept[group[0]] = tmp_path_factory.mktemp("both")
            ends = (f"0.024,{EVERY}", f"0.016/native,{NATIVE}", f"0.024/native,{NATIVE}")
            launch(2, strategy, folder, [f"{m}/{s}/4/{end}" for m, s in group for end in ends])
            for model, strategy in group:
                native = native_of(folder, model, strategy)
                shutil.copytree(native, native.with_name("as_written"))
        return kept[group[0]]

    return run


def native_of(folder, model, strategy):
    return folder / f"{model}-{strategy}-4-native" / "runs" / model


@pytest.mark.slow
@pytest.mark.parametrize("model, strategy", RUNS)
def test_interrupted_and_consolidated_is_what_a_canonical_run_saves(model, strategy, both):
    """To the bit: in the middle, where it was interrupted, and at the end, and everything that a checkpoint holds."""
    folder = both(strategy)
    for moment in (MIDDLE, LAST):
        native = native_of(folder, model, strategy) / "checkpoints" / moment
        assert len(list((native / "native").glob("__*.distcp"))) == 2
        consolidate(native)
        ours = canonical.read(native)
        theirs = canonical.read(run_of(folder, model, strategy, 4) / "checkpoints" / moment)
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"config"}:
            assert same(ours[key], theirs[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("model, strategy", RUNS)
def test_what_is_in_parts_is_written_in_parts(model, strategy, both):
    """Under ZeRO 1 that is the optimizer's state; under ZeRO 3 and FSDP everything but what a network keeps whole."""
    folder = both(strategy)
    native = native_of(folder, model, strategy).with_name("as_written") / "checkpoints" / LAST
    state = torch.load(native / "native" / "state.pt", weights_only=True)
    there = canonical.read(run_of(folder, model, strategy, 4) / "checkpoints" / LAST)
    whole = {name for name, value in state["weights"].items() if not value.is_meta and value.dim()}
    parameters = {f"{net}.{name}" for net, found in there["optimizers"].items() for name in found}
    heads = {name for name in parameters if ".heads." in name}
    assert whole & parameters == (parameters if strategy == "deepspeed_zero1" else heads)
    moments = {f"{net}.{name}": m["exp_avg"] for net, kept in state["optimizers"].items() for name, m in kept.items()}
    assert {name for name, value in moments.items() if not value.is_meta} == heads
    averages = state["callbacks"]["EMA"]["averages"]
    assert all(value.is_meta != (name in whole) for name, value in averages.items())


@pytest.mark.slow
def test_one_process_goes_on_with_it_by_resharding_or_consolidated(both, tmp_path, composed, capsys):
    folder, started = both("fsdp"), {}
    for strategy, name in (("fsdp", "ddgan-fsdp-4-native"), ("single", "ddgan-single-4")):
        started[strategy] = tmp_path / name / "runs" / "ddgan"
        (started[strategy] / "checkpoints").mkdir(parents=True)
        written = native_of(folder, "ddgan", "fsdp").with_name("as_written") / "checkpoints" / MIDDLE
        shutil.copytree(written, started[strategy] / "checkpoints" / MIDDLE)
    prepare(composed("task=consolidate", f"run={started['single']}", command="prepare"))
    assert capsys.readouterr().out.endswith(f"checkpoints/{MIDDLE} is canonical now\n")
    launch(1, "fsdp", tmp_path, [f"ddgan/fsdp/4/0.024/native,{NATIVE}", f"ddgan/single/4/0.024,{EVERY}"])
    consolidate(started["fsdp"] / "checkpoints" / LAST)
    theirs = tensors(run_of(folder, "ddgan", "fsdp", 4), LAST)
    for run in started.values():
        ours = tensors(run, LAST)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12)


@needs_deepspeed
def test_zero_reads_only_what_as_many_processes_wrote():
    from src.strategies.deepspeed import _Zero

    formats = {_Zero(SimpleNamespace(stage=stage, world_size=world)).native for stage in (1, 2, 3) for world in (1, 2)}
    assert len(formats) == 6 and "deepspeed_zero3 on 2 processes" in formats
    assert _Zero(SimpleNamespace(stage=0, world_size=2)).native is None
