"""Distances between image sets: closed forms, honest names, cached statistics, and both extractors for real."""

import numpy as np
import pytest
import torch

from src.distances import Distances, find_extractor
from src.extractors import EffNetLite0, Extractor, Inception


class Flat(Extractor):
    """The pixels themselves, as features."""

    num_features, name = 4, "flat"

    def metric(self, kind):
        return f"{kind}_flat"

    def forward(self, images):
        return images.flatten(1).float() / 25


def images(count, seed, shift=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, 1, 2, 2, generator=generator) * torch.tensor([[[10.0, 20], [5, 15]]]) + 120 + shift
    return drawn.clamp(0, 255).to(torch.uint8)


def frechet(a, b):
    """|m - n|^2 + Tr(A + B - 2 (A B)^(1/2)), Heusel et al. 2017, eq. 6."""
    a, b = (x.flatten(1).double().numpy() / 25 for x in (a, b))
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real)  # of the product's square root
    return np.square(a.mean(0) - b.mean(0)).sum() + np.trace(cov_a + cov_b) - 2 * roots.sum()


def polynomial_mmd(x, y):
    """Unbiased squared MMD with the kernel (x.y/d + 1)^3, Binkowski et al. 2018."""
    x, y = (z.flatten(1).double() / 25 for z in (x, y))
    within = lambda z: ((z @ z.T / 4 + 1) ** 3).fill_diagonal_(0).sum() / (len(z) * (len(z) - 1))  # noqa: E731
    return float(within(x) + within(y) - 2 * ((x @ y.T / 4 + 1) ** 3).mean())


def test_distances_are_those_of_the_closed_forms():
    real, fake = images(200, 1), images(150, 2, shift=12)
    measure = Distances(Flat(), kid_subset=1000)
    for part in real.split(64):
        measure.update(part, real=True)
    measure.update(fake, real=False)
    found = measure.compute()
    assert found["fid_flat"] == pytest.approx(frechet(real, fake), rel=1e-4)
    # every subset holds all 150 generated images, and 150 of the 200 real ones
    assert found["kid_flat"] == pytest.approx(polynomial_mmd(real, fake), rel=0.05)


def test_generated_images_are_forgotten_and_real_ones_kept():
    measure = Distances(Flat())
    measure.update(images(50, 1), real=True)
    values = []
    for seed in (2, 3, 2):
        measure.update(images(50, seed, shift=seed), real=False)
        values.append(measure.compute())
    assert values[0] == values[2] != values[1]


def test_statistics_of_real_images_come_from_the_cache_under_the_name_of_what_they_are(tmp_path):
    asked = []

    def real():
        asked.append(1)
        return images(40, 1).split(10)

    found = []
    for identity in ("set", "set", "other"):
        measure = Distances(Flat())
        measure.real_from(tmp_path, identity, 40, real, rank=0)
        measure.update(images(30, 5), real=False)
        found.append(measure.compute())
    assert len(asked) == 2 and found[0] == found[1] == found[2]
    assert not list(tmp_path.glob("*.part"))


def test_global_generators_are_untouched():
    measure = Distances(Flat())
    measure.update(images(50, 1), real=True)
    measure.update(images(50, 2), real=False)
    before = torch.get_rng_state()
    measure.compute()
    assert torch.equal(before, torch.get_rng_state())


def test_the_offline_extractor_knows_images_apart_and_never_calls_its_distance_fid():
    extractor = EffNetLite0()
    assert {extractor.metric("fid"), extractor.metric("kid")} == {"fd_efflite0", "kid_efflite0"}
    extractor.train()
    assert not extractor.network.training and not any(p.requires_grad for p in extractor.parameters())
    grey = images(3, 1).repeat(1, 1, 16, 16)
    assert extractor(grey).shape == (3, 1280)
    assert torch.equal(extractor(grey), extractor(grey.expand(-1, 3, -1, -1)))
    assert (extractor(grey)[0] - extractor(grey)[1]).norm() > 0.1


def test_a_missing_weights_file_is_named():
    with pytest.raises(ValueError, match=r"there are no InceptionV3 weights at nowhere\.pth; put weights-inception"):
        find_extractor("nowhere.pth")


@pytest.mark.slow
def test_inception_weights_are_read_from_the_configured_path(tmp_path, monkeypatch):
    """With random weights of the right shapes, since the real ones are not shipped; the code is the same."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3 as Network

    path = tmp_path / "weights.pth"
    torch.save({}, path)
    with monkeypatch.context() as patch, torch.random.fork_rng():
        torch.manual_seed(0)
        patch.setattr(Network, "load_state_dict", lambda self, state: None)
        torch.save(Network("random", ["2048"], str(path)).state_dict(), path)
    extractor = find_extractor(str(path))
    assert isinstance(extractor, Inception) and (extractor.metric("fid"), extractor.metric("kid")) == ("fid", "kid")
    assert extractor(images(2, 1).repeat(1, 1, 16, 16)).shape == (2, 2048)
