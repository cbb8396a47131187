"""Publishes the network that a run trains, for ensembles elsewhere."""

from lightning import Callback

from src import store as stores
from src.contract import contract_of, require_same
from src.engine import engine_of
from src.protocols import Described


class Publish(Callback):
    """Puts averaged weights and their card into a store, at validations every so many images, and at the last.

    During validation the averages are swapped in, so that what is published is what was scored.

    Args:
        store: a folder, or any URL of fsspec's.
        kind: such as "experts/3" or "router".
        every_kimg: how often; every validation at most.
        total_kimg: of the run, after which the last is published.
        keep: how many of the newest stay.
    """

    def __init__(self, store: str, kind: str, every_kimg: float, total_kimg: float, keep: int = 2):
        if keep < 1:
            raise ValueError(f"callbacks.publish.keep={keep}, but at least the newest has to stay")
        if kind.endswith("/None"):
            raise ValueError("expert=null is no expert to publish; set it to its cluster's number")
        self.store, self.kind, self.keep = store, kind, keep
        self.every_kimg, self.total_kimg = every_kimg, total_kimg
        self.published = 0  # images seen at the last one
        self.before = 0  # images that the weights had seen with which the run began
        self.config: dict = {}

    def about_run(self, config: dict, stamp: dict[str, str]) -> None:
        """The card names network, objective and precision (KnowsRun)."""
        self.config = config

    def setup(self, trainer, module, stage):
        if len(module.parallel_networks()) != 1:
            raise ValueError(
                f"{type(module).__name__} trains several networks, of which a store holds one; use ~callbacks.publish"
            )
        if trainer.limit_val_batches == 0:
            raise ValueError("what is published is what validation scores; let trainer.limit_val_batches be above 0")
        self.contract = contract_of(trainer.datamodule)
        if not trainer.is_global_zero:
            return
        older, _ = stores.newest(self.store, self.kind)
        place = f"{self.store}/{self.kind}"
        if older is None:
            return
        if self.config["name"] != older.get("run") and place != (self.config.get("start") or "").rstrip("/"):
            raise ValueError(
                f"{place} holds the network of another run, {older.get('run')}: go on from it with start={place}, or "
                "choose another store, or remove it"
            )
        require_same(self.contract, older["contract"], f"{place}, which is published already,")

    def on_train_start(self, trainer, module):
        if module.images_seen == 0:
            self.before = getattr(module, "images_before", 0)

    def on_validation_epoch_end(self, trainer, module):
        images, last = module.images_seen, module.images_seen >= self.total_kimg * 1000
        if images == self.published or not (last or images - self.published >= self.every_kimg * 1000):
            return
        self.published = images
        weights, (name,) = engine_of(trainer).weights(module), module.parallel_networks()  # by all processes together
        if trainer.is_global_zero:
            tensors = {k.removeprefix(f"{name}."): v for k, v in weights.items() if k.startswith(f"{name}.")}
            card = self._card(trainer, module)
            stores.publish(self.store, self.kind, self.before + images, tensors, card, self.keep)
            if last:
                print(f"Published after {self.before + images} images: {self.store}/{self.kind}", flush=True)

    def state_dict(self) -> dict:
        return {"published": self.published, "before": self.before}

    def load_state_dict(self, state: dict) -> None:
        self.published, self.before = state["published"], state["before"]

    def _card(self, trainer, module) -> dict:
        data, model = trainer.datamodule, self.config["model"]
        return {
            "k": data.cluster,
            "n_k": len(data.train),
            "contract": self.contract,
            "step": module.batches_seen,
            "objective": model.get("objective"),
            "network": model["network"],
            "label_dropout": model.get("label_dropout"),
            "precision": str(trainer.precision),
            "ema": self.config.get("callbacks", {}).get("ema"),
            "batch": self.config["batch"],
            "run": self.config["name"],
        } | (module.card() if isinstance(module, Described) else {})
