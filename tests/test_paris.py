"""The ensemble on real files: mixing, guidance, experts that differ, that come late, and that are killed meanwhile."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from src import store as stores
from src.contract import contract
from src.evaluation import evaluate
from src.experts import Experts
from src.gate import Gate
from src.modules.networks.dit import DiT
from src.modules.networks.router import RouterDiT
from src.modules.paris import Paris
from src.noise import Noise
from src.objectives import DDPM, Epsilon, Velocity
from src.results import coloured, draw, sample
from src.routing import Full, Oracle, Sample, Threshold, TopK
from src.store import network_of

CLASSES, COUNTS = 3, [40, 30, 20, 10]
CONTRACT = contract((1, 8, 8), CLASSES, "uint8 / 127.5 - 1", "base")
NETWORK = {"_target_": "src.modules.networks.dit.DiT", "channels": 1, "resolution": 8, "patch": 4}
NETWORK |= {"width": 16, "depth": 1, "heads": 2, "classes": CLASSES}
ROUTER = NETWORK | {"_target_": "src.modules.networks.router.RouterDiT", "clusters": 4}


def random_network(kind, node, seed):
    """A network that does something everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = kind(**{key: value for key, value in node.items() if key != "_target_"})
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.3)
    return network


def publish_expert(store, k, images=1000, seed=None, keep=2, objective="Velocity", dtype=None, **changes):
    node = NETWORK | changes.pop("network", {})
    weights = random_network(DiT, node, 10 + k if seed is None else seed).state_dict()
    card = {"k": k, "n_k": 10, "contract": CONTRACT, "network": node, "label_dropout": 0.1}
    card["objective"] = {"_target_": f"src.objectives.{objective}"}
    weights = {name: value.to(dtype or value.dtype) for name, value in weights.items()}
    return stores.publish(str(store), f"experts/{k}", images, weights, card | changes, keep)


def publish_router(store, kind="router", clusters=4, counts=COUNTS, k=None, seed=5, contract=CONTRACT, **calibration):
    node = ROUTER | {"clusters": clusters}
    card = {"k": k, "counts": counts, "contract": contract, "network": node}
    card["calibration"] = {"temperatures": [1.0, 2.0], "smoothing": 0.0} | calibration
    stores.publish(str(store), kind, 1, random_network(RouterDiT, node, seed).state_dict(), card)


@pytest.fixture
def store(tmp_path):
    publish_router(tmp_path)
    for k in range(4):
        publish_expert(tmp_path, k)
    return tmp_path


def paris(store, strategy=None, **options):
    return Paris(str(store), strategy or Full(), **{"steps": 4, "check_seconds": 0.0} | options)


def shown(n=6):
    noise = Noise(0, torch.arange(n))
    return noise.normal("x", 1, 8, 8), noise.uniform("t"), torch.arange(n) % CLASSES


def expert_velocity(store, k, x, t, labels, objective=None):
    card, _ = stores.newest(str(store), f"experts/{k}")
    network = network_of(str(store), card)
    return (objective or Velocity()).velocity(lambda x, t: network(x, t, labels), x, t)


@torch.no_grad()
def test_the_velocity_is_the_weighted_sum_and_the_loop_over_samples(store):
    model, (x, t, labels) = paris(store, TopK(2)), shown()
    found = model.velocity(x, t, labels)
    w = model.weights(x, t, labels)
    assert ((w > 0).sum(1) <= 2).all() and (w > 0.01).any(0).sum() >= 3
    for i in range(6):
        one = (x[i : i + 1], t[i : i + 1], labels[i : i + 1])
        loop = sum(w[i, k] * expert_velocity(store, k, *one)[0] for k in range(4) if w[i, k] > 0)
        torch.testing.assert_close(found[i], loop, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_guidance_comes_after_mixing_and_weights_know_the_label(store):
    (x, t, labels), scale = shown(), 3.0
    plain, guided = paris(store, Threshold(0.2)), paris(store, Threshold(0.2), guidance=scale)
    null = torch.full_like(labels, CLASSES)
    c, u = plain.velocity(x, t, labels), plain.velocity(x, t, null)
    torch.testing.assert_close(guided.velocity(x, t, labels), u + scale * (c - u), rtol=1e-4, atol=1e-4)
    assert (plain.weights(x, t, labels) - plain.weights(x, t, null)).abs().max() > 0.01
    assert torch.equal(plain.velocity(x, t), u)  # nothing known is the null class


@torch.no_grad()
def test_experts_of_other_sizes_objectives_and_precisions_are_mixed(store):
    publish_expert(store, 1, 2000, network={"width": 32, "depth": 2}, objective="Epsilon")
    publish_expert(store, 2, 2000, network={"learn_sigma": True}, objective="DDPM")
    publish_expert(store, 3, 2000, dtype=torch.bfloat16)
    model, (x, t, labels) = paris(store), shown()
    w, objectives = model.weights(x, t, labels), [Velocity(), Epsilon(), DDPM(), Velocity()]
    parts = [expert_velocity(store, k, x, t, labels, o) for k, o in enumerate(objectives)]
    expected = sum(w[:, k, None, None, None] * part for k, part in enumerate(parts))
    torch.testing.assert_close(model.velocity(x, t, labels), expected, rtol=1e-4, atol=1e-4)
    images = model.sample(Noise(0, torch.arange(3)), labels[:3])
    assert images.shape == (3, 1, 8, 8) and images.isfinite().all() and images.abs().max() <= 1


@pytest.mark.parametrize("strategy", [Full(), Sample(), Oracle(), TopK(1)])
def test_images_depend_neither_on_the_batch_split_nor_on_what_is_in_memory(store, strategy):
    numbers = torch.arange(20, 28)
    whole = torch.cat(list(draw(paris(store, strategy), 0, numbers, 8, None, CLASSES)))
    assert len(whole.flatten(1).unique(dim=0)) == 8
    small = paris(store, strategy, in_memory=1)
    for batch in (3, 1):
        parts = torch.cat(list(draw(small, 0, numbers, batch, None, CLASSES)))
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-4)
    assert len(small.experts._networks) == 1


def test_an_oracle_keeps_the_expert_of_the_first_step(store):
    seen = []

    class Watching(Oracle):
        def __call__(self, p, t, draw, cluster):
            seen.append(cluster)
            return super().__call__(p, t, draw, cluster)

    n = 400
    paris(store, Watching(), steps=2).sample(Noise(0, torch.arange(n)))
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])
    start = Noise(0, torch.arange(n)).normal("sample/x", 1, 8, 8)
    p = paris(store).weights(start, torch.ones(n)).mean(0)
    torch.testing.assert_close(torch.bincount(seen[0], minlength=4) / n, p, rtol=0, atol=0.08)


def newest_file(store, k, end=".safetensors"):
    return sorted((store / "experts" / str(k)).glob(f"*{end}"))[-1]


def truncate(store):
    os.truncate(newest_file(store, 1), 100)


def delete(store):
    newest_file(store, 1).unlink()


def delete_all(store):
    shutil.rmtree(store / "experts" / "1")


def corrupt(store):
    with open(newest_file(store, 1), "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"wrong")


def spoil_card(store):
    newest_file(store, 1, ".json").write_text("{")


HARM = [truncate, delete, delete_all, corrupt, spoil_card]


class Meanwhile:
    """A strategy in the middle of whose work something happens to the files: at its third call."""

    def __init__(self, happens):
        self.calls, self.happens, self.weights = 0, happens, []

    def __call__(self, p, t, draw, cluster):
        self.calls += 1
        if self.calls == 3:
            self.happens()
        self.weights.append(p)
        return p


@pytest.mark.parametrize("in_memory", [8, 1])
@pytest.mark.parametrize("harm", HARM)
def test_an_expert_killed_in_the_middle_is_left_out_from_then_on(store, harm, in_memory, capsys):
    strategy = Meanwhile(lambda: harm(store))
    model = paris(store, strategy, in_memory=in_memory)
    images = model.sample(Noise(0, torch.arange(5)), torch.zeros(5, dtype=torch.long))
    told = capsys.readouterr().out.splitlines()
    assert any("experts/1 is not there" in line for line in told) and len(told) <= 3
    before, after = strategy.weights[:2], strategy.weights[3:]
    assert all((w[:, 1] > 0).all() for w in before) and not any(w[:, 1].any() for w in after)
    assert all(torch.allclose(w.sum(1), torch.ones(5)) for w in strategy.weights)
    assert images.isfinite().all()
    assert model.account().endswith(", without experts/1")
    # from then on as an ensemble that never had it
    x, t, labels = shown()
    without = paris(store)
    torch.testing.assert_close(model.velocity(x, t, labels), without.velocity(x, t, labels), rtol=0, atol=1e-6)


@pytest.mark.parametrize("harm", HARM[:2])
def test_a_killed_expert_is_found_when_it_has_to_be_read_again(store, harm, capsys):
    """The store is not looked at, but one expert alone fits into memory, so that all are read again in every step."""
    strategy = Meanwhile(lambda: harm(store))
    model = paris(store, strategy, in_memory=1, check_seconds=1e9)
    model.sample(Noise(0, torch.arange(5)))
    assert "experts/1 is not there" in capsys.readouterr().out
    assert not strategy.weights[-1][:, 1].any() and model.experts.living == [True, False, True, True]


@pytest.mark.parametrize("harm", [truncate, corrupt])
def test_a_damaged_expert_falls_back_on_its_older_card(store, harm, capsys):
    publish_expert(store, 1, 2000, seed=99)
    model, older = paris(store, Meanwhile(lambda: harm(store))), stores.newest(str(store), "experts/1")[0]
    model.sample(Noise(0, torch.arange(3)))
    told = capsys.readouterr().out
    assert "is not used" in told and "experts/1 is now the one after 1000 images" in told
    assert all(model.experts.living) and model.experts.cards[1] != older


@pytest.mark.parametrize("images", [1000, 2000])
@pytest.mark.parametrize("in_memory", [8, 1])
def test_an_expert_of_another_contract_is_refused_in_the_middle(store, images, in_memory):
    other = contract((1, 8, 8), CLASSES, "uint8 / 255", "base")
    model = paris(store, Meanwhile(lambda: publish_expert(store, 1, images, contract=other)), in_memory=in_memory)
    with pytest.raises(ValueError, match="experts/1 cannot be mixed with the others: its contract says normalisation"):
        model.sample(Noise(0, torch.arange(3)))


def test_an_expert_of_another_contract_is_refused_from_the_start(store):
    publish_expert(store, 2, 2000, contract=contract((1, 8, 8), CLASSES, "uint8 / 127.5 - 1", "another"))
    with pytest.raises(ValueError, match=r"experts/2 cannot be mixed .* partition = 'another'"):
        paris(store)


def test_the_share_of_data_that_may_be_missing(store, capsys):
    shutil.rmtree(store / "experts" / "3")
    shutil.rmtree(store / "experts" / "1")
    assert paris(store, max_dead_mass=0.4).experts.living == [True, False, True, False]
    assert capsys.readouterr().out.count("is not there: going on without it") == 2
    with pytest.raises(ValueError, match=r"experts 1, 3 are missing, and with them 40 % of the data, .*max_dead_mass"):
        paris(store, max_dead_mass=0.39)
    model = paris(store, Meanwhile(lambda: shutil.rmtree(store / "experts" / "0")), max_dead_mass=0.5)
    with pytest.raises(ValueError, match="80 % of the data"):
        model.sample(Noise(0, torch.arange(2)))
    shutil.rmtree(store / "experts")
    with pytest.raises(ValueError, match="all of the data"):
        paris(store, max_dead_mass=1.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"contract": None}, "experts/1/000000002000.json is not used: it lacks 'contract'"),
        ({"network": NETWORK | {"unheard_of": 3}}, "a card describes what this version cannot build .*unheard_of"),
        ({"objective": {"_target_": "src.objectives.Unheard"}}, "a card describes what this version cannot build"),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_a_card_that_says_too_little_or_too_much_costs_its_expert_alone(store, changes, told, early, capsys):
    def spoil():
        publish_expert(store, 1, 2000)
        path = store / "experts" / "1" / "000000002000.json"
        card = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in card.items() if value is not None}))

    if early:
        spoil()
    strategy = Meanwhile((lambda: None) if early else spoil)
    images = paris(store, strategy).sample(Noise(0, torch.arange(3)))
    assert images.isfinite().all() and re.search(told, capsys.readouterr().out)
    assert bool(strategy.weights[-1][:, 1].any()) == ("contract" in changes)  # then its older card is used


def test_an_expert_that_cannot_be_guided_is_refused_in_the_middle_too(store):
    strategy = Meanwhile(lambda: publish_expert(store, 1, 2000, label_dropout=0.0))
    model = paris(store, strategy, guidance=2.0)
    with pytest.raises(ValueError, match="experts/1 was not trained both with labels and without"):
        model.sample(Noise(0, torch.arange(3)), torch.zeros(3, dtype=torch.long))


def test_latents_are_decoded_by_what_encoded_them_alone(tmp_path):
    vae = {"id": "mine", "factor": 0.18215}
    of_latents = contract((1, 8, 8), CLASSES, "encoded", "base", vae)
    publish_router(tmp_path, contract=of_latents)
    for k in range(4):
        publish_expert(tmp_path, k, contract=of_latents)
    decoder = SimpleNamespace(identity="mine", factor=0.18215, decode=lambda x: x.expand(-1, 3, -1, -1))
    images = paris(tmp_path, decoder=decoder).sample(Noise(0, torch.arange(2)))
    assert images.shape == (2, 3, 8, 8)
    decoder.identity = "another"
    with pytest.raises(ValueError, match=r"model\.decoder is .*another.*, but the experts' latents are of .*mine"):
        paris(tmp_path, decoder=decoder)


def test_experts_join_when_they_are_published_and_are_replaced_by_newer_ones(store, capsys):
    shutil.rmtree(store / "experts" / "2")
    strategy = Meanwhile(lambda: (publish_expert(store, 2), publish_expert(store, 0, 5000, seed=77)))
    model = paris(store, strategy)
    model.sample(Noise(0, torch.arange(3)))
    assert not strategy.weights[1][:, 2].any() and (strategy.weights[3][:, 2] > 0).all()
    told = capsys.readouterr().out
    assert "experts/2 is now the one after 1000 images" in told and "experts/0 is now the one after 5000 images" in told
    x, t, labels = shown()
    torch.testing.assert_close(model.velocity(x, t, labels), paris(store).velocity(x, t, labels))


@torch.no_grad()
def test_an_added_expert_takes_its_share_and_leaves_the_others_theirs(store, capsys):
    publish_expert(store, 4)
    before, (x, t, labels) = paris(store), shown()
    assert len(before.experts.living) == 4  # without a head nobody asks it
    publish_router(store, "heads/4", clusters=2, counts=[100, 25], k=4, seed=8)
    model = paris(store)
    w, old = model.weights(x, t, labels), before.weights(x, t, labels)
    head, calibration = model.gate.heads[0]
    r = calibration.log_probabilities(head(x, 1000 * t, labels), t).exp()[:, 1]
    torch.testing.assert_close(w[:, 4], r)
    torch.testing.assert_close(w[:, :4], (1 - r)[:, None] * old)
    assert model.counts == [40, 30, 20, 10, 25] and len(model.experts.living) == 5
    publish_router(store, "heads/3", clusters=2, counts=[100, 25], k=3)
    assert paris(store).counts == [40, 30, 20, 10, 25]
    assert "heads/3 is not used: router knows that expert itself" in capsys.readouterr().out
    publish_router(store, "heads/6", clusters=2, counts=[100, 25], k=6)
    with pytest.raises(ValueError, match="heads/6 tells expert 6 from the others; that of 5 is missing"):
        paris(store)


def test_calibration_of_the_card_is_used(store):
    x, t, labels = shown()
    plain = Gate(str(store), "router", "cpu").weights(x, t, labels, Full(), [True] * 4)
    publish_router(store, "router_smooth", smoothing=0.2, temperatures=[1.0, 2.0])
    smooth = Gate(str(store), "router_smooth", "cpu").weights(x, t, labels, Full(), [True] * 4)
    expected = ((plain - 0.05) / 0.8).clamp(min=0)
    torch.testing.assert_close(smooth, expected / expected.sum(1, keepdim=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("break_it", "options", "fix"),
    [
        (lambda store: shutil.rmtree(store / "router"), {}, "no router that can be used; train it: .*paris_router"),
        (lambda store: publish_router(store, counts=[1, 1, 1]), {}, r"router counts \[1, 1, 1\] images for its 4"),
        (lambda store: None, {"router": "router_infonce"}, "no router_infonce that .*=paris_router_infonce"),
        (lambda store: None, {"max_dead_mass": 1.1}, "max_dead_mass=1.1 must be a share from 0 to 1"),
        (lambda store: None, {"steps": 0}, "set it to 1 or more"),
        (lambda store: None, {"solver": "rk4"}, "choose one of"),
        (lambda store: None, {"in_memory": 0}, "one expert has to be in memory"),
        (
            lambda store: publish_expert(store, 1, 2000, label_dropout=0.0),
            {"guidance": 2.0},
            "experts/1 was not trained",
        ),
    ],
)
def test_what_cannot_work_is_refused(store, break_it, options, fix):
    break_it(store)
    with pytest.raises(ValueError, match=fix):
        paris(store, **options)


def test_experts_of_any_file_system(store):
    """An object store has no memory maps, and its files are read whole."""
    url = f"memory://{store.name}"
    for kind in ("router", *(f"experts/{k}" for k in range(4))):
        card, _ = stores.newest(str(store), kind)
        stores.publish(url, kind, card["images"], stores.load(str(store), card), card)
    noise = Noise(0, torch.arange(3))
    torch.testing.assert_close(paris(url, in_memory=2).sample(noise), paris(store).sample(noise), rtol=0, atol=1e-6)


def test_global_generators_stay_untouched(store):
    before = torch.get_rng_state()
    paris(store, Sample()).sample(Noise(0, torch.arange(2)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "ensemble", ["full", "top1", "top2", "threshold", "sample", "oracle", "schedule", "confidence"]
)
def test_the_command_draws_from_the_store_with_every_strategy(store, composed, tmp_path, ensemble, capsys):
    sample(
        composed(
            "experiment=paris",
            f"ensemble={ensemble}",
            f"store={store}",
            "num=4",
            "model.steps=2",
            "cfg_scale=2",
            f"folder={tmp_path}/drawn",
            command="sample",
        )
    )
    told = capsys.readouterr().out
    assert "of 4 experts a step" in told and "s each: " in told
    assert list((tmp_path / "drawn" / "samples").glob("*_s0_0-3.png"))


def test_an_ensemble_is_not_trained(composed):
    from src.run import train

    with pytest.raises(ValueError, match=r"drawn from, not trained: python sample\.py experiment=paris"):
        train(composed("experiment=paris"))


def test_colours_are_those_asked_for():
    images = 0.2 * Noise(0, torch.arange(50)).normal("x", 3, 8, 8) + torch.tensor([0.3, 0.0, -0.2]).view(1, 3, 1, 1)
    mean, std = torch.tensor([-0.1, 0.0, 0.1]), torch.tensor([0.1, 0.2, 0.15])
    found = coloured(images, mean, std)
    torch.testing.assert_close(found.mean((0, 2, 3)), mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.std((0, 2, 3)), std, rtol=0, atol=1e-3)
    assert coloured(images, mean, 20 * std).abs().max() == 1


def test_devices_are_taken_in_turns(store):
    experts = Experts(str(store), CONTRACT, 4, ["cpu", "meta"])
    assert {p.device.type for p in experts._loaded(0)[0].parameters()} == {"cpu"}
    assert {p.device.type for p in experts._loaded(3)[0].parameters()} == {"meta"}


def test_an_ensemble_is_scored_against_images_of_its_kind(store, composed, tmp_path):
    words = ["experiment=paris", f"store={store}", "num=4", "reference=4", "model.steps=1", f"folder={tmp_path}/scored"]
    words += [f"cache={tmp_path}/cache"]
    evaluate(composed(*words, "data=fashion10k", command="evaluate"))
    found = json.loads((tmp_path / "scored" / "metrics.json").read_text())
    assert found["checkpoints"]["scored"]["fd_efflite0"] > found["held_out"]["fd_efflite0"] > 100  # of random weights
    with pytest.raises(ValueError, match="draws images of 1 channels, and data's have 3: set data to what it was"):
        evaluate(composed(*words, "data=emoji32", command="evaluate"))
