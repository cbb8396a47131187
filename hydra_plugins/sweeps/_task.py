"""A job's command as a process, here or where SLURM or Ray carry it; so this module imports nothing of ours."""

import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress

OF_A_RANK = (
    "(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_(RANK|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)


def environment(remove: str = "", **more: str) -> dict[str, str]:
    """This process's environment, without what would make the command a rank of something that it is no part of.

    `remove` is a regular expression of further names.
    """
    kept = {k: v for k, v in os.environ.items() if not re.fullmatch(f"{OF_A_RANK}|{remove}", k)}
    return kept | {"PYTHONUNBUFFERED": "1"} | more


def begin(command: list[str], log: str, env: dict[str, str], session: bool, cwd: str | None = None) -> subprocess.Popen:
    """Start the command, all its output appended to the log; `session`: in a session and process group of its own."""
    with open(log, "a") as file:
        file.write(f"\n$ {shlex.join(command)}\n")
        file.flush()
        streams = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=session, **streams)


class Task:
    """Runs a command on another machine; RuntimeError unless it ends well.

    What interrupts the task asks the command to save and to end, and kills it after the grace. Under SLURM submitit
    calls `checkpoint` when the time is almost over, or the job preempted: the same happens, and it is queued again.

    Args:
        log: a file that the command's output is appended to.
        variables: of its environment.
        session: whether it gets a process group of its own, which is ended with it.
    """

    def __init__(
        self, command: list[str], log: str, cwd: str, variables: dict[str, str], session: bool, grace_seconds: float
    ):
        self.made_of = (command, log, cwd, variables, session, grace_seconds)
        self.session, self.grace_seconds = session, grace_seconds
        self.process: subprocess.Popen | None = None

    def __call__(self) -> None:
        command, log, cwd, variables, session, _ = self.made_of
        signal.signal(signal.SIGINT, signal.default_int_handler)  # by which Ray cancels; ignored below `command &`
        before = signal.getsignal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM sends it to every process; this one alone listens
        try:
            self.process = begin(command, log, environment(**variables), session, cwd)
        finally:
            signal.signal(signal.SIGUSR2, before)
        try:
            while not self._ended():
                time.sleep(0.2)
        finally:
            self._stop()
        code = self.process.wait()
        if code in (143, -signal.SIGTERM) and "SLURM_JOB_ID" in os.environ:
            time.sleep(600)  # preempted or cancelled: SLURM ends this task, and decides whether it is queued again
        if code:
            raise RuntimeError(f"exit code {code}")

    def checkpoint(self):
        """submitit's hook: what to queue in place of this task."""
        from submitit.helpers import DelayedSubmission

        self._stop()
        return DelayedSubmission(Task(*self.made_of))

    def _ended(self) -> bool:
        """Without taking the exit code, since a signal's handler may be asking meanwhile."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:
            return True

    def _stop(self) -> None:
        if self.process is None:
            return
        until = time.monotonic() + self.grace_seconds
        if not self._ended():
            os.kill(self.process.pid, signal.SIGTERM)
        while not self._ended() and time.monotonic() < until:
            time.sleep(0.2)
        with suppress(ProcessLookupError):
            (os.killpg if self.session else os.kill)(self.process.pid, signal.SIGKILL)
