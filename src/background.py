"""Writing while training goes on."""

import threading
from collections.abc import Callable
from typing import Any

import torch


class Writer:
    """One task at a time, in a thread of its own; the process does not end before it has."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._failed: OSError | None = None

    def begin(self, task: Callable[[], None]) -> None:
        """Run the task once the one before has ended. An OSError of it is told in a line, and kept for `wait`."""
        self.wait()
        self._failed = None
        self._thread = threading.Thread(target=self._run, args=(task,), name="checkpoint")
        self._thread.start()

    def wait(self) -> OSError | None:
        """Wait for the last task; what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._failed

    def failed(self, error: OSError, tell: bool = True) -> None:
        """What `wait` answers, until another task has begun."""
        self._failed = error
        if tell:
            print(error, flush=True)

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except OSError as error:
            self.failed(error)


def copied(state: Any) -> Any:
    """A state of nested dicts with every tensor copied to host memory, so that training may go on changing them."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.detach().to("cpu", copy=True) if torch.is_tensor(state) else state
