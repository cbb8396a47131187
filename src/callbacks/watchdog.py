"""Ends a run that stands still; of the health callback."""

import os
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress

STOOD_STILL = 75  # exit code: a failure that another try may not meet

# A program of its own, since a process that was stopped, or holds Python's lock, cannot watch itself. It reads a pipe,
# as a file's system may be what stands still, and counts its own seconds, of which none pass while it is stopped too.
GUARD = """
import os, select, signal, sys
parent, limit, still = int(sys.argv[1]), float(sys.argv[2]), 0
while still < limit and os.getppid() == parent:
    still += 0.5
    if select.select([0], [], [], 0.5)[0]:
        if not os.read(0, 4096):
            sys.exit()
        still = 0
if os.getppid() == parent:
    print(f"health: process {parent} gave no sign of life for {limit / 60:.3g} minutes; it is killed, so that it can "
          "be started again", file=sys.stderr, flush=True)
    os.kill(parent, signal.SIGKILL)
"""


class Watchdog:
    """A thread that ends the process after one sentence when nothing has moved for `seconds`.

    A single process that waits for images saves as after SIGTERM, in this thread, and ends with 143: a lock holds the
    next batch back, so nothing changes meanwhile. One that stands within a batch ends with 75. Of several processes
    none can save alone: each is asked to stop after the batch at hand, and ends with 75 where that has not ended after
    as much time again. A process that cannot even do that, since it was stopped, is killed after twice as much more.
    """

    def __init__(self, trainer, module, seconds: float):
        self.trainer, self.module, self.seconds = trainer, module, seconds
        self.moved_at = time.monotonic()
        self.acting, self.left = threading.Lock(), threading.Event()
        command = [sys.executable, "-S", "-c", GUARD, str(os.getpid()), str(4 * seconds)]
        self.guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def moved(self) -> None:
        """Something has begun or ended; never returns while the run is being saved and ended."""
        with self.acting:
            self.moved_at = time.monotonic()

    def leave(self) -> None:
        """Nothing is watched any more."""
        self.left.set()
        self.guard.terminate()
        self.guard.wait()

    def _watch(self) -> None:
        while not self.left.wait(min(1.0, self.seconds / 10)):
            with suppress(OSError):  # it may have been killed
                self.guard.stdin.write(b".")
            with self.acting:
                idle, saver = time.monotonic() - self.moved_at, self.trainer.checkpoint_callback
                if idle < self.seconds:
                    continue
                if self.trainer.world_size == 1:
                    self._end(self._save(saver) if saver is not None and self._between_batches() else STOOD_STILL)
                if saver is None or idle > 2 * self.seconds:
                    self._end(STOOD_STILL)
                saver.asked_to_stop = True

    def _between_batches(self) -> bool:
        """Whether the run waits for images, so that nothing is half done and no average swapped in."""
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return self.trainer.training and batches.ready == batches.completed

    def _save(self, saver) -> int:
        """Save as after SIGTERM; the exit code."""
        late = threading.Timer(self.seconds, self._end, [STOOD_STILL])  # it may be the disk that stands still
        late.daemon = True
        late.start()
        saver.asked_to_stop = True
        try:
            saver.on_train_batch_start(self.trainer, self.module, None, 0)
        except SystemExit as ended:
            return ended.code
        except Exception as error:
            print(f"health: nothing was saved: {error}", file=sys.stderr, flush=True)
        return STOOD_STILL

    def _end(self, code: int) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident)
        where = traceback.extract_stack(frame)[-1]
        print(
            f"health: nothing has moved for {(time.monotonic() - self.moved_at) / 60:.3g} minutes in process "
            f"{self.trainer.global_rank}, which stands in {where.name} ({where.filename}:{where.lineno}); it ends with "
            f"exit code {code}, so that it can be started again",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(code)
