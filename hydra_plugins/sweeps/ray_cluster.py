"""Jobs on a Ray cluster."""

import os
import sys

from hydra.core.config_store import ConfigStore

from hydra_plugins.sweeps import _task
from hydra_plugins.sweeps._job import Job
from hydra_plugins.sweeps._launcher import ProcessLauncher

TARGET = "hydra_plugins.sweeps.ray_cluster.RayLauncher"
ConfigStore.instance().store(group="hydra/launcher", name="ray_processes", node={"_target_": TARGET})


class RayLauncher(ProcessLauncher):
    """Each job is a Ray task on one node, which starts ranks of its own there; a task whose node is lost starts again
    elsewhere, where the run goes on. Nodes share the folder of the project and that of the runs.

    Args:
        jobs: how many are handed over at once; None for all.
        address: of the cluster ("auto": the one that this machine belongs to); None starts one on this machine.
        cpus_per_job: what a job asks the cluster for.
        gpus_per_job: None for trainer.devices where the cluster has GPUs, and none where trainer.accelerator=cpu.
        grace_seconds, max_restarts: as in ProcessLauncher.
    """

    poll_seconds = 1.0

    def __init__(
        self,
        jobs: int | None = None,
        address: str | None = None,
        cpus_per_job: float = 1,
        gpus_per_job: float | None = None,
        grace_seconds: float = 60,
        max_restarts: int | None = None,
    ):
        super().__init__(jobs, grace_seconds, max_restarts)
        self.address, self.cpus_per_job, self.gpus_per_job = address, cpus_per_job, gpus_per_job

    def connect(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError("launcher=ray needs Ray: pip install -e '.[ray]'") from error
        if not ray.is_initialized():
            ray.init(address=self.address, log_to_driver=False, include_dashboard=False, logging_level="warning")
        ray.cloudpickle.register_pickle_by_value(sys.modules[_task.__name__])  # workers need not find this folder

    def start(self, job: Job) -> "_Remote":
        import ray

        trainer, gpus = job.config.trainer, self.gpus_per_job
        if trainer.num_nodes != 1:
            raise ValueError(f"trainer.num_nodes={trainer.num_nodes}, but launcher=ray gives each job one node")
        if gpus is None:
            wanted = trainer.devices if isinstance(trainer.devices, int) else 1
            gpus = wanted if ray.cluster_resources().get("GPU") and trainer.accelerator != "cpu" else 0
        task = _task.Task(
            job.command(), str(job.log.absolute()), os.getcwd(), self.variables(), True, self.grace_seconds
        )
        asked = dict(num_cpus=self.cpus_per_job, num_gpus=gpus, max_retries=-1, name=job.name)
        return _Remote(ray, ray.remote(**asked)(_run).remote(task))


def _run(task: "_task.Task") -> None:
    task()


class _Remote:
    def __init__(self, ray, reference):
        self.ray, self.reference = ray, reference

    def poll(self) -> int | None:
        if not self.ray.wait([self.reference], timeout=0)[0]:
            return None
        try:
            self.ray.get(self.reference)
        except (self.ray.exceptions.RayError, RuntimeError):
            return 1
        return 0

    def stop(self) -> None:
        self.ray.cancel(self.reference)

    def kill(self) -> None:
        """The task does, when its grace is over."""
