"""Routing in closed form: Gaussian mixtures divided into clusters, whose experts and routers are known exactly.

Everything is computed in float64 without training. A cluster is itself a mixture of isotropic Gaussians; all data is
the mixture of the clusters, so that the exact velocity of all data, the monolith's, is known as well.
"""

import pytest
import torch

from src.flow import SOLVERS, solver, times
from src.noise import Noise
from src.routing import (
    Calibration,
    Confidence,
    Full,
    Oracle,
    Sample,
    Schedule,
    Threshold,
    TopK,
    dead_mass,
    drawn,
    mixed,
    noise_bin,
    weights,
)


class Mixture:
    """Isotropic Gaussians of given shares, means (m, d) and standard deviations (m,) on the path (1 - t) x_0 + t e."""

    def __init__(self, shares, means, stds):
        self.shares, self.means, self.stds = shares, means, stds

    def of(self, chosen):
        """The mixture of some components: shares stay those in all data."""
        return Mixture(self.shares[chosen], self.means[chosen], self.stds[chosen])

    def log_density(self, x, t):
        """log sum_m shares_m N(x; (1 - t) mean_m, variance_m): (n,); shares need not sum to 1."""
        return self._log_parts(x, t).logsumexp(1)

    def velocity(self, x, t):
        """E[e - x_0 | x_t = x] at one t for all: (n, d)."""
        away = x[:, None] - (1 - t) * self.means  # (n, m, d)
        slope = (t - (1 - t) * self.stds**2) / self._variances(t)  # of e - x_0 on x_t, component by component
        parts = -self.means + slope[:, None] * away
        return (self._log_parts(x, t).softmax(1)[:, :, None] * parts).sum(1)

    def moments(self):
        share = self.shares / self.shares.sum()
        mean = share @ self.means
        second = share @ (self.means**2 + self.stds[:, None] ** 2)
        return mean, second - mean**2

    def _variances(self, t):
        return (1 - t) ** 2 * self.stds**2 + t**2

    def _log_parts(self, x, t):
        variances = self._variances(t)
        squares = (x[:, None] - (1 - t) * self.means).square().sum(2)
        return self.shares.log() - squares / (2 * variances) - x.shape[1] / 2 * variances.log()


CLUSTERS = [[0, 1], [2], [3, 4, 5], [6]]  # components of each


def data():
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.2, 0.1, 0.05, 0.15, 0.1, 0.1, 0.3], dtype=torch.float64)
    means = 2 * torch.randn(7, 3, dtype=torch.float64, generator=generator)
    return Mixture(shares, means, torch.tensor([0.3, 0.5, 0.2, 0.4, 0.6, 0.3, 0.5], dtype=torch.float64))


def clusters(which=range(4)):
    return [data().of(CLUSTERS[k]) for k in which]


def router(parts, x, t):
    """Exact logits, up to a constant for each sample as a network's: log p(k) p_t(x | k)."""
    return torch.stack([part.log_density(x, t) for part in parts], 1) + x[:, :1]


def mixture(parts, x, t, strategy=None, **options):
    """The velocity of the ensemble of exact experts under an exact router, through the functions under test."""
    column = torch.full((len(x),), t, dtype=torch.float64)
    w = weights(router(parts, x, t), column, strategy or Full(), **options)
    return mixed(w, lambda k, rows: parts[k].velocity(x[rows], t))


def points(t, n=200):
    generator = torch.Generator().manual_seed(1)
    return 2.5 * torch.randn(n, 3, dtype=torch.float64, generator=generator)


T = [0.02, 0.3, 0.7, 0.95, 1.0]


@pytest.mark.parametrize("t", T)
def test_experts_mixed_by_the_router_are_the_velocity_of_all_data(t):
    x = points(t)
    found, whole = mixture(clusters(), x, t), data().velocity(x, t)
    assert (found - whole).abs().max() < 1e-10 < 1 < whole.abs().max()
    if t < 1:  # which needs the router: other weights are another field
        equal = sum(part.velocity(x, t) for part in clusters()) / 4
        assert (equal - whole).abs().max() > 0.05


@pytest.mark.parametrize("t", T)
@pytest.mark.parametrize("dead", [[1], [0, 3]])
def test_without_some_experts_the_velocity_is_that_of_the_data_that_remains(t, dead):
    x, living = points(t), torch.tensor([k not in dead for k in range(4)])
    rest = data().of([m for k in range(4) if k not in dead for m in CLUSTERS[k]])
    found = mixture(clusters(), x, t, living=living)
    assert (found - rest.velocity(x, t)).abs().max() < 1e-10
    assert (found - data().velocity(x, t)).abs().max() > 1e-2


@pytest.mark.parametrize("t", T)
def test_added_experts_with_heads_are_the_velocity_of_the_enlarged_data(t):
    """Experts 2 and 3 come later, one after the other; the router knows 0 and 1 alone, and none of them changes."""
    x, column = points(t), torch.full((200,), t, dtype=torch.float64)
    parts, heads = clusters(), []
    for new in (2, 3):
        old = data().of([m for k in range(new) for m in CLUSTERS[k]])
        head = torch.stack([old.log_density(x, t), parts[new].log_density(x, t)], 1)
        heads.append(head.log_softmax(1))
    w = weights(router(parts[:2], x, t), column, Full(), added=heads)
    torch.testing.assert_close(w, router(parts, x, t).softmax(1), rtol=0, atol=1e-12)
    found = mixed(w, lambda k, rows: parts[k].velocity(x[rows], t))
    assert (found - data().velocity(x, t)).abs().max() < 1e-10


@pytest.mark.parametrize(("name", "steps"), [("heun", 30), ("euler", 150), ("ddim", 150), ("ddpm", 150)])
def test_an_ensemble_of_gaussian_experts_gives_mean_and_variance_through_every_sampler(name, steps):
    """Four clusters whose mixture is one known distribution: its moments within 2 %, its components' shares as well."""
    assert name in SOLVERS
    n = 12_000
    x = torch.randn(n // 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = torch.cat([x, -x])
    draw = torch.Generator().manual_seed(3)
    found = solver(name)(
        lambda x, t: mixture(clusters(), x, float(t[0])),
        x,
        times(steps),
        lambda step: torch.randn(n, 3, dtype=torch.float64, generator=draw),
    )
    mean, variance = data().moments()
    assert ((found.mean(0) - mean).abs() / variance.sqrt()).max() < 0.02
    assert (found.std(0) / variance.sqrt() - 1).abs().max() < 0.02
    nearest = torch.cdist(found, data().means).div(data().stds).argmin(1)
    shares = torch.bincount(nearest, minlength=7) / n
    assert (shares - data().shares).abs().max() < 0.02


@pytest.mark.parametrize(
    ("strategy", "far"), [(Full(), 0.02), (Threshold(0.02), 0.02), (Sample(), 0.03), (TopK(1), None)]
)
def test_which_strategies_keep_the_clusters_shares(strategy, far):
    """As in the exact experiment: all experts, those above a threshold, or one drawn at each step keep them within
    the noise of 20,000 samples; the most probable one alone starves the small ones."""
    n, counter = 20_000, iter(range(1000))
    x = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def field(x, t):
        generator = torch.Generator().manual_seed(next(counter))
        return mixture(clusters(), x, float(t[0]), strategy, draw=lambda: torch.rand(n, generator=generator))

    found = solver("euler")(field, x, times(40))
    nearest = torch.cdist(found, data().means).div(data().stds).argmin(1)
    of_cluster = torch.tensor([k for m in range(7) for k in range(4) if m in CLUSTERS[k]])
    shares = torch.bincount(of_cluster[nearest], minlength=4) / n
    exact = torch.stack([part.shares.sum() for part in clusters()])
    distance = (shares - exact).abs().sum().item() / 2
    assert distance < far if far else distance > 0.1


def probabilities(n=50, k=5, seed=0):
    return (2 * torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).softmax(1)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothing_is_taken_out_exactly(smoothing):
    p = probabilities()
    q = (1 - smoothing) * p + smoothing / 5  # the optimum of cross-entropy with smoothed labels
    t = torch.full((50,), 0.5).double()
    found = weights(q.log() + 3, t, Full(), Calibration((1.0,), smoothing))
    torch.testing.assert_close(found, p, rtol=0, atol=1e-12)
    assert (weights(q.log(), t, Full()) - p).abs().max() > 0.05
    below = torch.tensor([[0.9, 0.1 - smoothing / 5, smoothing / 5]]).double()  # less than its share of the smoothing
    found = weights(below.log(), t[:1], Full(), Calibration((1.0,), 3 * smoothing / 5 + 0.2))
    assert found.sum() == pytest.approx(1) and found.min() >= 0 and found.isfinite().all()


def test_each_noise_bin_has_its_own_temperature():
    logits, t = probabilities().log(), torch.linspace(0, 1, 50).double()
    found = weights(logits, t, Full(), Calibration((0.5, 1.0, 2.0)))
    for k, temperature in enumerate((0.5, 1.0, 2.0)):
        rows = noise_bin(t, 3) == k
        assert rows.sum() >= 16
        torch.testing.assert_close(found[rows], (logits[rows] / temperature).softmax(1), rtol=0, atol=1e-12)
    assert noise_bin(torch.tensor([0.0, 0.32, 0.34, 0.99, 1.0]), 3).tolist() == [0, 0, 1, 2, 2]


STRATEGIES = [
    Full(),
    TopK(1),
    TopK(2),
    TopK(9),
    Threshold(0.05),
    Threshold(0.9),
    Sample(),
    Oracle(),
    Schedule([0.8, 0.4, 0], [5, 2, 1]),
    Confidence(0.7, 1, 3),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_shares_of_the_living_whatever_the_strategy(strategy):
    logits, t = probabilities().log(), torch.linspace(0, 1, 50).double()
    living = torch.tensor([True, False, True, True, False])
    draw, cluster = lambda: torch.linspace(0, 1, 51).double()[:-1], torch.arange(50) % 5
    for mask in (None, living):
        w = weights(logits, t, strategy, living=mask, draw=draw, cluster=cluster)
        torch.testing.assert_close(w.sum(1), torch.ones(50).double(), rtol=0, atol=1e-12)
        assert w.min() >= 0
        if mask is not None:
            assert not w[:, ~mask].any()
            p = logits.softmax(1) * mask
            same = (
                weights((p / p.sum(1, keepdim=True))[:, mask].log(), t, strategy, draw=draw, cluster=None)
                if not (isinstance(strategy, Oracle))
                else w[:, mask]
            )
            torch.testing.assert_close(w[:, mask], same, rtol=0, atol=1e-12)  # as if the dead had never been


def test_what_each_strategy_chooses():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.9, 0.06, 0.04, 0.0], [0.25, 0.25, 0.25, 0.25]]).double()
    t, asked = torch.tensor([0.9, 0.5, 0.1]).double(), lambda s, **o: (weights(p.log(), t, s, **o) > 0).tolist()
    assert asked(TopK(1)) == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert asked(TopK(2)) == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert asked(Threshold(0.1)) == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert asked(Threshold(0.6)) == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]  # falls back to the first
    assert asked(Schedule([0.8, 0.4, 0], [4, 2, 1])) == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert asked(Confidence(0.7, 1, 3)) == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert asked(Oracle(), cluster=torch.tensor([2, 3, 1])) == [[0, 0, 1, 0], [1, 1, 1, 0], [0, 1, 0, 0]]
    halves = weights(p.log(), t, TopK(2))
    torch.testing.assert_close(halves[0], torch.tensor([0.625, 0.375, 0, 0]).double())


def test_one_expert_is_drawn_as_often_as_it_is_probable():
    p = torch.tensor([[0.5, 0.0, 0.3, 0.2, 0.0]]).expand(20_000, -1)
    uniform = Noise(3, torch.arange(20_000)).uniform("sample/expert/0")
    w = weights(p.log(), torch.zeros(20_000), Sample(), draw=lambda: uniform)
    torch.testing.assert_close(w.mean(0), p[0], rtol=0, atol=0.01)
    assert w.unique().tolist() == [0, 1] and not w[:, [1, 4]].any()
    assert drawn(p[:3], torch.tensor([0.0, 0.65, 1.0])).tolist() == [0, 2, 3]  # rounding never draws the impossible


def test_grouped_calls_are_the_loop_over_samples():
    w, x = weights(probabilities(64).log(), torch.zeros(64).double(), TopK(2)), points(0, 64)
    experts = [lambda x, k=k: torch.tanh((k + 1) * x) * x.sum(1, keepdim=True) for k in range(5)]
    asked = []

    def ask(k, rows):
        asked.append((k, len(rows)))
        return experts[k](x[rows])

    found = mixed(w, ask)
    loop = torch.stack([sum(w[i, k] * experts[k](x[i : i + 1])[0] for k in range(5) if w[i, k] > 0) for i in range(64)])
    torch.testing.assert_close(found, loop, rtol=0, atol=1e-13)
    assert [k for k, _ in asked] == sorted(set(k for k, _ in asked)) and sum(n for _, n in asked) == 128


def test_the_dead_share_of_the_data():
    assert dead_mass([10, 20, 70], [True, False, True]) == pytest.approx(0.2)
    assert dead_mass([10, 20, 70], [True] * 3) == 0


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: TopK(0), "ask at least 1"),
        (lambda: Threshold(1.5), "from 0 to 1"),
        (lambda: Schedule([0.5, 0.8, 0], [1, 2, 3]), "fall to 0"),
        (lambda: Schedule([0.5], [1]), "fall to 0"),
        (lambda: Schedule([0.5, 0], [1, 0]), "ask at least 1"),
        (lambda: Confidence(raised=0), "ensemble.raised is 0"),
    ],
)
def test_impossible_strategies_are_refused(make, fix):
    with pytest.raises(ValueError, match=fix):
        make()
