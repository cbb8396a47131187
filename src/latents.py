"""Latent diffusion's autoencoder (arXiv 2112.10752): images to small arrays, and back; a local folder of diffusers'."""

import hashlib
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor


class Autoencoder:
    """An AutoencoderKL, read from `path` when it is first needed; it is no part of what is trained or saved.

    Args:
        path: folder with config.json and diffusion_pytorch_model.safetensors; nothing is downloaded.
        factor: what latents are multiplied by, so that their variance is about one; 0.18215 for Stable Diffusion's.
    """

    def __init__(self, path: str | None, factor: float = 0.18215):
        self.path, self.factor = path and Path(path), factor

    @cached_property
    def network(self):
        if self.path is None or not (self.path / "config.json").is_file():
            raise ValueError(
                f"data.autoencoder.path={self.path} is no autoencoder; name a folder with config.json and safetensors"
            )
        try:
            from diffusers import AutoencoderKL
        except ImportError as error:
            raise ValueError("latents need diffusers: pip install -e '.[latent]'") from error
        try:
            network = AutoencoderKL.from_pretrained(
                self.path, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.path} holds no autoencoder that can be read ({error})") from error
        return network.float().eval().requires_grad_(False)

    @cached_property
    def identity(self) -> str:
        """Of what it computes: its configuration and weights."""
        found = hashlib.sha256()
        for file in (self.path / "config.json", *sorted(self.path.glob("*.safetensors"))):
            found.update(file.read_bytes())
        return found.hexdigest()[:16]

    @property
    def shrinks(self) -> int:
        """How many pixels on a side become one number."""
        return 2 ** (len(self.network.config.block_out_channels) - 1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images (n, 3, h, w) in [-1, 1] -> the mean of their latents times the factor, (n, c, h / 8, w / 8)."""
        return self.network.to(images.device).encode(images).latent_dist.mean * self.factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents, as `encode` gives them -> images (n, 3, h, w) in [-1, 1]."""
        return self.network.to(latents.device).decode(latents / self.factor).sample.clamp(-1, 1)
