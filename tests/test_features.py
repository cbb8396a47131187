"""Features of clustering: principal components, the offline extractor, and DINOv2 from a folder of its own."""

import numpy as np
import pytest
import torch

from src.datamodules.base import Images
from src.extractors import EffNetLite0
from src.features import LARGEST, Features


def images(count, *shape, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
    return Images(pixels, np.zeros(count), None)


def test_pixels_are_projected_on_the_directions_in_which_they_vary():
    """Against the eigenvectors of the covariance, up to signs."""
    data = images(500, 1, 3, 3)
    data.images //= np.arange(1, 10, dtype=np.uint8).reshape(3, 3)
    x = data.images.reshape(500, 9) / 127.5 - 1
    values, vectors = np.linalg.eigh(np.cov(x.T))
    found = Features("pixels").fit(data.read, 500)(data.read, 500)
    expected = (x - x.mean(0)) @ vectors[:, ::-1]
    assert found.shape == (500, 9) and found.dtype == np.float32
    np.testing.assert_allclose(np.abs(found), np.abs(expected), rtol=0, atol=3e-3)
    np.testing.assert_allclose(found.var(0, ddof=1), values[::-1], rtol=1e-2)


def test_large_images_are_compared_by_averages_and_have_at_most_64_components():
    data = images(70, 3, 2 * LARGEST, 2 * LARGEST)
    features = Features("pixels").fit(data.read, 70)
    assert features.components.shape == (64, 3 * LARGEST**2)
    one = data.read(slice(3, 4)).float() / 127.5 - 1
    averages = one.unflatten(3, (LARGEST, 2)).unflatten(2, (LARGEST, 2)).mean((3, 5)).flatten(1).numpy()
    expected = (averages - features.mean) @ features.components.T
    np.testing.assert_allclose(features(data.read, 70)[3:4], expected, rtol=1e-4, atol=1e-4)


def test_what_is_fitted_is_spread_over_all_images(monkeypatch):
    monkeypatch.setattr("src.features.FITTED_ON", 50)
    monkeypatch.setattr("src.features.BATCH", 7)
    data, seen = images(120, 1, 2, 2), []

    def read(rows):
        seen.append(np.arange(120)[rows])
        return data.read(rows)

    features = Features("pixels").fit(read, 120)
    assert np.concatenate(seen).tolist() == list(range(0, 120, 3))
    np.testing.assert_allclose(features.mean, (data.images[::3] / 127.5 - 1).reshape(40, 4).mean(0), rtol=1e-4)
    assert features(data.read, 120).shape == (120, 4)


def test_the_offline_extractors_features_are_of_length_one():
    data = images(6, 1, 8, 8)
    features = Features("efflite0").fit(data.read, 6)
    raw = EffNetLite0()(data.read(slice(0, 6)))
    expected = torch.nn.functional.normalize(raw).numpy() - features.mean
    np.testing.assert_allclose(features(data.read, 6), expected @ features.components.T, rtol=1e-3, atol=1e-5)
    two = images(6, 2, 8, 8)
    with pytest.raises(ValueError, match=r"features=efflite0 takes grey or colour images.*choose features=pixels"):
        Features("efflite0").fit(two.read, 6)


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    """A tiny DINOv2 with random weights, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("dino")
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.Dinov2Model(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_dinov2s_features_are_the_mean_over_its_patches(dino):
    from transformers import Dinov2Model

    data = images(5, 1, 8, 8)
    features = Features("dino", str(dino)).fit(data.read, 5)
    x = data.read(slice(0, 5)).expand(-1, 3, -1, -1).float() / 255
    x = torch.nn.functional.interpolate(x, size=(224, 224), mode="bicubic", antialias=True).clamp(0, 1)
    x = (x - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    hidden = Dinov2Model.from_pretrained(dino).eval()(pixel_values=x).last_hidden_state
    assert hidden.shape == (5, 1 + 16**2, 16)
    raw = torch.nn.functional.normalize(hidden[:, 1:].mean(1)).numpy()
    expected = (raw - features.mean) @ features.components.T
    np.testing.assert_allclose(features(data.read, 5), expected, rtol=1e-3, atol=1e-5)


def test_dinov2_is_known_by_its_weights_wherever_they_lie(dino, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in dino.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    features = Features("dino", str(dino))
    assert features.id == Features("dino", str(moved)).id and features.here
    weights = moved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert features.id != Features("dino", str(moved)).id
    weights.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be loaded"):
        Features("dino", str(moved)).fit(images(3, 1, 4, 4).read, 3)
    assert not Features("dino", str(tmp_path / "nowhere")).here
    with pytest.raises(ValueError, match=r"dino=.*nowhere is no folder of DINOv2 as transformers saves it"):
        Features("dino", str(tmp_path / "nowhere")).fit(images(3, 1, 4, 4).read, 3)
