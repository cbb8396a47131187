"""Time counted in images: cadences that no batch size makes miss a beat, and the learning rate in closed form."""

from math import cos, pi

import pytest

from src.schedule import Schedule, due


@pytest.mark.parametrize("batch", [1, 7, 32, 100, 250, 333, 500])
@pytest.mark.parametrize("every_kimg", [0.5, 1, 1.25])
def test_due_counts_every_multiple_exactly_once(batch, every_kimg):
    moments = [images for images in range(batch, 12_000 + batch, batch) if due(images, batch, every_kimg)]
    multiples = range(round(every_kimg * 1000), moments[-1] + 1, round(every_kimg * 1000))
    first_at_or_after = [-(-multiple // batch) * batch for multiple in multiples]
    assert moments == first_at_or_after


def test_due_once_where_a_batch_crosses_several_multiples():
    assert [due(images, 2500, 1) for images in (2500, 5000, 7500)] == [True, True, True]


def test_due_is_never_true_without_a_cadence_and_before_the_first_multiple():
    assert not any(due(images, 10, None) for images in range(10, 5000, 10))
    assert not due(990, 10, 1) and due(1000, 10, 1) and not due(1010, 10, 1)


def test_due_does_not_depend_on_where_counting_began():
    """A run that continues at an odd position keeps to the same multiples."""
    assert [images for images in range(1013 + 10, 3100, 10) if due(images, 10, 1)] == [2003, 3003]


def test_a_cadence_below_one_image_is_every_batch():
    assert due(1, 1, 1e-9) and due(32, 32, 1e-9)


@pytest.mark.parametrize("images", [0, 1, 5_000, 10**9])
def test_without_arguments_the_rate_is_the_optimizers_own(images):
    assert Schedule().rate(3e-4, images) == 3e-4


def test_warmup_is_linear_and_then_over():
    schedule = Schedule(warmup_kimg=4)
    assert [schedule.rate(2.0, images) for images in (0, 1000, 3000, 4000, 50_000)] == [0, 0.5, 1.5, 2, 2]


@pytest.mark.parametrize("floor", [0, 1e-5])
def test_cosine_goes_from_its_start_to_the_floor_and_stays(floor):
    schedule, initial = Schedule(decay="cosine", schedule_kimg=8, floor=floor), 2e-4
    for kimg in (0, 1, 2, 4, 6.5, 8):
        closed_form = floor + (initial - floor) * (1 + cos(pi * kimg / 8)) / 2
        assert schedule.rate(initial, round(kimg * 1000)) == pytest.approx(closed_form, rel=1e-12, abs=1e-18)
    assert schedule.rate(initial, 0) == initial
    assert schedule.rate(initial, 4000) == pytest.approx((initial + floor) / 2)
    assert schedule.rate(initial, 8000) == schedule.rate(initial, 20_000) == pytest.approx(floor, abs=1e-18)


def test_networks_with_rates_of_their_own_reach_the_same_floor():
    schedule = Schedule(decay="cosine", schedule_kimg=8, floor=1e-5)
    assert [schedule.rate(initial, 8000) for initial in (1.6e-4, 1.25e-4)] == pytest.approx([1e-5, 1e-5])


def test_warmup_multiplies_the_cosine():
    both = Schedule(warmup_kimg=2, decay="cosine", schedule_kimg=8)
    assert both.rate(1.0, 1000) == pytest.approx(0.5 * (1 + cos(pi / 8)) / 2)
    assert both.rate(1.0, 3000) == Schedule(decay="cosine", schedule_kimg=8).rate(1.0, 3000)


def test_an_unknown_decay_names_the_known_ones():
    with pytest.raises(ValueError, match="decay=linear is unknown; it may be constant or cosine"):
        Schedule(decay="linear")


@pytest.mark.parametrize("end", [None, 0])
def test_a_cosine_needs_its_end(end):
    with pytest.raises(ValueError, match="needs schedule_kimg > 0"):
        Schedule(decay="cosine", schedule_kimg=end)
