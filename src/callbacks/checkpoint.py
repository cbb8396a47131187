"""Saves and resumes; the one owner of checkpoints."""

import shutil
import signal
import time
from functools import partial
from math import isfinite
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Checkpoint as LastInLine  # Lightning calls these after all other callbacks
from lightning.pytorch.utilities import rank_zero_only

from src import checkpoint as canonical
from src.background import Writer, copied
from src.engine import engine_of
from src.native import read_parts, write_parts
from src.protocols import Rewinds, RollsBack
from src.schedule import due


class Checkpoint(LastInLine):
    """Canonical checkpoints of a run: the newest, the best by a metric, and every so many images for good.

    Saving happens between two batches and after validation, so that nothing is half done and no average swapped in. At
    the start the newest checkpoint that verifies is loaded, if there is one: the same command continues. SIGTERM, and
    SIGUSR1, SLURM's warning, save after the batch in progress and exit with 143. Training goes on when a checkpoint
    cannot be written, and ends with the reason if the last one cannot.

    Args:
        folder: of the run.
        every_kimg: how often the newest is written.
        every_minutes: how often at the latest.
        keep: how many of the newest stay.
        archive_every_kimg: those at multiples of it stay for good.
        metric: the first of these that is logged decides which is best; lower is better.
        native: every process writes what it keeps, so that none needs memory for all of a network; for engines that
            keep tensors in parts. Such checkpoints are read by the same engine alone, until `prepare.py
            task=consolidate` makes them canonical.
        background: training waits only until the state is copied to host memory; a thread writes it. Native
            checkpoints are written by all processes together, while training waits.
    """

    def __init__(
        self,
        folder: str,
        every_kimg: float,
        every_minutes: float | None = None,
        keep: int = 1,
        archive_every_kimg: float | None = None,
        metric: list[str] | None = None,
        native: bool = False,
        background: bool = True,
    ):
        if keep < 1:
            raise ValueError(f"callbacks.checkpoint.keep={keep}, but at least the newest has to stay")
        self.folder, self.keep, self.metric = Path(folder) / "checkpoints", keep, list(metric or [])
        self.every_kimg, self.every_minutes, self.archive_every_kimg = every_kimg, every_minutes, archive_every_kimg
        self.native, self.background, self.writer = native, background and not native, Writer()
        self.config: dict = {}
        self.stamp: dict[str, str] = {}
        self.asked_to_stop = False

    def about_run(self, config: dict, stamp: dict[str, str]) -> None:
        """Both are kept in every checkpoint (KnowsRun)."""
        self.config, self.stamp = config, stamp

    def setup(self, trainer, module, stage):
        if self.native and engine_of(trainer).native is None:
            raise ValueError(
                "callbacks.checkpoint.native=true is for engines that keep tensors in parts (fsdp, hsdp, "
                "deepspeed_zero1 to 3), which this one does not; set it to false"
            )

    def on_fit_start(self, trainer, module):
        self._resume(trainer, module)
        self.saved, self.saved_at = module.images_seen, time.monotonic()

    def on_train_start(self, trainer, module):
        # after Lightning's, which would end in the middle
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        """Between two batches, the validation behind us."""
        stop, late = self._agreed(trainer, module)
        if stop:
            self._save_last(trainer, module)
            trainer.strategy.barrier("saved")
            raise SystemExit(143)
        if late or self._is_due(module):
            self._save(trainer, module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if any(c.after_batch(trainer, module, self.go_back) for c in trainer.callbacks if isinstance(c, RollsBack)):
            trainer.fit_loop.epoch_loop._skip_next_val = True  # one that is due there lies behind the checkpoint

    def on_validation_end(self, trainer, module):
        self.writer.wait()  # it may be writing the best
        value, metrics = self._value(trainer), self._metrics(trainer)
        best = canonical.read_best(self.folder)
        watching = [c for c in trainer.callbacks if isinstance(c, RollsBack)]
        if any(c.after_validation(trainer, module, best, self.go_back) for c in watching):
            return
        better = value is not None and isfinite(value) and (best is None or value < best["value"])
        if trainer.strategy.broadcast(better):  # the first process decides: others may not see its files
            self._save(trainer, module, {"value": value, **metrics})

    def on_train_end(self, trainer, module):
        self._save_last(trainer, module)

    def teardown(self, trainer, module, stage):
        self.writer.wait()
        for number, handler in getattr(self, "_before", {}).items():
            signal.signal(number, handler)

    def _stop(self, signum, frame) -> None:
        self.asked_to_stop = True

    def _agreed(self, trainer, module) -> tuple[bool, bool]:
        """Whether any process was asked to stop, and whether any clock says that the newest checkpoint is old."""
        late = self.every_minutes is not None and time.monotonic() - self.saved_at > 60 * self.every_minutes
        late = late and module.images_seen > self.saved
        if trainer.world_size == 1:
            return self.asked_to_stop, late
        flags = torch.tensor([float(self.asked_to_stop), float(late)], device=module.device)
        stop, late = trainer.strategy.reduce(flags, reduce_op="sum").tolist()
        return stop > 0, late > 0

    def _is_due(self, module) -> bool:
        if module.images_seen <= self.saved:
            return False
        batch = module.images_per_batch
        archived = due(module.images_seen, batch, self.archive_every_kimg)
        return archived or due(module.images_seen, batch, self.every_kimg)

    def _value(self, trainer) -> float | None:
        found = [float(trainer.callback_metrics[key]) for key in self.metric if key in trainer.callback_metrics]
        return found[0] if found else None

    def _metrics(self, trainer) -> dict[str, float]:
        return {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}

    def _save_last(self, trainer, module) -> None:
        """Have the newest state on disk. Raises OSError, in all processes, where it cannot be written."""
        if module.images_seen > self.saved or trainer.strategy.broadcast(self.writer.wait() is not None):
            self._save(trainer, module)
        if why := trainer.strategy.broadcast(str(self.writer.wait() or "")):
            raise OSError(why)

    def _save(self, trainer, module, best: dict | None = None) -> None:
        """A checkpoint of this moment, which becomes the best one with these values."""
        if not module.require_finite():
            return
        folder = canonical.folder_of(self.folder, module.images_seen)
        self.saved, self.saved_at = module.images_seen, time.monotonic()
        try:
            state = self._parts(trainer, module, folder) if self.native else self._tensors(trainer, module)
        except OSError as error:  # in all processes
            self.writer.failed(error, tell=trainer.is_global_zero)
            return
        state |= {
            "position": {
                "images": module.images_seen,
                "batches": module.batches_seen,
                "data_offset": module.data_offset,
                "lr_scale": module.lr_scale,
            },
            "metrics": self._metrics(trainer),
            "config": self.config,
        }
        if trainer.is_global_zero:
            self.writer.wait()  # so that only one copy is in memory
            task = partial(self._write, folder, copied(state) if self.background else state, best)
            self.writer.begin(task)
            if not self.background:
                self.writer.wait()

    def _parts(self, trainer, module, folder: Path) -> dict:
        """Write what every process keeps; the rest of the state. Raises OSError, in all of them, where one cannot."""
        engine, why = engine_of(trainer), ""
        if trainer.is_global_zero:
            try:
                canonical.begin(folder)
            except OSError as error:
                why = str(error)
        if why := trainer.strategy.broadcast(why):
            raise OSError(why)
        with engine.in_parts():
            return write_parts(folder, self._tensors(trainer, module), engine.native)

    def _write(self, folder: Path, state: dict, best: dict | None) -> None:
        canonical.write(folder, state, self.stamp)
        if best is not None:
            canonical.write_best(self.folder, {"checkpoint": folder.name, **best})
        self._prune(int(folder.name))

    def _tensors(self, trainer, module) -> dict:
        """Weights, and the states of optimizers and callbacks; all processes call it together."""
        engine, optimizers = engine_of(trainer), module.named_optimizers()
        return {
            "weights": engine.weights(module),
            "optimizers": {
                name: engine.optimizer_state(network, optimizers[name].optimizer)
                for name, network in module.parallel_networks().items()
            },
            "callbacks": {
                type(c).__name__: kept for c in trainer.callbacks if c is not self and (kept := c.state_dict())
            },
        }

    def _prune(self, images: int) -> None:
        best = (canonical.read_best(self.folder) or {}).get("checkpoint")
        there = [path for path in canonical.committed(self.folder) if int(path.name) <= images]  # later ones are broken
        for old in there[: -self.keep]:
            every = self.archive_every_kimg and round(self.archive_every_kimg * 1000)
            archived = every and int(old.name) // every > (int(old.name) - self.config.get("batch", 1)) // every
            if old.name != best and not archived:
                shutil.rmtree(old)

    def _resume(self, trainer, module) -> None:
        choice = [None]
        if trainer.is_global_zero:
            for part in self.folder.glob("*.tmp"):  # of a process that was killed while it saved
                shutil.rmtree(part)
            found, rejected = canonical.newest(self.folder)
            for line in rejected:
                print(line)
            best = canonical.read_best(self.folder)
            if best is not None and canonical.fault(self.folder / best["checkpoint"]) is not None:
                (self.folder / canonical.BEST).unlink()  # its score will be reached again, and saved again
            choice = [str(found) if found else None]
        folder = trainer.strategy.broadcast(choice)[0]
        self._restore(trainer, module, Path(folder) if folder else None)
        if folder is not None:
            rank_zero_only(print)(
                f"Continuing from checkpoint {Path(folder).name} ({module.images_seen / 1000:g} kimg)"
            )

    def go_back(self, trainer, module, until: int, lr_factor: float, states: dict[str, dict]) -> Path | None:
        """See RollsBack. Later checkpoints are removed before the older one is changed, so that a process that is
        killed in between leaves none of them to continue from."""
        choice = [None]
        self.writer.wait()
        if trainer.is_global_zero and (found := canonical.newest(self.folder, until)[0]) is not None:
            upcoming = module.images_seen + module.data_offset
            position = {"data_offset": upcoming - int(found.name), "lr_scale": module.lr_scale * lr_factor}
            for later in (path for path in canonical.committed(self.folder) if path.name > found.name):
                shutil.rmtree(later)
            if (best := canonical.read_best(self.folder)) and best["checkpoint"] > found.name:
                (self.folder / canonical.BEST).unlink()
            canonical.amend(found, {"position": position, "callbacks": states})
            choice = [str(found)]
        folder = trainer.strategy.broadcast(choice)[0]
        if folder is None:
            return None
        self._restore(trainer, module, Path(folder))
        self.saved, self.saved_at = module.images_seen, time.monotonic()
        trainer.should_stop = False
        trainer.callback_metrics.clear()
        trainer.train_dataloader.sampler.start = trainer.datamodule.position
        iter(trainer.fit_loop._data_fetcher)  # what it had fetched ahead is dropped
        return Path(folder)

    def _restore(self, trainer, module, folder: Path | None) -> None:
        """The run as it was when this checkpoint was written, or at its start."""
        position = {"images": 0, "batches": 0, "data_offset": 0, "lr_scale": 1.0}
        if folder is not None:
            engine, networks = engine_of(trainer), module.parallel_networks()
            state = canonical.state_of(folder, engine.native)  # the first process has verified it
            position |= state["position"]
            engine.load_weights(module, state["weights"], f"checkpoint {folder}")
            for name, optimizer in module.named_optimizers().items():
                engine.load_optimizer(networks[name], optimizer.optimizer, state["optimizers"][name])
            for callback in trainer.callbacks:
                if type(callback).__name__ in state["callbacks"]:
                    callback.load_state_dict(state["callbacks"][type(callback).__name__])
            if "native" in state:
                with engine.in_parts():
                    read_parts(folder, state, self._tensors(trainer, module))
                engine.parts_read(module)
        module.images_seen, module.batches_seen = position["images"], position["batches"]
        module.data_offset, module.lr_scale = position["data_offset"], position["lr_scale"]
        module.first_bad.fill_(-1)
        trainer.datamodule.position = position["images"] + position["data_offset"]
        progress = trainer.fit_loop.epoch_loop.batch_progress.total
        progress.ready = progress.started = progress.processed = progress.completed = position["batches"]
        for logger in trainer.loggers:
            if isinstance(logger, Rewinds):
                logger.rewind(position["batches"])
