"""Takes a run that has gone wrong back to its last good checkpoint."""

from collections.abc import Callable
from pathlib import Path

import torch
from lightning import Callback

from src.schedule import due

NEVER = 2**62  # later than any batch


class Rollback(Callback):
    """Goes back when a metric has become bad, or a gradient is not finite, and on from there with other data.

    Weights, optimizers, averages and the clock are again those of the checkpoint; images go on after the bad stretch,
    so that order and noise differ from it, and every learning rate is multiplied by `lr_factor`. The checkpoint is
    changed to say so, and later ones are removed: a run that is started again goes on from there. A bad metric leads
    back to the best checkpoint, as callbacks.checkpoint.metric decides; a gradient that is not finite to the newest one
    before it.

    Args:
        metric: the first of these that is logged is watched; lower is better.
        factor: a value is bad above so many times that of the best checkpoint; None for never.
        patience: so many bad values in a row are one too many.
        bound: one value above it is, once the best is not; None for no bound.
        lr_factor: of all learning rates, each time.
        max_rollbacks: how often the run may go back.
        every_kimg: how often gradients are looked at, and rollback/count and rollback/lr_scale logged. They are looked
            at before every validation as well, and nothing is saved after one that is not finite.

    Raises ValueError where the run would have to go back once more, or has no checkpoint to go back to.
    """

    def __init__(
        self,
        metric: list[str],
        factor: float | None = 1.5,
        patience: int = 2,
        bound: float | None = None,
        lr_factor: float = 0.5,
        max_rollbacks: int = 3,
        every_kimg: float = 0.5,
    ):
        if unknown := [key for key in metric if not key.startswith("val/")]:
            raise ValueError(f"callbacks.rollback.metric names {unknown[0]}, but only val/... are kept with the best")
        if factor is not None and factor <= 1:
            raise ValueError(f"callbacks.rollback.factor={factor} must be greater than 1; null for never")
        if not 0 < lr_factor <= 1:
            raise ValueError(f"callbacks.rollback.lr_factor={lr_factor} must lie between 0 and 1")
        if patience < 1 or max_rollbacks < 1:
            raise ValueError(
                f"callbacks.rollback needs patience and max_rollbacks of at least 1, but has {patience} and "
                f"{max_rollbacks}"
            )
        self.metric, self.factor, self.patience, self.bound = list(metric), factor, patience, bound
        self.lr_factor, self.max_rollbacks, self.every_kimg = lr_factor, max_rollbacks, every_kimg
        self.count = 0
        self.bad = 0  # values in a row; counted by the first process, which knows the best

    def setup(self, trainer, module, stage):
        if trainer.checkpoint_callback is None:
            raise ValueError("callbacks.rollback has no checkpoints to go back to; add checkpoint to callbacks")

    def after_batch(self, trainer, module, go_back: Callable[..., Path | None]) -> bool:
        """Look at gradients, now and then; whether the run went back (RollsBack)."""
        validated = trainer.should_stop or module.batches_seen % trainer.val_check_batch == 0
        if not validated and not due(module.images_seen, module.images_per_batch, self.every_kimg):
            return False
        if self._agreed(trainer, module, None, go_back):
            return True
        module.report({"rollback/count": float(self.count), "rollback/lr_scale": module.lr_scale})
        return False

    def after_validation(self, trainer, module, best: dict | None, go_back: Callable[..., Path | None]) -> bool:
        """Look at the metric; whether the run went back (RollsBack)."""
        wrong = self._judge(trainer.callback_metrics, best) if trainer.is_global_zero and best is not None else None
        return self._agreed(trainer, module, wrong and (wrong, int(best["checkpoint"])), go_back)

    def _judge(self, metrics: dict, best: dict) -> str | None:
        """What is wrong with the newest value of the metric. One that is no number is bad."""
        key = next((key for key in self.metric if key in metrics), None)
        if key is None or key not in best:
            return None
        value, least = float(metrics[key]), best[key]
        bad = self.factor is not None and not value <= least + (self.factor - 1) * abs(least)
        self.bad = self.bad + 1 if bad else 0
        if self.bound is not None and least <= self.bound and not value <= self.bound:
            return f"{key} is {value:.4g}, but was within {self.bound:g} before"
        if self.bad >= self.patience:
            return f"{key} is {value:.4g}, after a best of {least:.4g} (bad {self.bad} times in a row)"
        return None

    def _agreed(self, trainer, module, wrong: tuple[str, int] | None, go_back: Callable[..., Path | None]) -> bool:
        """Go back where any process says that something is `wrong`: what, and until how many images nothing was."""
        first = int(module.first_bad)
        found = torch.tensor([first if first >= 0 else NEVER, int(wrong is None)], device=module.device)
        batch, right = trainer.strategy.reduce(found, reduce_op="min").tolist()
        if batch == NEVER and right:
            return False
        if batch < NEVER:
            images = module.images_seen - (module.batches_seen - batch) * module.images_per_batch
            wrong = f"the gradient of batch {batch} ({images / 1000:g} kimg) is not finite", images
        what, until = trainer.strategy.broadcast(wrong)
        if self.count == self.max_rollbacks:
            raise ValueError(
                f"{what}, and the run was rolled back {self.count} times already (callbacks.rollback.max_rollbacks); "
                f"lower a learning rate or set model.clip_norm"
            )
        gone, states = module.images_seen, {type(self).__name__: {"count": self.count + 1, "bad": 0}}
        folder = go_back(trainer, module, until, self.lr_factor, states)
        if folder is None:
            raise ValueError(
                f"{what}, and there is no checkpoint from before to go back to; lower a learning rate or set "
                f"model.clip_norm"
            )
        if trainer.is_global_zero:
            print(
                f"Rolled back from {gone / 1000:g} kimg to checkpoint {folder.name} ({module.images_seen / 1000:g} "
                f"kimg), time {self.count} of at most {self.max_rollbacks}: {what}; learning rates are now "
                f"{module.lr_scale:g} times what was set",
                flush=True,
            )
        return True

    def state_dict(self) -> dict:
        return {"count": self.count, "bad": self.bad}

    def load_state_dict(self, state: dict) -> None:
        self.count, self.bad = state["count"], state["bad"]
