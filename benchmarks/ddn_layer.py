"""What does one Discrete Distribution Layer cost, forward and backward, against one that builds all K candidates?"""

import argparse
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import measure, report, serve, times, verdict, write

BATCH = {32: 16, 64: 4, 256: 1}  # samples of each size of map
SPEED_UP, EXTRA = 15, 0.35  # targets at 32x32, K=512, C=128: times faster, share of the extra memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maps", type=int, nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--leaves", type=int, nargs="+", default=[64, 512], help="K")
    parser.add_argument("--features", type=int, nargs="+", default=[64, 128, 256], help="C, the features of the head")
    parser.add_argument("--leak", action="store_true", help="as many features again draw the leak")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="CPU seconds of a turn")
    parser.add_argument("--quick", action="store_true", help="only 32x32, K=512, C=128")
    args = parser.parse_args()
    if args.quick:
        args.maps, args.leaves, args.features = [32], [512], [128]
    targets = {}
    for size, k, c in product(args.maps, args.leaves, args.features):
        layer = {"map": size, "batch": BATCH[size], "k": k, "c": c, "leak": args.leak}
        variants = {name: {**layer, "variant": name} for name in ("reference", "gather", "ours")}
        costs = measure(work, variants, args.turns, args.seconds)
        for variant, cost in costs.items():
            report({"variant": variant, **layer}, cost)
        reference, gather, ours = costs.values()
        speed_up, extra = times(reference, ours), times(ours, reference, "extra_mb")
        ratios = {"reference_over_ours": speed_up, "gather_over_ours": times(gather, ours)}
        write({**layer, **ratios, "extra_ours_over_reference": extra})
        if (size, k, c) == (32, 512, 128):
            targets = {"reference_over_ours": (speed_up, ">=", SPEED_UP), "extra_memory": (extra, "<=", EXTRA)}
    if targets:
        verdict(targets)


def work(connection, variant: str, map: int, batch: int, k: int, c: int, leak: bool) -> None:
    """One variant in its own process."""
    import torch

    from benchmarks.reference_layer import VARIANTS, layer_loss

    torch.set_num_threads(1)
    layer = VARIANTS[variant]()
    generator = torch.Generator().manual_seed(0)

    def stepper(size, batch, k):
        features = torch.randn(batch, 2 * c if leak else c, size, size, generator=generator).requires_grad_()
        weight = (torch.randn(k, 3, c, generator=generator) * c**-0.5).requires_grad_()
        previous, target = torch.randn(2, batch, 3, size, size, generator=generator)

        def step():
            features.grad = weight.grad = None
            loss, _, leaked, *_ = layer_loss(layer, features, weight, previous, target, leak)
            (loss + leaked.square().mean() if leak else loss).backward()

        return step

    serve(connection, stepper(map, batch, k), warm_up=stepper(16, 1, 8))


if __name__ == "__main__":
    main()
