"""TensorBoard."""

import json

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only


class TensorBoard(TensorBoardLogger):
    """Metrics, grids and the configuration in the folder <folder>/tensorboard, against the global batch number.

    Raises ValueError where the package is not installed.
    """

    def __init__(self, folder: str):
        try:
            super().__init__(save_dir=folder, name="tensorboard", version="")
        except ModuleNotFoundError as error:
            raise ValueError("logger=tensorboard needs the package `tensorboard`; install it with pip") from error

    @rank_zero_only
    def about_run(self, config: dict, stamp: dict[str, str]) -> None:
        """The configuration and what code runs, as texts (KnowsRun)."""
        self.experiment.add_text("config", _preformatted(json.dumps(config, indent=1)), 0)
        self.experiment.add_text("code", _preformatted(stamp["code.json"]), 0)

    @rank_zero_only
    def rewind(self, batch: int) -> None:
        """A file that makes TensorBoard forget what earlier ones hold after this batch."""
        self.experiment.close()
        self._experiment, self._kwargs["purge_step"] = None, batch + 1

    @rank_zero_only
    def log_image(self, key, images, step=None, **kwargs):
        for image in images:
            self.experiment.add_image(key, image.clamp(0, 1), step)


def _preformatted(text: str) -> str:
    """Markdown that is shown as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
