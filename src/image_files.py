"""Image files on disk: which there are below a folder, and each one as an array."""

import hashlib
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"}


def image_files(folder: Path) -> list[Path]:
    """Every image below the folder, in the order of their names' digests, which is alike on every machine.

    Raises ValueError where there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    walked = (Path(parent) / name for parent, _, names in os.walk(folder, followlinks=True) for name in names)
    found = [p for p in walked if p.suffix.lower() in ENDINGS and p.is_file()]
    if not found:
        raise ValueError(f"{folder} holds no images (looked for {', '.join(sorted(ENDINGS))})")
    return sorted(found, key=lambda p: hashlib.sha256(str(p.relative_to(folder)).encode()).digest())


def listing(files: list[Path], folder: Path) -> str:
    """Names, sizes and times of the files: what a cache of their contents depends on."""
    return "\n".join(f"{p.relative_to(folder)} {(s := p.stat()).st_size} {s.st_mtime_ns}" for p in files)


def read_image(file: Path, channels: int, size: int) -> np.ndarray:
    """The image, cropped to a centred square and resized: uint8 (channels, size, size), transparency on white.

    Raises ValueError with the file's name where it cannot be read.
    """
    try:
        with Image.open(file) as image:
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I;16"):  # Pillow would cut it off at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
            if image.mode == "RGBA":  # on white
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (size, size), Image.LANCZOS)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error})") from error
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
