"""Scores of finished runs: closed forms, real images from a folder or as statistics, curves, and modes by command."""

import json
import shutil

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from src import checkpoint as canonical
from src.distances import Distances, read_statistics, scores
from src.evaluation import evaluate
from src.extractors import EffNetLite0
from src.images import to_uint8
from src.results import draw, load, sample
from src.run import train


class Four:
    """Stands for an extractor of four features: its names and their number are all that scores ask for."""

    num_features, name = 4, "four"

    def metric(self, kind):
        return kind


def features(count, seed, shift=0.0):
    draw = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return draw * torch.tensor([1.0, 2, 0.5, 1]) + shift


def inside(points, others, neighbours=3):
    """Share of the points that lie in a ball around one of the others, each as wide as to its third neighbour."""
    hits = 0
    for point in points.tolist():
        for other in others.tolist():
            radius = sorted(np.linalg.norm(np.array(other) - third) for third in others.numpy())[neighbours]
            if np.linalg.norm(np.array(point) - np.array(other)) <= radius:
                hits += 1
                break
    return hits / len(points)


def test_scores_are_those_of_the_closed_forms():
    real, fake = features(60, 1), features(50, 2, shift=1.0)
    found = scores(fake, real, Four())
    a, b = real.double().numpy(), fake.double().numpy()
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real)
    frechet = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(cov_a + cov_b) - 2 * roots.sum()
    assert found["fid"] == pytest.approx(frechet, rel=1e-9)
    assert found["precision"] == pytest.approx(inside(fake, real), abs=1e-6)
    assert found["recall"] == pytest.approx(inside(real, fake), abs=1e-6)
    assert 0 < found["precision"] < 1 and found["precision"] != found["recall"]


def test_three_images_have_no_third_neighbour():
    assert set(scores(features(3, 2), features(60, 1), Four())) == {"fid", "kid"}


def test_kid_is_the_unbiased_polynomial_one():
    real, fake = features(40, 1), features(40, 2, shift=1.0)  # subsets of all: nothing is left to chance
    x, y = real.double(), fake.double()
    kernel = lambda u, v: (u @ v.T / 4 + 1) ** 3  # noqa: E731
    within = lambda u: kernel(u, u).fill_diagonal_(0).sum() / (len(u) * (len(u) - 1))  # noqa: E731
    assert scores(fake, real, Four())["kid"] == pytest.approx(float(within(x) + within(y) - 2 * kernel(x, y).mean()))


def test_scores_agree_with_those_during_training():
    extractor = EffNetLite0()
    generator = torch.Generator().manual_seed(0)
    real, fake = (torch.randint(0, high, (24, 1, 32, 32), generator=generator).byte() for high in (256, 200))
    measure = Distances(extractor)
    measure.update(real, real=True)
    measure.update(fake, real=False)
    ours = scores(extractor(fake), extractor(real), extractor)
    theirs = measure.compute()
    assert set(ours) == {"fd_efflite0", "kid_efflite0", "precision_efflite0", "recall_efflite0"}
    assert ours["fd_efflite0"] == pytest.approx(theirs["fd_efflite0"], rel=1e-3)
    assert ours["kid_efflite0"] == pytest.approx(theirs["kid_efflite0"], rel=1e-3)


def test_statistics_serve_as_real_images_for_the_frechet_distance_alone(tmp_path):
    real, fake = features(60, 1), features(50, 2, shift=1.0)
    np.savez(tmp_path / "real.npz", mu=real.double().mean(0), sigma=np.cov(real.double().numpy(), rowvar=False))
    found = scores(fake, read_statistics(tmp_path / "real.npz", Four()), Four())
    assert found == {"fid": pytest.approx(scores(fake, real, Four())["fid"])}


@pytest.mark.parametrize(
    "saved, said",
    [
        ({"mu": np.zeros(7), "sigma": np.eye(7)}, "is of 7 features, but four has 4"),
        ({"mu": np.zeros(4)}, "is no file of statistics, which holds mu and sigma"),
    ],
)
def test_other_statistics_are_refused_in_a_sentence(tmp_path, saved, said):
    np.savez(tmp_path / "real.npz", **saved)
    with pytest.raises(ValueError, match=said):
        read_statistics(tmp_path / "real.npz", Four())


def test_a_file_that_holds_no_statistics_is_named(tmp_path):
    (tmp_path / "real.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"real\.npz is no file of statistics"):
        read_statistics(tmp_path / "real.npz", Four())


@pytest.fixture
def evaluated(tmp_path, tiny_run, compose_in):
    """evaluated(*words) -> metrics.json of a copy of the tiny run."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)

    def call(*words):
        words = [f"run={run}", "num=8", "batch=8", "reference=16", f"cache={tmp_path / 'cache'}", *words]
        evaluate(compose_in(tmp_path, *words, command="evaluate"))
        return json.loads((run / "metrics.json").read_text())

    return call


def test_all_checkpoints_are_scored_and_the_best_is_named(evaluated, tmp_path, capsys):
    found = evaluated("checkpoint=all")
    run, key = tmp_path / "run", "fd_efflite0"
    names = [path.name for path in canonical.committed(run / "checkpoints")]
    assert len(names) >= 2 and list(found["checkpoints"]) == names
    values = {name: found["checkpoints"][name][key] for name in names}
    assert len(set(values.values())) == len(names)  # each was loaded
    assert found["best"] == {"checkpoint": min(values, key=values.get), "metric": key, "value": min(values.values())}
    assert [found["checkpoints"][name]["kimg"] for name in names] == [int(name) / 1000 for name in names]
    with Image.open(run / "pictures" / "evaluation.png") as picture:
        assert picture.width > 1000
    assert f"best by {key}: {found['best']['checkpoint']}" in capsys.readouterr().out
    assert not list(run.rglob("*.part"))


def test_scores_are_of_the_averaged_weights_and_of_the_samples_that_sample_draws(evaluated, tmp_path):
    found = evaluated()
    model, state, source = load(str(tmp_path / "run"), "newest")
    averages = state["callbacks"]["EMA"]["averages"]
    assert any((state["weights"][name] != value).any() for name, value in averages.items())
    extractor = EffNetLite0()
    images = torch.cat(list(draw(model, 0, torch.arange(8), 8, None, state["config"]["data"]["classes"])))
    data = instantiate(state["config"]["data"])
    data.setup()
    expected = scores(extractor(to_uint8(images)), extractor(data.train.read(slice(0, 16))), extractor)
    measured = found["checkpoints"][source.name]
    assert {name: measured[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert (found["held_out_images"], found["real"]) == (8, "the first 16 training images")


def test_a_folder_of_real_images_gives_the_scores_of_the_images_themselves(evaluated, tmp_path, tiny_run):
    data = instantiate(load(str(tiny_run), "newest")[1]["config"]["data"])
    data.setup()
    (tmp_path / "real").mkdir()
    for number, image in enumerate(data.train.read(slice(0, 16))):
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(tmp_path / "real" / f"{number}.png")
    from_folder, from_data = evaluated(f"real={tmp_path / 'real'}"), evaluated()
    (one,), (other,) = from_folder["checkpoints"].values(), from_data["checkpoints"].values()
    for key in ("fd_efflite0", "precision_efflite0", "recall_efflite0"):  # KID's subsets depend on the order
        assert one[key] == pytest.approx(other[key], rel=1e-4)
    assert from_folder["real"].startswith("the 16 images in ")


def test_a_damaged_real_image_is_named(evaluated, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "broken.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read"):
        evaluated(f"real={tmp_path / 'real'}")
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_real_images_that_are_not_there_are_told_in_a_sentence(evaluated):
    with pytest.raises(ValueError, match="real=/no/such/place is neither a folder nor a file"):
        evaluated("real=/no/such/place")


def test_the_command_counts_the_modes_that_training_counted(composed, tmp_path):
    small = ["model.generator.width=16", "model.discriminator.width=16", "data.count=64", "data.held_out=16"]
    words = ["batch=16", "schedule_kimg=0.064", "val_every_kimg=0.064", "data.val_batch=16", "logger=[csv]", *small]
    config = composed("experiment=ddgan_25gaussians", *words)
    run = config.paths.run
    train(config)
    trained = json.loads((tmp_path / "runs" / config.name / "result.json").read_text())["metrics"]
    evaluate(composed(f"run={run}", "num=16", "batch=16", f"cache={tmp_path / 'cache'}", command="evaluate"))
    found = json.loads((tmp_path / "runs" / config.name / "metrics.json").read_text())
    (measured,) = found["checkpoints"].values()
    assert {f"val/{name}": measured[name] for name in ("modes", "share_within_3_sigma")} == pytest.approx(trained)
    assert found["held_out"]["modes"] > 8 and found["held_out"]["share_within_3_sigma"] > 0.9
    assert found["best"]["metric"] == "share_within_3_sigma"
    assert list((tmp_path / "runs" / config.name / "pictures").glob("evaluated_*.png"))
    with pytest.raises(ValueError, match=r"draws points, not images; look at them with evaluate\.py"):
        sample(composed(f"run={run}", "num=1", command="sample"))
