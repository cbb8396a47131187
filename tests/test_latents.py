"""Latents: a tiny autoencoder of the real kind, saved to disk with random weights, through a run from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_expert import TINY

from src.evaluation import evaluate
from src.latents import Autoencoder
from src.noise import Noise
from src.run import train

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory) -> Path:
    """One that halves images twice, to 4 channels."""
    folder = tmp_path_factory.mktemp("vae")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sides = ["DownEncoderBlock2D"] * 3, ["UpDecoderBlock2D"] * 3
        network = diffusers.AutoencoderKL(3, 3, *sides, (8, 8, 8), norm_num_groups=4, latent_channels=4)
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(20):
        (folder / f"{number % 2}").mkdir(exist_ok=True)
        pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number % 2}" / f"{number}.png")
    return folder


def words(autoencoder, images, *more):
    return [
        *TINY,
        "data=latents",
        f"data.source.path={images}",
        "data.source.held_out=4",
        "data.source.resolution=16",
        "data.source.classes=2",
        "data.resolution=4",
        f"data.autoencoder.path={autoencoder}",
        "data.val_batch=4",
        "callbacks.pictures.count=4",
        "model.network.patch=2",
        "model.network.classes=2",
        *more,
    ]


def test_latents_are_those_of_the_autoencoder_and_decode_to_its_images(autoencoder):
    known, own = diffusers.AutoencoderKL.from_pretrained(autoencoder), Autoencoder(str(autoencoder), factor=0.5)
    x = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        mean = known.encode(x).latent_dist.mean
        torch.testing.assert_close(own.encode(x), 0.5 * mean)
        assert mean.shape == (3, 4, 4, 4)
        torch.testing.assert_close(own.decode(own.encode(x)), known.decode(mean).sample.clamp(-1, 1))
    assert own.shrinks == 4 and len(own.identity) == 16


def test_a_run_on_latents_encodes_once_and_draws_images(autoencoder, images, composed, monkeypatch):
    config = composed(*words(autoencoder, images))
    train(config)
    cached = list(Path(config.paths.cache).glob("latents-*.npy"))
    assert sorted(np.load(file).shape for file in cached) == [(4, 4, 4, 4), (16, 4, 4, 4)]
    (picture, *_) = sorted((Path(config.paths.run) / "pictures").glob("samples_*.png"))
    assert np.asarray(Image.open(picture)).shape[2] == 3

    from hydra.utils import instantiate

    monkeypatch.setattr(Autoencoder, "encode", None)  # what is cached is not encoded again
    data = instantiate(config.data)
    data.prepare_data()
    data.setup()
    shown = next(data.source.reference(16, 0, 1))[:3]
    assert torch.equal(next(data.reference(3, 0, 1)), shown)
    own = Autoencoder(str(autoencoder))
    with torch.no_grad():
        expected = own.network.encode(data.source.as_seen(shown)).latent_dist.mean * 0.18215
    torch.testing.assert_close(data.as_seen(data.train.read(slice(0, 3))), expected, rtol=1e-4, atol=1e-5)
    assert data.vae == {"id": own.identity, "factor": 0.18215}
    assert (
        data.normalisation == "uint8 / 127.5 - 1, encoded"
        and data.train.labels.tolist() == data.source.train.labels.tolist()
    )


def test_scores_of_latents_are_those_of_images(autoencoder, images, composed, tmp_path):
    config = composed(*words(autoencoder, images))
    train(config)
    options = ["num=4", "reference=16", f"cache={tmp_path / 'cache'}"]
    evaluate(composed(f"run={config.paths.run}", *options, command="evaluate"))
    found = json.loads((Path(config.paths.run) / "metrics.json").read_text())
    assert found["real"] == "the first 16 training images" and found["held_out_images"] == 4
    assert 0 < found["held_out"]["fd_efflite0"] < found["best"]["value"]  # real images are nearer than samples


def test_a_model_of_latents_saves_no_autoencoder_and_clips_images_alone(autoencoder, images, composed):
    from src.run import build_model

    model = build_model(composed(*words(autoencoder, images)))
    assert not any("decoder" in name for name in model.state_dict())
    drawn = model.sample(Noise(0, torch.arange(3)), torch.tensor([0, 1, 0]))
    assert drawn.shape == (3, 3, 16, 16) and drawn.abs().max() <= 1
    assert build_model(composed("model=expert")).decoder is None


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        (["data.resolution=8"], "set data.channels=4 and data.resolution=4"),
        (["data.flip=true"], "data.flip=false"),
        (["data.source.channels=1"], "not 1 channels"),
        (["data.autoencoder.path=nowhere"], "data.autoencoder.path=nowhere is no autoencoder"),
    ],
)
def test_what_does_not_fit_is_told(autoencoder, images, composed, more, fix):
    with pytest.raises(Exception, match=fix) as told:
        train(composed(*words(autoencoder, images, *more)))
    assert isinstance(told.value, ValueError) or isinstance(told.value.__cause__, ValueError)


def test_a_damaged_autoencoder_is_named(autoencoder, tmp_path):
    (tmp_path / "config.json").write_text((autoencoder / "config.json").read_text())
    with pytest.raises(ValueError, match=f"{tmp_path} holds no autoencoder that can be read"):
        _ = Autoencoder(str(tmp_path)).network
    described = json.loads((autoencoder / "config.json").read_text())
    assert described["latent_channels"] == 4
