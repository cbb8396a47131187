"""Images on their way to metrics and files."""

import io
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid

from src.files import replacing


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 where it is that; what losses are computed in, also under autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] -> 0..255, rounded to the nearest: uint8 of the same shape."""
    return ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def coloured(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Images (n, c, h, w) shifted and scaled so that over all of them each channel has this mean and standard
    deviation (c,), in [-1, 1]: against a cast or a contrast that samples share."""
    dims, column = (0, 2, 3), (1, -1, 1, 1)
    away = images - images.mean(dims).view(column)
    scaled = away / images.std(dims).clamp(min=1e-6).view(column) * std.to(images).view(column)
    return (scaled + mean.to(images).view(column)).clamp(-1, 1)


def grid(images: Tensor, columns: int = 8) -> Tensor:
    """Images (n, c, h, w) in [-1, 1] side by side, `columns` in a row: one picture (c, H, W) in [-1, 1]."""
    return make_grid(images.float(), nrow=columns, padding=2, pad_value=1.0)[: images.shape[1]]


def png(picture: Tensor) -> bytes:
    """A picture (1 or 3, h, w) in [-1, 1] as a file."""
    file = io.BytesIO()
    pixels = to_uint8(picture).cpu().permute(1, 2, 0).squeeze(2).numpy()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def write_png(path: Path, picture: Tensor) -> None:
    """Write a picture (1 or 3, h, w) in [-1, 1]; a file of that name is replaced whole or not at all."""
    with replacing(path) as part:
        part.write_bytes(png(picture))
