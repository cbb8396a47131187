"""Runs that go wrong and go back: to which checkpoint, on which images, how fast, and how often."""

import os
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from conftest import compose_config
from test_checkpoint import same, written
from test_ddn_training import BATCH, SMALL, Watching, built, fit, read_rows

from src import checkpoint as canonical
from src.callbacks.checkpoint import Checkpoint
from src.callbacks.ema import EMA
from src.callbacks.metrics import Metrics
from src.callbacks.rollback import Rollback
from src.config import ROOT
from src.loggers.csv import MetricsLog

NAN = float("nan")
LOOK = BATCH / 1000  # after every batch


class Scores(lightning.Callback):
    """A score for each validation, by its batch number and whether the run has gone back by then."""

    def __init__(self, first, again=(), *, every=2):
        self.scores = {(False, every * n): score for n, score in enumerate(first, 1)}
        self.scores |= {(True, batch): score for batch, score in dict(again).items()}

    def on_validation_epoch_end(self, trainer, module):
        module.report({"val/score": self.scores[module.lr_scale < 1, module.batches_seen]})


class Seen:
    """What each batch began with."""

    def __init__(self, poison=(), stop=None):
        self.poison, self.stop, self.batches = poison, stop, []

    def __call__(self, module, batch):
        ema = next(c for c in module.trainer.callbacks if isinstance(c, EMA))
        optimizer = module.named_optimizers()["decoder"]
        state = {
            "weights": {k: v.clone() for k, v in module.state_dict().items()},
            "moments": canonical.optimizer_state(module.decoder, optimizer.optimizer),
            "averages": {k: v.clone() for k, v in ema.averages.items()},
        }
        state["moments"] = {n: {k: v.clone() for k, v in kept.items()} for n, kept in state["moments"].items()}
        self.batches.append((module.batches_seen, batch.first // BATCH, state))
        if batch.first // BATCH == self.stop:
            raise RuntimeError("killed")
        if batch.first // BATCH in self.poison:
            batch.images[0, 0, 0, 0] = torch.nan

    @property
    def numbers(self):
        return [(done, first) for done, first, _ in self.batches]


def run(config, folder, batches, rollback, scores=None, poison=(), stop=None, every=1):
    """Train a tiny DDN; what its batches began with, their learning rates, and the module."""
    module, data = built(config)
    seen, rates = Seen(poison, stop), []
    rate = Watching(seen, lambda module, _: rates.append(module.named_optimizers()["decoder"].param_groups[0]["lr"]))
    saving = Checkpoint(str(folder), every_kimg=every * LOOK, keep=9, metric=["val/score"])
    # the order in which they are given does not matter
    callbacks = [rollback, saving, rate, *([scores] if scores else []), Metrics(every_kimg=LOOK), EMA(halflife_kimg=1)]
    options = dict(logger=MetricsLog(str(folder)), val_every=2 if scores else None, default_root_dir=folder)
    try:
        fit(module, data, batches, *callbacks, **options)
    except RuntimeError as error:
        assert str(error) == "killed"
    return seen, rates, module


def at(folder, batches):
    return canonical.read(canonical.folder_of(folder / "checkpoints", batches * BATCH))


def test_a_metric_that_stays_bad_leads_back_to_the_best_and_on_with_other_images(composed, tmp_path, capsys):
    """Also where the last validation is the second bad one, at which the run would have ended."""
    scores = Scores([3.0, 1.0, 1.6, 1.6], {6: 0.9, 8: 1.2})
    seen, rates, _ = run(composed(*SMALL), tmp_path, 8, Rollback(["val/none", "val/score"]), scores)
    assert seen.numbers == [(n, n) for n in range(8)] + [(n, n + 4) for n in range(4, 8)]
    assert same(seen.batches[8][2], seen.batches[4][2]) and not same(seen.batches[7][2], seen.batches[4][2])
    assert rates[8:] == [rate / 2 for rate in rates[4:8]] and rates[4] > 0
    end = at(tmp_path, 8)
    assert end["position"] == {"images": 96, "batches": 8, "data_offset": 48, "lr_scale": 0.5}
    assert end["callbacks"]["Rollback"] == {"count": 1, "bad": 0}
    assert canonical.read_best(tmp_path / "checkpoints")["value"] == pytest.approx(0.9)
    assert at(tmp_path, 4)["position"]["data_offset"] == 48
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Rolled back")]
    assert lines == [
        "Rolled back from 0.096 kimg to checkpoint 000000000048 (0.048 kimg), time 1 of at most 3: val/score is 1.6, "
        "after a best of 1 (bad 2 times in a row); learning rates are now 0.5 times what was set"
    ]
    rows = [(int(b), float(v)) for b, _, metric, v in read_rows(tmp_path)[1:] if metric == "rollback/lr_scale"]
    assert rows == [(2, 1.0), (4, 1.0), (6, 0.5), (8, 0.5)]


def test_one_value_beyond_a_bound_that_was_met_is_enough(composed, tmp_path):
    rollback = Rollback(["val/score"], factor=None, bound=20)
    scores = Scores([30.0, 25.0, 19.0, 21.0], {8: 18.0})
    seen, _, _ = run(composed(*SMALL), tmp_path, 8, rollback, scores)
    assert seen.numbers[8:] == [(6, 8), (7, 9)]


def test_bad_values_that_do_not_follow_one_another_are_no_reason(composed, tmp_path):
    seen, _, module = run(composed(*SMALL), tmp_path, 8, Rollback(["val/score"]), Scores([1.0, 1.6, 1.4, NAN]))
    assert len(seen.numbers) == 8 and module.lr_scale == 1
    assert at(tmp_path, 8)["callbacks"]["Rollback"] == {"count": 0, "bad": 1}


@pytest.mark.parametrize("look", [1, 100])
def test_a_gradient_that_is_not_finite_leads_back_to_the_newest_checkpoint_before(composed, tmp_path, capsys, look):
    """Seen at once or, at the latest, before a validation; nothing is saved, scored or logged in between."""
    scores = Scores([3.0, 2.0, 1.0], {4: NAN, 6: 1.5, 8: 1.0})
    rollback = Rollback(["val/score"], every_kimg=look * LOOK)
    seen, rates, _ = run(composed(*SMALL), tmp_path, 6, rollback, scores, poison=[4])
    last = 4 if look == 1 else 5
    assert seen.numbers == [(n, n) for n in range(last + 1)] + [(n, n + last - 3) for n in (4, 5)]
    assert same(seen.batches[last + 1][2], seen.batches[4][2])
    assert rates[last + 1] == rates[4] / 2
    assert all(value.isfinite().all() for value in at(tmp_path, 6)["weights"].values())
    assert "the gradient of batch 4 (0.048 kimg) is not finite; learning rates" in capsys.readouterr().out
    rows = [(batch, metric) for batch, _, metric, _ in read_rows(tmp_path)[1:]]
    assert len(rows) == len(set(rows)) and not any(row[3] == "nan" for row in read_rows(tmp_path))


@pytest.mark.parametrize("poison", [[], [4]])
def test_a_run_that_is_killed_after_going_back_goes_on_from_there(composed, tmp_path, poison):
    """To the same end, to the bit, as the run that was not killed; nothing of the bad stretch is used."""
    ends = []
    for name, stop in (("straight", None), ("killed", 6 if poison else 8)):
        first = [1.0, 2.0] if poison else [3.0, 1.0, 1.6, 1.6]
        for kill in (stop, None) if stop else (None,):
            scores = Scores(first, {4: 1.0, 6: 0.9, 8: 0.8})
            folder = tmp_path / name
            seen, *_ = run(composed(*SMALL), folder, 8, Rollback(["val/score"]), scores, poison, kill)
        ends.append(at(folder, 8))
    assert seen.numbers[0] == ((4, 6) if poison else (4, 8))
    straight, killed = ends
    assert straight["position"]["lr_scale"] == 0.5
    assert all(same(straight[part], killed[part]) for part in ("weights", "optimizers", "callbacks", "position"))


def test_after_so_many_times_the_run_ends_with_a_sentence(composed, tmp_path):
    rollback = Rollback(["val/score"], max_rollbacks=2, every_kimg=LOOK)
    with pytest.raises(ValueError, match=r"gradient of batch 4 .*rolled back 2 times already .*; lower a learning"):
        run(composed(*SMALL), tmp_path, 9, rollback, poison=[2, 4, 6])
    assert at(tmp_path, 3)["position"] == {"images": 36, "batches": 3, "data_offset": 24, "lr_scale": 0.25}


def test_without_a_checkpoint_from_before_the_run_ends_with_a_sentence(composed, tmp_path):
    with pytest.raises(ValueError, match=r"gradient of batch 0 .*there is no checkpoint from before"):
        run(composed(*SMALL), tmp_path, 3, Rollback([], every_kimg=LOOK), poison=[0])


@pytest.mark.parametrize(
    "options", [{"factor": 1}, {"lr_factor": 0}, {"patience": 0}, {"max_rollbacks": 0}, {"metric": ["train/loss"]}]
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=rf"callbacks\.rollback.*{next(iter(options))}"):
        Rollback(**({"metric": ["val/score"]} | options))


def test_it_is_off_by_default_and_built_from_its_file(composed):
    assert "rollback" not in composed().callbacks
    config = composed("callbacks=[budget,checkpoint,rollback]").callbacks.rollback
    assert (list(config.metric), config.lr_factor) == (["val/fid", "val/fd_efflite0"], 0.5)


# Changes of a checkpoint


def test_changes_are_part_of_the_state_and_of_what_is_verified(tmp_path):
    (folder,) = written(tmp_path, 8)
    before = canonical.read(folder)
    for offset in (4, 12):
        changes = {"position": {"data_offset": offset}, "callbacks": {"Rollback": {"count": offset}}}
        canonical.amend(folder, changes)
        state = canonical.read(folder)
        assert state["position"] == {"images": 8, "batches": 1, "data_offset": offset}
        assert same(state["callbacks"], before["callbacks"] | {"Rollback": {"count": offset}})
        assert same(state["weights"], before["weights"])
        assert len(list(folder.glob("amended*"))) == 1
    (changed,) = folder.glob("amended*")
    changed.write_text(changed.read_text().replace("12", "13"))
    assert "amended" in canonical.fault(folder)


@pytest.mark.parametrize("call", [("fsync", 0), ("fsync", 1), ("replace", 0), ("fsync", 2)])
def test_a_process_that_dies_while_it_changes_a_checkpoint_leaves_it_as_before_or_changed(tmp_path, monkeypatch, call):
    (folder,) = written(tmp_path, 8)
    canonical.amend(folder, {"position": {"data_offset": 1}})
    name, number = call
    real, seen = getattr(os, name), []

    def dying(*arguments):
        seen.append(arguments)
        if len(seen) == number + 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(canonical.os, name, dying)
    with pytest.raises(KeyboardInterrupt):
        canonical.amend(folder, {"position": {"data_offset": 2}})
    monkeypatch.undo()
    assert canonical.read(folder)["position"]["data_offset"] == (2 if call == ("fsync", 2) else 1)


# Several processes


class Poison(lightning.Callback):
    """One process has one bad image, once; every process's batches are noted."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        place = Path(trainer.default_root_dir) / f"seen{trainer.global_rank}.txt"
        with open(place, "a") as file:
            file.write(f"{module.batches_seen} {batch.first} {module.lr_scale}\n")
        if batch.first == 3 * BATCH + BATCH // 2:
            batch.images[0, 0, 0, 0] = torch.nan


@pytest.mark.slow
def test_two_processes_go_back_together_and_stay_the_same(tmp_path, strategy="fsdp"):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *torchrun, str(tmp_path), strategy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("Rolled back") == 1
    (root,) = (tmp_path / "runs").glob("*")
    for rank in range(2):
        seen = [line.split() for line in (root / f"seen{rank}.txt").read_text().splitlines()]
        first = [(int(batch), (int(number) - rank * BATCH // 2) / BATCH, float(scale)) for batch, number, scale in seen]
        assert first == [(n, n, 1.0) for n in range(4)] + [(n, n + 1, 0.5) for n in (3, 4, 5)]
    assert at(root, 6)["position"] == {"images": 72, "batches": 6, "data_offset": 12, "lr_scale": 0.5}


def main(folder: str, strategy: str) -> None:
    """One of two processes."""
    from src.run import train

    words = ["callbacks=[budget,ema,metrics,rollback,checkpoint]", "total_kimg=0.072", "trainer.devices=2"]
    words += ["+callbacks.poison._target_=test_rollback.Poison"]
    words += ["+callbacks.consistency._target_=src.callbacks.consistency.Consistency"]
    words += ["val_every_kimg=1", "+trainer.limit_val_batches=1"]
    words += [f"callbacks.{name}.every_kimg={LOOK}" for name in ("metrics", "rollback", "checkpoint")]
    words += [f"strategy={strategy}", "trainer.accelerator=cpu", "callbacks.checkpoint.keep=9"]
    train(compose_config(Path(folder), *SMALL, *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
