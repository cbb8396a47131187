"""What all launchers share: jobs one after the other or side by side, until all have ended or the sweep is stopped."""

import json
import os
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from hydra_plugins.sweeps._job import Job, settings, table

if TYPE_CHECKING:
    from filelock import FileLock


class Started(Protocol):
    """A job's processes, wherever they run."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def stop(self) -> None:
        """Ask it to save and to end."""

    def kill(self) -> None:
        """End whatever is left of it."""


@dataclass
class Running:
    """A job that has been started."""

    started: Started
    lock: "FileLock"  # tells other sweeps that somebody is at this run
    begun: float
    asked: float | None = None  # when it was asked to stop


class ProcessLauncher(Launcher):
    """Starts every job as the command of a single run, so that it may start ranks of its own, run out of memory or be
    killed without touching the others; a run that is finished is skipped, any other one goes on.

    Args:
        jobs: how many run at once; None for all.
        grace_seconds: how long a job that is asked to stop may take to save, before it is killed.
        max_restarts: each node's part of a job is an elastic agent, which starts its processes again so often; None
            for no agent.
    """

    poll_seconds = 0.2

    def __init__(self, jobs: int | None = 1, grace_seconds: float = 60, max_restarts: int | None = None):
        for name, value in (("jobs", jobs), ("grace_seconds", grace_seconds)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
                raise ValueError(f"hydra.launcher.{name}={value} must be a number greater than 0")
        if max_restarts is not None and (type(max_restarts) is not int or max_restarts < 0):
            raise ValueError(f"hydra.launcher.max_restarts={max_restarts} must be a whole number, or null for no agent")
        self.jobs, self.grace_seconds, self.max_restarts = jobs, grace_seconds, max_restarts
        self.known: list[Job] = []

    def setup(self, *, hydra_context, task_function, config: DictConfig) -> None:
        self.config, self.loader = config, hydra_context.config_loader
        self.folder = Path(config.hydra.sweep.dir)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run these jobs; ValueError once all have ended, if some have failed."""
        jobs = [self.job(list(overrides)) for overrides in job_overrides]
        self.run(iter(jobs), jobs)
        if failed := self.report():
            raise ValueError(f"{failed} of {len(jobs)} runs failed; the same command tries them again")
        done = dict(status=JobStatus.COMPLETED, task_name="train")
        return [JobReturn(j.overrides, j.config, j.config, str(j.folder), _return_value=j.value, **done) for j in jobs]

    def job(self, overrides: list[str]) -> Job:
        """The run that these overrides name; errors of its configuration are raised before anything starts."""
        config = self.loader.load_sweep_config(self.config, overrides)
        HydraConfig.instance().set_config(config)
        return Job(overrides, config.name, Path(config.hydra.run.dir), config)

    def run(
        self,
        jobs: Iterator[Job],
        known: list[Job],
        watch: Callable[[Job], bool] = lambda job: False,
        ended: Callable[[Job], None] = lambda job: None,
    ) -> None:
        """Run jobs as they come, each as soon as there is room; Ctrl-C, SIGTERM and a closed terminal stop all of them.

        Args:
            known: all jobs so far, of which records are kept and the table is made.
            watch: whether to prune a running job, asked several times a second.
            ended: told of each job that has finished, failed or been pruned.
        """
        waiting: list[Job] = []
        running: dict[Job, Running] = {}
        self.known = known
        self.connect()
        with _signals() as self.signals:
            try:
                while True:
                    if self.signals:
                        raise SystemExit(128 + self.signals[0])
                    while self.jobs is None or len(running) < self.jobs:
                        job, lock = self._next(jobs, waiting, ended)
                        if job is None:
                            break
                        running[job] = Running(self.start(job), lock, time.monotonic())
                        job.state = "running"
                        self._say(job, f"started, writes {job.log}")
                    if not running and not waiting:
                        return
                    time.sleep(self.poll_seconds)
                    for job, now in list(running.items()):
                        job.seconds = time.monotonic() - now.begun
                        self._prune(job, now, watch)
                        if (code := now.started.poll()) is not None:
                            del running[job]
                            self._end(job, code)
                            now.lock.release()
                            ended(job)
            except BaseException:
                self._stop_all([now.started for now in running.values()])
                for job in running:
                    job.state = "stopped"
                with suppress(OSError):  # the terminal may be gone
                    self._write()
                    self.report()
                raise

    def connect(self) -> None:
        """Before the first job, and before signals are listened to: Ray's library has handlers of its own."""

    def variables(self) -> dict[str, str]:
        """Of the jobs' environment: W&B groups them by the sweep, unless a group is set already."""
        return {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP") or self.folder.name}

    @abstractmethod
    def start(self, job: Job) -> Started:
        """Start the job's command, its output appended to job.log."""

    def report(self) -> int:
        """Print how it went, failed jobs at last; how many those are."""
        if not self.known:
            return 0
        failed = [job for job in self.known if job.state == "failed"]
        print("", table(self.known), *(f"\n{job.how_it_failed()}" for job in failed), sep="\n", flush=True)
        return len(failed)

    def _next(self, jobs: Iterator[Job], waiting: list[Job], ended: Callable):
        """The next job that nobody else is at, with the lock that says so to other sweeps; (None, None) for none."""
        from filelock import FileLock, Timeout

        for job in chain(list(waiting), jobs):
            job.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(job.folder / "sweep.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:  # another sweep, or another job of this one, is at this run: its result will be ours
                if job not in waiting:
                    waiting.append(job)
                continue
            if job in waiting:
                waiting.remove(job)
            if job.result() is None:
                return job, lock
            self._end(job, None)
            lock.release()
            ended(job)
        return None, None

    def _end(self, job: Job, code: int | None) -> None:
        """`code` is None for a run that needed nothing."""
        job.code = code
        if code in (None, 0):
            job.state = "was finished" if code is None else "finished"
            job.measure()
        elif job.state != "pruned":
            job.state = "failed"
        after = "" if code is None else f" after {job.seconds:.0f} s"
        value = "" if job.value is None else f", {job.measured} {job.value:.5g}"
        self._say(job, f"{job.state}{after}{value}")

    def _say(self, job: Job, what: str) -> None:
        place = self.known.index(job) + 1
        print(f"[{place}] {' '.join(filter(None, (job.name, settings(job, self.known))))}: {what}", flush=True)
        self._write()

    def _write(self) -> None:
        """sweep.json: what belongs to this sweep, since its first start."""
        keep = ("name", "overrides", "state", "measured", "value", "seconds")
        runs = [{key: getattr(job, key) for key in keep} | {"folder": str(job.folder)} for job in self.known]
        self.folder.mkdir(parents=True, exist_ok=True)
        now = {job.name for job in self.known}
        runs = [run for run in self._written_before() if run["name"] not in now] + runs
        part = self.folder / f"sweep.{os.getpid()}.part"
        part.write_text(json.dumps(runs, indent=1))
        os.replace(part, self.folder / "sweep.json")

    def _written_before(self) -> list[dict]:
        """What sweep.json has: of a study that goes on, earlier trials as well."""
        path = self.folder / "sweep.json"
        return json.loads(path.read_text()) if path.exists() else []

    def _prune(self, job: Job, now: Running, watch: Callable[[Job], bool]) -> None:
        if now.asked is not None:
            if time.monotonic() - now.asked > self.grace_seconds:
                now.started.kill()
        elif watch(job):
            job.state, now.asked = "pruned", time.monotonic()
            now.started.stop()

    def _stop_all(self, started: list[Started]) -> None:
        """Every job saves and ends; what has not when the grace is over, or at one more signal, is killed."""
        until, signals = time.monotonic() + self.grace_seconds, len(self.signals)
        for one in started:
            one.stop()
        if started:
            with suppress(OSError):
                print("\nstopping: jobs save and end; once more kills them", flush=True)
        while any(one.poll() is None for one in started) and time.monotonic() < until and len(self.signals) == signals:
            time.sleep(self.poll_seconds)
        for one in started:
            one.kill()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and a closed terminal as they come, unless ignored as under nohup; none breaks into a start."""
    found: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    listen = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda received, frame: found.append(received)) for number in listen}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
