"""Jobs on this machine."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress

from hydra.core.config_store import ConfigStore

from hydra_plugins.sweeps._job import Job
from hydra_plugins.sweeps._launcher import ProcessLauncher
from hydra_plugins.sweeps._task import begin, environment

TARGET = "hydra_plugins.sweeps.local.LocalLauncher"
ConfigStore.instance().store(group="hydra/launcher", name="processes", node={"_target_": TARGET})


class LocalLauncher(ProcessLauncher):
    """Each job is a process on this machine, in a session of its own, and ends with all that it has started.

    Args:
        jobs: how many run at once; None for as many as there are GPUs for, where gpus_per_job is given.
        gpus_per_job: each job sees as many GPUs of those that this process sees, and shares them with no other job of
            the sweep; None leaves it to the jobs.
        grace_seconds, max_restarts: as in ProcessLauncher.
    """

    def __init__(
        self,
        jobs: int | None = 1,
        gpus_per_job: int | None = None,
        grace_seconds: float = 60,
        max_restarts: int | None = None,
    ):
        super().__init__(jobs, grace_seconds, max_restarts)
        self.shares = _shares(gpus_per_job, jobs) if gpus_per_job else None
        if self.shares and jobs is None:
            self.jobs = len(self.shares)
        self.started: list[_Process] = []

    def start(self, job: Job) -> "_Process":
        more, busy = self.variables(), [process for process in self.started if process.process.returncode is None]
        share = None
        if self.shares:
            share = more["CUDA_VISIBLE_DEVICES"] = next(s for s in self.shares if s not in [p.share for p in busy])
        if self.jobs != 1 and "OMP_NUM_THREADS" not in os.environ:
            more["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (self.jobs or len(self.known))))
        env = environment("SLURM_.*", **more)  # an allocation that the sweep itself runs in has tasks of its own
        started = _Process(begin(job.command(), job.log, env, session=True), share)
        self.started = [*busy, started]
        return started


class _Process:
    def __init__(self, process: subprocess.Popen, share: str | None):
        self.process, self.share = process, share

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None:
            self.kill()  # what it has started and left behind
        return code

    def stop(self) -> None:
        self.process.terminate()  # it alone: it stops its ranks and workers once everything is saved

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _shares(each: int, jobs: int | None) -> list[str]:
    """Groups of `each` GPUs as CUDA_VISIBLE_DEVICES wants them; ValueError where there are too few."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        given = ",".join(subprocess.run(query, capture_output=True, text=True).stdout.split())
    gpus = [gpu for gpu in (given or "").split(",") if gpu.strip()]
    shares = [",".join(gpus[i : i + each]) for i in range(0, len(gpus) - each + 1, each)]
    if len(shares) < (jobs or 1):
        raise ValueError(
            f"{jobs or 1} jobs at once with hydra.launcher.gpus_per_job={each} need {each * (jobs or 1)} GPUs, but "
            f"{len(gpus)} can be seen; lower one of both"
        )
    return shares
