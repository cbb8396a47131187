"""Runs under torch's elastic agent: processes are killed and stopped, nodes go and come back, and weights stay."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, run_command

from src import checkpoint as canonical
from src import elastic
from src.config import AGENT, ROOT
from src.report import read_log
from src.run import _check, train

LENGTH = 960  # images
RUN = [
    *TINY,
    "callbacks=[budget,ema,metrics,checkpoint,health]",
    "callbacks.checkpoint.every_kimg=0.08",
    "callbacks.metrics.every_kimg=0.04",
    "logger=[csv]",
    "batch=8",
    "val_every_kimg=4",
    "data.val_batch=8",
    "+trainer.limit_val_batches=1",
    "strategy=ddp",
    "trainer.accelerator=cpu",
    f"schedule_kimg={LENGTH / 1000}",
]
TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, str(ROOT / "train.py"), *RUN]


def below(folder: Path) -> list[str]:
    return [f"paths.runs={folder / 'runs'}", f"paths.cache={folder / 'cache'}"]


class Agent:
    """A command that starts processes, its output in a file; whatever is left of it ends with the test."""

    def __init__(self, folder: Path, *command: str, number: int = 0):
        self.folder, self.log = folder, folder / f"log{number}"
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | TORCHRUN
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, *below(folder)], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def workers(self) -> dict[int, int]:
        """RANK -> process id, of those that run."""
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            try:
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            except OSError:
                continue
            ranks = [line[5:] for line in environment if line.startswith("RANK=")]
            if ranks:
                found[int(ranks[0])] = int(pid)
        return found

    def said(self) -> str:
        return self.log.read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [*self.workers().values(), self.process.pid] if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def newest(folder: Path) -> int:
    checkpoints = [path for path in folder.glob("runs/*/checkpoints/*") if not path.suffix and path.is_dir()]
    return max((int(path.name) for path in checkpoints), default=0)


def wait_until(what, *agents: Agent, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not what():
        dead = [agent for agent in agents if agent.process.poll() is not None]
        assert not dead and time.monotonic() < until, [agent.said()[-3000:] for agent in agents]
        time.sleep(0.02)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (run,) = folder.glob("runs/*")
    state = canonical.read(run / "checkpoints" / f"{LENGTH:012d}")
    averages = state["callbacks"]["EMA"]["averages"]
    return state["weights"] | {f"average of {name}": value for name, value in averages.items()}


def curve(folder: Path) -> list[tuple[float, float]]:
    (run,) = folder.glob("runs/*")
    return read_log(run)["train/loss"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    with Agent(folder, sys.executable, "train.py", *RUN, "trainer.devices=2") as run:
        assert run.process.wait(300) == 0, run.said()
    return folder


@pytest.mark.slow
def test_killed_and_stopped_processes_are_started_again_and_end_in_the_same_bits(uninterrupted, tmp_path):
    """One of two is killed; later one is stopped, which the other's watchdog ends by ending itself."""
    words = ["launcher=local_elastic", "hydra.launcher.grace_seconds=1", "trainer.devices=2"]
    words.append("callbacks.health.stop_when_idle_minutes=0.04")
    with Agent(tmp_path, sys.executable, "train.py", *RUN, *words) as agent:
        wait_until(lambda: newest(tmp_path) >= 160, agent)
        os.kill(agent.workers()[1], signal.SIGKILL)
        wait_until(lambda: "restart 1 of at most 10" in agent.said(), agent)
        killed_at = newest(tmp_path)
        wait_until(lambda: newest(tmp_path) >= max(480, killed_at + 80), agent)
        os.kill(agent.workers()[1], signal.SIGSTOP)
        assert agent.process.wait(300) == 0, agent.said()
    said = agent.said()
    assert re.findall(r"restart (\d+) of", said) == ["1", "2"]
    assert re.search(r"nothing has moved for \S+ minutes in process 0, .* exit code 75", said)
    assert len(re.findall("Continuing from checkpoint", said)) == 2
    assert curve(tmp_path) == curve(uninterrupted)
    expected, found = weights(uninterrupted), weights(tmp_path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.slow
def test_one_node_goes_on_without_the_other_and_with_it_again(uninterrupted, tmp_path):
    """Two agents meet; one is killed, with its process; then another comes. The command's trainer.devices is wrong for
    all of them, and not asked. The losses are those of the run that nothing happened to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = [f"--rdzv-endpoint={endpoint}", "--rdzv-backend=c10d", "--rdzv-id=run", "--local-addr=127.0.0.1"]
    options += ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--shutdown-timeout=1"]
    waiting = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=200"

    def agent(number: int) -> Agent:
        host = f"{waiting},is_host={'false' if number else 'true'}"
        return Agent(tmp_path, *torchrun(*options, host), "trainer.devices=7", number=number)

    def saved_by(ranks: set[int], *agents: Agent) -> None:
        """A checkpoint of a group of these has been written."""
        wait_until(lambda: {rank for agent in agents for rank in agent.workers()} == ranks, *agents)
        began = newest(tmp_path)
        wait_until(lambda: newest(tmp_path) > began, *agents)
        assert {rank for agent in agents for rank in agent.workers()} == ranks

    with agent(0) as host:
        with agent(1) as other:
            saved_by({0, 1}, host, other)
            os.kill(other.process.pid, signal.SIGKILL)  # its process ends with it
            saved_by({0}, host)
        os.kill(host.workers()[0], signal.SIGSTOP)  # so that the run is not over before the other one comes
        with agent(2) as back:
            saved_by({0, 1}, host, back)
            assert host.process.wait(300) == 0, host.said()
            assert back.process.wait(60) == 0, back.said()
    found, expected = curve(tmp_path), curve(uninterrupted)
    assert [kimg for kimg, _ in found] == [kimg for kimg, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-5)


@pytest.mark.slow
def test_three_processes_share_a_batch_of_eight_and_save_when_their_agent_is_asked_to_stop(uninterrupted, tmp_path):
    words = ["launcher=local_elastic", "trainer.devices=3", "data.share_unit=1", "callbacks.checkpoint.every_kimg=0.2"]
    with Agent(tmp_path, sys.executable, "train.py", *RUN, *words) as agent:
        wait_until(lambda: newest(tmp_path) >= 200, agent)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(100) == 143, agent.said()
    assert "Traceback" not in agent.said()
    found, rejected = canonical.newest(next(tmp_path.glob("runs/*/checkpoints")))
    assert int(found.name) == newest(tmp_path) < LENGTH and not rejected
    losses = [loss for _, loss in curve(tmp_path)]
    assert len(losses) >= 5
    assert losses == pytest.approx([loss for _, loss in curve(uninterrupted)][: len(losses)], abs=1e-5)


# Without processes


@pytest.fixture
def world(monkeypatch):
    def set(**variables):
        for name, value in ({"TORCHELASTIC_RUN_ID": "run"} | variables).items():
            monkeypatch.setenv(name, value)

    return set


def test_processes_are_those_that_the_agent_has_started(world, composed):
    assert elastic.processes("auto", 3) == ("auto", 3)
    world(LOCAL_WORLD_SIZE="2", WORLD_SIZE="6")
    assert elastic.processes(7, 1) == (2, 3) and elastic.processes([4, 5], 1) == ([4, 5], 3)
    _check(composed("strategy=ddp", "trainer.devices=7"))
    with pytest.raises(ValueError, match="torch's agent has started several processes, but strategy=single is one"):
        _check(composed("trainer.devices=1"))
    world(LOCAL_WORLD_SIZE="2", WORLD_SIZE="5")
    with pytest.raises(ValueError, match="5 processes are not the same number on every node"):
        elastic.processes(1, 1)


def test_a_process_whose_agent_was_killed_before_it_could_ask_for_its_own_end_ends():
    done = run_command("train.py", *TINY, TORCHELASTIC_RUN_ID="run", **{AGENT: "1"})
    assert done.returncode == 1
    assert done.stderr == "train: the agent that started this process was killed meanwhile\n"


def test_a_store_that_survives_restarts_is_warned_of(world):
    world(TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_USE_AGENT_STORE="False")
    assert elastic.restarts() == ""
    world(TORCHELASTIC_RESTART_COUNT="2", TORCHELASTIC_USE_AGENT_STORE="True")
    assert re.match(", restart 2 of at most 3; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", elastic.restarts())


def test_several_nodes_without_a_meeting_point_are_refused(monkeypatch):
    for name in ("MASTER_ADDR", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="several nodes meet at MASTER_ADDR and MASTER_PORT"):
        elastic.supervise(1, 2, 3, 60, "run")


def test_mistakes_are_told_before_an_agent_starts(composed):
    words = ["launcher=local_elastic", "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "batch=9"]
    with pytest.raises(ValueError, match="batch=9 does not divide among 2 processes"):
        train(composed(*words, *TINY, "logger=[csv]", "callbacks=[budget]"))
