"""Stateless noise: the same bits by name, whatever the split, the order and the global generators."""

import random

import numpy as np
import pytest
import torch

from src.noise import Noise, order

SEED, COUNT = 5, 24


def normals(numbers, purpose="z", seed=SEED, shape=(3, 4)):
    return Noise(seed, torch.as_tensor(numbers)).normal(purpose, *shape)


@pytest.fixture(scope="module")
def whole():
    return normals(torch.arange(COUNT))


@pytest.mark.parametrize("sizes", [[1] * COUNT, [12, 12], [5, 7, 12], [23, 1]])
def test_the_split_into_batches_changes_no_bit(whole, sizes):
    parts = [normals(numbers) for numbers in torch.arange(COUNT).split(sizes)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("draw", ["normal", "uniform"])
def test_the_order_of_numbers_changes_no_bit(draw):
    numbers = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    straight = getattr(Noise(SEED, torch.arange(COUNT)), draw)("z", 3, 4)
    mixed = getattr(Noise(SEED, numbers), draw)("z", 3, 4)
    assert torch.equal(mixed, straight[numbers])


def test_what_was_drawn_before_does_not_matter(whole):
    noise = Noise(SEED, torch.arange(COUNT))
    noise.uniform("z", 100)
    noise.normal("other", 7)
    assert torch.equal(noise.normal("z", 3, 4), whole)


def test_seed_purpose_and_number_each_give_other_draws(whole):
    others = [
        normals(torch.arange(COUNT), seed=SEED + 1),
        normals(torch.arange(COUNT), purpose="zz"),
        normals(torch.arange(COUNT) + COUNT),
    ]
    drawn = torch.cat([whole, *others]).flatten(1)  # (4 * COUNT, 12)
    assert len(drawn.unique(dim=0)) == 4 * COUNT
    correlations = torch.corrcoef(torch.stack([whole.flatten(), *(o.flatten() for o in others)]))
    assert (correlations - torch.eye(4)).abs().max() < 0.25  # 4.2 standard deviations of 288 independent pairs


def test_names_that_run_together_when_written_are_told_apart():
    """Seed 1 with number 23 is not seed 12 with number 3, and a purpose with a slash is not another seed's."""
    drawn = [normals([23], seed=1), normals([3], seed=12), normals([3], "a/b", seed=1), normals([3], "b", seed=1)]
    assert len(torch.cat(drawn).flatten(1).unique(dim=0)) == 4


def test_draws_have_recorded_values():
    """Known values: another hash or generator would turn every published seed into another image."""
    known = normals([0, 10**9], "z", seed=0, shape=(2,))
    expected = torch.tensor([[1.6094981, -1.2498386], [0.9044438, -0.1526771]])
    torch.testing.assert_close(known, expected, rtol=1e-6, atol=1e-6)


def test_shapes_and_types():
    noise = Noise(SEED, torch.arange(5))
    assert noise.normal("z").shape == (5,)
    assert noise.uniform("u", 2, 1, 1).shape == (5, 2, 1, 1)
    assert noise.normal("z", 2).dtype == noise.uniform("u", 2).dtype == torch.float32
    assert Noise(SEED, torch.arange(0)).normal("z", 3).shape == (0, 3)


def test_moments():
    noise = Noise(0, torch.arange(500))
    normal, uniform = noise.normal("moments", 400).double(), noise.uniform("moments", 400).double()
    count = normal.numel()
    assert abs(normal.mean()) < 4 / count**0.5
    assert abs(normal.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs((normal**4).mean() - 3) < 4 * (96 / count) ** 0.5
    assert abs(uniform.mean() - 0.5) < 4 * (1 / 12 / count) ** 0.5
    assert abs(uniform.var() - 1 / 12) < 4 * (1 / 180 / count) ** 0.5
    assert uniform.min() >= 0 and uniform.max() < 1
    across = normal.mean(1)  # samples are independent of one another: their means spread as they should
    assert abs(across.var() * 400 - 1) < 4 * (2 / 500) ** 0.5


def test_global_generators_stay_untouched():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    Noise(SEED, torch.arange(9)).normal("z", 8)
    Noise(SEED, torch.arange(9)).uniform("z", 8)
    order(SEED, 3, 100)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert random.getstate() == before[2]


def test_global_generators_have_no_influence(whole):
    torch.manual_seed(1)
    assert torch.equal(normals(torch.arange(COUNT)), whole)


def test_order_is_a_permutation_of_its_own_for_every_pass_and_seed():
    orders = [order(seed, passing, 50) for seed in (0, 1) for passing in (0, 1, 2)]
    for each in orders:
        assert each.dtype == torch.int64 and torch.equal(each.sort().values, torch.arange(50))
    assert len(torch.stack(orders).unique(dim=0)) == 6
    assert torch.equal(order(1, 2, 50), orders[5])


def test_order_puts_every_image_everywhere():
    """Over many passes the place of image 0 is uniform: chi-square with 9 degrees of freedom."""
    places = torch.stack([order(0, passing, 10).argsort()[0] for passing in range(500)])
    observed = torch.bincount(places, minlength=10).double()
    assert ((observed - 50).square() / 50).sum() < 27.9  # p = 0.001
