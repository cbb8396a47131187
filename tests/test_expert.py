"""Flow matching: path and solvers in closed form, training step by step, samples, guidance, a run from end to end."""

from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from test_ddgan_training import doubles, farthest, weights  # noqa: F401
from torch import nn

from src import checkpoint as canonical
from src.datamodules.base import ImageData
from src.flow import TIME_SCALE, ddim, euler, guided, heun, path, times, velocity
from src.modules.expert import Expert
from src.modules.networks.dit import DiT
from src.modules.networks.reference_names import dit_state
from src.noise import Noise
from src.report import read_log
from src.results import draw, load
from src.run import build_model, train

BATCH, SEED, RATE, CLASSES = 8, 3, 1e-3, 3


class Random(ImageData):
    """64 random images of 8 x 8 grey pixels with labels."""

    def __init__(self):
        super().__init__(channels=1, resolution=8, classes=CLASSES, batch=BATCH, seed=1)

    def load(self):
        images = np.random.default_rng(0).integers(0, 256, (65, 1, 8, 8), dtype=np.uint8)
        return (images[1:], np.arange(64) % CLASSES), (images[:1], np.zeros(1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch._replace(images=batch.images.to(torch.get_default_dtype()) / 127.5 - 1)


def small_module(classes=CLASSES, **options):
    """An expert with a tiny network whose every layer does something from the start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = DiT(channels=1, resolution=8, patch=4, width=16, depth=2, heads=2, classes=classes)
        for parameter in network.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
    return Expert(network, partial(torch.optim.AdamW, lr=RATE, weight_decay=0.01), seed=SEED, **options)


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


class Watch(lightning.Callback):
    """Keeps the batches, what their steps return, and the state of the global generator around them."""

    def __init__(self):
        self.batches, self.logged, self.states = [], [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append(batch)
        self.states.append(torch.get_rng_state())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.logged.append(outputs)
        self.states.append(torch.get_rng_state())


# Path, velocity and solvers


def some(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_path_runs_straight_from_data_to_noise():
    x_0, noise, t = some(5, 3, 2, 2), some(5, 3, 2, 2, seed=1), torch.linspace(0, 1, 5, dtype=torch.float64)
    x_t, v, column = path(x_0, noise, t), velocity(x_0, noise), t[:, None, None, None]
    assert torch.equal(x_t[0], x_0[0]) and torch.equal(x_t[4], noise[4])
    torch.testing.assert_close(x_t - column * v, x_0, rtol=0, atol=1e-14)
    torch.testing.assert_close(x_t + (1 - column) * v, noise, rtol=0, atol=1e-14)
    torch.testing.assert_close(4 * (x_t[1:] - path(x_0, noise, t - 0.25)[1:]), v[1:], rtol=0, atol=1e-13)


def gaussian_field(mean, std):
    """The exact field of data N(mean, std^2): the velocity's mean given x_t, by the rule for joint Gaussians."""

    def field(x, t):
        t = t[:, None]
        covariance = t - (1 - t) * std**2  # of noise - x_0 with x_t
        return -mean + covariance / ((1 - t) ** 2 * std**2 + t**2) * (x - (1 - t) * mean)

    return field


def test_the_exact_field_is_what_regression_on_velocities_finds():
    """Least squares of velocities on x_t, a linear problem for Gaussian data, finds the field of the next test."""
    x_0, noise, t = 0.3 + 0.5 * some(200_000, 1), some(200_000, 1, seed=1), torch.full((200_000,), 0.6).double()
    x_t = path(x_0, noise, t)
    both = torch.cat([x_t, torch.ones_like(x_t)], 1)
    slope, offset = torch.linalg.lstsq(both, velocity(x_0, noise)).solution.flatten()
    at = torch.tensor([[0.0], [1.0]]).double()
    expected = gaussian_field(0.3, 0.5)(at, torch.full((2,), 0.6).double())
    torch.testing.assert_close(slope * at + offset, expected, rtol=0, atol=0.01)


@pytest.mark.parametrize(("solver", "order"), [(euler, 1), (heun, 2)])
def test_solvers_carry_noise_to_gaussian_data_with_their_order(solver, order):
    field, x_1 = gaussian_field(0.3, 0.5), torch.linspace(-3, 3, 13, dtype=torch.float64)[:, None]
    exact = 0.3 + 0.5 * x_1  # the flow keeps quantiles
    errors = [(solver(field, x_1, times(steps)) - exact).abs().max().item() for steps in (50, 100, 200)]
    assert errors[2] < {1: 2e-2, 2: 2e-4}[order]
    for coarse, fine in pairwise(errors):
        assert coarse / fine == pytest.approx(2**order, rel=0.06)


@pytest.mark.parametrize("solver", [euler, heun, ddim])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_solvers_ask_for_falling_times_and_follow_a_straight_field_exactly(solver, steps):
    x_0, x_1, asked = some(4, 3), some(4, 3, seed=1), []

    def field(x, t):
        asked.append(t)
        torch.testing.assert_close(x, path(x_0, x_1, t), rtol=0, atol=1e-14)
        return x_1 - x_0

    torch.testing.assert_close(solver(field, x_1, times(steps)), x_0, rtol=0, atol=1e-14)
    ends = torch.linspace(1, 0, steps + 1).double()
    expected = torch.stack([ends[:-1], ends[1:]], 1).flatten() if solver is heun else ends[:-1]
    found = torch.stack(asked)
    assert found.shape == (len(expected), 4) and found.dtype == torch.float64
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=1e-7)


def test_guidance_goes_from_the_unconditional_through_the_conditional():
    c, u = some(2, 4, 2, 2), some(2, 4, 2, 2, seed=1)
    torch.testing.assert_close(guided(c, u, 0), u)
    torch.testing.assert_close(guided(c, u, 1), c)
    torch.testing.assert_close(guided(c, u, 3), u + 3 * (c - u))
    part = guided(c, u, 3, channels=3)
    assert torch.equal(part[:, 3:], c[:, 3:])
    torch.testing.assert_close(part[:, :3], 3 * c[:, :3] - 2 * u[:, :3])


# Training


def literal_training(network, batches, dropout):
    """Flow matching as its papers write it, sample by sample."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    for batch in batches:
        noise, losses = Noise(SEED, batch.numbers), []
        times, dropped = noise.uniform("train/t"), noise.uniform("train/label_dropout")
        ends = noise.normal("train/x", 1, 8, 8)
        for x_0, label, t, x_1, u in zip(batch.images, batch.labels, times, ends, dropped, strict=True):
            x_t = (1 - t) * x_0 + t * x_1
            seen = torch.tensor([CLASSES]) if u < dropout else label[None]
            losses.append((network(x_t[None], 1000 * t[None], seen)[0] - (x_1 - x_0)).square().mean())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return losses


def test_three_batches_are_the_literal_algorithm(doubles):  # noqa: F811
    module, watch = small_module(label_dropout=0.3), Watch()
    before, copy = weights(module), deepcopy(module)
    fit(module, 3, watch, precision="64-true")
    losses = literal_training(copy.network, watch.batches, dropout=0.3)
    assert farthest(weights(module), weights(copy)) < 1e-12
    assert 1e-4 < farthest(weights(module), before) < 1e-2
    torch.testing.assert_close(watch.logged[-1]["train/loss"], torch.stack(losses).mean())


def test_micro_batches_make_the_step_of_the_whole_batch(doubles):  # noqa: F811
    def trained(micro_batch):
        module = small_module(micro_batch=micro_batch, label_dropout=0.3)
        return weights(fit(module, 3, precision="64-true"))

    whole = trained(None)
    for micro_batch in (4, 1):
        assert farthest(trained(micro_batch), whole) < 1e-12


def test_the_asked_share_of_labels_is_dropped():
    module, numbers = small_module(label_dropout=0.1), torch.arange(20_000)
    labels = numbers % CLASSES
    found = module._with_dropout(labels, Noise(SEED, numbers))
    dropped = found == CLASSES
    assert dropped.float().mean() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(found[~dropped], labels[~dropped]) and labels.max() < CLASSES  # those of the batch stay
    assert torch.equal(module._with_dropout(labels[500:], Noise(SEED, numbers[500:])), found[500:])
    for options in [dict(label_dropout=0.0), dict(label_dropout=0.1, classes=0)]:
        assert small_module(**options)._with_dropout(labels, Noise(SEED, numbers)) is labels


def test_what_is_logged():
    watch = Watch()
    fit(small_module(), 2, watch)
    for found in watch.logged:
        assert found.keys() == {"train/loss", "train/grad_norm_network"}
        assert all(value.dim() == 0 and not value.requires_grad and value > 0 for value in found.values())


def test_training_under_bf16_keeps_weights_and_images_in_float32():
    module, watch = small_module(label_dropout=0.1), Watch()
    fit(module, 2, watch, precision="bf16-mixed")
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in module.parameters())
    assert watch.logged[0]["train/loss"].dtype == torch.float32
    assert module.sample(Noise(0, torch.arange(2)), torch.tensor([0, 1])).dtype == torch.float32


# The sampler


class Knows(nn.Module):
    """A network whose velocity always points away from its data, and which keeps what it was asked."""

    def __init__(self, data, classes=0):
        super().__init__()
        self.data, self.shape, self.classes, self.asked = data, data.shape[1:], classes, []

    def forward(self, x, t, labels=None):
        self.asked.append((t, labels))
        data = self.data.repeat(len(x) // len(self.data), 1, 1, 1)
        return (x - data) / (t / TIME_SCALE)[:, None, None, None]


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_a_perfect_predictor_draws_the_data(steps):
    data = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    knows = Knows(data)
    module = Expert(knows, None, steps=steps, seed=0)
    torch.testing.assert_close(module.sample(Noise(5, torch.arange(6))), data, rtol=0, atol=1e-5)
    assert [t.unique().item() for t, _ in knows.asked] == pytest.approx([1000 * (1 - k / steps) for k in range(steps)])
    knows.data = 3 * data
    assert torch.equal(module.sample(Noise(5, torch.arange(6))).abs() == 1, knows.data.abs() > 1)  # clipped


def test_guidance_asks_with_and_without_the_label_in_one_pass():
    knows = Knows(torch.zeros(2, 1, 8, 8), classes=CLASSES)
    module = Expert(knows, None, steps=3, guidance=2.5, label_dropout=0.1, seed=0)
    module.sample(Noise(0, torch.arange(2)), torch.tensor([2, 1]))
    assert [labels.tolist() for _, labels in knows.asked] == [[2, 1, CLASSES, CLASSES]] * 3


@torch.no_grad()
def test_guided_velocities_are_those_of_the_network_alone():
    module, labels = small_module(guidance=2.5, label_dropout=0.1), torch.tensor([0, 2])
    x, t = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.7])
    c, u = module.network(x, 1000 * t, labels), module.network(x, 1000 * t, torch.full((2,), CLASSES))
    torch.testing.assert_close(module.velocity(x, t, labels), u + 2.5 * (c - u), rtol=1e-4, atol=1e-5)
    assert (c - u).abs().mean() > 1e-3


@pytest.mark.parametrize("options", [dict(), dict(solver="heun", guidance=2.0, label_dropout=0.1)])
def test_samples_do_not_depend_on_the_batch_split(options):
    module, numbers = small_module(steps=4, **options).eval(), torch.arange(10, 18)
    whole = torch.cat(list(draw(module, 0, numbers, 8, None, CLASSES)))
    assert whole.std() > 0.1 and whole.abs().max() <= 1 and len(whole.flatten(1).unique(dim=0)) == 8
    for batch in (1, 3):
        parts = torch.cat(list(draw(module, 0, numbers, batch, None, CLASSES)))
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def test_a_network_of_labels_asks_for_them_and_one_without_draws_alone():
    noise = Noise(0, torch.arange(2))
    assert small_module(classes=0, steps=2).sample(noise).shape == (2, 1, 8, 8)
    for options in [dict(), dict(guidance=2.0, label_dropout=0.1)]:
        with pytest.raises(ValueError, match="pass labels"):
            small_module(steps=2, **options).sample(noise)


def test_global_generators_stay_untouched():
    module, watch = small_module(label_dropout=0.1), Watch()
    fit(module, 2, watch)
    module.sample(Noise(0, torch.arange(2)), torch.tensor([0, 1]))
    assert len(watch.states) == 4
    assert all(torch.equal(state, watch.states[0]) for state in [*watch.states, torch.get_rng_state()])


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (dict(label_dropout=1.0), "share of the samples, from 0 to below 1"),
        (dict(solver="rk4"), "choose one of euler, heun, ddim, ddpm"),
        (dict(eta=0.5), "model.eta=0.5 is for model.solver=ddim"),
        (dict(solver="ddim", eta=2), "a share of DDPM's noise, from 0 to 1"),
        (dict(steps=0), "model.steps is 0; set it to 1 or more"),
        (dict(guidance=2.0), "model.label_dropout above 0, or model.guidance=1"),
        (dict(guidance=2.0, label_dropout=0.1, classes=0), "set model.network.classes"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, fix):
    with pytest.raises(ValueError, match=fix):
        small_module(**options)


def test_a_network_of_variances_is_refused():
    network = DiT(1, 8, 4, 16, 1, 2, learn_sigma=True)
    with pytest.raises(ValueError, match="learn_sigma=false"):
        Expert(network, None, seed=0)


# A run from end to end

TINY = [
    "experiment=expert_small",
    "logger=[csv]",
    "callbacks=[budget,ema,metrics,pictures,checkpoint]",
    "model.network.width=16",
    "model.network.depth=1",
    "model.network.heads=2",
    "model.steps=2",
    "batch=8",
    "schedule_kimg=0.064",
    "val_every_kimg=0.032",
    "data.val_batch=8",
    "+trainer.limit_val_batches=1",
    "callbacks.metrics.every_kimg=0.016",
    "callbacks.pictures.count=8",
]


@pytest.mark.parametrize("classes", [0, 10])
def test_a_tiny_run_trains_and_is_drawn_from(composed, classes):
    guidance = ["model.guidance=2"] if classes else []
    config = composed(*TINY, f"model.network.classes={classes}", *guidance)
    train(config)
    folder = Path(config.paths.run)
    losses = [loss for _, loss in read_log(folder)["train/loss"]]
    assert len(losses) == 4 and 0 < losses[-1] < losses[0] < 3
    assert [path.name for path in (folder / "pictures").glob("samples_*.png")]

    model, state, _ = load(str(folder), "newest")
    assert state["position"]["images"] == 64
    initial = build_model(config).state_dict()
    assert farthest(canonical.averaged(state), initial) > 0
    assert set(state["optimizers"]["network"]) == set(dict(model.network.named_parameters()))
    (images,) = draw(model.cpu(), 0, torch.arange(4), 100, None, classes)
    assert images.shape == (4, 1, 32, 32) and images.abs().max() <= 1
    assert len(images.flatten(1).unique(dim=0)) == 4


def test_the_recipe_is_a_small_unconditional_transformer(composed):
    config = composed("experiment=expert_small")
    model = build_model(config)
    assert (model.network.shape, model.network.classes, len(model.network.blocks)) == ((1, 32, 32), 0, 6)
    assert sum(p.numel() for p in model.parameters()) == 1_867_664
    (optimizer,) = model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)


# A published DiT


def test_a_published_dit_is_imported_and_drawn_from(composed, tmp_path, capsys):
    """DDIM as its paper has it, with the recorded network of the reference, guided, in latents that nothing decodes."""
    case = torch.load(Path(__file__).parent / "golden" / "dit_tiny.pt", weights_only=True)
    torch.save(case["state"], tmp_path / "DiT.pt")
    c = case["config"]
    sizes = dict(channels=4, resolution=8, patch=2, width=c["hidden_size"], depth=2, heads=c["num_heads"], classes=10)
    words = [f"model.network.{key}={value}" for key, value in sizes.items()]
    words += ["experiment=dit_imagenet256", "logger=[csv]", "data.classes=10", "model.decoder=null", "model.steps=5"]
    config = composed(*words, f"start={tmp_path / 'DiT.pt'}", "model.solver=ddim", "batch=8")
    train(config)
    folder = config.paths.run
    assert f"draw with them: python sample.py run={folder}" in capsys.readouterr().out
    model, _, _ = load(folder, "newest")
    model = model.cpu()
    labels, noise = torch.tensor([3, 7]), Noise(1, torch.arange(2))

    network = DiT(**sizes, learn_sigma=True).eval()
    network.load_state_dict(dit_state(case["state"], network))
    alphas_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0).float()
    x, indices = noise.normal("sample/x", 4, 8, 8), [999, 749, 500, 250, 0]
    with torch.no_grad():
        for i, i_next in zip(indices, [*indices[1:], None], strict=True):
            a, a_next = alphas_bar[i], torch.ones(()) if i_next is None else alphas_bar[i_next]
            time = torch.full((2,), float(i))
            c, u = (network(x, time, y)[:, :4] for y in (labels, torch.full((2,), 10)))
            noise_found = u + 1.5 * (c - u)
            x_0 = (x - (1 - a).sqrt() * noise_found) / a.sqrt()
            x = a_next.sqrt() * x_0 + (1 - a_next).sqrt() * noise_found
    drawn = model.sample(noise, labels)
    assert (x.clamp(-1, 1) - x).abs().max() > 0 and drawn.abs().max() <= 1
    torch.testing.assert_close(drawn, x.clamp(-1, 1), rtol=0, atol=5e-3)
