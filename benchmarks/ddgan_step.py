"""What do a DDGAN training step and its samples cost, against the published way of computing the same numbers?

Random 32-pixel images and freshly initialised networks of the published CIFAR-10 size, or of a quarter of its width.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import measure, report, serve, times, verdict, write

WIDTHS = {"cifar10": 128, "small": 32}  # of the generator; the discriminator is the published one in both
CASES = ("cifar10-4", "small-8", "small-16")  # width and batch
VARIANTS = {  # of ours: what is on
    "ours": (),
    "bf16": ("bf16",),
    "channels_last": ("channels_last",),
    "reuse": ("reuse",),
    "bf16_channels_last": ("bf16", "channels_last"),
    "bf16_reuse": ("bf16", "reuse"),
}
SPEED_UP = {"cifar10-4": 2.0, "small-8": 2.6}  # targets in fp32
SPEED_UP_BF16, MEMORY, INTERVAL = 2.8, 0.8, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="SIZE-BATCH")
    parser.add_argument("--tasks", nargs="+", default=["step", "r1", "sample"], choices=["step", "r1", "sample"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.1, help="CPU seconds of a turn, at least one step")
    parser.add_argument(
        "--quick", action="store_true", help="one turn of small steps: ours, in fp32, and the published"
    )
    args = parser.parse_args()
    if args.quick:
        args.cases, args.tasks, args.variants, args.turns = ["small-8"], ["step"], ["ours"], 1
    targets = {}
    for case, task in product(args.cases, args.tasks):
        size, batch = case.split("-")
        net = {"size": size, "batch": int(batch), "task": task}
        names = ["published", *(name for name in args.variants if task != "sample" or "reuse" not in name)]
        costs = measure(work, {name: {**net, "variant": name} for name in names}, args.turns, args.seconds)
        for name, cost in costs.items():
            more = {"cpu_s_per_image": median(cost["cpu_s"]) / int(batch)} if task == "sample" else {}
            report({**net, "variant": name}, cost, **more)
        reference = costs.pop("published")
        write({**net, **{f"published_over_{name}": times(reference, cost) for name, cost in costs.items()}})
        if task == "step" and case in SPEED_UP:
            for name, bound in [("ours", SPEED_UP[case]), ("bf16", SPEED_UP_BF16)]:
                if name in costs:
                    targets[f"{case}_published_over_{name}"] = (times(reference, costs[name]), ">=", bound)
            if "ours" in costs:
                share = times(costs["ours"], reference, "peak_mb")
                targets[f"{case}_peak_memory_ours_over_published"] = (share, "<=", MEMORY)
    if targets:
        verdict(targets)


def work(connection, variant: str, task: str, size: str, batch: int) -> None:
    """One variant in its own process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = published(size, task) if variant == "published" else ours(size, task, VARIANTS[variant])
    images = torch.rand(batch, 3, 32, 32) * 2 - 1
    serve(connection, lambda: step(images), warm_up=lambda: step(images[:1]))


def published(size: str, task: str):
    """The published way: images -> one step, or as many samples."""
    import torch

    from benchmarks.reference_ddgan import PublishedStep
    from src.noise import Noise

    module = build(size)
    rates = {"generator": 1.6e-4, "discriminator": 1.25e-4}
    step = PublishedStep(module.generator, module.discriminator, module.diffusion, 0.02, 0.9999, rates)
    if task == "sample":
        return lambda images: step.sample(Noise(0, torch.arange(len(images))))
    return lambda images: step(images, Noise(0, torch.arange(len(images))), with_r1=task == "r1")


def ours(size: str, task: str, options: tuple[str, ...]):
    """Our module, its penalty and its averages: images -> one step, or as many samples."""
    import torch

    from src.callbacks.ema import EMA
    from src.callbacks.lazy_r1 import LazyR1
    from src.noise import Noise
    from src.protocols import Batch

    penalty, average = LazyR1(0.02, INTERVAL), EMA(decay=0.9999)
    module = alone(build(size, reuse_generator="reuse" in options), [penalty, average])
    if "channels_last" in options:
        module.to(memory_format=torch.channels_last)
    average.on_fit_start(None, module)

    def step(images):
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in options):
            module.batches_seen = 0 if task == "r1" else 1
            penalty.on_train_batch_start(None, module, None, 0)
            module.learn(Batch(images, torch.zeros(len(images)).long(), 0))
            average.on_train_batch_end(None, module, None, None, 0)

    if task == "sample":
        return lambda images: module.sample(Noise(0, torch.arange(len(images))))
    return step


def build(size: str, **options):
    """The module of the recipes, with published optimizers."""
    from functools import partial

    import torch

    from src.diffusion import Diffusion
    from src.modules.ddgan import DDGAN
    from src.modules.networks.discriminators import SmallDiscriminator
    from src.modules.networks.ncsnpp import NCSNpp

    generator = NCSNpp(3, 32, width=WIDTHS[size], multipliers=(1, 2, 2, 2))
    adam = partial(torch.optim.Adam, betas=(0.5, 0.9), fused=True)
    optimizers = {"optimizer_generator": partial(adam, lr=1.6e-4), "optimizer_discriminator": partial(adam, lr=1.25e-4)}
    return DDGAN(generator, SmallDiscriminator(3, 32), Diffusion(4), **optimizers, seed=0, **options)


def alone(module, callbacks):
    """The module without a Trainer, of which a step needs the callbacks, a strategy and the optimizers alone."""
    from types import SimpleNamespace

    optimizers = dict(zip(module.parallel_networks(), module.configure_optimizers(), strict=True))
    data = SimpleNamespace(batch=1)
    trainer = SimpleNamespace(callbacks=callbacks, strategy=None, datamodule=data, global_rank=0, world_size=1)

    class Alone(type(module)):
        named_optimizers = lambda self: optimizers  # noqa: E731
        manual_backward = lambda self, loss: loss.backward()  # noqa: E731
        trainer = property(lambda self: self.__dict__["alone"])

        def learn(self, batch):
            data.batch = len(batch.images)
            return super().learn(batch)

    module.__dict__["alone"], module.__class__ = trainer, Alone
    return module


if __name__ == "__main__":
    main()
