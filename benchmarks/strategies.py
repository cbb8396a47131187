"""What does each engine cost on two processes: time of a step, bytes given to the process group, and memory?

A DDN, a DDGAN with R1 in every batch and a flow-matching transformer over gloo. The same global batch by one process
stands beside them. Bytes are those of the tensors that collectives and messages are given, by the network whose turn it
is; memory is that of every live tensor when an optimizer's step begins: parameters, gradients, optimizer state, and
what an engine keeps besides.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ["ddp", "ddp_manual", "fsdp", *(f"deepspeed_zero{stage}" for stage in range(4))]
ALSO = {"ddn": ["pipeline"], "ddgan": [], "expert": ["tensor_parallel"]}
LACKS = {("ddn", "deepspeed_zero3")}
MODELS = {
    "ddn": ["experiment=ddn_small", "callbacks=[budget]"],
    "ddgan": ["experiment=ddgan_small", "callbacks=[budget,r1]", "callbacks.r1.interval=1"],
    "expert": ["experiment=expert_small", "callbacks=[budget]", "model.network.width=256"],
}
SHARED = [
    "logger=[]",
    "data=fashion10k",
    "val_every_kimg=1000",
    "+trainer.limit_val_batches=0",
    "trainer.precision=32-true",
    "trainer.accelerator=cpu",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=None, metavar="STRATEGY")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    for model in args.models:
        alone = measured(model, "single", 1, args)
        for strategy in args.strategies or [*STRATEGIES, *ALSO[model]]:
            if (model, strategy) in LACKS:
                continue
            found = measured(model, strategy, 2, args)
            found["wall_over_single"] = found["wall_s"] / alone["wall_s"]
            found["live_over_single"] = found["live_mb"] / alone["live_mb"]
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
    """A run of `steps` batches: the second is looked into, those after it are timed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    from conftest import compose_config
    from lightning import Callback
    from torch.utils._python_dispatch import TorchDispatchMode

    import src.run
    from benchmarks.side_by_side import _status_mb
    from src.engine import engine_of
    from src.modules.base import Module

    sent, live, seconds = Counter(), [], []

    class Counted(TorchDispatchMode):
        """Bytes of the tensors that go to the process group, under the name of the network whose turn it is."""

        name = ""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "c10d":
                given = args[1] if function.__name__.startswith(("allgather", "_allgather", "scatter")) else args[0]
                sent[self.name] += sum(t.nbytes for t in flat(given))
            return function(*args, **(kwargs or {}))

    def flat(given):
        return [given] if isinstance(given, torch.Tensor) else [t for part in given for t in flat(part)]

    turn, counted = Module.turn, Counted()

    def watched(module, name, *args, **kwargs):
        if module.batches_seen != 1:
            return turn(module, name, *args, **kwargs)
        engine, counted.name = engine_of(module.trainer), name
        step = engine.step

        def stepping(network, *rest):
            live.append(live_bytes(network))
            return step(network, *rest)

        engine.step = stepping
        with counted:
            logged = turn(module, name, *args, **kwargs)
        engine.step = step
        return logged

    Module.turn = watched

    class Watch(Callback):
        def on_train_batch_start(self, trainer, *_):
            trainer.strategy.barrier()
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer, module, *_):
            trainer.strategy.barrier()
            seconds.append(time.perf_counter() - self.started)

        def on_train_end(self, trainer, module):
            whole = [getattr(p, "ds_shape", p.shape) for p in module.parameters()]
            found = {
                "wall_s": median(seconds[2:]),
                **{f"sent_mb_{name}": sent[name] / 1e6 for name in module.parallel_networks()},
                "parameters_mb": sum(shape.numel() for shape in whole) * 4 / 1e6,
                "live_mb": max(live) / 1e6,
                "peak_rss_mb": _status_mb("VmHWM"),
            }
            if trainer.is_global_zero:
                (folder / "found.json").write_text(json.dumps(found))

    trainer_of, folder = src.run._trainer, Path(os.environ["FOLDER"])

    def with_watch(config):
        trainer = trainer_of(config)
        trainer.callbacks.insert(0, Watch())
        return trainer

    src.run._trainer = with_watch
    torch.set_num_threads(1)
    words = [f"batch={batch}", f"total_kimg={steps * batch / 1000}", f"strategy={strategy}"]
    words.append(f"trainer.devices={os.environ['WORLD_SIZE']}")
    src.run.train(compose_config(folder, *MODELS[model], *SHARED, *words))


def live_bytes(network) -> int:
    """Bytes of all tensors of this process but its images: each piece of memory once."""
    import torch

    from src.sharding import local

    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    found += [p.grad for p in network.parameters() if p.grad is not None]
    pieces = {}
    for tensor in map(local, found):
        if tensor.device.type != "meta" and tensor.dtype.is_floating_point:
            storage = tensor.untyped_storage()
            pieces[storage.data_ptr()] = storage.nbytes()
    return sum(pieces.values())


def write(line: dict) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:4], *map(int, sys.argv[4:6]))
    else:
        main()
