"""Training a DDN: steps, Split-and-Prune inside the module, statistics, samples; and the callbacks that go along."""

import random
from functools import cache
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from conftest import TINY
from hydra.utils import instantiate
from torch import nn

from src import checkpoint as canonical
from src.callbacks.budget import Budget
from src.callbacks.checkpoint import Checkpoint
from src.callbacks.ema import EMA
from src.callbacks.metrics import Metrics
from src.datamodules.base import ImageData
from src.discrete import decide
from src.loggers.csv import MetricsLog
from src.modules.base import Module
from src.noise import Noise
from src.report import read_log
from src.results import draw
from src.run import build_model, train
from src.schedule import Schedule

BATCH = 12
SMALL = [
    *TINY,
    "data=emoji32",
    "logger=[csv]",
    "model.decoder.leaves=[4,3,4,5,4,4]",
    "model.min_evidence=3",
    f"batch={BATCH}",
    "schedule_kimg=0.12",
    "data.val_batch=8",
]


class Watching(lightning.Callback):
    """Calls a function before and after each batch."""

    def __init__(self, before=None, after=None):
        self.before, self.after = before, after

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.before:
            self.before(module, batch)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.after:
            self.after(module, outputs)


def fit(module, data, batches, *callbacks, logger=False, val_every=None, **options):
    """Train for as many batches in all."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        callbacks=[Budget(batches * data.batch / 1000), *callbacks],
        logger=logger,
        val_check_interval=val_every,
        check_val_every_n_epoch=None,
        limit_val_batches=1 if val_every else 0,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        use_distributed_sampler=False,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(module, data)
    return trainer


def built(config):
    data = instantiate(config.data)
    data.setup()
    return build_model(config), data


def choices(module, batch):
    """What one training pass chooses and the distances it sums, counted anew: (2, layers, k)."""
    noise = Noise(module.seed, batch.numbers)
    dropped = noise.uniform("chain_dropout", len(module.leaves)) < module.decoder.chain_dropout
    codes = (noise.uniform("chain_dropout_codes", len(module.leaves)) * module.leaves).long()
    counted = torch.zeros_like(module.tally)
    with torch.no_grad():
        for number, layer in enumerate(module.decoder(batch.images, batch.labels, dropped, codes)):
            for leaf in layer.nearest.tolist():
                counted[0, number, leaf] += 1
            counted[1, number, : layer.distances.shape[1]] = layer.distances.sum(0)
    return counted


# One step


@pytest.mark.parametrize("clip", ["null", "0.01"])
def test_micro_batches_make_the_step_of_the_whole_batch(composed, clip):
    found = []
    for micro_batch in ("null", "4", "1"):
        config = composed(*SMALL, f"micro_batch={micro_batch}", f"model.clip_norm={clip}", "model.decoder.classes=10")
        module, data = built(config)
        outputs = []
        fit(module, data, 2, Watching(after=lambda _, found, kept=outputs: kept.append(found)), precision="64-true")
        found.append((module.state_dict(), outputs))
    (whole, logged), *others = found
    assert not torch.equal(whole["decoder.heads.3.weight"], built(config)[0].decoder.heads[3].weight)
    for state, outputs in others:
        assert torch.equal(state["tally"][0], whole["tally"][0])
        for name, value in whole.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-6, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
            )
        for ours, theirs in zip(outputs, logged, strict=True):
            assert ours.keys() == theirs.keys()
            for key in theirs:
                torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-8, check_dtype=False)


def test_clipping_scales_the_whole_gradient_to_the_norm(composed):
    config = composed(
        *SMALL, "model.optimizer._target_=torch.optim.SGD", "model.optimizer.lr=1", "model.clip_norm=0.001",
        "model.schedule.warmup_kimg=0", "model.min_evidence=1000",
    )  # fmt: skip
    module, data = built(config)
    before = torch.cat([p.detach().clone().flatten() for p in module.decoder.parameters()]).double()
    outputs = []
    fit(module, data, 1, Watching(after=lambda _, found: outputs.append(found)))
    after = torch.cat([p.detach().flatten() for p in module.decoder.parameters()]).double()
    assert (after - before).norm() == pytest.approx(0.001, rel=1e-3)
    assert outputs[0]["train/grad_norm_decoder"] > 0.01  # before clipping


def test_the_learning_rate_is_a_function_of_the_images_seen(composed):
    module, data = built(composed(*SMALL, "model.schedule.warmup_kimg=0.024"))
    seen = []
    fit(
        module, data, 4, Watching(after=lambda m, _: seen.append(m.named_optimizers()["decoder"].param_groups[0]["lr"]))
    )
    schedule = Schedule(warmup_kimg=0.024, decay="cosine", schedule_kimg=0.12)
    assert seen == [schedule.rate(1e-3, images) for images in (0, 12, 24, 36)]
    assert seen[0] == 0 < seen[1] < seen[2] > seen[3]


def test_the_loss_is_the_mean_of_the_layers(composed):
    module, data = built(composed(*SMALL))
    outputs = []
    fit(module, data, 2, Watching(after=lambda _, found: outputs.append(found)))
    for found in outputs:
        assert found["train/loss_layer"].shape == (6,)
        torch.testing.assert_close(found["train/loss"], found["train/loss_layer"].mean())


def test_global_generators_stay_untouched_by_a_whole_run(composed):
    config = composed(
        *SMALL,
        "callbacks=[budget,ema,metrics,pictures,checkpoint]",
        "val_every_kimg=0.06",
        "+trainer.limit_val_batches=1",
    )
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    train(config)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert random.getstate() == before[2]


def test_a_model_is_initialised_by_the_seed_alone(composed):
    def weights(seed):
        torch.rand(3)  # the global generator moves on
        return build_model(composed(*SMALL, f"seed={seed}")).state_dict()["decoder.blocks.0.conv_in.weight"]

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


def test_a_gradient_that_is_not_finite_ends_the_run_before_anything_is_saved(composed, tmp_path):
    module, data = built(composed(*SMALL))

    def poison(module, batch):
        if module.batches_seen == 3:
            batch.images[0, 0, 0, 0] = torch.nan

    saving = Checkpoint(str(tmp_path), every_kimg=BATCH / 1000, keep=9)
    with pytest.raises(ValueError, match=r"gradient of batch 3 \(0.036 kimg\) is not finite; .*000000000036; lower"):
        fit(module, data, 9, saving, Watching(before=poison), default_root_dir=tmp_path)
    saved = canonical.committed(tmp_path / "checkpoints")
    assert [int(path.name) for path in saved] == [12, 24, 36]
    assert all(value.isfinite().all() for value in canonical.read(saved[-1])["weights"].values())


# Split-and-Prune inside the module


@pytest.fixture(scope="module")
def watched(compose_in, tmp_path_factory):
    """Ten batches whose learning rate is 0, so that only Split-and-Prune changes heads: what was there before and after
    each, with the choices counted anew."""
    config = compose_in(tmp_path_factory.mktemp("watched"), *SMALL, "model.optimizer.lr=0", "model.halflife_kimg=0.05")
    module, data = built(config)
    steps, ema = [], EMA(halflife_kimg=0.02, rampup=None)

    def heads(of):
        return [of(head.weight).clone() for head in module.decoder.heads]

    def moments(key):
        state = module.named_optimizers()["decoder"].optimizer.state
        return lambda weight: state[weight][key] if key in state[weight] else torch.zeros_like(weight)

    def snapshot():
        kept = {"tally": module.tally.clone(), "weight": heads(lambda w: w.detach())}
        kept |= {key: heads(moments(key)) for key in ("exp_avg", "exp_avg_sq")}
        return kept | {"ema": heads(lambda w: ema.averages[ema._names[w]])}

    def before(module, batch):
        if not steps:
            with torch.no_grad():  # averages that differ from the weights
                for value in ema.averages.values():
                    value += torch.randn(value.shape, generator=torch.Generator().manual_seed(len(value)))
        steps.append(SimpleNamespace(before=snapshot(), chosen=choices(module, batch)))

    def after(module, outputs):
        steps[-1].after, steps[-1].logged = snapshot(), outputs

    fit(module, data, 10, ema, Watching(before, after))
    for step in steps:
        kept = step.before["tally"] * 0.5 ** (BATCH / 50) + step.chosen
        step.counts, step.chosen = kept[0], step.chosen[0]
        step.source, step.target = decide(kept, module.leaves, module.min_evidence)
        pairs = enumerate(zip(step.source.tolist(), step.target.tolist(), strict=True))
        step.splits = [(layer, source, target) for layer, (source, target) in pairs if source != target]
    return module, steps


def test_leaves_are_split_and_pruned_as_decided_from_the_counted_choices(watched):
    _, steps = watched
    visible = 0
    for step in steps:
        expected = [weight.clone() for weight in step.before["weight"]]
        for layer, source, target in step.splits:
            visible += not torch.equal(expected[layer][target], expected[layer][source])
            expected[layer][target] = expected[layer][source]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(step.after["weight"], expected, strict=True))
        assert step.logged["train/splits"] == len(step.splits)
    assert visible >= 5


def test_nothing_is_split_before_there_is_evidence(watched):
    module, steps = watched
    wide = module.leaves.tolist().index(5)
    assert module.min_evidence * 5 > BATCH and steps[0].counts[wide].sum() == BATCH
    assert wide not in {layer for layer, _, _ in steps[0].splits}
    assert all(step.counts[layer].sum() >= 3 * module.leaves[layer] for step in steps for layer, _, _ in step.splits)


@pytest.mark.parametrize("follower", ["exp_avg", "exp_avg_sq", "ema"])
def test_moments_and_averages_follow_the_rows(watched, follower):
    _, steps = watched
    for step in steps:
        for layer, source, target in step.splits:
            new, old = step.after[follower][layer], step.before[follower][layer]
            assert torch.equal(new[target], new[source])
            assert old[source].abs().sum() == 0 or not torch.equal(new[target], old[target])


def test_other_rows_keep_their_averages(watched):
    """With weights that stay, averages approach them by the half-life alone."""
    _, steps = watched
    weight = 1 - 0.5 ** (BATCH / 20)
    for step in steps:
        moved = {(layer, target) for layer, _, target in step.splits}
        for layer, old in enumerate(step.before["ema"]):
            expected = old + weight * (step.after["weight"][layer] - old)
            for row in range(len(old)):
                if (layer, row) not in moved:
                    torch.testing.assert_close(step.after["ema"][layer][row], expected[row], rtol=1e-5, atol=1e-6)


def test_the_tally_decays_and_is_conserved(watched):
    """b (1 - r^n) / (1 - r) after n batches, r = 2^(-b / half-life), whatever was split."""
    _, steps = watched
    r = 0.5 ** (BATCH / 50)
    for n, step in enumerate(steps, 1):
        expected = torch.full((6,), BATCH * (1 - r**n) / (1 - r), dtype=torch.float64)
        torch.testing.assert_close(step.after["tally"][0].sum(1), expected, rtol=1e-12, atol=0)


def test_where_nothing_was_split_the_tally_is_the_decayed_count(watched):
    _, steps = watched
    for step in steps:
        for layer in set(range(6)) - {layer for layer, _, _ in step.splits}:
            torch.testing.assert_close(step.after["tally"][0, layer], step.counts[layer], rtol=1e-12, atol=1e-12)


def test_twins_share_the_choices_equally(watched):
    _, steps = watched
    for step in steps:
        for layer, source, target in step.splits:
            counts = step.after["tally"][0, layer]
            assert counts[source] == counts[target]
            pruned, total = step.counts[layer, target], step.counts[layer].sum()
            expected = step.counts[layer, source] * total / (total - pruned) / 2
            assert counts[source] == pytest.approx(float(expected), rel=1e-9)


def test_statistics_by_brute_force(watched):
    module, steps = watched
    for step in steps:
        used, perplexity, kl, selected = [], [], [], []
        for layer, k in enumerate(module.leaves.tolist()):
            counts = step.after["tally"][0, layer, :k].numpy()
            shares = counts / counts.sum()
            entropy = -sum(p * np.log(p) for p in shares if p > 0)
            used.append((counts > 0).sum() / k)
            perplexity.append(np.exp(entropy))
            kl.append(sum(p * np.log(p * k) for p in shares if p > 0))
            selected.append((step.chosen[layer] > 0).sum().item() / min(k, BATCH))
        for name, values in [
            ("used_leaves", used), ("perplexity", perplexity), ("choice_kl", kl), ("selection_rate", selected),
        ]:  # fmt: skip
            assert float(step.logged[f"train/{name}"]) == pytest.approx(np.mean(values), rel=1e-5, abs=1e-6), name


def test_without_a_halflife_nothing_is_forgotten(composed):
    module, data = built(composed(*SMALL, "model.halflife_kimg=null"))
    fit(module, data, 3)
    assert torch.allclose(module.tally[0].sum(1), torch.full((6,), 36.0, dtype=torch.float64), rtol=1e-12)
    padding = torch.arange(5) >= module.leaves[:, None]
    assert (module.tally[:, padding] == 0).all()


def test_accumulated_losses_are_the_sums_of_the_distances(composed):
    module, data = built(
        composed(*SMALL, "model.halflife_kimg=null", "model.min_evidence=1000", "model.decoder.chain_dropout=0")
    )
    expected = torch.zeros(6, 5, dtype=torch.float64)

    def add(module, batch):
        for number, layer in enumerate(module.decoder(batch.images, batch.labels)):
            expected[number, : layer.distances.shape[1]] += layer.distances.double().sum(0)

    fit(module, data, 2, Watching(before=add))
    torch.testing.assert_close(module.tally[1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0, -1])
def test_a_halflife_must_be_positive(composed, value):
    with pytest.raises(Exception, match=f"model.halflife_kimg is {value}.*or null for never"):
        build_model(composed(*SMALL, f"model.halflife_kimg={value}"))


# Going on


CONTINUED = [
    *SMALL,
    "callbacks=[budget,ema,metrics,checkpoint]",
    "val_every_kimg=100",
    "callbacks.metrics.every_kimg=0.024",
    "callbacks.checkpoint.every_kimg=100",
    "data.flip=true",
]


def end_of(folder):
    return canonical.read(folder / "checkpoints" / "000000000120"), read_log(folder)


@pytest.fixture(scope="module")
def straight_run(compose_in, tmp_path_factory):
    """straight_run(precision) -> the last state and the metrics of a run that nothing stopped."""

    @cache
    def run(precision):
        folder = tmp_path_factory.mktemp("straight")
        config = compose_in(folder, *CONTINUED, f"trainer.precision={precision}")
        train(config)
        return end_of(folder / "runs" / config.name)

    return run


@pytest.mark.parametrize(
    ("workers", "precision"),
    [
        (0, "32-true"),
        pytest.param(2, "32-true", marks=pytest.mark.slow),
        pytest.param(0, "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_stopped_goes_on_to_the_same_end(composed, straight_run, tmp_path, workers, precision):
    """Weights, optimizer state, averages, tally and every training metric; without splits that were not due."""
    straight, log = straight_run(precision)
    for budget in (0.048, 0.06, 0.12):  # 0.06: between two reports
        config = composed(
            *CONTINUED, f"trainer.precision={precision}", f"data.workers={workers}", f"total_kimg={budget}"
        )
        train(config)
    stopped, other_log = end_of(tmp_path / "runs" / config.name)
    for part in ("weights", "optimizers", "callbacks"):
        ours, theirs = _flat(stopped[part]), _flat(straight[part])
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert stopped["position"] == straight["position"]
    assert straight["position"] == {"images": 120, "batches": 10, "data_offset": 0, "lr_scale": 1.0}
    assert len(log["train/splits"]) == 5 and sum(value for _, value in log["train/splits"]) > 0
    assert other_log == log


def _flat(tree, prefix=""):
    if torch.is_tensor(tree):
        return {prefix: tree}
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}/{key}").items()}
    return {prefix: torch.tensor(float(tree))} if isinstance(tree, (int, float)) else {}


# Samples, codes, pictures


@pytest.fixture(scope="module")
def conditional(compose_in, tmp_path_factory):
    """A class-conditional model whose weights are far from their start."""
    config = compose_in(tmp_path_factory.mktemp("conditional"), *SMALL, "model.decoder.classes=${data.classes}")
    module, data = built(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    module.tally[0] = torch.rand(6, 5, generator=generator) * (torch.arange(5) < module.leaves[:, None])
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, training=False)
    return module.eval(), data


def sampled(module, numbers, batch, seed=0, label=None, monkeypatch=None):
    codes = []
    if monkeypatch:
        decode = module.decoder.decode
        monkeypatch.setattr(module.decoder, "decode", lambda given, *rest: codes.append(given) or decode(given, *rest))
    images = torch.cat(list(draw(module, seed, numbers, batch, label, 10)))
    return images, torch.cat(codes) if codes else None


@pytest.mark.parametrize("batch", [1, 7, 16])
def test_samples_are_the_same_whatever_the_batches(conditional, batch, monkeypatch):
    module, _ = conditional
    whole, codes = sampled(module, torch.arange(20), 20, monkeypatch=monkeypatch)
    parts, same_codes = sampled(module, torch.arange(20), batch, monkeypatch=monkeypatch)
    assert whole.shape == (20, 3, 32, 32)
    assert torch.equal(same_codes, codes)
    assert (parts - whole).abs().max() < 1e-5 * whole.abs().max()
    assert (whole[0] - whole[1]).abs().max() > 1e-2


def test_a_number_names_a_sample(conditional):
    module, _ = conditional
    whole, _ = sampled(module, torch.arange(20), 20)
    later, _ = sampled(module, torch.arange(13, 17), 20)
    torch.testing.assert_close(later, whole[13:17], rtol=1e-5, atol=1e-5)
    other, _ = sampled(module, torch.arange(20), 20, seed=1)
    assert (other - whole).abs().amax((1, 2, 3)).min() > 1e-3


def test_random_codes_are_uniform_over_each_layers_leaves(conditional, monkeypatch):
    module, _ = conditional
    _, codes = sampled(module, torch.arange(2000), 500, monkeypatch=monkeypatch)
    for layer, k in enumerate(module.leaves.tolist()):
        observed = torch.bincount(codes[:, layer], minlength=k).double()
        assert len(observed) == k
        assert ((observed - 2000 / k).square() / (2000 / k)).sum() < {3: 13.8, 4: 16.3, 5: 18.5}[k]  # p = 0.001


def test_labels_are_drawn_with_the_number_or_given(conditional):
    module, _ = conditional
    numbers = torch.arange(30)
    drawn, _ = sampled(module, numbers, 30)
    labels = (Noise(0, numbers).uniform("label") * 10).long()
    assert len(set(labels.tolist())) >= 7
    for label in (0, 9):
        given, _ = sampled(module, numbers, 30, label=label)
        agree = (given - drawn).abs().amax((1, 2, 3)) < 1e-5
        assert torch.equal(agree, labels == label)


def test_reconstructions_stand_below_their_images(conditional):
    module, data = conditional
    batch = data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0)
    module.validation_step(batch, 0)
    picture = module.pictures()["reconstructions"]
    rebuilt = module.decode(module.encode(batch.images, batch.labels), batch.labels)
    tile = lambda row, column: picture[:, 2 + 34 * row :, 2 + 34 * column :][:, :32, :32]  # noqa: E731
    count = len(batch.images)
    for number in range(count):
        assert torch.equal(tile(0, number), batch.images[number])
        row, column = divmod(count + number, 16)
        torch.testing.assert_close(tile(row, column), rebuilt[number], rtol=1e-4, atol=1e-4)


def test_the_tree_branches_level_by_level_down_to_whole_images(conditional):
    """Its cells are 64 pixels wide; an image stands in the middle of the columns of its branch, on white."""
    module, data = conditional
    module.validation_step(data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0), 0)
    tree = module.pictures()["tree"]
    levels = tree.shape[1] // 64 - 1
    assert levels >= 2 and tree.shape == (3, 64 * (levels + 1), 64 * 2**levels)
    for level in range(levels + 1):
        count = 2 ** min(level + 1, levels)
        row, wide = tree[:, 64 * level : 64 * (level + 1)], 64 * 2**levels // count
        cells = [
            row[:, 2:62, wide * number + wide // 2 - 30 : wide * number + wide // 2 + 30] for number in range(count)
        ]
        assert len({cell.numpy().tobytes() for cell in cells}) > count / 2  # few leaves: twins happen
        assert (row[:, :2] == 1).all() and (row[:, 62:] == 1).all()
        assert (row[:, :, ::wide] == 1).all() and (row[:, :, wide - 1 :: wide] == 1).all()
        edges = torch.stack([(cell[:, :, 1:] - cell[:, :, :-1]).abs().sum() for cell in cells])
        assert (edges.max() == 0) == (level == 0)  # of one pixel at first, whole images in the end


# Callbacks over a network whose weight is the number of the batch


class Four(ImageData):
    def load(self):
        images = np.zeros((4, 1, 1, 1), np.uint8)
        return (images, np.zeros(4, np.int64)), (images, np.zeros(4, np.int64))


def four():
    data = Four(channels=1, resolution=1, classes=0, batch=4, seed=0, val_batch=4)
    data.setup()
    return data


class Ramp(Module):
    """Its weight is 1, 2, 3, ... after each batch, and so is what it logs."""

    averaged = ("network",)

    def __init__(self):
        super().__init__(seed=0)
        self.network = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.network.weight)
        self.optimizer_makers = {"network": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
        self.validated_with: list[float] = []

    def parallel_networks(self):
        return {"network": self.network}

    def learn(self, batch):
        with torch.no_grad():
            self.network.weight.fill_(self.batches_seen + 1)
        ramp = self.network.weight.detach()[0, 0].clone()
        rare = {"train/rare": ramp.clone()} if self.batches_seen % 2 else {}  # as a lazy penalty
        return {"train/ramp": ramp, "train/each": torch.tensor([1.0, 2.0])} | rare

    def validation_step(self, batch, batch_idx):
        self.validated_with.append(float(self.network.weight))
        return {"real": batch.images, "fake": batch.images, "numbers": batch.numbers}

    def sample(self, noise, labels=None):
        return torch.zeros(len(noise.numbers), 1, 1, 1)


def average_of_ramp(n, factor):
    """e_t = f_t e_{t-1} + (1 - f_t) t from e_0 = 0, in double precision."""
    value = 0.0
    for t in range(1, n + 1):
        value = factor(t) * value + (1 - factor(t)) * t
    return value


@pytest.mark.parametrize("n", [1, 2, 40])
def test_a_decay_averages_a_ramp_as_its_formula_says(n):
    ema, decay = EMA(decay=0.9), 0.9
    fit(Ramp(), four(), n, ema)
    closed = n - decay * (1 - decay**n) / (1 - decay)
    assert float(ema.averages["network.weight"]) == pytest.approx(closed, rel=1e-5)
    assert average_of_ramp(n, lambda t: decay) == pytest.approx(closed)


def test_a_halflife_counts_images():
    ema = EMA(halflife_kimg=0.012, rampup=None)  # three batches of 4
    fit(Ramp(), four(), 30, ema)
    decay = 0.5 ** (1 / 3)
    assert float(ema.averages["network.weight"]) == pytest.approx(30 - decay * (1 - decay**30) / (1 - decay), rel=1e-5)
    assert ema.factor(4000, 4) ** 3 == pytest.approx(0.5)
    assert ema.factor(4000, 12) == pytest.approx(0.5)


def test_a_rampup_keeps_early_halflives_to_a_share_of_the_images_seen():
    ema = EMA(halflife_kimg=0.02, rampup=0.5)
    fit(Ramp(), four(), 15, ema)
    expected = average_of_ramp(15, lambda t: 0.5 ** (4 / min(20, 2 * t)))
    assert float(ema.averages["network.weight"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 6.94])
def test_a_power_weighs_batch_t_by_its_share_of_the_power_function(gamma):
    """The weight of batch t after n is (t/n)^(gamma+1) - ((t-1)/n)^(gamma+1)."""
    ema, n = EMA(power=gamma), 40
    fit(Ramp(), four(), n, ema)
    closed = sum(((t / n) ** (gamma + 1) - ((t - 1) / n) ** (gamma + 1)) * t for t in range(1, n + 1))
    assert float(ema.averages["network.weight"]) == pytest.approx(closed, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"decay": 0.9, "power": 3}, {"halflife_kimg": 1, "decay": 0.9}])
def test_averages_need_exactly_one_profile(options):
    with pytest.raises(ValueError, match="exactly one of halflife_kimg, decay and power"):
        EMA(**options)


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"power": -2.0}, {"halflife_kimg": -1.0}])
def test_profiles_that_do_not_average_are_refused(options):
    with pytest.raises(ValueError, match=rf"callbacks\.ema\.{next(iter(options))}={next(iter(options.values()))}"):
        EMA(**options)


class Looking(lightning.Callback):
    """What the weight is at each hook of a validation."""

    def __init__(self):
        self.seen = []

    def on_validation_batch_end(self, trainer, module, *_):
        self.seen.append(float(module.network.weight))

    on_validation_batch_start = on_validation_epoch_start = on_validation_epoch_end = on_validation_batch_end


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
def test_averages_are_swapped_in_for_the_whole_validation_and_never_saved_as_weights(tmp_path, order):
    module, ema, looking, batches = Ramp(), EMA(decay=0.5), Looking(), []
    saving = Checkpoint(str(tmp_path), every_kimg=0.004, keep=100, metric=["val/score"])

    class Score(lightning.Callback):
        def on_validation_epoch_end(self, trainer, module):
            module.report({"val/score": -module.images_seen})  # every validation is the best so far

    given = [ema, saving, looking]
    seen = Watching(lambda module, _: batches.append(module.network.weight.item()))
    fit(module, four(), 6, *[given[place] for place in order], Score(), seen, val_every=2)
    averages = [average_of_ramp(n, lambda t: 0.5) for n in (2, 4, 6)]
    assert module.validated_with == pytest.approx(averages)
    assert looking.seen == pytest.approx([value for value in averages for _ in range(4)])
    assert batches == [0, 1, 2, 3, 4, 5] and float(module.network.weight) == 6
    saved = canonical.committed(tmp_path / "checkpoints")
    assert [int(folder.name) for folder in saved] == [4, 8, 12, 16, 20, 24]
    for n, folder in enumerate(saved, 1):
        state = canonical.read(folder)
        assert float(state["weights"]["network.weight"]) == n
        assert float(state["callbacks"]["EMA"]["averages"]["network.weight"]) == pytest.approx(
            average_of_ramp(n, lambda t: 0.5)
        )
    assert canonical.read_best(tmp_path / "checkpoints") == {
        "checkpoint": "000000000024",
        "value": -24,
        "val/score": -24,
    }


def test_averages_continue_from_a_checkpoint(tmp_path):
    for batches in (3, 7):
        ema = EMA(decay=0.9)
        fit(Ramp(), four(), batches, ema, Checkpoint(str(tmp_path), every_kimg=100))
    assert float(ema.averages["network.weight"]) == pytest.approx(average_of_ramp(7, lambda t: 0.9), rel=1e-5)


def test_only_what_the_model_names_is_averaged(composed):
    module, data = built(composed(*SMALL))
    ema = EMA(halflife_kimg=1)
    fit(module, data, 1, ema)
    assert ema.averages.keys() == {f"decoder.{name}" for name, _ in module.decoder.named_parameters()}
    assert all(value.dtype == torch.float32 for value in ema.averages.values())


# Checkpoints: when they are written, and which of them stay


def saved_at(folder):
    return [int(path.name) // 4 for path in canonical.committed(folder / "checkpoints")]


def test_checkpoints_come_by_cadence_at_the_end_and_those_at_multiples_stay(tmp_path):
    fit(Ramp(), four(), 11, Checkpoint(str(tmp_path), every_kimg=0.008, keep=2, archive_every_kimg=0.016))
    assert saved_at(tmp_path) == [4, 8, 10, 11]


def test_archives_stay_where_the_batch_does_not_divide_their_cadence(tmp_path):
    saving = Checkpoint(str(tmp_path), every_kimg=100, archive_every_kimg=0.010)
    saving.about_run({"batch": 4}, {})
    fit(Ramp(), four(), 11, saving)
    assert saved_at(tmp_path) == [3, 5, 8, 10, 11]  # the first batches at or after 10, 20, 30 and 40 images


def test_checkpoints_come_by_the_clock_as_well(tmp_path):
    fit(Ramp(), four(), 3, Checkpoint(str(tmp_path), every_kimg=100, every_minutes=0, keep=9))
    assert saved_at(tmp_path) == [1, 2, 3]


class Scored(lightning.Callback):
    """A score for each validation, lower is better."""

    def __init__(self, scores):
        self.scores = iter(scores)

    def on_validation_epoch_end(self, trainer, module):
        module.report({"val/b": next(self.scores), "val/c": 0.0})


def test_the_best_stays_whatever_comes_after(tmp_path):
    saving = Checkpoint(str(tmp_path), every_kimg=0.004, keep=1, metric=["val/a", "val/b"])
    fit(Ramp(), four(), 6, saving, Scored([3.0, 1.0, 2.0]), val_every=2)
    assert saved_at(tmp_path) == [4, 6]
    assert canonical.read_best(tmp_path / "checkpoints") == {
        "checkpoint": "000000000016",
        "value": 1.0,
        "val/b": 1.0,
        "val/c": 0.0,
    }


def test_what_was_best_once_does_not_stay_when_the_last_is_better(tmp_path):
    saving = Checkpoint(str(tmp_path), every_kimg=100, keep=1, metric=["val/b"])
    fit(Ramp(), four(), 6, saving, Scored([3.0, 2.0, 1.0]), val_every=2)
    assert saved_at(tmp_path) == [6]


def test_a_score_that_is_no_number_is_never_the_best(tmp_path):
    """A nan would compare false with everything after it, and stay."""
    saving = Checkpoint(str(tmp_path), every_kimg=100, keep=1, metric=["val/b"])
    fit(Ramp(), four(), 6, saving, Scored([float("nan"), 2.0, 3.0]), val_every=2)
    assert canonical.read_best(tmp_path / "checkpoints")["value"] == 2.0


def test_a_best_that_was_damaged_is_looked_for_anew(tmp_path):
    """Training comes to the same score again, which is then not better than the one that was lost."""
    for batches in (4, 6):
        saving = Checkpoint(str(tmp_path), every_kimg=100, keep=1, metric=["val/b"])
        fit(Ramp(), four(), batches, saving, Scored([3.0, 1.0, 2.0]), val_every=2)
        if batches == 4:
            assert saved_at(tmp_path) == [4]
            (tmp_path / "checkpoints" / "000000000016" / "state.pt").write_bytes(b"torn")
    best = canonical.read_best(tmp_path / "checkpoints")
    assert best["value"] == 1.0
    assert canonical.fault(tmp_path / "checkpoints" / best["checkpoint"]) is None


def test_at_least_one_checkpoint_has_to_stay():
    with pytest.raises(ValueError, match=r"callbacks\.checkpoint\.keep=0"):
        Checkpoint("run", every_kimg=1, keep=0)


def test_a_run_continues_from_the_newest_that_verifies_and_says_which_does_not(tmp_path, capsys):
    fit(Ramp(), four(), 4, Checkpoint(str(tmp_path), every_kimg=0.008, keep=9))
    (tmp_path / "checkpoints" / "000000000016" / "state.pt").write_bytes(b"torn")
    (tmp_path / "checkpoints" / "000000000020.tmp").mkdir()
    seen = []
    fit(
        Ramp(),
        four(),
        5,
        Checkpoint(str(tmp_path), every_kimg=0.008, keep=9),
        Watching(lambda m, b: seen.append(b.first)),
    )
    assert seen == [8, 12, 16]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("checkpoint 000000000016 is not used: state.pt has 4 bytes")
    assert said[1] == "Continuing from checkpoint 000000000008 (0.008 kimg)"
    assert canonical.fault(tmp_path / "checkpoints" / "000000000016") is None
    assert not list(tmp_path.rglob("*.tmp"))


# Metrics


def read_rows(folder):
    return [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]


def test_metrics_are_averages_since_the_last_time_with_one_for_each_layer(tmp_path):
    fit(Ramp(), four(), 7, Metrics(every_kimg=0.012), logger=MetricsLog(str(tmp_path)))
    header, *rows = read_rows(tmp_path)
    assert header == ["batch", "kimg", "metric", "value"]
    found = {(int(batch), metric): float(value) for batch, _, metric, value in rows if metric != "train/rare"}
    constant = {"train/each/00": 1, "train/each/01": 2, "train/lr_network": 0.1}
    expected = {(batch, metric): value for batch in (3, 6) for metric, value in constant.items()}
    assert found == pytest.approx(expected | {(3, "train/ramp"): 2, (6, "train/ramp"): 5})
    assert {kimg for _, kimg, _, _ in rows} == {"0.012", "0.024"}


def test_every_row_is_written_once(tmp_path):
    class Late(lightning.Callback):
        def on_validation_epoch_end(self, trainer, module):
            module.report({"val/late": 1.0})

    fit(Ramp(), four(), 9, Metrics(every_kimg=0.012), Late(), logger=MetricsLog(str(tmp_path)), val_every=4)
    rows = [(batch, metric) for batch, _, metric, _ in read_rows(tmp_path)[1:]]
    assert len(rows) == len(set(rows))
    assert [batch for batch, metric in rows if metric == "train/ramp"] == ["3", "6", "9"]
    assert [batch for batch, metric in rows if metric == "val/late"] == ["4", "8", "9"]


def test_what_some_batches_log_is_averaged_over_those(tmp_path):
    fit(Ramp(), four(), 8, Metrics(every_kimg=0.016), logger=MetricsLog(str(tmp_path)))
    found = [float(value) for _, _, metric, value in read_rows(tmp_path)[1:] if metric == "train/rare"]
    assert found[:1] + found[-1:] == [3, 7]  # of 2 and 4, then of 6 and 8


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_averages_of_metrics_survive_a_stop_between_two_reports(tmp_path, stop):
    for batches in (stop, 9):
        saving = Checkpoint(str(tmp_path), every_kimg=100)
        fit(Ramp(), four(), batches, Metrics(every_kimg=0.012), saving, logger=MetricsLog(str(tmp_path)))
    ramps = [(int(batch), float(value)) for batch, _, metric, value in read_rows(tmp_path) if metric == "train/ramp"]
    assert ramps == [(3, 2), (6, 5), (9, 8)]


def test_the_metrics_log_is_cut_back_to_the_checkpoint(tmp_path):
    saving = Checkpoint(str(tmp_path), every_kimg=100)
    fit(Ramp(), four(), 4, Metrics(every_kimg=0.004), saving, logger=MetricsLog(str(tmp_path)))
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("5,0.02,train/ramp,5.0\n6,0.024,train/ra")  # from after the checkpoint, the last of them torn
    fit(Ramp(), four(), 5, Metrics(every_kimg=0.004), saving, logger=MetricsLog(str(tmp_path)))
    ramps = [
        (int(batch), float(value)) for batch, _, metric, value in read_rows(tmp_path)[1:] if metric == "train/ramp"
    ]
    assert ramps == [(n, n) for n in range(1, 6)]


def test_a_log_without_a_checkpoint_begins_anew(tmp_path):
    log = MetricsLog(str(tmp_path))
    log.log_metrics({"progress/kimg": 1.0, "train/old": 1.0}, 5)
    saving = Checkpoint(str(tmp_path), every_kimg=100)
    fit(Ramp(), four(), 1, Metrics(every_kimg=0.004), saving, logger=MetricsLog(str(tmp_path)))
    assert "train/old" not in (tmp_path / "metrics.csv").read_text()


def test_metrics_without_a_clock_are_logged_too(tmp_path):
    """A callback from elsewhere knows nothing of progress/kimg."""
    log = MetricsLog(str(tmp_path))
    log.log_metrics({"lr-Adam": 0.5}, 7)
    assert read_rows(tmp_path)[1] == ["7", "", "lr-Adam", "0.5"]
    assert set(read_log(tmp_path)) <= {"lr-Adam"}
