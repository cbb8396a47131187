"""Weights & Biases, with and without a network."""

import os
from netrc import NetrcParseError, netrc
from urllib.parse import urlparse

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only


class Wandb(WandbLogger):
    """One W&B run per run folder: its id is the run's name, its x axis progress/kimg, its step the global batch number.

    Online where a login exists, offline otherwise; WANDB_MODE wins.
    """

    def __init__(self, folder: str, name: str, **options):
        os.makedirs(folder, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_login() else "offline")
        quiet = {"silent": mode != "online", "console": "off"}
        given = dict(id=name, mode=mode, resume="allow", settings=quiet)
        super().__init__(name=name, save_dir=folder, **given, **options)
        self._wandb_init.pop("anonymous", None)  # which Lightning passes and W&B no longer knows

    def about_run(self, config: dict, stamp: dict) -> None:
        """The configuration goes with the run (KnowsRun)."""
        self._wandb_init["config"] = config

    @property
    def experiment(self):
        fresh = self._experiment is None
        run = super().experiment
        if fresh and rank_zero_only.rank == 0:
            run.define_metric("progress/kimg")
            run.define_metric("*", step_metric="progress/kimg")
        return run

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def log_image(self, key, images, step=None, **kwargs):
        import wandb

        bytes_ = [(image.permute(1, 2, 0).clamp(0, 1) * 255).round().byte() for image in images]  # it takes 0..255 only
        pictures = [wandb.Image(image.cpu().numpy()) for image in bytes_]
        self.experiment.log({key: pictures}, step=step)

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs):
        """The configuration is there from the start."""

    @rank_zero_only
    def finalize(self, status):
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
