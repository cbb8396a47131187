"""Does a run of two processes survive kill -9 at any moment, at what cost, and does it end in the same weights?

Each run of a DDN or a DDGAN goes under torch's elastic agent (launcher=local_elastic), and is killed again and again:
one process, the agent, all at once, or a process while a checkpoint is being written. Killed processes are started
again by the agent; where that is gone, the command is repeated. The weights, moments and averages at the end are
compared with those of a run that nothing happened to. One JSON line for every kill and every run, and one for all.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median

import torch
from rich.progress import Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[1]
BATCH, EVERY, VICTIMS = 8, 80, ("process", "agent", "all", "saving")
MODELS = {
    "ddn": [
        "experiment=ddn_small",
        "model.decoder.widths=[16,16,16,16,8,8]",
        "callbacks=[budget,ema,metrics,checkpoint]",
    ],
    "ddgan": [
        "experiment=ddgan_small",
        "callbacks=[budget,ema,r1,metrics,checkpoint]",
        "model.generator={width:8,multipliers:[1,1],attention:[]}",
        "model.discriminator.width=4",
        "callbacks.r1.interval=2",
    ],
}
SHARED = [
    "logger=[csv]",
    f"batch={BATCH}",
    "val_every_kimg=1000",
    "+trainer.limit_val_batches=0",
    "trainer.precision=32-true",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    f"callbacks.metrics.every_kimg={BATCH / 1000}",
    f"callbacks.checkpoint.every_kimg={EVERY / 1000}",
    "callbacks.checkpoint.archive_every_kimg=null",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="over all runs")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2], help="loader processes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    runs = list(product(args.models, args.strategies, args.workers))
    moments, kills, ends = random.Random(args.seed), [], []
    columns = (*Progress.get_default_columns()[:2], TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress, tempfile.TemporaryDirectory() as scratch:
        task = progress.add_task("kills", total=args.kills)
        for number, (model, strategy, workers) in enumerate(runs):
            count = args.kills * (number + 1) // len(runs) - args.kills * number // len(runs)
            if not count:
                continue
            run = Run(Path(scratch) / str(number), model, strategy, workers, (2 * count + 4) * EVERY)
            for found in run.killed(count, moments):
                kills.append(found)
                write(found)
                progress.update(task, advance=1, description=f"{model} {strategy}, {workers} loaders")
            ends.append(run.compared())
            write(ends[-1])
    seconds = [kill["restart_seconds"] for kill in kills]
    lost = [kill["images_lost"] for kill in kills]
    write(
        {
            "kills": len(kills),
            "runs": len(ends),
            "equal_runs": sum(end["equal"] for end in ends),
            "max_difference": max(end["max_difference"] for end in ends),
            "most_images_lost": max(lost),
            "interval": EVERY,
            "median_restart_seconds": round(median(seconds), 1),
            "max_restart_seconds": round(max(seconds), 1),
        }
    )


class Run:
    """A command that is killed and goes on, and the same command left in peace."""

    def __init__(self, folder: Path, model: str, strategy: str, workers: int, images: int):
        self.is_of = {"model": model, "strategy": strategy, "workers": workers, "images": images}
        self.folder, self.images = folder, images
        self.words = [*MODELS[model], *SHARED, f"strategy={strategy}", f"data.workers={workers}"]
        self.words.append(f"schedule_kimg={images / 1000}")
        folder.mkdir(parents=True)

    def killed(self, count: int, moments: random.Random):
        """Run to the end through so many kills, spread over the run; what each has cost."""
        span = (self.images - 3 * EVERY) // count
        targets = [EVERY + number * span + moments.randrange(span) for number in range(count)]
        victims = moments.sample(VICTIMS * count, count)
        agent = self._start()
        try:
            for target, victim in zip(targets, victims, strict=True):
                self._wait(lambda target=target: self._seen() >= target, agent)
                if victim == "saving":
                    self._wait(lambda: list(self.folder.glob("runs/*/checkpoints/*.tmp")), agent, pause=0.0)
                else:
                    time.sleep(moments.random() / 5)
                said = self._resumed()
                at, began = self._seen(), time.monotonic()
                saving = bool(list(self.folder.glob("runs/*/checkpoints/*.tmp")))
                for pid in self._chosen(agent, victim, moments):
                    os.kill(pid, signal.SIGKILL)
                if victim in ("agent", "all"):
                    agent.wait()
                    agent = self._start()
                self._wait(lambda said=said: len(self._resumed()) > len(said), agent)
                resumed = self._resumed()[-1]
                self._wait(lambda resumed=resumed: self._seen() > resumed, agent)
                cost = {"images_lost": at - resumed, "restart_seconds": round(time.monotonic() - began, 1)}
                yield self.is_of | {"killed": victim, "at_images": at, "while_saving": saving} | cost
            self._wait(lambda: agent.poll() is not None, agent)
            assert agent.returncode == 0, self._log()[-3000:]
        finally:
            for pid in [*descendants(agent.pid), agent.pid] if agent.poll() is None else []:
                os.kill(pid, signal.SIGKILL)

    def compared(self) -> dict:
        """Against the same command without an agent, which nothing happens to."""
        peace = self.folder / "peace"
        command = self._command(peace, "launcher=local")
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        ours, theirs = (tensors(next(place.glob("runs/*/checkpoints"))) for place in (self.folder, peace))
        assert ours.keys() == theirs.keys()
        worst = max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
        same = all(torch.equal(ours[name], theirs[name]) for name in ours)
        shutil.rmtree(self.folder)
        return self.is_of | {"tensors": len(ours), "equal": same, "max_difference": worst}

    def _command(self, folder: Path, launcher: str) -> list[str]:
        places = [f"paths.runs={folder / 'runs'}", f"paths.cache={folder / 'cache'}"]
        return [sys.executable, "train.py", *self.words, *places, launcher]

    def _start(self) -> subprocess.Popen:
        command = [*self._command(self.folder, "launcher=local_elastic"), "hydra.launcher.max_restarts=1000"]
        with open(self.folder / "log", "a") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True
            )

    def _chosen(self, agent: subprocess.Popen, victim: str, moments: random.Random) -> list[int]:
        if victim == "agent":
            return [agent.pid]
        if victim == "all":
            return [agent.pid, *descendants(agent.pid)]
        return [moments.choice(children(agent.pid))]

    def _wait(self, what, agent: subprocess.Popen, pause: float = 0.02, seconds: float = 600) -> None:
        until = time.monotonic() + seconds
        while not what():
            if agent.poll() not in (None, 0) or time.monotonic() > until:
                raise RuntimeError(f"{self.is_of} stands still or has failed:\n{self._log()[-3000:]}")
            time.sleep(pause)

    def _log(self) -> str:
        return (self.folder / "log").read_text()

    def _resumed(self) -> list[int]:
        """Where processes went on from, each time."""
        return [int(images) for images in re.findall(r"Continuing from checkpoint (\d+)", self._log())]

    def _seen(self) -> int:
        """Images up to the last line of the log."""
        logs = list(self.folder.glob("runs/*/metrics.csv"))
        lines = logs[0].read_text().rpartition("\n")[0].splitlines()[1:] if logs else []
        return int(lines[-1].split(",")[0]) * BATCH if lines else 0


def tensors(checkpoints: Path) -> dict[str, torch.Tensor]:
    """Everything that the last checkpoint holds: weights, moments, averages, sums of metrics."""
    last = max(path for path in checkpoints.iterdir() if path.is_dir())
    return dict(flat(torch.load(last / "state.pt", weights_only=True)))


def flat(state: dict, prefix: str = ""):
    """Its tensors, by their path."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        elif torch.is_tensor(value):
            yield f"{prefix}{key}", value


def environment() -> dict[str, str]:
    """One thread per process, so that sums have one order."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """And those that they have started."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def write(found: dict) -> None:
    """One JSON line."""
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
