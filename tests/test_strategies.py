"""Every model under every engine: two processes against one, checkpoints from and into each, and what is refused."""

import json
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
from conftest import TINY, compose_config, run_command
from hydra.utils import instantiate

from src import checkpoint as canonical
from src.config import ROOT
from src.sharding import total_norm
from src.strategies.pipeline import bubble, even_ends

MODELS = ("ddn", "ddgan", "ddgan_lazy", "expert")
DOUBLE = ("ddp", "ddp_manual", "fsdp", "hsdp", "pipeline", "tensor_parallel")  # compared in float64
SINGLE = ("deepspeed_zero0", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")  # in float32
REFUSED = {("ddn", "deepspeed_zero3"), *((model, "pipeline") for model in MODELS if model != "ddn")}
REFUSED |= {(m, "tensor_parallel") for m in MODELS if m != "expert"}
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


def run_of(folder: Path, model: str, strategy: str, micro_batch: int | str) -> Path:
    return folder / f"{model}-{strategy}-{micro_batch}" / "runs" / model


def micro_batch(model: str) -> int:
    """Of the four images that each of two processes has: two parts, or one."""
    return 4 if model == "ddgan_lazy" else 2


def once(make):
    """run(strategy) -> folder: what make(strategies) leaves there, once for each of the two precisions."""
    kept = {}

    def run(strategy):
        strategies = SINGLE if strategy in SINGLE else DOUBLE
        if strategies not in kept:
            kept[strategies] = make(strategies)
        return kept[strategies]

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(strategy): the runs of one process in the precision that this strategy is compared in."""

    def make(strategies):
        folder = tmp_path_factory.mktemp("alone")
        launch(1, strategies[0], folder, [f"{model}/single/4/0.04" for model in MODELS])
        return folder

    return once(make)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """together(strategy): the runs of two processes."""

    def make(strategies):
        folder = tmp_path_factory.mktemp("together")
        cases = [f"{m}/{s}/{micro_batch(m)}/0.04" for m, s in PROVEN if s in strategies]
        launch(2, strategies[0], folder, cases)
        return folder

    return once(make)


def copied(run: Path, to: Path) -> None:
    """The middle of a run as the beginning of another."""
    (to / "checkpoints").mkdir(parents=True)
    shutil.copytree(run / "checkpoints" / MIDDLE, to / "checkpoints" / MIDDLE)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, alone):
    """resumed(strategy): two processes from the middle of one process's runs to their end."""

    def make(strategies):
        folder = tmp_path_factory.mktemp("resumed")
        pairs = [(m, s) for m, s in PROVEN if s in strategies and m != "ddgan_lazy"]
        for model, strategy in pairs:
            copied(run_of(alone(strategy), model, "single", 4), run_of(folder, model, strategy, micro_batch(model)))
        launch(2, strategies[0], folder, [f"{m}/{s}/{micro_batch(m)}/0.04" for m, s in pairs])
        return folder

    return once(make)


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
    ours = run_of(together(strategy), model, strategy, micro_batch(model))
    theirs = run_of(alone(strategy), model, "single", 4)
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

    def make(strategies):
        folder = tmp_path_factory.mktemp("resumed_alone")
        pairs = [(m, s) for m, s in PROVEN if s in strategies and m != "ddgan_lazy"]
        for model, strategy in pairs:
            begun = run_of(together(strategy), model, strategy, micro_batch(model))
            copied(begun, run_of(folder, model, "single", f"4-{strategy}"))
        launch(1, strategies[0], folder, [f"{m}/single/4/0.04/{s}" for m, s in pairs])
        return folder

    return once(make)


@pytest.mark.slow
@pytest.mark.parametrize("model, strategy", proven(lambda model, strategy: model != "ddgan_lazy"))
def test_what_two_processes_saved_one_goes_on_with(model, strategy, alone, resumed_alone):
    ours = run_of(resumed_alone(strategy), model, "single", f"4-{strategy}")
    theirs = run_of(alone(strategy), model, "single", 4)
    assert_equal(tensors(ours, LAST), tensors(theirs, LAST), strategy)


@pytest.mark.slow
def test_splits_happened_while_engines_were_compared(alone):
    log = (run_of(alone("ddp"), "ddn", "single", 4) / "metrics.csv").read_text()
    assert sum(float(line.split(",")[3]) for line in log.splitlines() if ",train/splits," in line) > 0


FOUR = [("ddgan", "hsdp"), ("ddn", "hsdp"), ("ddn", "pipeline"), ("expert", "tensor_parallel")]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The runs of four processes: two replicas of two shards, two copies of two stages, two copies of two shares."""
    folder = tmp_path_factory.mktemp("four")
    launch(4, DOUBLE[0], folder, [f"{model}/{strategy}/2/0.04" for model, strategy in FOUR])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model, strategy", FOUR)
def test_four_processes_give_the_weights_of_one(model, strategy, four, alone):
    ours, theirs = run_of(four, model, strategy, 2), run_of(alone(strategy), model, "single", 4)
    assert_equal(tensors(ours, LAST), tensors(theirs, LAST), strategy)


def logged(run: Path) -> dict[tuple, float]:
    """Everything in metrics.csv that is no time: (batch, metric) -> value."""
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()[1:]]
    return {(row[0], row[2]): float(row[3]) for row in rows if not row[2].startswith(("time/", "memory/"))}


@pytest.mark.slow
def test_stages_log_what_one_process_logs(tmp_path, alone):
    """Both schedules, with four micro-batches in a pass: losses of every layer, the gradient's norm before clipping,
    splits and how leaves are used."""
    words = "strategy.micro_batches=4,strategy.schedule"
    launch(2, "pipeline", tmp_path, [f"ddn/pipeline/8/0.04/{name},{words}={name}" for name in ("gpipe", "1f1b")])
    theirs = run_of(alone("pipeline"), "ddn", "single", 4)
    for name in ("gpipe", "1f1b"):
        ours = run_of(tmp_path, "ddn", "pipeline", f"8-{name}")
        assert_equal(tensors(ours, LAST), tensors(theirs, LAST), "pipeline")
        assert logged(ours) == pytest.approx(logged(theirs), abs=1e-9) and len(logged(ours)) > 50


def test_layers_are_cut_where_stages_take_equally_long():
    assert even_ends([1, 1, 1, 1, 1, 5], 2) == [5, 6]
    assert even_ends([1, 2, 3, 4, 5, 6, 7], 3) == [4, 6, 7]
    assert even_ends([9, 1, 1, 1], 2) == [1, 4] and even_ends([3, 1], 1) == [2]


def test_stages_wait_for_one_another_at_both_ends_of_a_batch():
    """Two equal stages and one micro-batch: each works half of the time."""
    assert bubble([0.5, 0.5], 1) == pytest.approx(0.5)
    assert bubble([0.25] * 4, 8) == pytest.approx(3 / 11)  # (stages - 1) / (micro-batches + stages - 1)
    assert bubble([0.8, 0.2], 1000) == pytest.approx(1 - 0.5 / 0.8, abs=1e-2)  # the slower one sets the pace


REFUSED_WORDS = [  # before training starts
    ("pipeline", ["model=ddgan"], "strategy=pipeline is for networks made of layers, such as model=ddn; the discrimin"),
    ("pipeline", [*TINY, "strategy.micro_batches=3"], "strategy.micro_batches=3 does not divide the 8 images of a for"),
    ("pipeline", [*TINY, "strategy.stages=2"], "a network is split over 2 processes, which does not divide the 1 that"),
    ("pipeline", [*TINY, "strategy.layers=[4]"], "strategy.layers=[4] must add up to the network's 6 layers"),
    ("tensor_parallel", [], "the decoder cannot be split by strategy=tensor_parallel, since DDNDecoder has no tensor"),
    ("tensor_parallel", ["model=ddgan"], "the discriminator cannot be split by strategy=tensor_parallel"),
    ("deepspeed_zero3", [], "the decoder keeps some parameters whole, which ZeRO 3 does not; use strategy="),
    ("deepspeed_zero2", ["model.clip_norm=1"], "model.clip_norm=1 cannot be had under DeepSpeed"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What is said to each of REFUSED_WORDS, by one process."""
    folder = tmp_path_factory.mktemp("refused")
    known = [i for i, (strategy, *_) in enumerate(REFUSED_WORDS) if strategy not in SINGLE or find_spec("deepspeed")]
    words = [[f"strategy={REFUSED_WORDS[i][0]}", "debug=fast", "batch=8", *REFUSED_WORDS[i][1]] for i in known]
    (folder / "words.json").write_text(json.dumps(words))
    launch(1, "", folder, ["refused"])
    return dict(zip(known, json.loads((folder / "said.json").read_text()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, marks=[needs_deepspeed] if strategy in SINGLE else [], id="-".join([strategy, *words[-1:]]))
        for i, (strategy, words, _) in enumerate(REFUSED_WORDS)
    ],
)
def test_what_an_engine_cannot_do_is_told_before_training(number, refusals):
    assert refusals[number].startswith(REFUSED_WORDS[number][2])


@pytest.mark.parametrize(
    "words, said",
    [
        (["strategy=ddp", "strategy.compression=int8"], "strategy.compression=int8 is unknown; it may be fp16, bf16"),
        (["strategy=deepspeed_zero1", "strategy.stage=4"], "strategy.stage=4 is unknown"),
        (["strategy=deepspeed_zero0", "strategy.offload_optimizer=true"], "needs a stage of at least 1"),
        (["strategy=tensor_parallel", "strategy.tensor=0"], "strategy.tensor=0 must be a whole number"),
        (["strategy=tensor_parallel", "trainer.devices=auto"], "strategy.tensor=auto must be a whole number"),
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


VARIANTS = [  # model, engine, settings of both, settings of the engine alone, largest difference to one process
    ("ddgan", "fsdp", ["model.reuse_generator=true"], [], 1e-12),
    ("ddgan", "ddp_manual", [], ["strategy.two_level=true"], 1e-12),
    ("ddgan", "ddp", [], ["strategy.compression=bf16"], 1e-2),
    ("ddgan", "deepspeed_zero3", ["model.reuse_generator=true"], [], 2e-6),
    ("ddgan", "deepspeed_zero2", [], ["strategy.offload_optimizer=true"], 2e-6),
    ("ddgan", "deepspeed_zero1", ["trainer.precision=bf16-mixed"], [], 1e-2),
]


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """varied(strategy): the runs of VARIANTS, of two processes and, where one needs other settings too, of one."""

    def make(strategies):
        folder = tmp_path_factory.mktemp("varied")
        variants = [v for v in VARIANTS if v[1] in strategies]
        ours = [",".join([f"{m}/{s}/2/0.04", *both, *own]) for m, s, both, own, _ in variants]
        theirs = [",".join([f"{m}/single/4/0.04/{s}", *both]) for m, s, both, *_ in variants if both]
        launch(2, strategies[0], folder, ours)
        launch(1, strategies[0], folder, theirs)
        return folder

    return once(make)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, strategy, both, own, bound",
    [
        pytest.param(*v, marks=[needs_deepspeed] if v[1] in SINGLE else [], id="-".join([v[1], *v[2], *v[3]]))
        for v in VARIANTS
    ],
)
def test_settings_of_engines_leave_the_weights(model, strategy, both, own, bound, varied, alone):
    """To rounding errors of what is sent or computed in bfloat16, which are there, and else as closely as ever."""
    folder = varied(strategy)
    ours = tensors(run_of(folder, model, strategy, 2), LAST)
    one = run_of(folder, model, "single", f"4-{strategy}") if both else run_of(alone(strategy), model, "single", 4)
    theirs = tensors(one, LAST)
    assert ours.keys() == theirs.keys()
    apart = max((ours[n].double() - v.double()).abs().max().item() for n, v in theirs.items() if "weights" in n)
    assert apart <= bound and (bound < 1e-3 or apart > 1e-7), apart


@pytest.mark.slow
def test_processes_meet_where_the_configuration_says(tmp_path):
    """Through a file, where the address of the first process leads nowhere."""
    nowhere, place = "strategy.connection.main_address=192.0.2.1", f"file://{tmp_path}/place"
    words = ["model=expert", "strategy=ddp_manual", "trainer.devices=2", "trainer.accelerator=cpu", "debug=fast"]
    words += ["model.steps=1"]  # of samples
    places = [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
    met = f"strategy.connection.init_method={place}"
    done = run_command("train.py", *words, *places, nowhere, met, "strategy.connection.timeout_minutes=2")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    spent = json.loads((folder / "time.json").read_text())
    assert spent["device_hours"] == pytest.approx(2 * spent["hours"])


@pytest.mark.slow
def test_processes_that_do_not_all_come_are_told(tmp_path):
    words = ["strategy=ddp", "trainer.num_nodes=2", "strategy.connection.timeout_minutes=0.05", "debug=fast"]
    places = [f"paths.runs={tmp_path}", f"paths.cache={tmp_path}", "trainer.accelerator=cpu"]
    done = run_command("train.py", *words, *places)
    assert done.returncode == 1 and "process 0 waited for 2 processes at 127.0.0.1" in done.stderr, done.stderr
    assert "start every node with the same trainer.devices" in done.stderr and "Traceback" not in done.stderr


COLUMNS = {"ddn": "DDN", "ddgan": "DDGAN", "expert": "expert"}
TABLE = re.compile(r"^\| `strategy=` .*?\n(?=\n)", re.M | re.S)


def strategy_table() -> str:
    """The README's: which models are proven under which engine, and what the engine's file says of itself."""
    rows = [["`strategy=`", *COLUMNS.values(), ""], ["---"] * (len(COLUMNS) + 2)]
    for name in ("single", *DOUBLE, *SINGLE):
        cells = ["yes" if name == "single" or (model, name) in PROVEN else "no" for model in COLUMNS]
        about = (ROOT / "conf/strategy" / f"{name}.yaml").read_text().splitlines()[0]
        rows.append([f"`{name}`", *cells, about.removeprefix("# ")])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace("|  |", "| |").replace("| --- ", "|---")


def test_the_readme_has_the_table_of_what_is_proven_here():
    assert strategy_table() in (ROOT / "README.md").read_text(), "PYTHONPATH=. python tests/test_strategies.py"


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
    from src.strategies.connection import all_reduce, node_groups

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


def small_transformer(share: slice) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network whose every weight matters, and its loss () of some of four images."""
    from src.modules.networks.dit import DiT

    network, generator = DiT(3, 8, width=16, depth=2, heads=4).double(), torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=generator)[share]
    return network, lambda: network(x, torch.full((len(x),), 400.5)).square().mean()


def sharing_worker(rank: int, port: int, out: str) -> None:
    from types import SimpleNamespace

    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from src.sharding import whole
    from src.strategies.tensor_parallel import TensorParallel

    here = {"MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in here.items()}
    dist.init_process_group("gloo", rank=rank, world_size=4)
    devices = [torch.device("cpu")] * 4
    strategy = TensorParallel(tensor=2, parallel_devices=devices, cluster_environment=TorchElasticEnvironment())
    network, loss = small_transformer(slice(rank // 2, None, 2))
    strategy.connect(SimpleNamespace(parallel_networks=lambda: {"network": network}))
    strategy.configure_ddp()
    with strategy.engine.hold(network, twice=False):
        loss().backward()
    kept = sum(p.to_local().numel() if hasattr(p, "to_local") else 0 for p in network.parameters())
    gradients = {name: whole(p.grad) for name, p in network.named_parameters()}
    torch.save({"gradients": gradients, "kept": kept}, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_gradients_of_shares_are_those_of_the_whole_and_the_same_everywhere(tmp_path):
    """Two copies of two shares with different images: to the bit, or what all have whole would drift apart."""
    spawned(sharing_worker, 4, tmp_path)
    network, loss = small_transformer(slice(None))
    loss().backward()
    expected = {name: p.grad for name, p in network.named_parameters()}
    split = [m for b in network.blocks for m in (b.attention.qkv, b.mlp.fc1, b.attention.out, b.mlp.fc2)]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for there in found:
        assert there["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(there["gradients"][name], gradient, rtol=0, atol=1e-12)
            assert torch.equal(there["gradients"][name], found[0]["gradients"][name]), name
        biases = sum(m.bias.numel() for m in split[:2] + split[4:6])
        assert there["kept"] == (sum(m.weight.numel() for m in split) + biases) / 2


def test_a_gradient_penalty_is_refused_where_networks_are_split():
    from src.strategies.tensor_parallel import TensorParallel

    engine = TensorParallel(tensor=2).engine
    with pytest.raises(ValueError, match="an exact gradient penalty cannot be had"), engine.hold(None, twice=True):
        pass


def test_norms_of_whole_tensors_are_the_common_ones():
    parts = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert total_norm(parts) == 5


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(TABLE.sub(lambda _: strategy_table(), readme.read_text()))
