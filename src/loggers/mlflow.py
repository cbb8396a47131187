"""MLflow, in a local file or on a server."""

import json
import logging
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

PARAMETER = 500  # characters of a setting that MLflow keeps on every kind of server


class Mlflow(Logger):
    """One MLflow run per run folder, found again by its name; its step is the global batch number.

    Args:
        folder: where mlflow.db and the pictures of all runs go, unless there is a server.
        name: of the run.
        experiment: the MLflow experiment that holds the runs.
        group: runs that belong together have the same; kept as a tag.
        uri: of a server; None for the local file.
    """

    def __init__(self, folder: str, name: str, experiment: str, group: str | None = None, uri: str | None = None):
        super().__init__()
        self.folder, self.run_name, self.experiment_name = Path(folder).absolute(), name, experiment
        self.group, self.uri = group, uri
        self.config: dict[str, Any] = {}
        self.stamp: dict[str, str] = {}
        self.client = None
        self.run_id, self.logged_until = "", -1  # the last batch of earlier starts

    name = "mlflow"

    @property
    def version(self) -> str:
        return self.run_name

    def about_run(self, config: dict, stamp: dict[str, str]) -> None:
        """The configuration and the commit go with the run (KnowsRun). Raises ValueError where MLflow is missing."""
        if find_spec("mlflow") is None:
            raise ValueError("logger=mlflow needs a package: pip install mlflow")
        self.config, self.stamp = config, stamp

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        from mlflow.entities import Metric

        self._begin()
        if step > self.logged_until:  # MLflow forgets nothing; a run that goes on repeats what is there already
            now = int(time.time() * 1000)
            self.client.log_batch(self.run_id, metrics=[Metric(k, float(v), now, step) for k, v in metrics.items()])

    @rank_zero_only
    def log_image(self, key, images, step=None, **kwargs):
        self._begin()
        for image in images:
            pixels = (image.permute(1, 2, 0).clamp(0, 1) * 255).round().byte().cpu().numpy()
            self.client.log_image(self.run_id, pixels, f"{key}/{step:08d}.png")

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs):
        """The configuration is there from the start."""

    @rank_zero_only
    def finalize(self, status):
        if self.client is not None:
            self.client.set_terminated(self.run_id, "FINISHED" if status == "success" else "FAILED")

    def _begin(self) -> None:
        """Create the run, or find it again."""
        if self.client is not None:
            return
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):  # runs that start together would both create the tables
            self.client = MlflowClient(self.uri or f"sqlite:///{self.folder / 'mlflow.db'}")
            known = self.client.get_experiment_by_name(self.experiment_name)
            place = None if self.uri else (self.folder / "artifacts").as_uri()
            where = known.experiment_id if known else self.client.create_experiment(self.experiment_name, place)
            found = self.client.search_runs([where], f"attributes.run_name = '{self.run_name}'", max_results=1)
            tags = {
                "group": self.group or "",
                "mlflow.source.git.commit": json.loads(self.stamp["code.json"])["commit"],
            }
            run = found[0] if found else self.client.create_run(where, tags=tags, run_name=self.run_name)
        self.run_id = run.info.run_id
        self.client.update_run(self.run_id, status="RUNNING")
        history = self.client.get_metric_history(self.run_id, "progress/kimg")
        self.logged_until = max((entry.step for entry in history), default=-1)
        new = [Param(k, v) for k, v in _flat(self.config).items() if k not in run.data.params]  # none can change
        for start in range(0, len(new), 100):
            self.client.log_batch(self.run_id, params=new[start : start + 100])
        self.client.log_dict(self.run_id, self.config, "config.json")


def _flat(config: dict, prefix: str = "") -> dict[str, str]:
    """{"model": {"width": 8}} -> {"model.width": "8"}"""
    found = {}
    for key, value in config.items():
        inner = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": str(value)[:PARAMETER]}
    return found
