"""Fits a router's temperatures on held-out images, and says how far its probabilities can be trusted."""

import json
from pathlib import Path

import torch
from lightning import Callback

from src.calibration import calibrated, draw, prior_scores, scores
from src.files import replacing


class Calibration(Callback):
    """At each validation's last batch: temperatures from one half of the held-out images, scores from the other.

    The module's `calibration` is theirs from then on, before anything is published. Logged as val/cross_entropy,
    val/accuracy and val/calibration_error, means over the noise bins; all bins are in router.json and router.png.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_validation_start(self, trainer, module):
        self.seen = []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append({key: outputs[key].to(module.device) for key in ("logits", "t", "clusters", "numbers")})
        if batch_idx + 1 < trainer.num_val_batches[0]:
            return
        seen = {key: torch.cat([part[key] for part in self.seen]) for key in self.seen[0]}
        if trainer.world_size > 1:
            seen = {key: value.flatten(0, 1) for key, value in module.all_gather(seen).items()}
        seen = {key: value[seen["numbers"] < len(trainer.datamodule.held_out)].cpu() for key, value in seen.items()}
        order = seen.pop("numbers").argsort()
        logits, t, clusters = (seen[key][order] for key in ("logits", "t", "clusters"))
        module.calibration = calibrated(logits[::2], clusters[::2], module.smoothing)
        plain = type(module.calibration)((1.0,) * module.bins, module.smoothing)
        judged = logits[1::2], t[1::2], clusters[1::2]
        self.found = {
            "images": len(clusters),
            "kimg": module.images_seen / 1000,
            "temperatures": list(module.calibration.temperatures),
            "fitted": scores(*judged, module.calibration),
            "trained": scores(*judged, plain),
            "prior": prior_scores(module.counts, judged[2]),
        }

    def on_validation_epoch_end(self, trainer, module):
        fitted = self.found["fitted"]
        module.report({f"val/{key}": sum(score[key] for score in fitted) / len(fitted) for key in fitted[0]})
        if trainer.is_global_zero:
            self._write("router.json", lambda part: part.write_text(json.dumps(self.found, indent=1)))
            self._write("router.png", lambda part: draw(part, self.found))

    def on_train_end(self, trainer, module):
        if not trainer.is_global_zero:
            return
        prior = self.found["prior"]
        print("Router on held-out images: t, accuracy, cross-entropy, calibration error, temperature")
        for number, (score, temperature) in enumerate(
            zip(self.found["fitted"], self.found["temperatures"], strict=True)
        ):
            told = f"{score['accuracy']:.3f}  {score['cross_entropy']:.3f}  {score['calibration_error']:.3f}"
            print(f"  {(number + 0.5) / module.bins:.2f}  {told}  {temperature:.2f}")
        print(f"  clusters' shares alone: accuracy {prior['accuracy']:.3f}, cross-entropy {prior['cross_entropy']:.3f}")
        print(f"Plot              {self.folder / 'router.png'}", flush=True)

    def _write(self, name: str, write) -> None:
        with replacing(self.folder / name) as part:
            write(part)
