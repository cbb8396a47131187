"""Every model under every engine: two processes against one, checkpoints from and into each, and what is refused."""

import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import compose_config, run_command
from hydra.utils import instantiate

from src import checkpoint as canonical
from src.config import ROOT
from src.sharding import total_norm

MODELS = ("ddn", "ddgan", "ddgan_lazy", "expert")
DOUBLE = ("ddp", "ddp_manual", "fsdp", "hsdp")  # compared in float64
SINGLE = ("deepspeed_zero0", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")  # in float32
REFUSED = {("ddn", "deepspeed_zero3")}
PROVEN = [(m, s) for s in (*DOUBLE, *SINGLE) for m in MODELS if (m, s) not in REFUSED]
MIDDLE, LAST = "000000000024", "000000000040"
WORKER = Path(__file__).parent / "strategy_worker.py"

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def proven(chosen=lambda model, strategy: True):
    """Parameters of a test for every combination that works."""
    return [
        pytest.param(m, s, marks=[needs_deepspeed] if s in SINGLE else [], id=f"{m}-{s}")
        for m, s in PROVEN
        if chosen(m, s)
    ]


def launch(processes: int, strategy: str, folder: Path, cases: list[str]) -> None:
    """The worker on these cases, by torchrun where there are several processes."""
    precision = "32" if strategy in SINGLE else "64"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(WORKER), precision, str(folder), *cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def run_of(folder: Path, model: str, strategy: str, micro_batch: int) -> Path:
    return folder / f"{model}-{strategy}-{micro_batch}" / "runs" / model


def micro_batch(model: str) -> int:
    """Of the four images that each of two processes has: two parts, or one."""
    return 4 if model == "ddgan_lazy" else 2


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(strategy): the runs of one process in the precision that this strategy is compared in."""
    kept = {}

    def run(strategy):
        precision = strategy in SINGLE
        if precision not in kept:
            kept[precision] = tmp_path_factory.mktemp("alone")
            launch(1, strategy, kept[precision], [f"{model}/single/4/0.04" for model in MODELS])
        return kept[precision]

    return run


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """together(strategy): the runs of two processes."""
    kept = {}

    def run(strategy):
        if strategy not in kept:
            kept[strategy] = tmp_path_factory.mktemp(strategy)
            cases = [f"{m}/{s}/{micro_batch(m)}/0.04" for m, s in PROVEN if s == strategy]
            launch(2, strategy, kept[strategy], cases)
        return kept[strategy]

    return run


def copied(run: Path, to: Path) -> None:
    """The middle of a run as the beginning of another."""
    (to / "checkpoints").mkdir(parents=True)
    shutil.copytree(run / "checkpoints" / MIDDLE, to / "checkpoints" / MIDDLE)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, alone):
    """resumed(strategy): two processes from the middle of one process's runs to their end."""
    kept = {}

    def run(strategy):
        if strategy not in kept:
            kept[strategy] = tmp_path_factory.mktemp(f"resumed_{strategy}")
            models = [m for m, s in PROVEN if s == strategy]
            for model in models:
                to = run_of(kept[strategy], model, strategy, micro_batch(model))
                copied(run_of(alone(strategy), model, "single", 4), to)
            launch(2, strategy, kept[strategy], [f"{m}/{strategy}/{micro_batch(m)}/0.04" for m in models])
        return kept[strategy]

    return run


def tensors(run: Path, moment: str) -> dict[str, torch.Tensor]:
    """Weights, moments and averages by name."""

    def flat(tree, prefix=""):
        if isinstance(tree, dict):
            return {k: v for name, child in tree.items() for k, v in flat(child, f"{prefix}/{name}").items()}
        return {prefix: tree} if torch.is_tensor(tree) else {}

    state = canonical.read(run / "checkpoints" / moment)
    return flat({part: state[part] for part in ("weights", "optimizers", "callbacks")})


def assert_equal(ours: dict, theirs: dict, strategy: str) -> None:
    """To 1e-12 in float64; in float32 to 2e-6, and sums of thousands of numbers to as much of their size."""
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, value in theirs.items():
        bound = dict(rtol=0, atol=1e-12) if strategy in DOUBLE else dict(rtol=1e-5 if "tally" in name else 0, atol=2e-6)
        told = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(ours[name], value, **bound, check_dtype=False, msg=told)


@pytest.mark.slow
@pytest.mark.parametrize("model, strategy", proven())
def test_two_processes_give_the_weights_of_one(model, strategy, alone, together):
    """Five batches with clipped gradients, moving averages, Split-and-Prune and exact R1, and what was saved midway."""
    ours, theirs = (
        run_of(together(strategy), model, strategy, micro_batch(model)),
        run_of(alone(strategy), model, "single", 4),
    )
    for moment in (MIDDLE, LAST):
        assert_equal(tensors(ours, moment), tensors(theirs, moment), strategy)
    begun, ended = tensors(theirs, MIDDLE), tensors(theirs, LAST)
    moved = [(ended[n] - begun[n]).abs().max().item() for n in begun if n.startswith("/weights") and "tally" not in n]
    assert max(moved) > 4e-5  # twenty times what may differ, and more


@pytest.mark.slow
@pytest.mark.parametrize("model, strategy", proven(lambda model, strategy: model != "ddgan_lazy"))
def test_what_one_process_saved_two_go_on_with(model, strategy, alone, resumed):
    ours = run_of(resumed(strategy), model, strategy, micro_batch(model))
    theirs = run_of(alone(strategy), model, "single", 4)
    assert_equal(tensors(ours, LAST), tensors(theirs, LAST), strategy)


@pytest.fixture(scope="module")
def resumed_alone(tmp_path_factory, together):
    """resumed_alone(strategy): one process from the middle of two processes' runs to their end."""
    kept = {}

    def run(strategy):
        if strategy not in kept:
            kept[strategy] = tmp_path_factory.mktemp(f"alone_{strategy}")
            models = [m for m, s in PROVEN if s == strategy and m != "ddgan_lazy"]
            for model in models:
                to = run_of(kept[strategy], model, "single", 4)
                copied(run_of(together(strategy), model, strategy, micro_batch(model)), to)
            launch(1, strategy, kept[strategy], [f"{model}/single/4/0.04" for model in models])
        return kept[strategy]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("model, strategy", proven(lambda model, strategy: model != "ddgan_lazy"))
def test_what_two_processes_saved_one_goes_on_with(model, strategy, alone, resumed_alone):
    ours = run_of(resumed_alone(strategy), model, "single", 4)
    theirs = run_of(alone(strategy), model, "single", 4)
    assert_equal(tensors(ours, LAST), tensors(theirs, LAST), strategy)


@pytest.mark.slow
def test_splits_happened_while_engines_were_compared(alone):
    log = (run_of(alone("ddp"), "ddn", "single", 4) / "metrics.csv").read_text()
    assert sum(float(line.split(",")[3]) for line in log.splitlines() if ",train/splits," in line) > 0


@pytest.mark.slow
def test_four_processes_as_two_replicas_of_two_shards(tmp_path, alone):
    launch(4, "hsdp", tmp_path, ["ddgan/hsdp/2/0.04", "ddn/hsdp/2/0.04"])
    for model in ("ddgan", "ddn"):
        ours, theirs = run_of(tmp_path, model, "hsdp", 2), run_of(alone("hsdp"), model, "single", 4)
        assert_equal(tensors(ours, LAST), tensors(theirs, LAST), "hsdp")


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    "words, said",
    [
        (["strategy=deepspeed_zero3"], "the decoder keeps some parameters whole, which ZeRO 3 does not; use strategy="),
        (["strategy=deepspeed_zero2", "model.clip_norm=1"], "model.clip_norm=1 cannot be had under DeepSpeed"),
    ],
)
def test_what_an_engine_cannot_do_is_told_before_training(words, said, tmp_path):
    places = [f"paths.runs={tmp_path}", f"paths.cache={tmp_path}"]
    done = run_command("train.py", "debug=fast", *words, *places, "trainer.accelerator=cpu", DS_ACCELERATOR="cpu")
    assert done.returncode == 1 and f"train: {said}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (["strategy=ddp", "strategy.compression=int8"], "strategy.compression=int8 is unknown; it may be fp16, bf16"),
        (["strategy=deepspeed_zero1", "strategy.stage=4"], "strategy.stage=4 is unknown"),
        (["strategy=deepspeed_zero0", "strategy.offload_optimizer=true"], "needs a stage of at least 1"),
    ],
)
def test_wrong_settings_of_a_strategy_are_told(words, said, tmp_path):
    with pytest.raises(Exception, match=said):
        instantiate(compose_config(tmp_path, *words).strategy)


def test_the_environment_wins_over_the_address_of_the_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "")
    monkeypatch.delenv("MASTER_PORT")
    words = ["strategy.connection.main_address=there", "strategy.connection.main_port=1234"]
    instantiate(compose_config(tmp_path, "strategy=ddp", *words).strategy)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("here", "1234")


def test_the_readme_claims_what_is_proven_here():
    section = (ROOT / "README.md").read_text().split("## Strategies")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)
    columns = len(MODEL_COLUMNS)
    cells = {name: zip(MODEL_COLUMNS, row.split(" | ")[:columns], strict=True) for name, row in rows}
    claimed = {(model, name) for name, row in cells.items() for model, cell in row if cell == "yes"}
    expected = {(m, s) for m, s in PROVEN if m in MODEL_COLUMNS} | {(m, "single") for m in MODEL_COLUMNS}
    assert claimed == expected


MODEL_COLUMNS = ("ddn", "ddgan", "expert")


def drifting_worker(rank: int, port: int, out: str) -> None:
    from types import SimpleNamespace

    from src.callbacks.consistency import Consistency

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    network = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(network.weight), torch.nn.init.zeros_(network.bias)
    module = SimpleNamespace(parallel_networks=lambda: {"network": network})
    trainer = SimpleNamespace(world_size=2, is_global_zero=rank == 0)
    Consistency().on_train_batch_end(trainer, module, None, None, 1)
    with torch.no_grad():
        network.bias[1] = rank
    try:
        Consistency().on_train_batch_end(trainer, module, None, None, 1)
    except ValueError as error:
        Path(f"{out}/{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def spawned(worker, processes: int, out: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(out)), nprocs=processes)


@pytest.mark.slow
def test_processes_that_drift_apart_are_noticed_by_the_parameter(tmp_path):
    spawned(drifting_worker, 2, tmp_path)
    for rank in range(2):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert said.startswith("1 parameters differ between processes, first network.bias;")


def test_parameters_that_nothing_reaches_are_listed(capsys):
    from types import SimpleNamespace

    from src.callbacks.consistency import Consistency

    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam(network.parameters())
    network[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    module = SimpleNamespace(
        parallel_networks=lambda: {"network": network},
        named_optimizers=lambda: {"network": SimpleNamespace(optimizer=optimizer)},
    )
    trainer = SimpleNamespace(world_size=1, is_global_zero=True)
    Consistency().on_train_batch_end(trainer, module, None, None, 0)
    assert capsys.readouterr().out == "no gradient reached 2 parameters: network.1.weight, network.1.bias\n"


def two_level_worker(rank: int, port: int, out: str) -> None:
    from src.strategies.ddp import all_reduce, node_groups

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=4)
    levels = node_groups(4, 2)
    found = torch.arange(7, dtype=torch.float64) * (rank + 1)
    all_reduce(found, levels)
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_levels_of_exchange_sum_over_all_processes(tmp_path):
    """Seven numbers, which two processes of a node cannot share equally, on two nodes of two."""
    spawned(two_level_worker, 4, tmp_path)
    for rank in range(4):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), torch.arange(7, dtype=torch.float64) * 10)


def test_norms_of_whole_tensors_are_the_common_ones():
    parts = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert total_norm(parts) == 5
