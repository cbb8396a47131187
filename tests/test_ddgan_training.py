"""Training a DDGAN: the published algorithm step by step, penalty, samples, published checkpoints, toys, export."""

import argparse
import json
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import run_command
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from src import checkpoint as canonical
from src.callbacks.ema import EMA
from src.callbacks.lazy_r1 import LazyR1
from src.classifier import mode_statistics, stacked_modes, trained_classifier
from src.config import CONF, fast_precision
from src.datamodules.base import ImageData
from src.datamodules.embedded import FOLDER
from src.datamodules.toys import SIGMA, SPACING
from src.diffusion import Diffusion
from src.modes import count_modes
from src.modules.ddgan import DDGAN
from src.modules.networks.discriminators import SmallDiscriminator
from src.modules.networks.layers import fir_blur, fir_downsample, fir_upsample, variance_scaling_
from src.modules.networks.ncsnpp import NCSNpp
from src.modules.networks.reference_names import discriminator_state, generator_state
from src.noise import Noise
from src.report import read_log
from src.results import draw, load, prepare
from src.run import build_model, train

BATCH, STEPS, SEED, GAMMA, DECAY = 8, 4, 3, 0.5, 0.9
RATES = {"generator": 1.6e-4, "discriminator": 1.25e-4}
RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("ddgan_*.yaml"))
GOLDEN = Path(__file__).parent / "golden" / "ddgan_small_32.pt"


@pytest.fixture
def doubles(monkeypatch):
    """Everything in float64; what asks for float32 to be precise enough keeps its float64."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Random(ImageData):
    """64 random images of 8 x 8 grey pixels."""

    def __init__(self):
        super().__init__(channels=1, resolution=8, classes=0, batch=BATCH, seed=1)

    def load(self):
        images = np.random.default_rng(0).integers(0, 256, (65, 1, 8, 8), dtype=np.uint8)
        return (images[1:], np.zeros(64)), (images[:1], np.zeros(1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch._replace(images=batch.images.to(torch.get_default_dtype()) / 127.5 - 1)


def small_module(group=4, **options):
    """A DDGAN of tiny networks whose every layer does something from the start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = dict(channels=1, resolution=8)
        generator = NCSNpp(
            **shape, width=8, multipliers=(1, 2), blocks=1, attention=(4,), z_dim=3, z_width=8, z_layers=1
        )
        discriminator = SmallDiscriminator(**shape, width=2, time_width=8, group=group)
        for parameter in (*generator.parameters(), *discriminator.parameters()):
            if parameter.dim() > 1 and parameter.abs().max() < 1e-4:
                variance_scaling_(parameter.data)
    optimizers = {
        f"optimizer_{name}": partial(torch.optim.Adam, lr=rate, betas=(0.5, 0.9)) for name, rate in RATES.items()
    }
    return DDGAN(generator, discriminator, Diffusion(STEPS), **optimizers, seed=SEED, **options)


def fit(module, batches, *callbacks, **options):
    """Train for as many batches."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=batches,
        limit_val_batches=0,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, Random())
    return module


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def farthest(found, expected):
    """The largest difference between two states."""
    assert found.keys() == expected.keys()
    return max((found[name].double() - expected[name].double()).abs().max().item() for name in expected)


@contextmanager
def calls(module):
    """The calls of each network, as the network that trains while it is called."""
    seen = {"generator": [], "discriminator": []}

    def note(name):
        def hook(*_):
            seen[name].append("discriminator" if module.discriminator.logit.weight.requires_grad else "generator")

        return hook

    hooks = [network.register_forward_pre_hook(note(name)) for name, network in module.parallel_networks().items()]
    yield seen
    for hook in hooks:
        hook.remove()


# The algorithm


def published_training(generator, discriminator, batches, interval):
    """The paper's algorithm 1 as its authors' program runs it: three backward passes in the discriminator's turn, the
    first keeping its graph, R1 on the real x_t alone, and a generator whose gradient from that turn is thrown away."""
    time = torch.arange(STEPS + 1) / STEPS * (1 - 1e-3) + 1e-3
    variance = 1 - (2 * (-(time**2) / 4 * (20 - 0.1) - time / 2 * 0.1)).exp()
    beta = torch.cat([torch.zeros(1), 1 - (1 - variance[1:]) / (1 - variance[:-1])])  # the first is 1e-8, 0 in float32
    a, s = (1 - beta).sqrt(), beta.sqrt()
    a_cum = a.cumprod(0)
    s_cum = (1 - a_cum**2).sqrt()
    alpha, alpha_bar, previous = 1 - beta[1:], (1 - beta[1:]).cumprod(0), (1 - beta[1:]).cumprod(0).roll(1)
    previous[0] = 1
    of_x_0 = beta[1:] * previous.sqrt() / (1 - alpha_bar)
    of_x_next = (1 - previous) * alpha.sqrt() / (1 - alpha_bar)
    log_variance = (beta[1:] * (1 - previous) / (1 - alpha_bar)).clamp(min=1e-20).log()

    def at(table, t):
        return table[t][:, None, None, None]

    def pair(x_0, t, noise, turn):
        x_t = at(a_cum, t) * x_0 + at(s_cum, t) * noise.normal(f"{turn}/x", 3, *x_0.shape[1:])[:, 0]
        return x_t, at(a, t + 1) * x_t + at(s, t + 1) * noise.normal(f"{turn}/x", 3, *x_0.shape[1:])[:, 1]

    def fake(x_next, t, noise, turn):
        x_0 = generator(x_next, t, noise.normal(f"{turn}/z", generator.z_dim))
        mean = at(of_x_0, t) * x_0 + at(of_x_next, t) * x_next
        mask = (t != 0).to(x_0.dtype)[:, None, None, None]
        draw = noise.normal(f"{turn}/x", 3, *x_0.shape[1:])[:, 2]
        return mean + mask * (0.5 * at(log_variance, t)).exp() * draw

    of_generator = torch.optim.Adam(generator.parameters(), RATES["generator"], (0.5, 0.9))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), RATES["discriminator"], (0.5, 0.9))
    averages = [p.detach().clone() for p in generator.parameters()]
    for step, batch in enumerate(batches):
        noise = Noise(SEED, batch.numbers)
        discriminator.requires_grad_(True)
        discriminator.zero_grad()
        t = (noise.uniform("discriminator/t") * STEPS).long()
        x_t, x_next = pair(batch.images, t, noise, "discriminator")
        x_t.requires_grad_(True)
        real = discriminator(x_t, t, x_next)
        F.softplus(-real).mean().backward(retain_graph=True)
        if step % interval == 0:
            (gradient,) = torch.autograd.grad(real.sum(), x_t, create_graph=True)
            (GAMMA / 2 * gradient.flatten(1).norm(2, dim=1).square().mean()).backward()
        F.softplus(discriminator(fake(x_next, t, noise, "discriminator"), t, x_next)).mean().backward()
        of_discriminator.step()

        discriminator.requires_grad_(False)
        generator.zero_grad()
        t = (noise.uniform("generator/t") * STEPS).long()
        _, x_next = pair(batch.images, t, noise, "generator")
        F.softplus(-discriminator(fake(x_next, t, noise, "generator"), t, x_next)).mean().backward()
        of_generator.step()
        averages = [DECAY * e + (1 - DECAY) * p.detach() for e, p in zip(averages, generator.parameters(), strict=True)]
    return averages


@pytest.mark.parametrize("interval", [1, 2])
def test_three_batches_are_the_published_algorithm(doubles, interval):
    module, ema = small_module(), EMA(decay=DECAY)
    before, copy = weights(module), deepcopy(module)
    batches = []

    class Keep(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            batches.append(batch)

    fit(module, 3, LazyR1(GAMMA, interval), ema, Keep(), precision="64-true")
    averages = published_training(copy.generator, copy.discriminator, batches, interval)
    assert farthest(weights(module), weights(copy)) < 1e-12
    assert 1e-4 < farthest(weights(module), before) < 1e-2
    for name, average in zip(dict(module.generator.named_parameters()), averages, strict=True):
        torch.testing.assert_close(ema.averages[f"generator.{name}"], average, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reuse", [False, True])
def test_micro_batches_make_the_step_of_the_whole_batch(doubles, reuse):
    def trained(micro_batch):
        module = small_module(group=2, micro_batch=micro_batch, reuse_generator=reuse)
        return weights(fit(module, 3, LazyR1(GAMMA), precision="64-true"))

    whole = trained(None)
    for micro_batch in (4, 2):
        assert farthest(trained(micro_batch), whole) < 1e-12


def test_one_pass_of_the_generator_serves_both_turns_where_asked(doubles):
    found = {}
    for reuse in (False, True):
        module = small_module(micro_batch=4, reuse_generator=reuse)
        with calls(module) as seen:
            found[reuse] = weights(fit(module, 1, LazyR1(GAMMA), precision="64-true"))
        assert seen["generator"] == ["discriminator"] * 2 + ([] if reuse else ["generator"] * 2)
        assert seen["discriminator"] == ["discriminator"] * 4 + ["generator"] * 2
    moved = {name for name in found[True] if farthest({name: found[True][name]}, {name: found[False][name]}) > 1e-12}
    assert moved and all(name.startswith("generator.") for name in moved)  # the discriminator saw the same fakes


@pytest.mark.parametrize("interval", [1, 1000])
def test_the_discriminator_runs_twice_in_its_turn_with_and_without_a_penalty(interval):
    module = small_module()
    with calls(module) as seen:
        fit(module, 2, LazyR1(GAMMA, interval))
    assert seen["discriminator"] == ["discriminator", "discriminator", "generator"] * 2
    assert seen["generator"] == ["discriminator", "generator"] * 2


@pytest.mark.parametrize("reuse", [False, True])
def test_no_gradient_reaches_the_network_whose_turn_it_is_not(reuse):
    """Each network's gradients as they are when the other one steps are those of its own last turn, or none."""
    kept = {}

    class Watch(lightning.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            turn = next(name for name, o in module.named_optimizers().items() if o.optimizer is optimizer)
            for name, network in module.parallel_networks().items():
                now = [None if p.grad is None else p.grad.clone() for p in network.parameters()]
                if name == turn:
                    assert all(gradient is not None for gradient in now)
                    kept[name] = now
                else:
                    for gradient, before in zip(now, kept.get(name, [None] * len(now)), strict=True):
                        assert gradient is None or torch.equal(gradient, before)

    fit(small_module(reuse_generator=reuse), 3, LazyR1(GAMMA, 2), Watch())
    assert kept.keys() == {"generator", "discriminator"}


def test_what_is_logged():
    logged = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            logged.append(outputs)

    fit(small_module(), 3, LazyR1(GAMMA, 2), Watch())
    assert [("train/r1" in found) for found in logged] == [True, False, True]
    for found in logged:
        both = found["train/loss_real"] + found["train/loss_fake"]
        torch.testing.assert_close(found["train/loss_discriminator"], both)
        assert all(value.dim() == 0 and not value.requires_grad for value in found.values())


def test_training_under_bf16_keeps_weights_and_images_in_float32():
    module = fit(small_module(), 2, LazyR1(GAMMA, 2), precision="bf16-mixed")
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in module.parameters())
    assert module.sample(Noise(0, torch.arange(2))).dtype == torch.float32


# The penalty


def due(penalty, batches_seen=0):
    penalty.on_train_batch_start(None, argparse.Namespace(batches_seen=batches_seen), None, 0)
    return penalty


def test_r1_of_a_linear_critic_is_half_gamma_times_the_square_of_its_weights():
    weight = torch.tensor([1.0, -2.0, 0.5, 4.0]).requires_grad_()
    term = due(LazyR1(0.25)).critic_penalty(lambda x: x.flatten(1) @ weight, torch.randn(8, 1, 2, 2))
    assert term.item() == 0.125 * 21.25
    (gradient,) = torch.autograd.grad(term, weight)
    assert torch.equal(gradient, 0.25 * weight.detach())


def test_r1_of_a_quadratic_critic():
    """D(x) = |x|^2 / 2 has the gradient x."""
    x = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    term = due(LazyR1(0.3)).critic_penalty(lambda x: x.square().sum((1, 2, 3)) / 2, x)
    torch.testing.assert_close(term, 0.15 * x.square().sum((1, 2, 3)).mean())
    assert not x.requires_grad


def test_r1_comes_every_interval_and_is_scaled_only_where_asked():
    x, weight = torch.zeros(2, 1), torch.ones(1).requires_grad_()

    def terms(penalty):
        found = [due(penalty, seen).critic_penalty(lambda x: x @ weight, x) for seen in range(7)]
        return [None if term is None else term.item() for term in found]

    assert terms(LazyR1(2.0, 3)) == [1, None, None, 1, None, None, 1]
    assert terms(LazyR1(2.0, 3, scale_by_interval=True)) == [3, None, None, 3, None, None, 3]
    assert terms(LazyR1(2.0)) == [1] * 7


@pytest.mark.parametrize("options", [{"gamma": 0}, {"gamma": -1}, {"gamma": 1, "interval": 0}])
def test_penalties_that_do_nothing_are_refused(options):
    with pytest.raises(ValueError, match="needs gamma > 0 and interval >= 1"):
        LazyR1(**options)


def test_r1_is_computed_in_float32_under_autocast():
    critic = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(16, 1))
    x, dtypes = torch.randn(4, 1, 4, 4), []

    def watched(x):
        dtypes.append(critic(x).dtype)
        return critic(x)

    plain = due(LazyR1(1.0)).critic_penalty(watched, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = due(LazyR1(1.0)).critic_penalty(watched, x)
        assert critic(x).dtype == torch.bfloat16
    assert dtypes == [torch.float32] * 2 and torch.equal(plain, mixed)


@pytest.mark.parametrize("resample", [fir_downsample, fir_upsample, fir_blur])
def test_resampling_has_its_derivatives_of_every_order(resample):
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(resample, x)
    assert torch.autograd.gradgradcheck(lambda x: resample(x.square()), x)


@pytest.mark.parametrize("resample", [fir_downsample, fir_upsample, fir_blur])
def test_resampling_in_bf16_rounds_only_its_result(resample):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = resample(x)
    expected = resample(wide)
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, expected.bfloat16())
    weight = torch.randn(narrow.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (found,), (known,) = torch.autograd.grad(narrow, x, weight), torch.autograd.grad(expected, wide, weight.float())
    assert torch.equal(found, known.bfloat16())


def test_a_penalty_does_not_visit_channels_one_by_one():
    """As PyTorch's own second derivative of a depthwise convolution would."""
    x = torch.randn(1, 64, 4, 4).requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (gradient,) = torch.autograd.grad(fir_downsample(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::convolution") < 8


# The sampler


class Knows(nn.Module):
    """A generator that always answers with the data, and keeps what it was asked."""

    z_dim = 3

    def __init__(self, data):
        super().__init__()
        self.data, self.shape, self.asked = data, data.shape[1:], []

    def forward(self, x, t, z, labels=None):
        self.asked.append((t, x, z))
        return self.data


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_a_perfect_predictor_draws_the_data_through_the_forward_process(steps):
    data = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    knows = Knows(data)
    module = DDGAN(knows, nn.Identity(), Diffusion(steps), None, None, seed=0)
    torch.testing.assert_close(module.sample(Noise(5, torch.arange(16))), data, rtol=0, atol=1e-6)
    assert [t.unique().tolist() for t, _, _ in knows.asked] == [[t] for t in reversed(range(steps))]
    latents = torch.stack([z for _, _, z in knows.asked])
    assert len(latents.unique(dim=0)) == steps
    for t, x, _ in knows.asked[1:]:  # below the pure noise that it starts from: x_{t+1} ~ q(x_{t+1} | x_0)
        alpha_bar = module.diffusion.alphas_bar[t[0] + 1].item()
        standard = (x - alpha_bar**0.5 * data) / (1 - alpha_bar) ** 0.5
        assert abs(standard.mean()) < 0.02 and abs(standard.std() - 1) < 0.02


def test_samples_do_not_depend_on_the_batch_split():
    module, numbers = small_module().eval(), torch.arange(10, 18)
    whole = torch.cat(list(draw(module, 0, numbers, 8, None, 0)))
    assert whole.std() > 0.1 and whole.abs().max() <= 1 and len(whole.flatten(1).unique(dim=0)) == 8
    for batch in (1, 3):
        torch.testing.assert_close(torch.cat(list(draw(module, 0, numbers, batch, None, 0))), whole, rtol=0, atol=1e-5)


def test_global_generators_stay_untouched():
    module, states = small_module(), []

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            states.append(torch.get_rng_state())

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            states.append(torch.get_rng_state())

    fit(module, 2, LazyR1(GAMMA), Watch())
    module.sample(Noise(0, torch.arange(2)))
    assert len(states) == 4
    assert all(torch.equal(state, states[0]) for state in [*states, torch.get_rng_state()])


# Published checkpoints

PUBLISHED = [
    "model=ddgan",
    "data=emoji32",
    "logger=[csv]",
    "callbacks=[budget,ema,r1,checkpoint]",
    "model.generator.width=16",
    "model.generator.multipliers=[1,2]",
    "model.generator.blocks=1",
    "model.generator.z_dim=8",
    "model.generator.z_width=16",
    "model.generator.z_layers=2",
    "model.discriminator.width=4",
    "model.discriminator.time_width=16",
    "batch=8",
    "data.val_batch=8",
    "+trainer.limit_val_batches=1",
]


@pytest.fixture(scope="module")
def golden():
    return torch.load(GOLDEN, weights_only=True)


def published_content(golden, prefix=""):
    """`content.pth` after 5 steps of 2 x 2 processes with 2 images each; what the optimizers keep is told from the
    weights w: averages -w, first moments 2 w, second moments w^2."""

    def optimizer(state, ema):
        moments = {
            number: {"step": 5, "exp_avg": 2 * w, "exp_avg_sq": w**2} | ({"ema": -w} if ema else {})
            for number, w in enumerate(state.values())
        }
        group = {"lr": 1e-4, "betas": (0.5, 0.9), "eps": 1e-8, "params": list(range(len(state)))}
        return {"state": moments, "param_groups": [group]}

    generator, discriminator = (
        {f"{prefix}{name}": value for name, value in golden[f"{network}_state"].items()}
        for network in ("generator", "discriminator")
    )
    return {
        "epoch": 1,
        "global_step": 5,
        "args": argparse.Namespace(batch_size=2, num_process_per_node=2, num_proc_node=2, exp="x", ch_mult=[1, 2]),
        "netG_dict": generator,
        "optimizerG": optimizer(generator, True),
        "schedulerG": {"T_max": 1800, "last_epoch": 1, "base_lrs": [1e-4]},
        "netD_dict": discriminator,
        "optimizerD": optimizer(discriminator, False),
        "schedulerD": {"T_max": 1800, "last_epoch": 1, "base_lrs": [1e-4]},
    }


@pytest.fixture
def published_model(composed):
    return build_model(composed(*PUBLISHED))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_published_run_is_translated_with_moments_averages_and_position(published_model, golden, tmp_path, prefix):
    torch.save(published_content(golden, prefix), tmp_path / "content.pth")
    state = published_model.published_state(str(tmp_path / "content.pth"))
    expected = {
        "generator": generator_state(golden["generator_state"], published_model.generator),
        "discriminator": discriminator_state(golden["discriminator_state"], published_model.discriminator),
    }
    assert state["position"] == {"images": 5 * 2 * 2 * 2, "batches": 5}
    averages = state["callbacks"]["EMA"]["averages"]
    assert len(averages) == len(expected["generator"])
    for network, known in expected.items():
        assert state["optimizers"][network].keys() == known.keys()
        for name, w in known.items():
            assert torch.equal(state["weights"][f"{network}.{name}"], w)
            moments = state["optimizers"][network][name]
            assert moments["step"] == 5
            assert torch.equal(moments["exp_avg"], 2 * w) and torch.equal(moments["exp_avg_sq"], w**2)
            if network == "generator":
                assert torch.equal(averages[f"generator.{name}"], -w)
    canonical.load_weights(published_model, state["weights"], "content.pth")
    i, e = golden["inputs"], golden["expected"]
    torch.testing.assert_close(
        published_model.generator(e["x_next"], i["t"], i["z"]), e["x0_hat"], rtol=1e-4, atol=1e-5
    )


def test_a_published_generator_alone_is_for_drawing(published_model, golden, tmp_path):
    torch.save({f"module.{k}": v for k, v in golden["generator_state"].items()}, tmp_path / "netG_1200.pth")
    fresh = weights(published_model)
    state = published_model.published_state(str(tmp_path / "netG_1200.pth"))
    assert state["position"] == {"images": 0, "batches": 0} and state["optimizers"] == {}
    known = generator_state(golden["generator_state"], published_model.generator)
    for name, value in canonical.averaged(state).items():
        network, _, rest = name.partition(".")
        assert torch.equal(value, known[rest] if network == "generator" else fresh[name])


def test_published_checkpoints_of_another_architecture_are_refused_in_a_sentence(composed, golden, tmp_path):
    torch.save(published_content(golden), tmp_path / "content.pth")
    model = build_model(composed(*PUBLISHED, "model.generator.z_layers=3"))
    with pytest.raises(ValueError, match=r"does not fit NCSNpp \(2 differences\).*options of the checkpoint") as error:
        model.published_state(str(tmp_path / "content.pth"))
    assert "\n" not in str(error.value)


class Surprise:
    """Something that a checkpoint has no business to hold."""

    def __reduce__(self):
        return print, ("surprise",)


def test_nothing_else_is_unpickled(published_model, golden, tmp_path, capsys):
    torch.save(published_content(golden) | {"more": Surprise()}, tmp_path / "content.pth")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint of the published DDGAN"):
        published_model.published_state(str(tmp_path / "content.pth"))
    assert "surprise" not in capsys.readouterr().out
    (tmp_path / "text.pth").write_text("no checkpoint at all")
    for name in ("text.pth", "missing.pth"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as a checkpoint of the published DDGAN"):
            published_model.published_state(str(tmp_path / name))


def test_training_goes_on_from_a_published_run(composed, golden, tmp_path):
    torch.save(published_content(golden), tmp_path / "content.pth")
    start, rate = f"start={tmp_path / 'content.pth'}", 1e-5
    rates = [f"model.optimizer_{name}.lr={rate}" for name in RATES]
    config = composed(
        *PUBLISHED, *rates, start, "schedule_kimg=0.056", "val_every_kimg=1", "callbacks.checkpoint.keep=9"
    )
    train(config)
    folder = Path(config.paths.run)
    first, last = (canonical.read(path) for path in canonical.committed(folder / "checkpoints"))
    assert (first["position"]["images"], last["position"]["images"]) == (40, 56)
    step = last["optimizers"]["generator"]["stem.weight"]["step"]
    assert step == 7
    # With moments 2 w and w^2, a step of Adam is about 1.4 rates; from none, the first two would be at most 1 each.
    assert 2.2 * rate < farthest(last["weights"], first["weights"]) < 3.2 * rate


def test_a_run_of_a_published_generator_is_drawn_from(composed, golden, tmp_path, capsys):
    torch.save(golden["generator_state"], tmp_path / "netG_550.pth")
    config = composed(*PUBLISHED, f"start={tmp_path / 'netG_550.pth'}", "schedule_kimg=0.056", "val_every_kimg=1")
    train(config)
    assert f"python sample.py run={config.paths.run}" in capsys.readouterr().out
    model, _, _ = load(config.paths.run, "newest")
    known = generator_state(golden["generator_state"], model.generator)
    assert farthest(model.generator.cpu().state_dict(), known) == 0


# Recipes


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_with_a_penalty_and_averages(composed, name):
    extra = ["data.path=images"] if name.endswith("256") else []
    config = composed(f"experiment={name}", *extra)
    assert {"r1", "ema", "checkpoint"} <= config.callbacks.keys()
    assert config.model._target_ == "src.modules.ddgan.DDGAN"
    assert instantiate(config.callbacks.r1).weight == config.callbacks.r1.gamma / 2


@pytest.mark.parametrize(
    ("name", "generator", "discriminator"),
    [
        ("ddgan_cifar10", 48_432_515, 12_741_633),
        ("ddgan_celebahq256", 39_726_979, 27_737_217),
        ("ddgan_lsun_church256", 39_726_979, 27_737_217),
    ],
)
def test_recipes_build_networks_of_the_published_sizes(composed, name, generator, discriminator):
    extra = ["data.path=images"] if name.endswith("256") else []
    config = composed(f"experiment={name}", *extra)
    with torch.device("meta"):
        model = instantiate(config.model)
    sizes = {name: sum(p.numel() for p in network.parameters()) for name, network in model.parallel_networks().items()}
    assert sizes == {"generator": generator, "discriminator": discriminator}


@pytest.mark.parametrize(
    ("name", "batch", "images", "steps", "gamma", "interval", "decay", "rates"),
    [
        ("ddgan_cifar10", 256, 1800 * 50_000, 4, 0.02, 15, 0.9999, (1.6e-4, 1.25e-4)),
        ("ddgan_celebahq256", 32, 800 * 27_000, 2, 2.0, 10, 0.9999, (2e-4, 1e-4)),
        ("ddgan_lsun_church256", 64, 500 * 120_000, 4, 1.0, 10, 0.999, (1.6e-4, 1e-4)),
    ],
)
def test_recipes_have_the_published_numbers(composed, name, batch, images, steps, gamma, interval, decay, rates):
    extra = ["data.path=images"] if name.endswith("256") else []
    c = composed(f"experiment={name}", *extra)
    assert (c.batch, c.schedule_kimg * 1000, c.model.diffusion.steps, c.data.flip) == (batch, images, steps, True)
    assert (c.callbacks.r1.gamma, c.callbacks.r1.interval, c.callbacks.ema.decay) == (gamma, interval, decay)
    assert (c.model.optimizer_generator.lr, c.model.optimizer_discriminator.lr) == rates
    assert c.model.schedule.floor == 1e-5 and not c.callbacks.r1.scale_by_interval


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddgan_cifar10", "ddgan_celebahq256", "ddgan_lsun_church256", "ddgan_stackedmnist"])
def test_every_published_recipe_takes_two_steps(name, tmp_path):
    batch = 1 if name.endswith("256") else 2
    words = [f"experiment={name}", f"batch={batch}", f"total_kimg={2 * batch / 1000}", "logger=[csv]", "metric=[]"]
    words += ["callbacks=[budget,ema,r1,metrics,checkpoint]", f"callbacks.metrics.every_kimg={batch / 1000}"]
    words += [f"model.discriminator.group={batch}", "+trainer.limit_val_batches=0"]
    if name.endswith("256"):  # the true sizes of these are counted above
        words += ["model.generator.width=32", "model.discriminator.width=32"]
    if name == "ddgan_cifar10":
        words.append("data=emoji32")  # colour at 32 pixels as well, and always here
    if name.endswith("256"):
        (tmp_path / "images").mkdir()
        draw = np.random.default_rng(0)
        for number in range(4):
            noise = draw.integers(0, 256, (256, 256, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / "images" / f"{number}.png")
        words += [f"data.path={tmp_path / 'images'}", "data.held_out=1", f"trainer.precision={fast_precision()}"]
    places = [f"paths.runs={tmp_path / 'runs'}", f"paths.cache={tmp_path / 'cache'}"]
    done = run_command("train.py", *words, *places, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    log = read_log(folder)
    assert [kimg for kimg, _ in log["train/loss_generator"]] == [batch / 1000, 2 * batch / 1000]
    assert len(log["train/r1"]) == 1 and log["train/r1"][0][1] > 0  # in batch 0 alone
    state = canonical.read(folder / "checkpoints" / f"{2 * batch:012d}")
    initial = build_model(OmegaConf.create(state["config"])).state_dict()
    for network in ("generator", "discriminator"):
        trained = {k: v for k, v in state["weights"].items() if k.startswith(f"{network}.")}
        assert sum(not torch.equal(v, initial[k]) for k, v in trained.items()) > 0.9 * len(trained)


# Toys


def test_modes_are_counted_as_by_brute_force():
    points = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2
    points[:25] = torch.cartesian_prod(torch.arange(-2, 3), torch.arange(-2, 3)) * SPACING
    spacing, sigma = SPACING, 0.05
    expected = torch.zeros(27)
    for x, y in points.tolist():
        near = [
            5 * i + j
            for i in range(5)
            for j in range(5)
            if ((x - (i - 2) * spacing) ** 2 + (y - (j - 2) * spacing) ** 2) ** 0.5 <= 3 * sigma
        ]
        expected[near[0] if near else 25] += 1
        expected[26] += 1
    assert torch.equal(count_modes(points, spacing, sigma), expected)
    assert expected[:25].min() > 0 and expected[25] > 0


def test_points_lie_on_the_grid_that_their_labels_name(composed):
    data = instantiate(composed("experiment=ddgan_25gaussians").data)
    data.setup()
    points = torch.from_numpy(data.train.images).flatten(1)
    counts = count_modes(points, SPACING, SIGMA)
    share = (counts[:25].sum() / counts[26]).item()
    assert share == pytest.approx(1 - np.exp(-4.5), abs=0.002)  # Rayleigh: 98.9 %
    centres = (np.stack([data.train.labels // 5, data.train.labels % 5], 1) - 2) * SPACING
    residuals = points.numpy() - centres
    assert np.abs(residuals.mean(0)).max() < 2e-4 and residuals.std(0) == pytest.approx([SIGMA] * 2, rel=0.02)
    assert len(data.held_out) == 10_000
    batch = data.on_after_batch_transfer(data.train[range(8)], 0)
    assert batch.images.shape == (8, 2, 1, 1) and batch.images.dtype == torch.float32


def test_a_model_of_points_trains_and_is_judged(composed):
    small = ["model.generator.width=16", "model.discriminator.width=16", "data.count=64", "data.held_out=20"]
    run = ["batch=16", "schedule_kimg=0.064", "val_every_kimg=0.032", "data.val_batch=16", "logger=[csv]"]
    config = composed("experiment=ddgan_25gaussians", *small, *run)
    train(config)
    folder = Path(config.paths.run)
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    assert 0 <= metrics["val/modes"] <= 20 and 0 <= metrics["val/share_within_3_sigma"] <= 1
    assert [path.name for path in (folder / "pictures").glob("modes_*")]


def test_labels_of_stacked_images_spell_the_classes_of_their_channels(composed):
    data = instantiate(composed("experiment=ddgan_stackedmnist").data)
    data.setup()
    with np.load(FOLDER / "fashion10k.npz") as file:
        known = {image.tobytes(): int(label) for image, label in zip(file["images"], file["labels"], strict=True)}
        count = len(file["images"])
    assert len(data.train) == 120_000 and len(data.held_out) == 2000 and len(known) >= count - 5
    for images, labels in [data.train[range(100)][:2], (data.held_out.read(slice(0, 100)), data.held_out.labels[:100])]:
        assert images.shape == (100, 3, 32, 32) and images[:, :, :2].sum() == 0
        for image, label in zip(images.numpy()[:, :, 2:-2, 2:-2], labels.tolist(), strict=True):
            digits = [known[np.ascontiguousarray(channel).tobytes()] for channel in image]
            assert label == 100 * digits[0] + 10 * digits[1] + digits[2]
    assert len(np.unique(data.train.labels)) == 1000
    train_rows, held_rows = data.load()[0][0], data.load()[1][0]
    assert not {x.tobytes() for x in held_rows} & {x.tobytes() for x in train_rows}


def test_mode_statistics_in_closed_form():
    uniform = torch.full((1000,), 7.0)
    assert mode_statistics(uniform) == (1000, pytest.approx(0, abs=1e-12))
    half = torch.cat([torch.full((500,), 3.0), torch.zeros(500)])
    assert mode_statistics(half) == (500, pytest.approx(np.log(2)))
    one = torch.zeros(1000)
    one[17] = 5
    assert mode_statistics(one) == (1, pytest.approx(np.log(1000)))


def test_modes_of_stacked_images_are_spelled_by_the_classes_of_their_channels():
    class Brightness(nn.Module):
        def forward(self, images):
            return F.one_hot(images[:, 0, 0, 0].long(), 10)

    digits = torch.randint(10, (50, 3), generator=torch.Generator().manual_seed(0))
    images = digits[:, :, None, None].expand(-1, -1, 4, 4).to(torch.uint8)
    assert stacked_modes(Brightness(), images).tolist() == [100 * a + 10 * b + c for a, b, c in digits.tolist()]


def test_the_classifier_is_trained_once_and_leaves_the_global_generator_alone(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (128, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = (images.float().mean((1, 2, 3)) > 127.5).long()
    before = torch.get_rng_state()
    with torch.no_grad():  # as in a validation
        first = trained_classifier(images, labels, tmp_path, passes=2)
        monkeypatch.setattr(torch.optim, "Adam", None)
        second = trained_classifier(images, labels, tmp_path, passes=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert farthest(second.state_dict(), first.state_dict()) == 0 and len(list(tmp_path.iterdir())) == 1
    assert not any(p.requires_grad for network in (first, second) for p in network.parameters())
    with pytest.raises(TypeError):
        trained_classifier(images, labels, tmp_path, passes=3)


@pytest.mark.slow
def test_the_classifier_knows_held_out_images(composed, tmp_path):
    data = instantiate(composed("experiment=ddgan_stackedmnist").data)
    network = data.modes(tmp_path).classifier
    images, labels = data.load()[1]
    padded = F.pad(torch.from_numpy(images), (data.padding,) * 4)
    right = network(padded).argmax(1) == torch.from_numpy(labels.astype(np.int64))
    assert right.float().mean() > 0.85


# Export


def test_an_exported_model_draws_in_five_lines_what_the_run_draws(composed):
    config = composed(*PUBLISHED, "schedule_kimg=0.032", "val_every_kimg=1")
    train(config)
    folder = Path(config.paths.run)
    prepare(composed(f"run={folder}", command="prepare"))
    model, _, _ = load(str(folder), "newest")
    (expected,) = draw(model.cpu(), 0, torch.arange(4), 100, None, 0)

    export = folder / "export"
    model = instantiate(json.loads((export / "config.json").read_text())["model"])
    model.load_state_dict(load_file(export / "model.safetensors"), strict=False)
    images = model.eval().sample(Noise(0, torch.arange(4)))
    assert torch.equal(images, expected)
    assert len(images.flatten(1).unique(dim=0)) == 4
