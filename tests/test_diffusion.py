"""Schedules, pairs and posteriors against closed forms, in float64."""

import math

import pytest
import torch

from src.diffusion import Diffusion

# steps -> (betas, sqrt(alpha_bar), posterior variance, weight of x_0, weight of x_{t+1}), published defaults
TABLES = {
    1: ([0.99996], [1, 0.00657], [0], [1], [0]),
    2: ([0.92132, 0.99945], [1, 0.28049, 0.00657], [0, 0.92086], [1, 0.28035], [0, 0.02159]),
    4: (
        [0.47826, 0.84921, 0.95642, 0.98740],
        [1, 0.72232, 0.28049, 0.05856, 0.00657],
        [0, 0.44082, 0.88420, 0.98406],
        [1, 0.66578, 0.26919, 0.05782],
        [0, 0.20158, 0.19300, 0.11185],
    ),
    8: (
        [0.15645, 0.38149, 0.54650, 0.66749, 0.75620, 0.82124, 0.86893, 0.90390],
        [1, 0.91845, 0.72232, 0.48643, 0.28049, 0.13850, 0.05856, 0.02120, 0.00657],
        [0, 0.12479, 0.34238, 0.55307, 0.71033, 0.80826, 0.86634, 0.90353],
        [1, 0.73263, 0.51710, 0.35241, 0.21626, 0.11413, 0.05090, 0.01916],
        [0, 0.25726, 0.42189, 0.47779, 0.46381, 0.41612, 0.36096, 0.30988],
    ),
}


def images(*names, n=5, seed=0):
    """One float64 tensor (n, 3, 2, 2) per name, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, 2, 2, dtype=torch.float64, generator=generator) for _ in names]


@pytest.mark.parametrize("steps", TABLES)
def test_vp_tables(steps):
    d = Diffusion(steps)
    tables = [d.betas, d.alphas_bar.sqrt(), d.posterior_variance, *d.posterior_coefficients]
    for table, expected in zip(tables, TABLES[steps], strict=True):
        assert table.dtype == torch.float64
        assert table.tolist() == pytest.approx(expected, abs=6e-6)


def test_vp_closed_form():
    # log alpha_bar(s) = -s^2/2 (beta_max - beta_min) - s beta_min, at s = i/T * 0.999 + 0.001, over its value at i = 0
    def log_alpha_bar(s):
        return -0.5 * s * s * (12.0 - 0.3) - s * 0.3

    d = Diffusion(3, beta_min=0.3, beta_max=12.0)
    expected = [math.exp(log_alpha_bar(i / 3 * 0.999 + 0.001) - log_alpha_bar(0.001)) for i in range(4)]
    assert d.alphas_bar.tolist() == pytest.approx(expected, rel=1e-13)
    assert (1 - d.betas).cumprod(0).tolist() == pytest.approx(expected[1:], rel=1e-12)


def test_geometric_closed_form():
    d = Diffusion(2, beta_min=0.01, beta_max=0.9, schedule="geometric")
    variance = [0.01 * 90 ** (i / 2 * 0.999 + 0.001) for i in range(3)]
    expected = [(1 - v) / (1 - variance[0]) for v in variance]
    assert d.alphas_bar.tolist() == pytest.approx(expected, rel=1e-13)
    assert expected[2] == pytest.approx(0.1 / 0.99, rel=1e-3)  # the last variance is beta_max


@pytest.mark.parametrize("schedule", [dict(steps=4), dict(steps=3, beta_min=0.1, beta_max=0.95, schedule="geometric")])
def test_posterior_is_bayes(schedule):
    d = Diffusion(**schedule)
    x_0, x_next = images("x_0", "x_next", n=d.steps - 1)
    t = torch.arange(1, d.steps)
    mean, log_variance = d.posterior(x_0, x_next, t)
    for i, step in enumerate(t.tolist()):
        # prior N(sqrt(abar) x_0, 1 - abar) times likelihood N(x_next; sqrt(1 - beta) x_t, beta), both of x_t
        abar, beta = math.prod(1 - b for b in d.betas[:step].tolist()), d.betas[step].item()
        precision = 1 / (1 - abar) + (1 - beta) / beta
        bayes = (math.sqrt(abar) / (1 - abar) * x_0[i] + math.sqrt(1 - beta) / beta * x_next[i]) / precision
        torch.testing.assert_close(mean[i], bayes, rtol=1e-12, atol=1e-13)
        assert math.exp(log_variance[i].item()) == pytest.approx(1 / precision, rel=1e-12)


def test_posterior_is_clipped_and_free_of_noise_at_the_last_step():
    d = Diffusion(4)
    x_0, x_next, noise = images("x_0", "x_next", "noise")
    t = torch.zeros(5, dtype=torch.long)
    mean, log_variance = d.posterior(x_0, x_next, t)
    assert torch.equal(mean, x_0)
    assert log_variance.flatten().tolist() == pytest.approx([math.log(1e-20)] * 5)
    assert torch.equal(d.posterior_sample(x_0, x_next, t, 1e30 * noise), x_0)


def test_pair_is_linear_in_its_noises():
    d = Diffusion(4)
    x_0, noise, noise_next = images("x_0", "noise", "noise_next", n=4)
    t = torch.arange(4)
    x_t, x_next = d.q_pair(x_0, t, noise, noise_next)
    for i in range(4):
        abar, beta = d.alphas_bar[i].item(), d.betas[i].item()
        expected = math.sqrt(abar) * x_0[i] + math.sqrt(1 - abar) * noise[i]
        torch.testing.assert_close(x_t[i], expected, rtol=1e-13, atol=1e-13)
        expected = math.sqrt(1 - beta) * x_t[i] + math.sqrt(beta) * noise_next[i]
        torch.testing.assert_close(x_next[i], expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(x_t[0], x_0[0])


def test_pair_has_the_marginal_of_the_next_step():
    # Moving x_{t+1}'s coefficients through x_t gives those of q(x_{t+1} | x_0): mean factor and total variance.
    d = Diffusion(4)
    t, ones, zeros = torch.arange(4), torch.ones(4, 1, 1, 1, dtype=torch.float64), torch.zeros(4, 1, 1, 1).double()
    of_x_0 = d.q_pair(ones, t, zeros, zeros)[1].flatten()
    of_noise = d.q_pair(zeros, t, ones, zeros)[1].flatten()
    of_noise_next = d.q_pair(zeros, t, zeros, ones)[1].flatten()
    torch.testing.assert_close(of_x_0**2, d.alphas_bar[1:], rtol=1e-12, atol=0)
    torch.testing.assert_close(of_noise**2 + of_noise_next**2, 1 - d.alphas_bar[1:], rtol=1e-12, atol=0)


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_sampling_with_a_perfect_predictor_returns_the_data(steps):
    d = Diffusion(steps)
    data, x = images("data", "start", n=2)
    for step in reversed(range(steps)):
        t = torch.full((2,), step)
        (noise,) = images("noise", n=2, seed=step + 1)
        previous, x = x, d.posterior_sample(data, x, t, noise)
        assert not torch.equal(previous, x)
    assert torch.equal(x, data)


def test_sampling_step_has_the_forward_marginal():
    # If x_{t+1} ~ q(x_{t+1} | x_0), one step through the true x_0 gives q(x_t | x_0).
    d = Diffusion(4)
    t, ones, zeros = torch.arange(4), torch.ones(4, 1, 1, 1, dtype=torch.float64), torch.zeros(4, 1, 1, 1).double()
    of_x_next = d.posterior_sample(zeros, ones, t, zeros).flatten()
    of_x_0 = d.posterior_sample(ones, zeros, t, zeros).flatten() + of_x_next * d.alphas_bar[1:].sqrt()
    of_noise = d.posterior_sample(zeros, zeros, t, ones).flatten()
    torch.testing.assert_close(of_x_0, d.alphas_bar[:-1].sqrt(), rtol=1e-12, atol=0)
    variance = of_x_next**2 * (1 - d.alphas_bar[1:]) + of_noise**2
    torch.testing.assert_close(variance, 1 - d.alphas_bar[:-1], rtol=1e-12, atol=1e-15)


def test_half_precision_images_are_diffused_in_float32():
    d = Diffusion(4)
    x_0, x_next, noise = (x.bfloat16() for x in images("x_0", "x_next", "noise", n=4))
    x_t = d.posterior_sample(x_0, x_next, torch.arange(4), noise)
    assert x_t.dtype == torch.float32
    exact = d.posterior_sample(x_0.double(), x_next.double(), torch.arange(4), noise.double())
    torch.testing.assert_close(x_t.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (dict(steps=0), "1 or more"),
        (dict(schedule="cosine"), "choose one of vp, geometric"),
        (dict(beta_min=0.0), "0 < beta_min < beta_max"),
        (dict(beta_min=2.0, beta_max=1.0), "0 < beta_min < beta_max"),
        (dict(schedule="geometric"), "schedule=vp"),
    ],
)
def test_impossible_schedules(options, fix):
    with pytest.raises(ValueError, match=fix):
        Diffusion(**options)
