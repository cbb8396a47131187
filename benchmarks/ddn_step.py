"""What do a training step and a sample of a whole Discrete Distribution Network cost, with our layer or plain ones?

The trunk is the same for all: 32x32 images, 11 layers, Adam, one thread; only the discrete layers are exchanged.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import measure, report, serve, times, verdict, write

BLOCKS = [1, 2, 2, 2, 2, 2]
TASKS = ("train", "sample")
SPEED_UP, TRAIN_GROWTH, SAMPLE_GROWTH, EXTRA = 4.5, 1.15, 1.10, 0.35  # targets at width 64 for K=512, growth from K=64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64, help="of the trunk; the targets are for 64")
    parser.add_argument("--leaves", type=int, nargs=2, default=[64, 512], metavar=("FEW", "MANY"), help="two K")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds of a turn")
    parser.add_argument("--quick", action="store_true", help="one turn, and only what the targets need")
    args = parser.parse_args()
    few, many = args.leaves
    cases = list(product(TASKS, args.leaves, ("reference", "gather", "ours")))
    cases = [case for case in cases if case[0] == "train" or case[2] != "gather"]  # it would sample as ours does
    if args.quick:
        args.turns, args.seconds = 1, 0.6
        cases = [case for case in cases if case[2] == "ours" or case == ("train", many, "reference")]
    net = {"width": args.width, "batch": args.batch}
    costs = {}
    for task in TASKS:
        settings = {case: dict(zip(("task", "k", "variant"), case, strict=True)) for case in cases if case[0] == task}
        variants = {case: {**net, **setting} for case, setting in settings.items()}
        costs |= measure(work, variants, args.turns, args.seconds)
        for case, setting in settings.items():
            more = {"cpu_s_per_image": median(costs[case]["cpu_s"]) / args.batch} if task == "sample" else {}
            report({**setting, **net}, costs[case], **more)
    ratios = compare(costs, few, many)
    write({**net, **ratios})
    if (args.width, few, many) == (64, 64, 512):
        targets = {
            "train_k512_reference_over_ours": (">=", SPEED_UP),
            "train_ours_k512_over_k64": ("<=", TRAIN_GROWTH),
            "sample_ours_k512_over_k64": ("<=", SAMPLE_GROWTH),
            "train_k512_extra_ours_over_reference": ("<=", EXTRA),
        }
        verdict({name: (ratios[name], *target) for name, target in targets.items()})


def compare(costs: dict[tuple, dict], few: int, many: int) -> dict[str, float]:
    """CPU seconds of plain variants over ours and of many leaves over few; extra memory of ours over the reference."""
    ratios = {}
    for (task, k, variant), cost in costs.items():
        if variant != "ours":
            ratios[f"{task}_k{k}_{variant}_over_ours"] = times(cost, costs[task, k, "ours"])
        if variant == "reference":
            ratios[f"{task}_k{k}_extra_ours_over_reference"] = times(costs[task, k, "ours"], cost, "extra_mb")
        if k == many and (task, few, variant) in costs:
            ratios[f"{task}_{variant}_k{many}_over_k{few}"] = times(cost, costs[task, few, variant])
    return ratios


def work(connection, variant: str, task: str, width: int, k: int, batch: int) -> None:
    """One variant in its own process, where the decoder's module gets the layer that is measured."""
    import torch

    from benchmarks.reference_layer import VARIANTS
    from src.modules.networks import ddn_decoder

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = VARIANTS[variant]()
    ddn_decoder.distances, ddn_decoder.emit = layer.distances, layer.emit
    stages = len(BLOCKS)
    decoder = ddn_decoder.DDNDecoder(3, 2 ** (stages - 1), BLOCKS, [width] * stages, [k] * stages)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)

    def train(images):
        optimizer.zero_grad(set_to_none=True)
        torch.stack([layer.loss for layer in decoder(images)]).mean().backward()
        optimizer.step()

    if task == "train":
        images = torch.rand(batch, 3, decoder.resolution, decoder.resolution) * 2 - 1
        serve(connection, lambda: train(images), warm_up=lambda: train(images[:1]))
    else:
        codes = torch.randint(k, (batch, sum(BLOCKS)))
        serve(connection, lambda: decoder.decode(codes), warm_up=lambda: decoder.decode(codes[:1]))


if __name__ == "__main__":
    main()
