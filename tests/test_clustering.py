"""Two-stage k-means and bounded sizes, against blobs whose clusters are known and the exact optimum."""

import numpy as np
import pytest

from src.clustering import BALANCE, _within, costs, imbalance, nearest, two_stage


def blobs(sizes, spread=0.1, seed=0):
    """Points around the corners of a large square, and the corner of each."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    corners = np.array([[0, 0], [10, 0], [0, 10], [10, 10]], float)[labels]
    order = draw.permutation(len(labels))
    points = (corners + spread * draw.standard_normal(corners.shape)).astype(np.float32)
    return points[order], labels[order]


def test_separate_blobs_are_the_clusters_whatever_their_sizes():
    points, labels = blobs([200, 40, 100, 60])
    centroids, coarse = two_stage(points, 32, 4, seed=0)
    found = coarse[nearest(points, centroids)]
    assert centroids.shape == (32, 2) and centroids.dtype == np.float32 and coarse.dtype == np.int16
    names = {(a, b) for a, b in zip(found.tolist(), labels.tolist(), strict=True)}
    assert len(names) == 4 and {a for a, _ in names} == {b for _, b in names} == {0, 1, 2, 3}


def test_the_seed_alone_decides():
    points, _ = blobs([50, 50, 50, 50], spread=4)
    first, again, other = (two_stage(points, 16, 4, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize(("images", "fine"), [(400, 40), (80, 10), (20, 4)])
def test_few_images_have_a_fine_cluster_for_eight_of_them_and_never_fewer_than_clusters(images, fine):
    points, _ = blobs([images // 4] * 4, spread=4)
    assert len(two_stage(points, 40, 4, seed=0)[0]) == fine


def test_more_clusters_than_images_are_refused():
    with pytest.raises(ValueError, match="clusters=5 of 4 images are impossible"):
        two_stage(np.zeros((4, 2), np.float32), 5, 5, seed=0)


def test_costs_are_distances_to_the_nearest_centroid_of_each_cluster():
    points, _ = blobs([5, 5, 5, 5], spread=3)
    centroids, coarse = np.array([[0, 0], [9, 1], [2, 2], [7, 7]], np.float32), np.array([0, 1, 0, 2])
    found = costs(points, centroids, coarse, 3)
    for point, row in zip(points.astype(float), found, strict=True):
        squared = ((point - centroids) ** 2).sum(1)
        np.testing.assert_allclose(row, [min(squared[0], squared[2]), squared[1], squared[3]], rtol=1e-9, atol=1e-9)
    assert np.array_equal(found.argmin(1), coarse[nearest(points, centroids)])


def test_imbalance_is_the_largest_deviation_from_the_mean():
    assert imbalance(np.array([10, 10, 10])) == 0
    assert imbalance(np.array([4, 10, 16])) == pytest.approx(0.6)
    assert imbalance(np.array([2, 14, 14])) == pytest.approx(0.8)


def uneven(n, k, seed=0):
    """Costs of which most prefer the first clusters."""
    draw = np.random.default_rng(seed)
    return draw.random((n, k)) + np.linspace(0, 0.8, k)


@pytest.mark.parametrize("balance", ["capacity", "sinkhorn"])
@pytest.mark.parametrize(("low", "high"), [(90, 110), (100, 100), (0, 150), (60, 400)])
def test_sizes_stay_within_their_bounds(balance, low, high):
    sizes = np.bincount(BALANCE[balance](uneven(400, 4), low, high), minlength=4)
    assert sizes.sum() == 400 and low <= sizes.min() and sizes.max() <= high
    assert np.bincount(uneven(400, 4).argmin(1), minlength=4).max() > 200


@pytest.mark.parametrize("balance", ["capacity", "sinkhorn"])
def test_what_is_within_its_bounds_stays_where_it_was(balance):
    cost = uneven(400, 4)
    assert np.array_equal(BALANCE[balance](cost, 0, 400), cost.argmin(1))


def test_prices_come_near_the_optimum_and_the_greedy_choice_is_no_better():
    from scipy.optimize import linear_sum_assignment

    cost = uneven(200, 4)
    rows, columns = linear_sum_assignment(np.repeat(cost, 50, axis=1))  # a place for each of 50 images of 4 clusters
    best = cost[rows, columns // 50].sum()
    by_price, greedy = (cost[np.arange(200), BALANCE[b](cost, 50, 50)].sum() for b in ("sinkhorn", "capacity"))
    assert best <= by_price < 1.01 * best and by_price <= greedy < 1.3 * best


@pytest.mark.parametrize(("low", "high"), [(101, 120), (0, 99)])
def test_bounds_that_cannot_hold_are_refused(low, high):
    with pytest.raises(
        ValueError, match=f"4 clusters of {low} to {high} images cannot hold 400 images; widen `bounds`"
    ):
        BALANCE["capacity"](uneven(400, 4), low, high)


def test_sizes_that_are_moved_into_bounds_keep_their_sum():
    found = _within(np.array([10, 50, 140]), 40, 90)
    assert found.sum() == pytest.approx(200, abs=1e-6)
    assert found.tolist() == pytest.approx([40, 70, 90], abs=1e-6)
