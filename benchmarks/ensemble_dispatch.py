"""What an ensemble of 8 costs beside one network: `python benchmarks/ensemble_dispatch.py`; about two minutes.

Velocities of 64 images by the recipe's networks (conf/experiment/paris_expert.yaml and paris_router.yaml), on one
thread: one network; the router alone; top-1 and top-2 with one call for each chosen expert, by the loop over samples,
and by asking all experts first. Images are spread over experts evenly, or as unevenly as plain k-means leaves clusters.
Variants take turns within a round; JSON lines with medians of CPU seconds, and ratios to one network round by round.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from src.modules.networks.dit import DiT
from src.modules.networks.router import RouterDiT
from src.routing import TopK, mixed, weights

SIZES = {"channels": 1, "resolution": 32, "patch": 4, "classes": 10}
UNEVEN = [0.24, 0.19, 0.16, 0.13, 0.11, 0.08, 0.06, 0.03]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    experts = [DiT(**SIZES, width=128, depth=6, heads=4).eval() for _ in range(8)]
    router = RouterDiT(**SIZES, clusters=8, width=64, depth=4, heads=4).eval()
    x, t, labels = torch.randn(given.batch, 1, 32, 32), torch.rand(given.batch), torch.arange(given.batch) % 10

    def ask(k, rows):
        return experts[k](x[rows], 1000 * t[rows], labels[rows])

    def one():
        return experts[0](x, 1000 * t, labels)

    variants = {"one network": one, "router": lambda: router(x, 1000 * t, labels)}
    for name, shares in (("even", [1 / 8] * 8), ("uneven", UNEVEN)):
        first = torch.multinomial(torch.tensor(shares), given.batch, replacement=True)
        logits = torch.randn(given.batch, 8) + 9 * torch.nn.functional.one_hot(first, 8)
        for k in (1, 2):
            w = weights(logits, t, TopK(k))
            variants[f"top-{k}, {name}, grouped"] = lambda w=w: mixed(w, ask)
            variants[f"top-{k}, {name}, with router"] = lambda w=w: (router(x, 1000 * t, labels), mixed(w, ask))
            variants[f"top-{k}, {name}, sample by sample"] = lambda w=w: [
                sum(w[i, j] * ask(j, torch.tensor([i])) for j in w[i].nonzero().flatten().tolist())
                for i in range(given.batch)
            ]
    variants["all experts"] = lambda: [ask(k, torch.arange(given.batch)) for k in range(8)]
    seconds = {name: [] for name in variants}
    for number in range(given.rounds + 1):
        for name, work in variants.items():
            began = time.process_time()
            work()
            if number:  # the first warms up
                seconds[name].append(time.process_time() - began)
    for name, found in seconds.items():
        ratio = median(a / b for a, b in zip(found, seconds["one network"], strict=True))
        print(json.dumps({"what": name, "cpu_s": round(median(found), 4), "times_one_network": round(ratio, 3)}))


if __name__ == "__main__":
    main()
