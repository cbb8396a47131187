"""Objectives in closed form: each converts to the one velocity, and every sampler draws the Gaussian that it is of."""

import math
from itertools import pairwise

import pytest
import torch
from test_expert import gaussian_field, small_module, some

from src.flow import SOLVERS, ddim, euler, path, solver, times
from src.modules.expert import Expert
from src.modules.networks.dit import DiT
from src.noise import Noise
from src.objectives import DDPM, Epsilon, Velocity, scale
from src.protocols import Batch

OBJECTIVES = {"velocity": Velocity(), "epsilon": Epsilon(), "ddpm": DDPM()}
MEAN, STD = 0.3, 0.5  # of the data

BETAS = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
ALPHAS_BAR = torch.cumprod(1 - BETAS, 0)


def between(i):
    """alpha_bar at times i that need not be whole: the log of noise over signal is linear between whole ones."""
    logs, below = 0.5 * torch.log((1 - ALPHAS_BAR) / ALPHAS_BAR), i.long().clamp(max=998)
    log_ratio = torch.lerp(logs[below], logs[below + 1], i - below)
    return torch.where(i == i.round(), ALPHAS_BAR[i.long()], 1 / (1 + (2 * log_ratio).exp()))


def predictor(name, mean=MEAN, std=STD):
    """The exact prediction for data N(mean, std^2), as a network gives it: (n, 1), times (n,) -> (n, 1)."""

    def predicted(x, time):
        if name == "velocity":
            return gaussian_field(mean, std)(x, time / 1000)
        t = (time / 1000)[:, None]
        signal, noise = (1 - t, t) if name == "epsilon" else (between(time).sqrt()[:, None], None)
        noise = (1 - signal**2).sqrt() if noise is None else noise
        return noise * (x - signal * mean) / (signal**2 * std**2 + noise**2)

    return predicted


# One velocity


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gives_the_same_velocity(name):
    t = torch.linspace(0.01, 0.98, 200, dtype=torch.float64)  # the middle, where all are exact
    x = 2 * some(200, 1)
    expected = gaussian_field(MEAN, STD)(x, t)
    found = OBJECTIVES[name].velocity(predictor(name), x, t)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_ends_of_the_path_are_near_and_finite(name):
    x = some(101, 1)
    for t in (torch.linspace(0, 0.01, 101).double(), torch.linspace(0.98, 1, 101).double()):
        found = OBJECTIVES[name].velocity(predictor(name), x, t)
        assert (found - gaussian_field(MEAN, STD)(x, t)).abs().max() < (1e-10 if name == "velocity" else 0.02)
    exact = OBJECTIVES[name].velocity(predictor(name), x, torch.zeros(101).double())
    torch.testing.assert_close(exact, -x, rtol=0, atol=1e-12)  # no noise: E[e | x_0] = 0


def test_mixtures_of_objectives_are_mixtures_of_velocities():
    """Two Gaussians, one learned as noise and one as velocity, mixed by their posterior: the field of the mixture."""
    t, x, parts = torch.full((50,), 0.4, dtype=torch.float64), some(50, 1), [(-1.0, 0.3, 0.25), (1.0, 0.2, 0.75)]
    logs = []
    for mean, std, prior in parts:
        variance = 0.6**2 * std**2 + 0.4**2
        logs.append(math.log(prior) - 0.5 * (x - 0.6 * mean) ** 2 / variance - 0.5 * math.log(variance))
    weights = torch.softmax(torch.cat(logs, 1), 1)
    mixed = sum(
        weights[:, k : k + 1] * OBJECTIVES[name].velocity(predictor(name, *parts[k][:2]), x, t)
        for k, name in enumerate(["ddpm", "velocity"])
    )
    grid = torch.linspace(-9, 9, 40001, dtype=torch.float64)  # x_0, integrated numerically
    density = sum(p / s * torch.exp(-0.5 * ((grid - m) / s) ** 2) for m, s, p in parts)
    posterior = density * torch.exp(-0.5 * ((x - 0.6 * grid) / 0.4) ** 2)
    x_0 = (posterior * grid).sum(1, keepdim=True) / posterior.sum(1, keepdim=True)
    torch.testing.assert_close(mixed, (x - x_0) / 0.4, rtol=0, atol=1e-8)


# What is trained


def test_ddpm_is_shown_its_own_path_and_whole_times():
    x_0, noise, u = some(1000, 3), some(1000, 3, seed=1), (torch.arange(1000).double() + 0.5) / 1000
    shown, i, target = DDPM().task(x_0, noise, u)
    assert torch.equal(i, torch.arange(1000).double()) and torch.equal(target, noise)
    expected = ALPHAS_BAR.sqrt()[:, None] * x_0 + (1 - ALPHAS_BAR).sqrt()[:, None] * noise
    torch.testing.assert_close(shown, expected, rtol=0, atol=1e-12)
    assert DDPM().task(x_0[:1], noise[:1], torch.tensor([1 - 1e-9]).double())[1] == 999


def test_velocity_and_noise_are_learned_on_the_common_path():
    x_0, noise, u = some(7, 3), some(7, 3, seed=1), torch.rand(7, generator=torch.Generator().manual_seed(0)).double()
    for name, target in {"velocity": noise - x_0, "epsilon": noise}.items():
        shown, time, found = OBJECTIVES[name].task(x_0, noise, u)
        assert torch.equal(shown, path(x_0, noise, u)) and torch.equal(time, 1000 * u) and torch.equal(found, target)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_exact_predictor_has_the_least_loss_that_there_is(name):
    """Its errors are orthogonal to every function of what it is shown; the loss is the conditional variance."""
    x_0, noise = MEAN + STD * some(400_000, 1), some(400_000, 1, seed=1)
    u = torch.full((400_000,), 0.3).double()
    shown, time, target = OBJECTIVES[name].task(x_0, noise, u)
    error = target - predictor(name)(shown, time)
    for function in (torch.ones_like(shown), shown, shown**2):
        assert (error * function).mean().abs() < 4e-3
    assert 0.05 < error.var() < target.var()


# Samplers


def moments(follow, name, steps):
    """Mean and variance of what a sampler makes of standard normal noise: for Gaussian data each step is affine."""
    objective, sizes = OBJECTIVES[name], OBJECTIVES[name].times(steps)
    starts = torch.zeros(steps + 2, 1, dtype=torch.float64)
    starts[1] = scale(sizes[0])

    def draw(step):  # one sample each has noise in one step
        noise = torch.zeros_like(starts)
        noise[2 + step] = 1
        return noise

    found = follow(lambda x, t: objective.velocity(predictor(name), x, t), starts, sizes, draw)[:, 0]
    return found[0].item(), (found[1:] - found[0]).square().sum().item()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("sampler", "eta"), [("euler", 0), ("heun", 0), ("ddim", 0), ("ddim", 0.5), ("ddpm", 0)])
def test_the_exact_predictor_through_every_sampler_gives_mean_and_variance(name, sampler, eta):
    errors = []
    for steps in (100, 200, 400):
        mean, variance = moments(solver(sampler, eta), name, steps)
        errors.append(abs(mean - MEAN) + abs(variance - STD**2))
    assert errors[-1] < (1e-3 if sampler == "heun" else 1e-2)
    if name == "velocity":  # those of noise start where their schedule ends, which costs a little at any number
        for coarse, fine in pairwise(errors):
            assert coarse / fine == pytest.approx(4 if sampler == "heun" else 2, rel=0.1)


def test_ddim_without_noise_is_euler():
    field, x = gaussian_field(MEAN, STD), some(9, 1)
    torch.testing.assert_close(ddim(field, x, times(7)), euler(field, x, times(7)), rtol=0, atol=1e-14)


def curved(x, i):
    """A network of no data in particular."""
    return torch.tanh(x * (1 + i[:, None] / 500)) + 0.1 * x.flip(1)


def literal_ddim(x, indices, eta, noises):
    """DDIM's eq. 12 and 16 on its own path; at eta = 1 over all steps it is DDPM's sampler."""
    for step, i in enumerate(indices):
        a = ALPHAS_BAR[i]
        a_next = ALPHAS_BAR[indices[step + 1]] if step + 1 < len(indices) else torch.ones(()).double()
        noise = curved(x, torch.full((len(x),), float(i)).double())
        sigma = eta * ((1 - a_next) / (1 - a)).sqrt() * (1 - a / a_next).sqrt()
        x_0 = (x - (1 - a).sqrt() * noise) / a.sqrt()
        x = a_next.sqrt() * x_0 + (1 - a_next - sigma**2).clamp(min=0).sqrt() * noise + sigma * noises[step]
    return x


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("steps", [1, 7, 250])
def test_ddim_on_the_common_path_is_ddim_on_its_own(eta, steps):
    x, noises, objective = some(5, 2), some(steps, 5, 2, seed=1), DDPM()
    indices = [round(i) for i in torch.linspace(999, 0, steps).tolist()]
    expected = literal_ddim(x, indices, eta, noises)
    sizes = objective.times(steps)
    found = ddim(lambda x, t: objective.velocity(curved, x, t), x * scale(sizes[0]), sizes, noises.__getitem__, eta=eta)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_ddpm_over_all_steps_is_ancestral_sampling():
    """Algorithm 2 of DDPM, with the posterior's variance."""
    x, noises, objective = some(3, 2), some(1000, 3, 2, seed=1), DDPM()
    sizes = objective.times(1000)
    found = solver("ddpm")(
        lambda x, t: objective.velocity(curved, x, t), x * scale(sizes[0]), sizes, noises.__getitem__
    )
    for step, i in enumerate(range(999, -1, -1)):
        before = ALPHAS_BAR[i - 1] if i else torch.ones(()).double()
        noise = curved(x, torch.full((3,), float(i)).double())
        mean = (x - BETAS[i] / (1 - ALPHAS_BAR[i]).sqrt() * noise) / (1 - BETAS[i]).sqrt()
        x = mean + (BETAS[i] * (1 - before) / (1 - ALPHAS_BAR[i])).sqrt() * noises[step]
    torch.testing.assert_close(found, x, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("steps", [1, 3, 1000, 1500])
def test_ddpm_stops_at_its_own_times_and_at_data(steps):
    found = torch.tensor(DDPM().times(steps)).double()
    assert len(found) == steps + 1 and found[-1] == 0 and (found.diff() < 0).all()
    assert found[0] / (1 - found[0]) == pytest.approx(float(((1 - ALPHAS_BAR[-1]) / ALPHAS_BAR[-1]).sqrt()))


# An expert of each


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_expert_of_each_objective_trains_and_samples(name):
    module = small_module(objective=OBJECTIVES[name], solver="ddim", eta=1, steps=3, label_dropout=0.2, guidance=2)
    batch = Batch(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]), 8)
    loss, _ = module._loss(batch)
    loss.backward()
    assert loss > 0 and all(p.grad is not None for p in module.parameters())
    whole = module.sample(Noise(0, torch.arange(4)), batch.labels)
    half = module.sample(Noise(0, torch.arange(2, 4)), batch.labels[2:])
    torch.testing.assert_close(half, whole[2:], rtol=0, atol=1e-4)
    assert len(whole.flatten(1).unique(dim=0)) == 4


def test_a_dit_of_variances_is_drawn_from_but_only_as_ddpm():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = DiT(1, 8, 4, 16, 1, 2, learn_sigma=True)
        torch.nn.init.normal_(network.head.weight, std=0.1)
    module = Expert(network, None, objective=DDPM(), solver="ddpm", steps=2, seed=0)
    assert module.sample(Noise(0, torch.arange(3))).shape == (3, 1, 8, 8)
    loss, _ = module._loss(Batch(torch.zeros(4, 1, 8, 8), torch.zeros(4).long(), 8))
    loss.backward()
    assert network.head.weight.grad.unflatten(0, (16, 2))[:, 1].abs().max() == 0  # variances are not trained
    for objective in (Velocity(), Epsilon()):
        with pytest.raises(ValueError, match=r"model\.objective to src\.objectives\.DDPM"):
            Expert(network, None, objective=objective, seed=0)


def test_samplers_are_told_by_name():
    assert set(SOLVERS) == {"euler", "heun", "ddim", "ddpm"}
    for wrong, fix in [
        (("rk4",), "choose one of"),
        (("heun", 0.3), "model.solver=ddim"),
        (("ddim", -1), "from 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=fix):
            solver(*wrong)


def test_errors_of_an_expert_are_those_of_velocities_whatever_it_predicts():
    """The exact predictor's error is the conditional variance of velocities, integrated over t."""
    x_0 = MEAN + STD * some(20_000, 1, 1, 1).float()
    batch = Batch(x_0, torch.zeros(20_000).long(), 0)
    t = torch.linspace(0, 1, 20001).double()
    signal, variance = 1 - t, (1 - t) ** 2 * STD**2 + t**2
    expected = (1 + STD**2 - (t - signal * STD**2) ** 2 / variance).mean()
    for name, objective in OBJECTIVES.items():

        class Exact(torch.nn.Module):
            shape, classes = (1, 1, 1), 0

            def forward(self, x, time, labels=None, name=name):
                return predictor(name)(x[:, :, 0, 0].double(), time.double())[:, :, None, None].float()

        found = Expert(Exact(), None, objective=objective, seed=0).error(batch).mean()
        assert found.item() == pytest.approx(expected.item(), rel=0.03)
