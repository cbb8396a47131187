"""What our benchmarks compare with computes the published numbers, and moves weights as our module does."""

from copy import deepcopy

import pytest
import test_ddgan_golden
import torch
from test_ddgan_golden import golden  # noqa: F401

from benchmarks.ddgan_step import alone
from benchmarks.reference_ddgan import PublishedStep, as_published
from src.callbacks.ema import EMA
from src.callbacks.lazy_r1 import LazyR1
from src.diffusion import Diffusion
from src.modules.ddgan import DDGAN
from src.modules.networks.discriminators import SmallDiscriminator
from src.modules.networks.ncsnpp import NCSNpp
from src.noise import Noise
from src.protocols import Batch


@pytest.mark.parametrize("check", ["test_discriminator_step", "test_generator_step", "test_sampler"])
def test_the_reference_gives_the_recorded_values(golden, check):  # noqa: F811
    as_published(golden.generator)
    as_published(golden.discriminator)
    getattr(test_ddgan_golden, check)(golden)


@pytest.mark.parametrize("interval", [1, 2])
def test_the_reference_moves_weights_as_our_module_does(monkeypatch, interval):
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    torch.set_default_dtype(torch.float64)
    try:
        networks = (
            NCSNpp(3, 16, width=8, multipliers=(1, 2), blocks=1, attention=(8,), z_dim=4, z_width=8, z_layers=1),
            SmallDiscriminator(3, 16, width=4, time_width=8),
        )
        rates = {"generator": 1.6e-4, "discriminator": 1.25e-4}
        makers = {
            f"optimizer_{name}": lambda p, rate=rate: torch.optim.Adam(p, rate, (0.5, 0.9), fused=True)
            for name, rate in rates.items()
        }
        theirs = PublishedStep(*deepcopy(networks), Diffusion(4), 0.5, 0.99, rates)
        penalty, average = LazyR1(0.5, interval), EMA(decay=0.99)
        ours = alone(DDGAN(*networks, Diffusion(4), **makers, seed=0), [penalty, average])
        average.on_fit_start(None, ours)
        for step in range(3):
            batch = Batch(torch.rand(4, 3, 16, 16) * 2 - 1, torch.zeros(4), 4 * step)
            ours.batches_seen = step
            penalty.on_train_batch_start(None, ours, batch, step)
            ours.learn(batch)
            average.on_train_batch_end(None, ours, None, batch, step)
            theirs(batch.images, Noise(0, batch.numbers), with_r1=step % interval == 0)
        for name in ("generator", "discriminator"):
            pairs = zip(getattr(ours, name).parameters(), getattr(theirs, name).parameters(), strict=True)
            assert max((a - b).abs().max().item() for a, b in pairs) < 1e-12
        pairs = zip(average.averages.values(), theirs.averages.averages, strict=True)
        assert max((a - b).abs().max().item() for a, b in pairs) < 1e-12
        images = [owner.sample(Noise(1, torch.arange(4))) for owner in (ours, theirs)]
        torch.testing.assert_close(*images, rtol=0, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)
