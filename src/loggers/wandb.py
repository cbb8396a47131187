"""Weights & Biases, with and without a network."""

import json
import os
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlparse

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from src import checkpoint as canonical


class Wandb(WandbLogger):
    """One W&B run per run folder: its id is the run's name, its x axis progress/kimg, its step the global batch number.

    Online where a login exists, offline otherwise; WANDB_MODE wins. A run that continues offline adds a second folder
    with the same id and steps that go on; `wandb sync` joins them.

    Args:
        folder: of the run.
        name: of the run.
        checkpoints: whether the newest and the best checkpoint go along as artifacts when training ends. Offline, the
            files themselves stay in the run folder until they are synchronised.
        options: of wandb.init, such as project, group and tags.
    """

    def __init__(self, folder: str, name: str, checkpoints: bool = False, **options):
        os.makedirs(folder, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_login() else "offline")
        quiet = {"silent": mode != "online", "console": "off"} | (options.pop("settings", None) or {})
        given = dict(id=name, mode=mode, resume="allow", settings=quiet)
        super().__init__(name=name, save_dir=folder, **given, **options)
        self._wandb_init.pop("anonymous", None)  # which Lightning passes and W&B no longer knows
        self.checkpoints, self.keep_checkpoints = Path(folder) / "checkpoints", checkpoints
        self.best: dict | None = None  # what the summary says
        self.finished = False

    def about_run(self, config: dict, stamp: dict[str, str]) -> None:
        """The configuration and the commit go with the run (KnowsRun)."""
        self._wandb_init["config"] = config
        self._wandb_init["settings"]["git_commit"] = json.loads(stamp["code.json"])["commit"]

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
        self._tell_best()

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
        if self._experiment is None or self.finished:
            return
        self.finished = True
        self._tell_best()
        if self.keep_checkpoints:
            self._log_checkpoints()
        self._experiment.finish(exit_code=0 if status == "success" else 1)

    def _tell_best(self) -> None:
        """Put into the summary what is marked as best in the run folder, by this start or an earlier one."""
        best = canonical.read_best(self.checkpoints)
        if best is not None and best != self.best:
            self.best = best
            scores = {f"best/{key}": value for key, value in best.items() if key != "checkpoint"}
            self.experiment.summary.update(scores | {"best/kimg": int(best["checkpoint"]) / 1000})

    def _log_checkpoints(self) -> None:
        import wandb

        saved = canonical.committed(self.checkpoints)
        for path in saved:
            aliases = ["newest"] * (path == saved[-1]) + ["best"] * (path.name == (self.best or {}).get("checkpoint"))
            if aliases:
                metadata = {"kimg": int(path.name) / 1000}
                artifact = wandb.Artifact(f"checkpoint-{self.version}", type="checkpoint", metadata=metadata)
                artifact.add_dir(str(path), policy="immutable", skip_cache=True)  # no second copy on this disk
                self.experiment.log_artifact(artifact, aliases=aliases)


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
