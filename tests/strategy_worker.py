"""Trains small models under the engines that its command line names; one of several processes, or the only one.

`python strategy_worker.py PRECISION FOLDER CASE...` with cases model/strategy/micro_batch/kimg, behind which may come
/label, to tell cases apart, and ,setting=value any number of times. Each writes the checkpoints of an ordinary run
below FOLDER/model-strategy-micro_batch-label and goes on from what lies there. hsdp is meant with two replicas,
pipeline and tensor_parallel with two processes for each copy. With `refused` instead of cases it writes down what is
said to settings that are refused.
PRECISION is 64, or 32 for DeepSpeed, which cannot do more: then without layers that begin near zero and with a larger
epsilon, so that Adam does not make whole steps of rounding errors.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from conftest import TINY, compose_config

import src.run
from src.datamodules.base import ImageData
from src.noise import Noise

SHARED = [
    "batch=8",
    "schedule_kimg=0.04",
    "val_every_kimg=0.016",  # with the averages in the place of the weights
    "data.val_batch=4",
    "+trainer.limit_val_batches=1",
    "callbacks.ema.rampup=null",
    "callbacks.checkpoint.every_kimg=0.024",
    "callbacks.checkpoint.keep=9",
    "callbacks.checkpoint.every_minutes=null",
    "callbacks.metrics.every_kimg=0.008",
    "logger=[csv]",
    "metric=[]",
    "model.clip_norm=0.05",
    "callbacks.ema.halflife_kimg=0.02",
    "trainer.accelerator=cpu",
]
LARGER_EPSILON = {
    "ddn": ["+model.optimizer.eps=1e-3", "model.clip_norm=null"],
    "expert": ["+model.optimizer.eps=1e-3"],
    "ddgan": ["+model.optimizer_generator.eps=1e-3", "+model.optimizer_discriminator.eps=1e-3"],
}
GAN = [
    "model=ddgan",
    "data=emoji32",
    "callbacks=[budget,ema,r1,metrics,checkpoint]",
    "model.generator.width=8",
    "model.generator.multipliers=[1,2]",
    "model.generator.blocks=1",
    "model.generator.z_dim=4",
    "model.generator.z_width=8",
    "model.generator.z_layers=1",
    "model.discriminator.width=4",
    "model.discriminator.time_width=8",
    "model.discriminator.group=2",
    "callbacks.r1.gamma=0.5",
]
MODELS = {
    "ddn": [*TINY, "data=emoji32", "callbacks=[budget,ema,metrics,checkpoint]", "model.schedule.warmup_kimg=0"],
    "ddgan": [*GAN, "callbacks.r1.interval=1"],
    "ddgan_lazy": [*GAN, "callbacks.r1.interval=2"],
    "expert": [
        "model=expert",
        "data=emoji32",
        "callbacks=[budget,ema,metrics,checkpoint]",
        "model.network.width=16",
        "model.network.depth=2",
        "model.network.heads=2",
        "model.optimizer.lr=1e-3",
        "model.steps=2",
    ],
}


def in_doubles() -> None:
    """Everything in float64: what asks for float32 to be precise enough keeps its float64."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else x.to(torch.float32)
    src.run.PRECISIONS = ("64-true",)
    drawn, seen = Noise._draw, ImageData.as_seen
    Noise._draw = lambda self, *what: drawn(self, *what).to(torch.float64)
    ImageData.as_seen = lambda self, images: seen(self, images.to(torch.float64))


def without_small_layers() -> None:
    """Layers that begin near zero begin as the others do."""
    torch.set_num_threads(1)
    build = src.run.build_model

    def built(config):
        model = build(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for parameter in model.parameters():
                if parameter.dim() > 1 and parameter.abs().max() < 1e-2:
                    torch.nn.init.xavier_uniform_(parameter.data)
        return model

    src.run.build_model = built


def refused(folder: Path) -> None:
    """What is said to each list of settings in FOLDER/words.json -> FOLDER/said.json."""
    said = []
    for number, words in enumerate(json.loads((folder / "words.json").read_text())):
        try:
            src.run.train(compose_config(folder / str(number), *words, "trainer.accelerator=cpu"))
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    (folder / "said.json").write_text(json.dumps(said))


def main(precision: str, folder: Path, words: list[str]) -> None:
    if words == ["refused"]:
        return refused(folder)
    if precision == "64":
        in_doubles()
    else:
        without_small_layers()
    for word in words:
        case, *more = word.split(",")
        model, strategy, micro_batch, kimg, *label = case.split("/")
        place = folder / "-".join([model, strategy, micro_batch, *label])
        words = [*MODELS[model], *SHARED, f"micro_batch={micro_batch}", f"total_kimg={kimg}", f"strategy={strategy}"]
        words += [f"trainer.devices={os.environ.get('WORLD_SIZE', 1)}", f"name={model}"]
        words += [f"trainer.precision={precision}-true", *(["strategy.replicas=2"] if strategy == "hsdp" else [])]
        if strategy == "pipeline":
            words += ["strategy.stages=2", "strategy.micro_batches=2"]
        if strategy == "tensor_parallel":
            words.append("strategy.tensor=2")
        if (model, strategy) == ("ddgan", "deepspeed_zero3"):  # even the smallest parameters in parts
            words.append("+strategy.zero.stage3_param_persistence_threshold=0")
        if precision == "32":
            words += LARGER_EPSILON[model.removesuffix("_lazy")]
        try:
            src.run.train(compose_config(place, *words, *more))
        except Exception:
            place.mkdir(parents=True, exist_ok=True)
            (place / f"error{os.environ.get('RANK', 0)}.txt").write_text(traceback.format_exc())
            raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
