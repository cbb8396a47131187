"""Experts of a decentralised model: each alone with its images, published as it is scored, killed and continued."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from conftest import compose_config, run_folder, start_command
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from test_sweeps import is_alive, processes, wait_for

from src import checkpoint as canonical
from src import store as stores
from src.callbacks.publish import Publish
from src.contract import contract_of
from src.datamodules.base import ImageData
from src.modules.base import Module
from src.modules.expert import Expert
from src.noise import Noise
from src.partitioning import partition
from src.protocols import Batch
from src.report import read_log
from src.run import build_model, train

TINY = [
    "experiment=paris_expert",
    "data=fashion10k",
    "logger=[csv]",
    "callbacks=[budget,ema,metrics,clusters,publish,checkpoint]",
    "model.network.width=16",
    "model.network.depth=1",
    "model.network.heads=2",
    "model.network.patch=8",
    "model.steps=1",
    "batch=8",
    "schedule_kimg=0.064",
    "val_every_kimg=0.032",
    "data.val_batch=8",
    "callbacks.metrics.every_kimg=0.016",
    "callbacks.checkpoint.every_kimg=0.016",
]


@pytest.fixture(scope="module")
def parted(tmp_path_factory) -> Path:
    """A store with a partition of Fashion-MNIST into two clusters."""
    store = tmp_path_factory.mktemp("parted")
    words = ["data=fashion10k", "clusters=2", "fine=8", f"store={store}", f"paths.cache={store}/cache"]
    partition(compose_config(store, *words, command="prepare"))
    return store


@pytest.fixture
def store(parted, tmp_path) -> Path:
    """A copy of it, for one test."""
    return Path(shutil.copytree(parted, tmp_path / "store"))


def expert(k, folder, store, *more):
    """The configuration of expert k."""
    return compose_config(folder, *TINY, f"expert={k}", f"store={store}", *more)


def published(store, k):
    return stores.newest(str(store), f"experts/{k}")[0]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Heard:
    """What this process opens and connects to while `listening`; audit hooks stay for good, so there is one."""

    listening, opened, network = False, [], []

    @classmethod
    def hook(cls, event, args):
        if cls.listening and event == "open" and isinstance(args[0], str):
            cls.opened.append(args[0])
        elif cls.listening and event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
            cls.network.append((event, args))


sys.addaudithook(Heard.hook)


def test_an_expert_joins_no_process_group_and_opens_no_file_of_another(store, tmp_path, monkeypatch):
    train(expert(1, tmp_path, store))
    other = run_folder()
    alone, learn = [], Module.training_step

    def step(module, *args):
        alone.append(not torch.distributed.is_initialized() and module.trainer.world_size == 1)
        return learn(module, *args)

    monkeypatch.setattr(Module, "training_step", step)
    before = files(store / "experts" / "1") | files(other)
    config = expert(0, tmp_path, store)
    Heard.listening, Heard.opened, Heard.network = True, [], []
    try:
        train(config)
    finally:
        Heard.listening = False
    assert alone == [True] * 8
    assert not torch.distributed.is_initialized() and Heard.network == []
    opened = {os.path.abspath(path) for path in Heard.opened}
    assert any(path.startswith(str(store / "experts" / "0")) for path in opened)  # it would have been heard
    assert str(store / "partition.json") in opened
    assert not [path for path in opened if path.startswith((str(store / "experts" / "1"), str(other)))]
    assert files(store / "experts" / "1") | files(other) == before


def test_what_is_published_is_the_average_with_a_card_that_says_what_it_is(store, tmp_path):
    config = expert(1, tmp_path, store)
    train(config)
    card = published(store, 1)
    checkpoint, _ = canonical.newest(run_folder() / "checkpoints")
    state = canonical.read(checkpoint)
    averages = state["callbacks"]["EMA"]["averages"]
    loaded = stores.load(str(store), card)
    assert loaded.keys() == {name.removeprefix("network.") for name in averages}
    assert all(torch.equal(loaded[name.removeprefix("network.")], value) for name, value in averages.items())
    assert not all(torch.equal(value, state["weights"][name]) for name, value in averages.items())
    sizes = json.loads((store / "partition.json").read_text())["sets"][0]["sizes"]
    assert (card["k"], card["n_k"], card["images"], card["step"]) == (1, sizes[1], 64, 8)
    assert (card["run"], card["precision"]) == (config.name, config.trainer.precision)
    assert card["ema"]["halflife_kimg"] == 440
    assert card["contract"]["partition"] == json.loads((store / "partition.json").read_text())["base"]
    names = sorted(p.name for p in (store / "experts" / "1").iterdir())
    assert names == [f"{n:012d}{end}" for n in (32, 64) for end in (".json", ".safetensors")]

    model = build_model(config)
    canonical.load_weights(model, canonical.averaged(state), "here")
    model.network = stores.network_of(str(store), card)
    model.objective = stores.built(card["objective"])
    labels = torch.tensor([0, 3])
    drawn = model.sample(Noise(0, torch.arange(2)), labels)
    canonical.load_weights(model, canonical.averaged(state), "here")
    assert torch.equal(drawn, model.sample(Noise(0, torch.arange(2)), labels))


def test_the_cluster_is_in_the_name_and_the_store_is_not(parted, tmp_path):
    names = [expert(k, tmp_path, parted).name for k in (0, 1)]
    assert names[0].startswith("expert-k0-fashion10k-single-s0-") and names[1].startswith("expert-k1-")
    assert names[0].rpartition("-")[2] != names[1].rpartition("-")[2]
    elsewhere = shutil.copytree(parted, tmp_path / "elsewhere")
    assert expert(0, tmp_path, elsewhere).name == names[0]


def test_errors_are_told_by_cluster_of_all_held_out_images(store, tmp_path):
    config = expert(0, tmp_path, store)
    train(config)
    log = read_log(run_folder())
    assert [log[f"val/error_cluster/0{k}"][-1][0] for k in (0, 1)] == [0.064, 0.064]
    assert log["val/error"] == log["val/error_cluster/00"] != log["val/error_cluster/01"]
    data: ImageData = instantiate(config.data)
    data.setup()
    model: Expert = build_model(config).eval()
    weights = stores.load(str(store), published(store, 0))
    model.network.load_state_dict(weights)
    everything = data.all_held_out
    assert len(data.held_out) < len(everything)
    part = everything[range(len(everything))]
    with torch.no_grad():
        errors = model.error(Batch(data.as_seen(part.images), part.labels, 0))
    for k in (0, 1):
        expected = errors[part.clusters == k].double().mean().item()
        assert log[f"val/error_cluster/0{k}"][-1][1] == pytest.approx(expected, rel=1e-4)


# Going on from a published expert


def test_an_expert_goes_on_from_a_published_one_and_tells_what_it_gained(store, tmp_path, capsys):
    train(expert(0, tmp_path, store))
    first = published(store, 0)
    log = read_log(run_folder())
    capsys.readouterr()
    more = [f"start={store}/experts/0", "data.seed=5", "model.optimizer.lr=1e-2"]
    config = expert(0, tmp_path, store, *more)
    train(config)
    said = capsys.readouterr().out
    assert f"Begins with {store}/experts/0 after 64 images" in said
    told = [line.split() for line in said.splitlines() if line.startswith("  cluster ")]
    for k, line in enumerate(told):
        assert line[:2] == ["cluster", str(k)] and line[3] == "->"
        assert float(line[2]) == pytest.approx(log[f"val/error_cluster/0{k}"][-1][1], abs=1e-4)  # where the other ended
        assert line[2] != line[4]
    assert ["(trained on)" in " ".join(line) for line in told] == [True, False]
    card = published(store, 0)
    assert (first["images"], card["images"], card["step"]) == (64, 128, 8)
    assert card["run"] == config.name != first["run"]


def test_another_runs_network_is_not_overwritten(store, tmp_path):
    train(expert(0, tmp_path, store))
    before = files(store)
    with pytest.raises(ValueError, match=r"experts/0 holds the network of another run, .* go on from it with start="):
        train(expert(0, tmp_path, store, "seed=1"))
    assert files(store) == before


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        (["start=STORE/experts/7"], "STORE/experts/7 has nothing published that can be used"),
        (["start=STORE/experts/0", "model.network.width=24"], "is of another architecture"),
        (["start=STORE/experts/0", "model.objective._target_=src.objectives.Epsilon"], "set model.objective="),
    ],
)
def test_a_start_that_does_not_fit_is_told(store, tmp_path, more, fix):
    model = build_model(expert(0, tmp_path, store))
    objective = {"_target_": "src.objectives.Velocity"}
    stores.publish(str(store), "experts/0", 8, model.network.state_dict(), {"objective": objective})
    with pytest.raises(ValueError) as told:
        train(expert(0, tmp_path, store, *(word.replace("STORE", str(store)) for word in more)))
    assert fix.replace("STORE", str(store)) in str(told.value)


def test_a_store_of_another_contract_is_refused(store, tmp_path):
    config = expert(0, tmp_path, store)
    train(config)
    card = published(store, 0)
    card["contract"] |= {"normalisation": "uint8 / 255"}
    path = store / "experts" / "0" / f"{card['images']:012d}.json"
    path.write_text(json.dumps(card))
    shutil.rmtree(run_folder())
    with pytest.raises(ValueError, match="its contract says normalisation = 'uint8 / 255'"):
        train(expert(0, tmp_path, store))


def test_what_cannot_be_published_is_refused():
    with pytest.raises(ValueError, match="the newest has to stay"):
        Publish("store", "router", 1, 1, keep=0)


def test_data_without_a_partition_has_a_contract_too(tmp_path):
    config = compose_config(tmp_path, "model=expert", "data=fashion10k")
    data = instantiate(config.data)
    data.setup()
    found = contract_of(data)
    assert (found["partition"], found["shape"], found["classes"], found["vae"]) == (None, [1, 32, 32], 10, None)


# Recipes


def test_the_recipes_are_those_of_the_brief_and_of_a_cpu(parted, tmp_path):
    small = compose_config(tmp_path, "experiment=paris_expert", f"store={parted}")
    assert (small.data.cluster, small.callbacks.publish.kind, small.trainer.devices) == (0, "experts/0", 1)
    assert HydraConfig.get().runtime.choices.strategy == "single"
    factor = build_ema(small).factor(10**9, small.batch)
    assert factor == pytest.approx(0.9999, abs=1e-6)
    brief = compose_config(tmp_path, "experiment=paris_expert_brief", f"store={parted}")
    assert (brief.batch, brief.micro_batch, brief.model.optimizer.lr) == (256, 128, 1e-4)
    assert build_ema(brief).factor(10**6, brief.batch) == 0.9999
    with torch.device("meta"):
        model = build_model(brief)
    assert 450e6 < sum(p.numel() for p in model.parameters()) < 460e6  # DiT-XL/2 with adaLN-single


def build_ema(config):
    return instantiate(config.callbacks.ema)


# A sweep, one job of which is killed


@pytest.mark.slow
def test_a_killed_expert_goes_on_to_the_bit_and_the_others_never_notice(parted, tmp_path):
    """Two experts at once: one is killed in its middle; the same sweep again; against experts trained alone."""
    long = ["schedule_kimg=2.4", "val_every_kimg=0.4", "callbacks.checkpoint.every_kimg=0.2"]
    alone, together = (Path(shutil.copytree(parted, tmp_path / name)) for name in ("alone", "together"))
    for k in (0, 1):
        train(expert(k, tmp_path / "a", alone, *long))

    paths = [f"store={together}", f"paths.runs={tmp_path / 'b'}", f"paths.cache={tmp_path / 'cache'}"]
    words = ["train.py", "-m", *TINY, *long, "expert=range(2)", "hydra.launcher.jobs=2", *paths]
    process = start_command(*words)
    try:
        wait_for(lambda: list(tmp_path.glob("b/expert-k1-*/checkpoints/0000*")))
        (job,) = (p for p, line in processes().items() if f"{tmp_path}" in line and " expert=1 " in line + " ")
        os.kill(job, signal.SIGKILL)
        said, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1 and "1 of 2 runs failed" in errors, said + errors
    assert not is_alive(job)
    assert files(together / "experts" / "0") == files(alone / "experts" / "0")
    stopped = published(together, 1)
    assert stopped is None or stopped["images"] < 2400

    before = {path: path.stat().st_mtime_ns for path in together.glob("experts/0/*")}
    process = start_command(*words)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, said + errors
    assert "was finished" in said and {path: path.stat().st_mtime_ns for path in before} == before
    assert files(together / "experts") == files(alone / "experts")
