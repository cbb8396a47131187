"""What does a training step of a diffusion transformer cost, against a plain loop over the same network?

Plain: float32, attention as products of matrices, AdamW and the average parameter by parameter. Ours: the expert with
its callback. Both learn flow matching; `--parity` compares the losses that they reach on the embedded images, with the
same weights, images and noise. The target is one of bfloat16, for CPUs that compute in it; others only emulate it.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import measure, report, serve, times, verdict, write

CASES = {  # size: channels, resolution, batch
    "mini/4": (1, 28, 64),
    "Ti/4": (3, 32, 64),
    "S/2": (3, 32, 16),
}
VARIANTS = {  # of ours: what is on
    "bf16": ("bf16",),
    "fp32": (),
    "bf16_fused_attention": ("bf16", "fused_attention"),
    "bf16_single": ("bf16", "single"),
    "fp32_single": ("single",),
    "fp32_checkpointing": ("checkpointing",),
}
SPEED_UP, LAST, LR, DECAY = 1.7, 20, 1e-3, 0.9999


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="all that this CPU has instructions for")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds of a turn, at least one step")
    parser.add_argument("--parity", type=int, default=80, help="steps whose losses are compared; 0 for none")
    parser.add_argument("--parity-cases", nargs="+", default=["mini/4"], choices=CASES)
    parser.add_argument(
        "--quick", action="store_true", help="one turn of mini/4: ours and plain, a few steps of parity"
    )
    args = parser.parse_args()
    if args.quick:
        args.cases, args.variants, args.turns, args.seconds, args.parity = ["mini/4"], ["fp32"], 1, 0.1, 4
    write({"cpu_computes_in_bf16": (has_bf16 := computes_in_bf16())})
    args.variants = args.variants or [name for name, on in VARIANTS.items() if has_bf16 or "bf16" not in on]
    targets = {}
    for case in args.cases:
        settings = {name: {"case": case, "variant": name} for name in ("plain", *args.variants)}
        costs = measure(work, settings, args.turns, args.seconds)
        for name, cost in costs.items():
            report({**settings[name], "batch": CASES[case][2]}, cost)
        plain = costs.pop("plain")
        ratios = {f"plain_over_{name}": times(plain, cost) for name, cost in costs.items()}
        write({"case": case, **ratios})
        if has_bf16 and "plain_over_bf16" in ratios:
            targets[f"{case}_plain_over_bf16"] = (ratios["plain_over_bf16"], ">=", SPEED_UP)
    for case, variant in product(args.parity_cases if args.parity else [], ("plain", *args.variants)):
        losses = curve(case, variant, args.parity)
        found = {"first_loss": losses[0], f"mean_of_last_{LAST}": mean(losses[-LAST:])}
        write({"case": case, "variant": variant, "steps": args.parity, **found})
    if targets:
        verdict(targets)


def computes_in_bf16() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    import torch

    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def work(connection, case: str, variant: str) -> None:
    """One variant in its own process."""
    import torch

    torch.set_num_threads(1)
    channels, resolution, batch = CASES[case]
    step = build(case, variant)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, channels, resolution, resolution, generator=generator) * 2 - 1
    serve(connection, lambda: step(images, 0), warm_up=lambda: step(images[:1], 0))


def curve(case: str, variant: str, steps: int) -> list[float]:
    """The losses of so many steps on embedded images."""
    import numpy as np
    import torch

    from src.modules.networks import dit

    torch.set_num_threads(1)
    attend = dit.attend
    channels, resolution, batch = CASES[case]
    step = build(case, variant)
    name = "fashion10k" if channels == 1 else "emoji32"
    with np.load(Path(__file__).parents[1] / "src" / "data" / f"{name}.npz") as file:
        images = torch.from_numpy(file["images"])
    images = images[:, None] if channels == 1 else images.permute(0, 3, 1, 2)
    assert images.shape[1:] == (channels, resolution, resolution)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    rows = [order[torch.arange(n * batch, (n + 1) * batch) % len(order)] for n in range(steps)]
    losses = [step(images[chosen].float() / 127.5 - 1, n * batch) for n, chosen in enumerate(rows)]
    dit.attend = attend
    return losses


def build(case: str, variant: str):
    """(images, number of the first) -> a step, and its loss; from the same weights for each variant."""
    import torch

    from src.modules.networks import dit

    channels, resolution, _ = CASES[case]
    options = VARIANTS.get(variant, ())
    if variant == "plain":
        dit.attend = plain_attention
    elif "fused_attention" in options:
        dit.attend = torch.nn.functional.scaled_dot_product_attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        modulation, checkpointing = "single" if "single" in options else "zero", "checkpointing" in options
        network = dit.DiT(channels, resolution, size=case, modulation=modulation, checkpointing=checkpointing)
    return plain(network) if variant == "plain" else ours(network, "bf16" in options)


def plain_attention(q, k, v):
    """softmax(q k^T / sqrt(d)) v, as it is written."""
    return (q * q.shape[3] ** -0.5 @ k.mT).softmax(3) @ v


def plain(network):
    """A loop as in the published training scripts."""
    import copy

    import torch

    from src.noise import Noise

    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0, foreach=False, fused=False)
    average = copy.deepcopy(network).requires_grad_(False)

    def step(images, first):
        noise = Noise(0, torch.arange(first, first + len(images)))
        t, e = noise.uniform("train/t"), noise.normal("train/x", *images.shape[1:])
        x_t = (1 - t[:, None, None, None]) * images + t[:, None, None, None] * e
        loss = (network(x_t, 1000 * t) - (e - images)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), network.parameters(), strict=True):
                kept.mul_(DECAY).add_(parameter, alpha=1 - DECAY)
        return loss.item()

    return step


def ours(network, bf16: bool):
    """The expert, with its optimizer and its averages."""
    from functools import partial

    import torch

    from benchmarks.ddgan_step import alone
    from src.callbacks.ema import EMA
    from src.modules.expert import Expert
    from src.protocols import Batch

    average = EMA(decay=DECAY)
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.0, fused=True)
    module = alone(Expert(network, adamw, seed=0), [average])
    average.on_fit_start(None, module)

    def step(images, first):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logged = module.learn(Batch(images, torch.zeros(len(images)).long(), first))
            average.on_train_batch_end(None, module, None, None, 0)
        return logged["train/loss"].item()

    return step


if __name__ == "__main__":
    main()
