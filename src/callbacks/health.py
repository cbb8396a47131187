"""Watches a run for what ruins it slowly: gradients, choices, waiting for images; and ends one that stands still."""

import math
import statistics
import time
from collections import deque
from typing import NamedTuple

import torch
from lightning import Callback
from torch import Tensor

from src.callbacks.watchdog import Watchdog

WATCHED = ("train/grad_norm_", "train/loss_layer", "train/choice_kl", "train/selection_rate")


class Bound(NamedTuple):
    """The lowest and the highest that a value may be, the setting that says so, and what may help."""

    low: float | None
    high: float | None
    setting: str
    advice: str


class Health(Callback):
    """Looks every `check_every` batches, logs what it sees as health/..., and says once what is out of bounds.

    What steps return is averaged on the device since the last look, and over all processes, so that nothing waits for
    the device in between. Times are the host's: a step lasts from the end of a batch to the end of the next, and waits
    until that one's start; validation is not counted. Of several processes, times and memory are those of the one with
    most, the device's use that of the one with least. A bound of None is none.

    Args:
        check_every: batches from one look to the next.
        gradient_norm: network name -> lowest and highest norm, before clipping; networks without a name here have none.
        choice_kl: highest train/choice_kl, in nats (DDN).
        selection_rate: lowest and highest train/selection_rate (DDN).
        layer_loss: highest loss of a layer, as a multiple of the median of all other layers'.
        loader_wait: highest share of the time that is spent waiting for images.
        slow_step: a step is slow that takes so many times the median of the last thousand ...
        slow_steps: ... and this share of them may be.
        device_utilisation: lowest share of the time that a GPU is at work, which needs `pip install nvidia-ml-py`.
        device_memory: highest share of a GPU's memory that was ever reserved.
        stop_when_idle_minutes: a run in which for so long no batch has begun or ended, of training or validation, ends
            as Watchdog says, so that an agent can start it again. Longer than anything between two batches takes:
            saving, scores, the compiler; None for never.

    Raises ValueError for cadences that are not positive, and for bounds that are no pair.
    """

    def __init__(
        self,
        check_every: int = 100,
        gradient_norm: dict[str, list[float] | None] | None = None,
        choice_kl: float | None = None,
        selection_rate: list[float] | None = None,
        layer_loss: float | None = None,
        loader_wait: float | None = None,
        slow_step: float = 3.0,
        slow_steps: float | None = None,
        device_utilisation: float | None = None,
        device_memory: float | None = None,
        stop_when_idle_minutes: float | None = None,
    ):
        for name, value in dict(check_every=check_every, stop_when_idle_minutes=stop_when_idle_minutes).items():
            if value is not None and value <= 0:
                raise ValueError(f"callbacks.health.{name}={value} must be greater than 0")
        self.check_every, self.slow_step, self.idle_minutes = check_every, slow_step, stop_when_idle_minutes
        leaves = "give model.halflife_kimg a value, or fewer leaves"
        self.bounds = {
            f"grad_norm_{name}": _band(f"gradient_norm.{name}", band, "look at the learning rate and at the loss")
            for name, band in (gradient_norm or {}).items()
        }
        self.bounds |= {
            "choice_kl": Bound(None, choice_kl, "choice_kl", leaves),
            "selection_rate": _band("selection_rate", selection_rate, leaves),
            "layer_loss": Bound(None, layer_loss, "layer_loss", "see train/loss_layer/... for which layer it is"),
            "loader_wait": Bound(None, loader_wait, "loader_wait", "raise data.workers"),
            "slow_steps": Bound(None, slow_steps, "slow_steps", "look for what else runs on this machine"),
            "device_utilisation": Bound(
                device_utilisation, None, "device_utilisation", "raise data.workers, batch or micro_batch"
            ),
            "device_memory": Bound(None, device_memory, "device_memory", "lower micro_batch"),
        }
        self.said: set[str] = set()
        self.recent: deque[float] = deque(maxlen=1000)  # seconds of steps
        self.ended_at: float | None = None  # when the last batch did, put off by what is not counted
        self.watchdog: Watchdog | None = None
        self._begin()

    def on_train_start(self, trainer, module):
        if self.idle_minutes is not None:
            self.watchdog = Watchdog(trainer, module, 60 * self.idle_minutes)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._moved()
        if self.ended_at is not None:
            self.waits.append(time.perf_counter() - self.ended_at)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self._moved()
        if self.ended_at is not None:
            self.steps.append(time.perf_counter() - self.ended_at)
        for key, value in outputs.items():
            if key.startswith(WATCHED):
                self.sums[key] = self.sums.get(key, 0) + value.detach().float()
        self.batches += 1
        if module.batches_seen % self.check_every == 0:
            self._look(trainer, module)
            self._begin()
        self.ended_at = time.perf_counter()

    def on_validation_start(self, trainer, module):
        self._moved()
        self.paused_at = time.perf_counter()

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self._moved()

    def on_validation_end(self, trainer, module):
        self._moved()
        if self.ended_at is not None:
            self.ended_at += time.perf_counter() - self.paused_at

    def on_train_end(self, trainer, module):
        self._leave()

    def on_exception(self, trainer, module, exception):
        self._leave()

    def _moved(self) -> None:
        if self.watchdog is not None:
            self.watchdog.moved()

    def _leave(self) -> None:
        if self.watchdog is not None:
            self.watchdog.leave()

    def _begin(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.batches, self.steps, self.waits = 0, [], []

    def _look(self, trainer, module) -> None:
        """One sum over all processes, which come to it after the same batch; then the same on each of them."""
        device, here = module.device, self._measured(module.device)
        mine = [torch.tensor(list(here.values()), device=device)]
        mine = torch.cat(mine + [total.reshape(-1) / self.batches for total in self.sums.values()])
        rows = mine.new_zeros(trainer.world_size, len(mine))
        rows[trainer.global_rank] = mine
        rows = trainer.strategy.reduce(rows, reduce_op="sum").cpu()
        found = {}
        for key, values in zip(here, rows.T.tolist(), strict=False):  # -1 where it is not known
            if min(values) >= 0:
                found[key] = min(values) if key == "device_utilisation" else max(values)
        sizes = [len(here), *(total.numel() for total in self.sums.values())]
        for key, values in zip(self.sums, rows.mean(0).split(sizes)[1:], strict=True):
            if key == "train/loss_layer":
                found["layer_loss"] = _worst(values.tolist())
            else:
                found[key.removeprefix("train/")] = float(values)
        outside = [key for key, value in found.items() if key in self.bounds and not self._inside(key, value)]
        for key in outside:
            if key not in self.said and trainer.is_global_zero:
                print(f"health, at {module.images_seen / 1000:g} kimg: {self._sentence(key, found[key])}", flush=True)
        self.said.update(outside)
        module.report({f"health/{key}": value for key, value in (found | {"outside": len(outside)}).items()})

    def _measured(self, device: torch.device) -> dict[str, float]:
        """What this process sees for itself; -1 where it is not known."""
        self.recent.extend(self.steps)
        median = statistics.median(self.recent) if self.recent else -1.0
        slow = sum(seconds > self.slow_step * median for seconds in self.steps)
        return {
            "step_seconds": median,
            "slowest_step_seconds": max(self.steps, default=-1.0),
            "slow_steps": slow / len(self.steps) if self.steps else -1.0,
            "loader_wait": sum(self.waits) / sum(self.steps) if self.steps else -1.0,
            "device_utilisation": _utilisation(device),
            "device_memory": _memory(device),
        }

    def _inside(self, key: str, value: float) -> bool:
        low, high, *_ = self.bounds[key]
        if low is None and high is None:
            return True
        return math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)

    def _sentence(self, key: str, value: float) -> str:
        low, high, setting, advice = self.bounds[key]
        ends = [f"{word} {end:g}" for word, end in (("at least", low), ("at most", high)) if end is not None]
        return f"{key} is {value:.3g}, but callbacks.health.{setting} wants {' and '.join(ends)}; {advice}"


def _band(name: str, band: list[float] | None, advice: str) -> Bound:
    if band is None:
        return Bound(None, None, name, advice)
    if len(band) != 2 or band[0] > band[1]:
        raise ValueError(f"callbacks.health.{name}={list(band)} must be the lowest and the highest value, or null")
    return Bound(*band, name, advice)


def _worst(losses: list[float]) -> float:
    """The highest ratio of a layer's loss to the median of all others; infinite where a loss is not finite."""
    if not all(math.isfinite(loss) for loss in losses):
        return math.inf
    if len(losses) < 2:
        return 1.0
    highest, *others = sorted(losses, reverse=True)
    median = statistics.median(others)
    return highest / median if median > 0 else 1.0


def _utilisation(device: torch.device) -> float:
    """Share of the last moments in which the GPU was at work; -1 where there is none, or nothing that tells."""
    if device.type != "cuda":
        return -1.0
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # pynvml is missing, or raises errors of its own on drivers and slices that do not tell
        return -1.0


def _memory(device: torch.device) -> float:
    """Highest share of the GPU's memory that was reserved so far; -1 where there is none."""
    if device.type != "cuda":
        return -1.0
    return torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory
