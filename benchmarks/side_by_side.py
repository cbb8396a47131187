"""Variants of a computation measured side by side: each in a fresh process of its own, one turn after the other.

Fresh processes keep peaks of memory honest, and taking turns lets noise of the machine hit all alike. Linux only.
"""

import ctypes
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median


def measure(work: Callable, variants: dict[Hashable, dict], turns: int, seconds: float) -> dict[Hashable, dict]:
    """Run `work(connection, **settings)` for every variant in its own process and let them take turns.

    `work` ends in `serve`. A turn repeats the step for at least so many CPU seconds: after the others' turns the first
    finds its caches cold. Returns cpu_s and wall_s of a step (one number a turn), peak_mb of the process and extra_mb
    (its peak above the level before the first step). The first turn of each counts only for the memory.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")  # children of a process that has done nothing but import torch
    context.set_forkserver_preload(["torch"])
    connections = {}
    for name, settings in variants.items():
        connections[name], end = context.Pipe()
        context.Process(target=work, args=(end,), kwargs=settings, daemon=True).start()
        end.close()
    seen = {name: [] for name in variants}
    for _ in range(turns + 1):
        for name, connection in connections.items():
            connection.send(seconds)
            seen[name].append(connection.recv())
    for connection in connections.values():
        connection.send(None)
    return {name: {key: [turn[key] for turn in costs[1:]] for key in costs[0]} for name, costs in seen.items()}


def serve(connection: Connection, step: Callable[[], None], warm_up: Callable[[], None]) -> None:
    """The worker's side: one turn of steps whenever it is asked for, answered with what a step cost.

    `warm_up` is a much smaller step, which loads libraries and builds what stays, so that no step is charged for it.
    """
    warm_up()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present level
    level = _status_mb("VmRSS")
    while seconds := connection.recv():
        cpu, wall, steps = time.process_time(), time.perf_counter(), 0
        while not steps or time.process_time() - cpu < seconds:
            step()
            steps += 1
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        peak = _status_mb("VmHWM")
        connection.send({"cpu_s": cpu / steps, "wall_s": wall / steps, "peak_mb": peak, "extra_mb": peak - level})


def report(settings: dict, cost: dict, **more) -> None:
    """One line of JSON: what was measured, and its medians over the turns."""
    write({**settings, **{key: median(values) for key, values in cost.items()}, **more, "turns": len(cost["cpu_s"])})


def write(line: dict) -> None:
    """One line of JSON with numbers of four digits."""
    print(json.dumps({key: _rounded(value) for key, value in line.items()}), flush=True)


def times(more: dict, less: dict, key: str = "cpu_s") -> float:
    """How many times one variant's cost is another's: median over the turns, each compared within the same turn."""
    return median(a / b for a, b in zip(more[key], less[key], strict=True))


def verdict(targets: dict[str, tuple[float, str, float]]) -> None:
    """The last line: value, target and whether it is met for {name: (value, "<=" or ">=", bound)}, and if all are."""
    lines = {}
    for name, (value, relation, bound) in targets.items():
        met = value <= bound if relation == "<=" else value >= bound
        lines[name] = {"value": _rounded(value), "target": f"{relation} {bound}", "met": met}
    write({"targets": lines, "met": all(line["met"] for line in lines.values())})


def _status_mb(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def _rounded(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value
