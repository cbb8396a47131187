"""How long does training stand still for a checkpoint, written while it waits or in the background?

A diffusion transformer of 100 million parameters with Adam's two moments (1.2 GB in all), on one process, each kind of
saving in a process of its own. Stall is what the training thread spends in a save; beside it the median step without
and during a write, and the peak of memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
NETWORK = ["model=expert", "model.network.width=1152", "model.network.depth=4", "model.network.heads=16"]
SAVING = [
    *NETWORK,
    "model.network.patch=8",
    "callbacks=[budget,checkpoint]",
    "logger=[]",
    "batch=1",
    "val_every_kimg=1000",
    "+trainer.limit_val_batches=0",
    "trainer.precision=32-true",
    "trainer.accelerator=cpu",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--batches", type=int, default=6, help="between two saves")
    args = parser.parse_args()
    found = {}
    for kind in ("waiting", "background"):
        command = [sys.executable, __file__, "--worker", kind, str(args.saves), str(args.batches)]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, env=os.environ | {"FOLDER": folder}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        found[kind] = json.loads(done.stdout.splitlines()[-1])
        write({"saving": kind, **found[kind]})
    write({"stall_waiting_over_background": found["waiting"]["stall_s"] / found["background"]["stall_s"]})


def worker(kind: str, saves: int, batches: int) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from conftest import compose_config

    from benchmarks.side_by_side import _status_mb
    from src.callbacks.checkpoint import Checkpoint
    from src.run import train

    stalls, steps = [], {False: [], True: []}

    class Watched(Checkpoint):
        def _save(self, trainer, module, best=None):
            started = time.perf_counter()
            super()._save(trainer, module, best)
            stalls.append(time.perf_counter() - started)

        def on_train_batch_start(self, *given):
            super().on_train_batch_start(*given)
            self.started = time.perf_counter()

        def on_train_batch_end(self, *given):
            super().on_train_batch_end(*given)
            thread = self.writer._thread
            steps[thread is not None and thread.is_alive()].append(time.perf_counter() - self.started)

    sys.modules["src.callbacks.checkpoint"].Checkpoint = Watched
    words = [f"callbacks.checkpoint.background={str(kind == 'background').lower()}"]
    words += [f"callbacks.checkpoint.every_kimg={batches / 1000}", f"schedule_kimg={(saves * batches + 2) / 1000}"]
    train(compose_config(Path(os.environ["FOLDER"]), *SAVING, *words))
    folder = next(Path(os.environ["FOLDER"]).rglob("state.pt"))
    found = {"stall_s": median(stalls[:saves]), "stalls_s": [round(s, 3) for s in stalls[:saves]]}
    found |= {f"step_s{'_during_a_write' * during}": median(s) for during, s in steps.items() if s}
    print(json.dumps({**found, "peak_rss_mb": _status_mb("VmHWM"), "state_mb": folder.stat().st_size / 1e6}))


def write(line: dict) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], *map(int, sys.argv[3:5]))
    else:
        main()
