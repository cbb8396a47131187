"""What does each engine cost on two processes: time of a step, bytes on the wire, and memory of a process?

A DDGAN and a flow-matching transformer, gloo over the loopback interface, whose counters tell the bytes. The same
global batch by one process stands beside them. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ["ddp", "ddp_manual", "fsdp", *(f"deepspeed_zero{stage}" for stage in range(4))]
MODELS = {
    "ddgan": ["experiment=ddgan_small", "callbacks=[budget,r1]", "callbacks.r1.interval=1"],
    "expert": ["experiment=expert_small", "callbacks=[budget]", "model.network.width=256"],
}
SHARED = ["logger=[]", "data=fashion10k", "val_every_kimg=1000", "trainer.precision=32-true", "trainer.accelerator=cpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    for model in args.models:
        alone = measured(model, "single", 1, args)
        for strategy in args.strategies:
            found = measured(model, strategy, 2, args)
            found["wall_over_single"] = found["wall_s"] / alone["wall_s"]
            found["state_over_single"] = found["state_mb"] / alone["state_mb"]
            write(found)


def measured(model: str, strategy: str, processes: int, args) -> dict:
    """One engine in processes of its own; what the first of them found."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *torchrun, __file__, "--worker", model, strategy, str(args.steps), str(args.batch)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "FOLDER": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        found = json.loads((Path(folder) / "found.json").read_text())
    found = {"model": model, "strategy": strategy, "processes": processes, **found}
    if processes == 1:
        write(found)
    return found


def worker(model: str, strategy: str, steps: int, batch: int) -> None:
    """A run of `steps` batches, the first of which counts for nothing."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    from conftest import compose_config
    from lightning import Callback

    import src.run
    from benchmarks.side_by_side import _status_mb

    folder = Path(os.environ["FOLDER"])
    seen: list[tuple[float, int]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            trainer.strategy.barrier()
            seen.append((time.perf_counter(), sent()))

        def on_train_end(self, trainer, module):
            steps_s = [b[0] - a[0] for a, b in pairwise(seen)]
            wire = [b[1] - a[1] for a, b in pairwise(seen)]
            parameters = sum(p.numel() for net in module.parallel_networks().values() for p in whole_shapes(net))
            found = {
                "wall_s": median(steps_s),
                "sent_mb": median(wire) / 1e6 / trainer.world_size,
                "parameters_mb": parameters * 4 / 1e6,
                "state_mb": state_bytes(module, trainer.strategy) / 1e6,
                "peak_rss_mb": _status_mb("VmHWM"),
            }
            if trainer.is_global_zero:
                (folder / "found.json").write_text(json.dumps(found))

    trainer_of = src.run._trainer

    def with_watch(config):
        trainer = trainer_of(config)
        trainer.callbacks.insert(0, Watch())
        return trainer

    src.run._trainer = with_watch
    torch.set_num_threads(1)
    words = [f"batch={batch}", f"total_kimg={steps * batch / 1000}", f"strategy={strategy}"]
    words.append(f"trainer.devices={os.environ['WORLD_SIZE']}")
    src.run.train(compose_config(folder, *MODELS[model], *SHARED, *words))


def sent() -> int:
    """Bytes that went over the loopback interface so far, by all processes."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def whole_shapes(network):
    """Meta tensors of the parameters' whole shapes."""
    import torch

    return [torch.empty(getattr(p, "ds_shape", p.shape), device="meta") for p in network.parameters()]


def state_bytes(module, strategy) -> int:
    """Parameters and optimizer state that this process keeps between two steps."""
    import torch

    from src.engine import WHOLE
    from src.sharding import local

    engine = getattr(strategy, "engine", WHOLE)
    kept = [engine.part(p) for net in module.parallel_networks().values() for p in net.parameters()]
    for optimizer in module.named_optimizers().values():
        kept += [local(v) for state in optimizer.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def write(line: dict) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:4], *map(int, sys.argv[4:6]))
    else:
        main()
