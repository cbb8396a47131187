"""What share of the time is computing: one model over a slow link (DDP), or experts that never talk to one another.

The link is in a communication hook of DDP's: each bucket of gradients waits, one after the other and beside the
backward pass, for 2 (N - 1) latencies and 2 (N - 1) / N of its bytes, a ring's all-reduce; then gloo averages it.
The share is an expert's seconds a step over DDP's. Calculated: C / (C + L), and with all of the backward pass (two
thirds of C) beside the link C / max(C, C / 3 + L), for a step of C seconds and a link that takes L.

    python benchmarks/utilisation.py                # two processes of one thread, a DiT-S/8 of 32 pixels
    python benchmarks/utilisation.py --steps 3 --size Ti/8
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parent.parent
LINKS = {  # name: bits a second, seconds of latency
    "100 Gb/s": (100e9, 1e-5),
    "10 Gb/s": (10e9, 1e-4),
    "1 Gb/s": (1e9, 1e-4),
    "intercontinental, 1 Gb/s and 75 ms": (1e9, 75e-3),
}
BUCKET = 25 * 2**20  # bytes of gradients that DDP sends at once
XL = {
    "parameters": 606e6,
    "step_s": 1.2,
    "batch": 32,
    "processes": 8,
}  # DiT-XL/2 on a data centre's GPU, all gradients at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S/8")
    parser.add_argument("--batch", type=int, default=4, help="images of each process")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    alone = measured("experts", args)
    write({"link": None, "experts": args.processes, **alone, "share_measured": 1.0})
    for name in ["loopback", *LINKS]:
        found = measured(name, args)
        told = {"link": name, "processes": args.processes, **found, "share_measured": alone["step_s"] / found["step_s"]}
        write(told | calculated(name, args.processes, found["parameters"], alone["step_s"], args.batch))
    for name in LINKS:
        told = {"link": name, "processes": XL["processes"], "calculated_for": "DiT-XL/2"}
        write(told | calculated(name, XL["processes"], XL["parameters"], XL["step_s"], XL["batch"], math.inf))


def seconds_on(link: str, processes: int, size: float, buckets: int = 1) -> float:
    """How long a ring's all-reduce of `size` bytes takes."""
    bits, latency = LINKS[link]
    return 2 * (processes - 1) * (latency * buckets + 8 * size / processes / bits)


def calculated(link: str, processes: int, parameters: float, step: float, batch: int, bucket: float = BUCKET) -> dict:
    """Shares of computing, and megabytes that a process sends for each of its images."""
    if link not in LINKS:
        return {}
    waits = seconds_on(link, processes, 4 * parameters, max(1, math.ceil(4 * parameters / bucket)))
    return {
        "link_s": waits,
        "share_without_overlap": step / (step + waits),
        "share_with_overlap": step / max(step, step / 3 + waits),
        "sent_mb_per_image": 2 * (processes - 1) / processes * 4 * parameters / batch / 1e6,
    }


def measured(link: str, args) -> dict:
    """Processes that train beside one another, over a link or each an expert: the mean of their medians."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--worker", link, args.size, str(args.batch), str(args.steps), folder]
        command = [sys.executable, *torchrun, __file__, *words]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: mean(f[key] for f in found) for key in found[0]}


def worker(link: str, size: str, batch: int, steps: int, folder: str) -> None:
    sys.path.insert(0, str(ROOT))
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from src.modules.networks.dit import DiT
    from src.objectives import Velocity

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    network = trained = DiT(channels=3, resolution=32, size=size)
    if link != "experts":
        dist.init_process_group("gloo")
        trained = DistributedDataParallel(network)
        wire = ThreadPoolExecutor(1)  # one link: bucket after bucket

        def slowly(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            future, gradients = torch.futures.Future(), bucket.buffer()

            def send():
                if link in LINKS:
                    time.sleep(seconds_on(link, processes, gradients.nbytes))
                dist.all_reduce(gradients)
                future.set_result(gradients.div_(processes))

            wire.submit(send)
            return future

        trained.register_comm_hook(None, slowly)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    draw = torch.Generator().manual_seed(rank)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        x, noise = (torch.randn(batch, 3, 32, 32, generator=draw) for _ in range(2))
        shown, t, target = Velocity().task(x, noise, torch.rand(batch, generator=draw))
        optimizer.zero_grad()
        (trained(shown, t) - target).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    assert dist.is_initialized() == (link != "experts")
    found = {"step_s": median(seconds[2:]), "parameters": sum(p.numel() for p in network.parameters())}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def write(line: dict) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:4], *map(int, sys.argv[4:6]), sys.argv[6])
    else:
        main()
