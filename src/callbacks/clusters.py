"""How well an expert knows the images of each cluster, its own and the others'."""

import torch
from lightning import Callback

from src.protocols import Batch, MeasuresErrors


class Clusters(Callback):
    """Held-out squared error of the velocity by cluster, before the first batch and at every validation.

    Logged as val/error for the run's own images, val/error_cluster/00 and so on for all; where data has no clusters,
    val/error alone. Errors of runs compare: each image always has the same noise and time. A run that began with
    published weights (`start`) ends with a table of what was gained and what was lost.

    Args:
        batch: images at once.
    """

    def __init__(self, batch: int = 250):
        self.batch = batch
        self.before: list[float] | None = None

    def setup(self, trainer, module, stage):
        if not isinstance(module, MeasuresErrors):
            raise ValueError(
                f"{type(module).__name__} has no error that experts could be compared by; use ~callbacks.clusters"
            )

    def on_train_start(self, trainer, module):
        if module.images_seen == 0:
            self.before = self._found(trainer, module)[1]

    def on_validation_epoch_end(self, trainer, module):
        own, self.now = self._found(trainer, module)
        module.report({"val/error": own} | {f"val/error_cluster/{k:02d}": e for k, e in enumerate(self.now)})

    def on_train_end(self, trainer, module):
        if self.before and trainer.is_global_zero:
            print("Held-out error of the velocity, before -> after")
            for k, (before, after) in enumerate(zip(self.before, self.now, strict=True)):
                mine = "  (trained on)" if trainer.datamodule.cluster in (None, k) else ""
                print(f"  cluster {k}  {before:.4f} -> {after:.4f}{mine}")

    def state_dict(self) -> dict:
        return {"before": self.before}

    def load_state_dict(self, state: dict) -> None:
        self.before = state["before"]

    @torch.no_grad()
    def _found(self, trainer, module) -> tuple[float, list[float]]:
        """The mean error of the run's own held-out images, and of each cluster's."""
        data = trainer.datamodule
        images = data.all_held_out
        errors = []
        was_training = module.training
        module.eval()
        for start in range(0, len(images), self.batch):
            part = images[range(start, min(start + self.batch, len(images)))]
            batch = Batch(data.as_seen(part.images.to(module.device)), part.labels.to(module.device), start)
            errors.append(module.error(batch).cpu())
        module.train(was_training)
        errors = torch.cat(errors).double()
        if images.clusters is None:
            return errors.mean().item(), []
        clusters = torch.from_numpy(images.clusters).long()
        by_cluster = [errors[clusters == k].mean().item() for k in range(int(clusters.max()) + 1)]
        return by_cluster[data.cluster] if data.cluster is not None else errors.mean().item(), by_cluster
