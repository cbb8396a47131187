"""The Discrete Distribution Layer against recorded values and literal definitions; Split-and-Prune's decisions."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.reference_layer import VARIANTS, layer_loss
from src import discrete
from src.discrete import decide, distances, emit, split_tally

GOLDEN = torch.load(Path(__file__).parent / "golden" / "ddn_layer.pt", weights_only=True)
SPLITS = [
    pytest.param(table["counts"], table["accumulated_loss"], table["decision"], id=f"k{table['k']}")
    for table in GOLDEN["split"]
]


def assert_close(actual, expected, relative):
    """Largest difference against the largest value."""
    assert (actual - expected).abs().max() <= relative * expected.abs().max()


def layer_data(b, c, height, width, k, channels=3, dtype=torch.float64):
    """Features, weight, previous image and target, from a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    shapes = (b, c, height, width), (k, channels, c), (b, channels, height, width), (b, channels, height, width)
    features, weight, previous, target = (torch.randn(s, dtype=dtype, generator=generator) for s in shapes)
    return features, weight * c**-0.5, previous, target


def brute_force(features, weight, previous, target):
    """Mean squared error of candidates built one by one in float64."""
    features, weight, previous, target = (x.double() for x in (features, weight, previous, target))
    candidates = [previous + torch.einsum("dc,bchw->bdhw", head, features) for head in weight]
    return torch.stack([(candidate - target).square().mean((1, 2, 3)) for candidate in candidates], 1)


@pytest.mark.parametrize("number", range(len(GOLDEN["layers"])))
@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_against_recorded_values(variant, number):
    case = GOLDEN["layers"][number]
    expected = case["expected"]
    weight = case["weight"].view(case["k"], 3, case["head_channels"]).requires_grad_()
    features, previous = (case[name].clone().requires_grad_() for name in ("features", "previous"))
    target = F.interpolate(case["target"], size=(case["size"],) * 2, mode="area")
    loss, image, leak, found, index = layer_loss(VARIANTS[variant](), features, weight, previous, target, case["leak"])
    assert torch.equal(index, expected["index"])
    assert torch.equal(index.bincount(minlength=case["k"]).double(), expected["counts"])
    assert_close(found, expected["distances"], 1e-5)
    assert_close(image, expected["image"], 1e-5)
    assert_close(loss, expected["loss"], 1e-5)
    if case["leak"]:
        assert_close(leak, expected["leak"], 1e-5)
        loss = loss + leak.square().mean()
    else:
        assert leak is None
    loss.backward()
    assert_close(weight.grad.view(case["weight"].shape), expected["grad_weight"], 1e-4)
    assert_close(features.grad, expected["grad_features"], 1e-4)
    assert_close(previous.grad, expected["grad_previous"], 1e-4)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("c", [5, 64, 150])  # one strip, a full one, three with a rest
@pytest.mark.parametrize("b", [1, discrete.MIN_BATCH])  # both orders of the quadratic form
def test_gram_matrix_and_candidates_give_the_definition(b, c, parts, monkeypatch):
    if parts:  # many parts of the image and of the table, the last ones smaller
        monkeypatch.setattr(discrete, "PART", 1)
        monkeypatch.setattr(discrete, "MIN_PLACES", 50)
        monkeypatch.setattr(discrete, "TABLE", 5 * 64 * 64)
    features, weight, previous, target = layer_data(b, c, 13, 12, k=12)
    expected = brute_force(features, weight, previous, target)
    assert distances(features, weight, previous, target).dtype == torch.float64
    assert_close(distances(features, weight, previous, target), expected, 1e-12)
    squares = distances(features, weight, previous, target, lambda x, y: (x - y).square().mean((2, 3, 4)))
    assert_close(squares, expected, 1e-12)


@pytest.mark.parametrize("b", [2, discrete.MIN_BATCH])
@pytest.mark.parametrize("sigmas", [0, 10, 100])
def test_large_mean_of_the_features_leads_to_no_wrong_choice(sigmas, b):
    features, weight, previous, target = layer_data(b, 96, 16, 16, k=200, dtype=torch.float32)
    weight = weight - weight.mean(2, keepdim=True)  # the mean hardly shows in the candidates, so it must cancel
    features = features + sigmas
    found = distances(features, weight, previous, target)
    exact = brute_force(features, weight, previous, target)
    best = exact.amin(1)
    assert_close(found.double(), exact, 1e-6 if sigmas < 100 else 1e-5)
    assert (exact.gather(1, found.argmin(1, keepdim=True))[:, 0] / best - 1).max() <= 1e-5


def test_small_maps_build_candidates(monkeypatch):
    monkeypatch.delattr(discrete, "_by_gram")
    data = layer_data(3, 20, 3, 4, k=70)
    assert_close(distances(*data), brute_force(*data), 1e-12)


@pytest.mark.parametrize("size", [2, 12])  # candidates and Gram matrix
def test_float32_under_autocast(size):
    features, weight, previous, target = layer_data(2, 16, size, size, k=9, dtype=torch.float32)
    index = torch.tensor([3, 8])
    outside = distances(features, weight, previous, target), *emit(features, weight[..., :8], index, leak=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = distances(features, weight, previous, target), *emit(features, weight[..., :8], index, leak=True)
        half = distances(features.bfloat16(), weight, previous, target)
    for a, b in zip(inside, outside, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    assert torch.equal(half, distances(features.bfloat16().float(), weight, previous, target))


def test_any_other_distance():
    features, weight, previous, target = layer_data(2, 6, 9, 8, k=discrete.LEAVES_AT_A_TIME + 6)
    found = distances(features, weight, previous, target, lambda x, y: (x - y).abs().mean((2, 3, 4)))
    candidates = previous[:, None] + torch.einsum("kdc,bchw->bkdhw", weight, features)
    assert_close(found, (candidates - target[:, None]).abs().mean((2, 3, 4)), 1e-12)


@pytest.mark.parametrize("leak", [False, True])
def test_only_chosen_heads_get_a_gradient(leak):
    features, weight, previous, target = layer_data(3, 12, 5, 4, k=7)
    weight = (weight[..., :6] if leak else weight).clone().requires_grad_()
    assert not distances(features[:, : weight.shape[2]], weight, previous, target).requires_grad
    index = torch.tensor([5, 2, 5])
    residual, leaked = emit(features, weight, index, leak)
    expected = torch.einsum("bdc,bchw->bdhw", weight[index], features[:, : weight.shape[2]])
    assert_close(residual, expected, 1e-12)
    assert (leaked is None) != leak
    (residual.sum() + (leaked.sum() if leak else 0)).backward()
    assert weight.grad.abs().amin((1, 2)).gt(0).tolist() == [leaf in (2, 5) for leaf in range(7)]
    assert weight.grad[[0, 1, 3, 4, 6]].count_nonzero() == 0


@pytest.mark.parametrize(("counts", "loss", "expected"), SPLITS)
def test_decisions_against_recorded_ones(counts, loss, expected):
    leaves = torch.full((len(counts),), counts.shape[1])
    source, target = decide(torch.stack([counts, loss]), leaves)
    due = source != target
    assert torch.equal(due, expected[:, 0] >= 0)
    assert torch.equal(torch.stack([source, target], 1)[due], expected[due])


@pytest.mark.parametrize(("counts", "loss", "expected"), SPLITS)
def test_split_conserves_counts(counts, loss, expected):
    tally = torch.stack([counts, loss])
    source, target = decide(tally, torch.full((len(counts),), counts.shape[1]))
    split, rows = split_tally(tally, source, target), torch.arange(len(counts))
    torch.testing.assert_close(split[0].sum(1), counts.sum(1), rtol=1e-12, atol=0)
    due = source != target
    assert due.any()
    assert torch.equal(split[:, ~due], tally[:, ~due])
    twins = split[:, rows, source], split[:, rows, target]
    assert torch.equal(twins[0][:, due], twins[1][:, due])
    assert torch.equal(twins[1][1, due], loss[rows, source][due])
    others = torch.ones_like(counts, dtype=torch.bool).scatter(1, source[:, None], False)
    others = others.scatter(1, target[:, None], False) & due[:, None]
    kept = counts.sum(1) - counts[rows, target]
    share = (counts / kept[:, None]).nan_to_num(), split[0] / counts.sum(1, keepdim=True)  # in proportion
    torch.testing.assert_close(share[0][others], share[1].nan_to_num()[others], rtol=1e-12, atol=0)


def test_layers_of_different_size_behave_as_each_alone():
    tables = GOLDEN["split"]
    rows, widest = 40, max(table["k"] for table in tables)
    alone, padded, leaves = [], [], []
    for table in tables:
        tally, k = torch.stack([table["counts"], table["accumulated_loss"]])[:, :rows], table["k"]
        size = torch.full((rows,), k)
        decision = decide(tally, size)
        padded.append(F.pad(tally, (0, widest - k)))
        leaves.append(size)
        alone.append((*decision, F.pad(split_tally(tally, *decision), (0, widest - k))))
    source, target = decide(torch.cat(padded, 1), torch.cat(leaves))
    assert torch.equal(source, torch.cat([decision[0] for decision in alone]))
    assert torch.equal(target, torch.cat([decision[1] for decision in alone]))
    split = split_tally(torch.cat(padded, 1), source, target)
    torch.testing.assert_close(split, torch.cat([decision[2] for decision in alone], 1), rtol=1e-12, atol=0)


def test_no_split_before_the_minimum_of_evidence():
    tally = torch.zeros(2, 3, 4, dtype=torch.float64)
    tally[0] = torch.tensor([[30, 5, 5, 0], [29, 5, 5, 0], [0, 0, 0, 0]])
    tally[1, 2] = torch.tensor([0, 1, 2, 3])
    source, target = decide(tally, torch.full((3,), 4), min_evidence=10)
    assert (source != target).tolist() == [True, False, False]
    source, target = decide(tally, torch.full((3,), 4))
    assert (source != target).all()
