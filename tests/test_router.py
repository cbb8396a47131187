"""The router: its network, its turn, its calibration in closed form, and one that learns and publishes itself."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_ddgan_training import doubles, farthest, weights  # noqa: F401
from torch import nn

from src import store as stores
from src.calibration import calibrated, calibration_error, prior_scores, scores
from src.callbacks.calibration import Calibration as Calibrate
from src.callbacks.ema import EMA
from src.callbacks.publish import Publish
from src.datamodules.base import ImageData
from src.flow import path
from src.gate import Gate
from src.modules.networks.router import RouterDiT
from src.modules.router import Router
from src.noise import Noise
from src.routing import Calibration, Full

BATCH, SEED, RATE, CLASSES, CLUSTERS = 8, 3, 3e-3, 3, 3


class Divided(ImageData):
    """Grey images of 8 x 8 in three clusters of unequal size, which differ in brightness; labels say nothing."""

    base = "base"

    def __init__(self, batch=BATCH, clusters=CLUSTERS):
        super().__init__(channels=1, resolution=8, classes=CLASSES, batch=batch, seed=1, val_batch=50)
        self.known = clusters

    def load(self):
        draw = np.random.default_rng(0)
        self.of = np.sort(np.concatenate([np.arange(640) % 2, np.full(160, 2)]))[draw.permutation(800)]
        images = np.clip(40 + 70 * self.of[:, None, None, None] + draw.normal(0, 30, (800, 1, 8, 8)), 0, 255)
        labels = np.arange(800) % CLASSES
        images = images.astype(np.uint8)
        return (images[200:], labels[200:]), (images[:200], labels[:200])

    def _divide(self):
        super()._divide()
        if self.known:
            self.train.clusters, self.held_out.clusters = self.of[200:], self.of[:200]
        self.base = "base"

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch._replace(images=batch.images.to(torch.get_default_dtype()) / 127.5 - 1)


def small_router(classes=CLASSES, clusters=CLUSTERS, cosine=None, alive=True, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = dict(patch=4, width=16, depth=1, heads=2)
        network = RouterDiT(channels=1, resolution=8, clusters=clusters, classes=classes, cosine=cosine, **sizes)
        for parameter in network.parameters():
            if alive and not parameter.any():
                nn.init.normal_(parameter, std=0.1)
    return Router(network, partial(torch.optim.AdamW, lr=RATE), seed=SEED, **options)


def fit(module, batches, *callbacks, data=None, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=batches,
        callbacks=list(callbacks),
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        inference_mode=False,
        **{"limit_val_batches": 0} | options,
    )
    trainer.fit(module, data or Divided())
    return module


# The network


@torch.no_grad()
def test_logits_depend_on_image_time_label_and_position():
    network = small_router().network
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    t, labels = torch.tensor([100.0, 900.0]), torch.tensor([0, CLASSES])
    found = network(x, t, labels)
    assert found.shape == (2, CLUSTERS)
    for other in [(x.flip(3), t, labels), (x, t.flip(0), labels), (x, t, labels.flip(0))]:
        assert (network(*other) - found).abs().max() > 1e-4
    with pytest.raises(ValueError, match="pass labels"):
        network(x, t)


@torch.no_grad()
def test_an_untrained_router_is_nearly_undecided():
    network = small_router(alive=False).network
    p = network(
        torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.ones(20), torch.arange(20) % 3
    )
    assert (p.softmax(1) - 1 / 3).abs().max() < 0.1


@torch.no_grad()
def test_cosine_logits_are_cosines_with_prototypes():
    network = small_router(cosine=0.07).network
    x, t, labels = (
        torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.ones(4),
        torch.zeros(4).long(),
    )
    found, read = network(x, t, labels), network._read(x, t, labels, network.token)[:, 0]
    expected = F.cosine_similarity(read[:, None], network.head.weight[None], dim=2) / 0.07
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    network.head.weight.mul_(3)
    torch.testing.assert_close(network(x, t, labels), found, rtol=1e-4, atol=1e-4)


# Its turn


class Watch(lightning.Callback):
    """Keeps the batches, and the state of the global generator after them."""

    def __init__(self):
        self.batches, self.states = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append(batch)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.states.append(torch.get_rng_state())


def test_three_batches_are_the_literal_algorithm(doubles):  # noqa: F811
    """Cross-entropy to smoothed targets at the curriculum's times, labels and features dropped, sample by sample."""
    options = dict(label_dropout=0.3, smoothing=0.1, dropout=0.2, curriculum_kimg=0.016)
    module, watch = small_router(**options), Watch()
    copy, before = deepcopy(module.network), weights(module)
    fit(module, 3, watch, precision="64-true")
    optimizer = torch.optim.AdamW(copy.parameters(), lr=RATE)
    for number, batch in enumerate(watch.batches):
        noise, losses = Noise(SEED, batch.numbers), []
        u, x_1 = noise.uniform("train/t"), noise.normal("train/x", 1, 8, 8)
        dropped, kept = noise.uniform("train/label_dropout") < 0.3, noise.uniform("train/dropout", 16) >= 0.2
        largest = (0.3, 0.65, 1.0)[number]  # of t, after 0, 8 and 16 images
        for i in range(BATCH):
            label = torch.tensor([CLASSES]) if dropped[i] else batch.labels[i : i + 1]
            t = largest * u[i : i + 1]
            logits = copy(path(batch.images[i : i + 1], x_1[i : i + 1], t), 1000 * t, label, kept[i : i + 1] / 0.8)[0]
            target = torch.full((3,), 0.1 / 3)
            target[batch.clusters[i]] += 0.9
            losses.append(-(target * logits.log_softmax(0)).sum())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert farthest(weights(module), {f"network.{n}": p for n, p in copy.state_dict().items()}) < 1e-10
    assert farthest(weights(module), before) > 1e-3


def test_micro_batches_make_the_step_of_the_whole_batch_and_draw_nothing_global(doubles):  # noqa: F811
    def trained(micro_batch):
        watch, before = Watch(), torch.get_rng_state()
        module = small_router(micro_batch=micro_batch, dropout=0.2, label_dropout=0.3)
        found = weights(fit(module, 2, watch, precision="64-true"))
        assert all(torch.equal(state, watch.states[0]) for state in watch.states) and before.shape
        return found

    assert farthest(trained(2), trained(None)) < 1e-12


# Calibration


def drawn(n=40_000, k=4, seed=0):
    """Logits with the labels that they say: exactly calibrated."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(n, k, dtype=torch.float64, generator=generator)
    clusters = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return logits, clusters


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_temperature_that_spoiled_the_logits_is_found(smoothing):
    """Also those of the smoothed optimum, whose probabilities come out unsmoothed."""
    logits, clusters = drawn()
    q = (1 - smoothing) * logits.softmax(1) + smoothing / 4
    spoiled = torch.stack([temperature * q.log() for temperature in (0.5, 1.0, 3.0)], 1)  # (n, bins, k)
    found = calibrated(spoiled, clusters, smoothing)
    assert found.temperatures == pytest.approx([0.5, 1.0, 3.0], rel=0.05)
    t = torch.tensor([0.1, 0.5, 0.9]).double().expand(len(logits), 3)
    good, bad = scores(spoiled, t, clusters, found), scores(spoiled, t, clusters, Calibration((1.0,) * 3, smoothing))
    for k, score in enumerate(good):
        p = found.log_probabilities(spoiled[:, k], t[:, k]).exp()
        torch.testing.assert_close(p, logits.softmax(1), rtol=0, atol=0.03)
        assert score["calibration_error"] < 0.015 and score["cross_entropy"] < bad[k]["cross_entropy"] + 1e-3
        assert score["accuracy"] == pytest.approx(bad[k]["accuracy"])
    assert bad[2]["calibration_error"] > 0.1 and bad[2]["cross_entropy"] > good[2]["cross_entropy"] + 0.1


def test_the_calibration_error_by_hand():
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.65, 0.35]]).double()
    assert calibration_error(p, torch.tensor([0, 1, 1, 1])) == pytest.approx((abs(0.9 * 2 - 1) + 0.2 + 0.65) / 4)
    assert calibration_error(torch.eye(3).double(), torch.arange(3)) == 0


def test_the_prior_is_the_baseline():
    found = prior_scores([60, 30, 10], torch.tensor([0] * 6 + [1] * 3 + [2]))
    entropy = -(0.6 * np.log(0.6) + 0.3 * np.log(0.3) + 0.1 * np.log(0.1))
    assert found == {"accuracy": pytest.approx(0.6), "cross_entropy": pytest.approx(entropy)}


# A router that learns


def test_a_router_learns_calibrates_and_publishes_what_an_ensemble_reads(tmp_path):
    publish = Publish(str(tmp_path / "store"), "router", every_kimg=1, total_kimg=4.8)
    publish.about_run({"name": "r", "batch": 16, "model": {"network": node(), "label_dropout": 0.1}}, {})
    module = small_router(label_dropout=0.1, bins=5, alive=False)
    callbacks = [EMA(halflife_kimg=0.5), Calibrate(str(tmp_path)), publish]
    fit(module, 300, *callbacks, data=Divided(batch=16), limit_val_batches=1.0, val_check_interval=300)
    found = json.loads((tmp_path / "router.json").read_text())
    assert found["images"] == 200 and (tmp_path / "router.png").stat().st_size > 10_000
    fitted, prior = found["fitted"], found["prior"]
    assert fitted[0]["accuracy"] > 0.9 > 0.5 > prior["accuracy"]
    assert fitted[0]["cross_entropy"] < 0.5 * prior["cross_entropy"]
    assert fitted[0]["accuracy"] > fitted[4]["accuracy"] and fitted[4]["cross_entropy"] < prior["cross_entropy"] + 0.1

    card, _ = stores.newest(str(tmp_path / "store"), "router")
    assert card["counts"] == np.bincount(Divided_clusters(), minlength=3).tolist()
    assert card["calibration"] == {"temperatures": found["temperatures"], "smoothing": 0.0}
    gate = Gate(str(tmp_path / "store"), "router", "cpu")
    noise, labels = Noise(0, torch.arange(6)), torch.arange(6) % 3
    x, t = noise.normal("x", 1, 8, 8), noise.uniform("t")
    with torch.no_grad():
        w = gate.weights(x, t, labels, Full(), [True] * 3)
        averages = {n: callbacks[0].averages[f"network.{n}"] for n, _ in module.network.named_parameters()}
        logits = torch.func.functional_call(module.network, averages, (x, 1000 * t, labels))
        expected = module.calibration.log_probabilities(logits, t).exp()
    torch.testing.assert_close(w, expected, rtol=1e-4, atol=1e-5)


def node():
    return {"_target_": "src.modules.networks.router.RouterDiT", "channels": 1, "resolution": 8, "clusters": 3} | {
        "classes": CLASSES,
        "patch": 4,
        "width": 16,
        "depth": 1,
        "heads": 2,
    }


def Divided_clusters():
    data = Divided()
    data.setup()
    return data.train.clusters


def test_a_head_tells_the_new_cluster_from_all_others(tmp_path):
    module = small_router(clusters=2, new=2, bins=5, alive=False)
    fit(module, 200, Calibrate(str(tmp_path)), data=Divided(batch=16), limit_val_batches=1.0, val_check_interval=200)
    card, found = module.card(), json.loads((tmp_path / "router.json").read_text())
    clusters = Divided_clusters()
    assert card["k"] == 2 and card["counts"] == [int((clusters != 2).sum()), int((clusters == 2).sum())]
    assert found["fitted"][0]["accuracy"] > 0.95 and found["prior"]["accuracy"] < 0.9


@pytest.mark.parametrize(
    ("options", "data", "fix"),
    [
        (dict(clusters=2), Divided, "the partition has 3 clusters; set model.network.clusters=3"),
        (dict(clusters=5), Divided, "no image is of cluster 3 of 5"),
        (dict(), partial(Divided, clusters=0), "set data.partition to the store of one"),
        (dict(clusters=2, new=7), Divided, "no image is of cluster 1 of 2"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_training(options, data, fix):
    with pytest.raises(ValueError, match=fix):
        fit(small_router(**options), 1, data=data())


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: small_router(smoothing=1.0), "model.smoothing is 1.0"),
        (lambda: small_router(dropout=-0.1), "model.dropout is -0.1"),
        (lambda: small_router(new=3), "set model.network.clusters=2"),
        (lambda: small_router(bins=0), "model.bins is 0"),
        (lambda: small_router(clusters=1), "chooses among at least 2"),
        (lambda: small_router(cosine=0.0), "model.network.cosine"),
    ],
)
def test_impossible_settings_are_refused(make, fix):
    with pytest.raises(ValueError, match=fix):
        make()


@pytest.mark.parametrize("name", ["paris_router", "paris_router_infonce", "paris_head"])
def test_the_recipes(composed, name):
    from src.run import build_model

    config = composed(f"experiment={name}")
    model = build_model(config)
    kind = {"paris_router": "router", "paris_router_infonce": "router_infonce", "paris_head": "heads/8"}[name]
    assert config.callbacks.publish.kind == kind and config.batch == 64
    if name == "paris_router_infonce":
        (optimizer,) = model.configure_optimizers()
        assert (model.dropout, model.smoothing, optimizer.param_groups[0]["lr"]) == (0.2, 0.1, 5e-5)
        assert model.schedule.warmup_kimg * 1000 / config.batch == 1000 and model.network.cosine == 0.07
    else:
        assert (model.smoothing, model.network.classes) == (0, 10)  # it sees labels
    assert model.network.clusters == (2 if name == "paris_head" else 8)
    assert Path(config.paths.run).name.startswith("router-k8" if name == "paris_head" else "router-fashion10k")
