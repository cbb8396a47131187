"""Jobs on a SLURM cluster, handed over by submitit."""

import os
import subprocess
import sys

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hydra_plugins.sweeps import _task
from hydra_plugins.sweeps._job import Job
from hydra_plugins.sweeps._launcher import ProcessLauncher

TARGET = "hydra_plugins.sweeps.slurm.SlurmLauncher"
ConfigStore.instance().store(group="hydra/launcher", name="slurm_processes", node={"_target_": TARGET})


class SlurmLauncher(ProcessLauncher):
    """Each job is a SLURM job of trainer.num_nodes nodes, queued again when it is preempted, loses a node or its time
    is over. Each node has one task, the agent that starts a process per device, and again when one is killed; without
    max_restarts each device has a task. A job that an earlier launcher left in the queue is waited for, not queued
    twice.

    Args:
        jobs: how many are in the queue at once; None for all.
        minutes: of a job, after which it is queued again and goes on.
        partition, account, cpus_per_task, mem_gb: SLURM's; None leaves them to it. CPUs are those of one device.
        gpus_per_node: None for one per device, and none where trainer.accelerator=cpu.
        options: further ones of submitit, such as {slurm_qos: low}.
        requeues: how often a job whose time is over is queued again.
        cluster: "slurm", or "local" for submitit's processes on this machine.
        grace_seconds: how long a job that is asked to stop may take to save.
        max_restarts: as in ProcessLauncher.
    """

    poll_seconds = 2.0

    def __init__(
        self,
        jobs: int | None = None,
        minutes: int = 1440,
        partition: str | None = None,
        account: str | None = None,
        cpus_per_task: int | None = None,
        mem_gb: float | None = None,
        gpus_per_node: int | None = None,
        options: dict | None = None,
        requeues: int = 100,
        cluster: str = "slurm",
        grace_seconds: float = 60,
        max_restarts: int | None = None,
    ):
        super().__init__(jobs, grace_seconds, max_restarts)
        self.asked = {"timeout_min": minutes, "slurm_partition": partition, "slurm_account": account}
        options = OmegaConf.to_container(options) if OmegaConf.is_config(options) else options or {}
        self.asked |= {"cpus_per_task": cpus_per_task, "mem_gb": mem_gb, **options}
        self.gpus_per_node, self.requeues, self.cluster = gpus_per_node, requeues, cluster

    def connect(self) -> None:
        try:
            import cloudpickle
            import submitit  # noqa: F401
        except ImportError as error:
            raise ValueError("launcher=slurm needs submitit: pip install -e '.[slurm]'") from error
        cloudpickle.register_pickle_by_value(sys.modules[_task.__name__])  # tasks need not find this folder

    def start(self, job: Job) -> "_Submitted":
        import submitit

        devices, folder = self._devices(job), (self.folder / "slurm").absolute()
        tasks = devices if self.cluster == "slurm" and self.max_restarts is None else 1
        if self.cluster == "slurm" and (queued := _queued(job.name)):
            return _Submitted(submitit.SlurmJob(folder, queued, tasks=range(tasks * job.config.trainer.num_nodes)), job)
        try:
            executor = submitit.AutoExecutor(folder, cluster=self.cluster, slurm_max_num_timeout=self.requeues)
            executor.update_parameters(**self._parameters(job, tasks, devices))
        except RuntimeError as error:  # no srun here
            raise ValueError(f"launcher=slurm: {error}") from error
        task = _task.Task(
            job.command(),
            str(job.log.absolute()),
            os.getcwd(),
            self.variables(),
            self.cluster != "slurm",
            self.grace_seconds,
        )
        return _Submitted(executor.submit(task), job)

    def _devices(self, job: Job) -> int:
        devices = job.config.trainer.devices
        count = devices if isinstance(devices, int) else None if isinstance(devices, str) else len(devices)
        if count is None or count < 1:
            raise ValueError(f"trainer.devices={devices} must be a number under launcher=slurm: of processes per node")
        return count

    def _parameters(self, job: Job, tasks: int, devices: int) -> dict:
        gpus = self.gpus_per_node
        if gpus is None:
            gpus = 0 if job.config.trainer.accelerator == "cpu" else devices
        found = {"name": job.name, "nodes": job.config.trainer.num_nodes, "tasks_per_node": tasks}
        found |= {"gpus_per_node": gpus, "slurm_srun_args": ["--kill-on-bad-exit=1"], **self.asked}
        if found["cpus_per_task"]:
            found["cpus_per_task"] *= devices // tasks
        found["slurm_additional_parameters"] = {"requeue": True} | self.asked.get("slurm_additional_parameters", {})
        return {key: value for key, value in found.items() if value}


class _Submitted:
    def __init__(self, submitted, job: Job):
        self.submitted, self.job = submitted, job

    def poll(self) -> int | None:
        if not self.submitted.done():
            return None
        try:
            self.submitted.results()
        except Exception:  # submitit's: it failed, was cancelled, or another sweep had queued it
            return 0 if self.job.result() is not None else 1
        return 0

    def stop(self) -> None:
        self.submitted.cancel(check=False)

    def kill(self) -> None:
        """SLURM does, some time after it was asked to cancel."""


def _queued(name: str) -> str | None:
    """The SLURM job of this user with this name, if there is one."""
    command = ["squeue", "--me", f"--name={name}", "--noheader", "--format=%i"]
    try:
        found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:
        return None
    return found[0] if found else None
