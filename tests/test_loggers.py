"""What is logged is there again when the files are read back, whatever stopped the run, without a network."""

import io
import json
import time
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from conftest import TINY, run_command
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from src import checkpoint as canonical
from src.config import ROOT
from src.loggers.csv import MetricsLog
from src.loggers.tensorboard import TensorBoard
from src.loggers.wandb import Wandb

STAMP = {"code.json": json.dumps({"commit": "c0ffee"}), "dirty.patch": ""}


def offline_folders(run: Path) -> list[Path]:
    """Those of W&B, in the order of their starts."""
    return sorted(run.glob("wandb/offline-run-*"))


def records(folder: Path) -> list:
    """The records of an offline folder, read from its file: a 7-byte header, then blocks of 32 KiB of records, each
    behind a checksum (4 bytes), a length (2) and a type (1: whole, 2: first, 3: middle, 4: last)."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    content, place, parts, found = path.read_bytes(), 7, b"", []
    assert content[:4] == b":W&B"
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found if place == len(content) else []  # is being written


def of_kind(folder: Path, kind: str) -> list:
    """Records of one kind, once W&B's own process has written the last: that of the run's exit."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and all(record.WhichOneof("record_type") != "exit" for record in records(folder)):
        time.sleep(0.1)
    return [getattr(record, kind) for record in records(folder) if record.WhichOneof("record_type") == kind]


def items(entries) -> dict:
    return {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def history(folder: Path) -> dict[int, dict]:
    """step -> what was logged at it"""
    return {entry.step.num: items(entry.item) for entry in of_kind(folder, "history")}


def summary(folder: Path) -> dict:
    found = {}
    for record in of_kind(folder, "summary"):
        found |= items(record.update)
    return found


def as_logged(run: Path) -> dict[tuple[int, str], float]:
    """(batch, metric) -> value, of metrics.csv"""
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()[1:]]
    return {(int(batch), metric): float(value) for batch, _, metric, value in rows}


@pytest.fixture(scope="module")
def continued(tmp_path_factory) -> Path:
    """The folder of a run that two processes began and one went on with, logged everywhere, without a network."""
    folder = tmp_path_factory.mktemp("continued")
    words = ["train.py", "debug=fast", "strategy=ddp", "trainer.accelerator=cpu", "data.val_batch=4"]
    words += [f"paths.runs={folder / 'runs'}", f"paths.cache={folder / 'cache'}", "logger=[csv,wandb,tensorboard]"]
    words += [
        *TINY,
        "callbacks=[budget,ema,metrics,throughput,pictures,checkpoint]",
        "callbacks.ema.halflife_kimg=0.01",
    ]
    words += ["metric=[train/loss]", "logger.wandb.checkpoints=true"]
    for options in (["trainer.devices=2", "total_kimg=0.008"], ["trainer.devices=1"]):
        done = run_command(*words, *options, HOME=str(folder), WANDB_RUN_GROUP="study")
        assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    return run


pytestmark = pytest.mark.slow


# W&B


def test_each_start_of_an_offline_run_is_a_folder_with_the_one_id_and_the_second_process_has_none(continued):
    folders = offline_folders(continued)
    assert len(folders) == 2
    for folder in folders:
        (begun,) = of_kind(folder, "run")
        assert begun.run_id == begun.display_name == continued.name
        assert (begun.project, begun.run_group) == ("fewstep", "study")
        assert list(begun.tags) == ["ddn", "fashion10k", "ddp"]
        stamp = json.loads((continued / "checkpoints" / "000000000016" / "code.json").read_text())
        assert begun.git.commit == stamp["commit"] != "unknown"


def test_the_history_of_all_starts_is_the_metrics_log(continued):
    first, second = map(history, offline_folders(continued))
    assert (list(first), list(second)) == ([1, 2], [3, 4])
    found = {(step, key): value for step, row in (first | second).items() for key, value in row.items()}
    wanted = as_logged(continued)
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-12)
    assert {key for _, key in found.keys() - wanted.keys() if not key.startswith(("_", "pictures/"))} == {
        "progress/kimg"
    }


def test_everything_is_shown_over_kimg(continued):
    for folder in offline_folders(continued):
        assert {step: row["progress/kimg"] for step, row in history(folder).items()} == {
            step: pytest.approx(step * 0.004) for step in history(folder)
        }
        defined = of_kind(folder, "metric")
        assert [metric.step_metric for metric in defined if metric.glob_name == "*"][-1] == "progress/kimg"


def test_the_configuration_comes_back_equal(continued):
    for folder, moment, budget in zip(offline_folders(continued), ("08", "16"), (0.008, 0.016), strict=True):
        found = items(of_kind(folder, "run")[0].config.update)
        found.pop("_wandb", None)
        assert found == canonical.read(continued / "checkpoints" / f"0000000000{moment}")["config"]
        assert found["total_kimg"] == budget


def test_the_grids_come_back_equal(continued):
    for folder, step in zip(offline_folders(continued), (2, 4), strict=True):
        rows = history(folder)
        assert [n for n, row in rows.items() if "pictures/samples/filenames" in row] == [step]
        for name in ("samples", "reconstructions"):
            (file,) = rows[step][f"pictures/{name}/filenames"]
            shown = np.asarray(Image.open(folder / "files" / file).convert("RGB")).astype(int)
            written = Image.open(continued / "pictures" / f"{name}_{step * 4:012d}.png").convert("RGB")
            assert shown.shape == np.asarray(written).shape and abs(shown - np.asarray(written)).max() <= 1
            assert shown.std() > 5


def test_the_summary_names_the_best_checkpoint(continued):
    best = canonical.read_best(continued / "checkpoints")
    found = summary(offline_folders(continued)[1])
    assert found["best/value"] == best["value"]
    assert found["best/kimg"] == int(best["checkpoint"]) / 1000


def test_checkpoints_go_along_as_artifacts_where_asked_for(continued):
    names = [name for name in ("000000000008", "000000000016") if (continued / "checkpoints" / name).exists()]
    newest = of_kind(offline_folders(continued)[1], "artifact")[-1]
    assert newest.name == f"checkpoint-{continued.name}" and "newest" in newest.aliases
    assert json.loads(newest.metadata) == {"kimg": 0.016}
    files = {entry.path: entry for entry in newest.manifest.contents}
    assert files.keys() == {"state.pt", "manifest.json", "code.json", "dirty.patch"}
    assert files["state.pt"].local_path == str(continued / "checkpoints" / names[-1] / "state.pt")


def test_every_start_was_finished(continued):
    for folder in offline_folders(continued):
        assert [record.exit_code for record in of_kind(folder, "exit")] == [0]


class Failing(lightning.LightningModule):
    """Logs a metric in each of three batches, then raises."""

    def __init__(self, error: BaseException):
        super().__init__()
        self.error, self.layer = error, torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        for logger in self.loggers:
            logger.log_metrics({"progress/kimg": (number + 1) / 100, "train/loss": float(number)}, number + 1)
        if number == 2:
            raise self.error
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def fail(error: BaseException, folder: Path, *loggers) -> None:
    with pytest.raises(type(error)):
        lightning.Trainer(
            accelerator="cpu",
            logger=list(loggers),
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
            log_every_n_steps=1,
        ).fit(Failing(error), torch.utils.data.DataLoader(torch.ones(8, 1)))


@pytest.mark.parametrize("error", [ValueError("the gradient is not finite"), SystemExit(143)], ids=["fault", "stop"])
def test_a_run_that_fails_or_is_stopped_is_finished_too(tmp_path, monkeypatch, error):
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = Wandb(str(tmp_path), "stopped", project="test")
    logger.about_run({"seed": 3}, STAMP)
    fail(error, tmp_path, logger)
    (folder,) = offline_folders(tmp_path)
    assert [record.exit_code for record in of_kind(folder, "exit")] == [1]
    assert [row["train/loss"] for row in history(folder).values()] == [0, 1, 2]
    assert of_kind(folder, "run")[0].git.commit == "c0ffee"


def test_what_a_killed_run_had_logged_beyond_its_checkpoint_has_the_same_steps_again(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (range(1, 5), range(3, 7)):
        logger = Wandb(str(tmp_path), "killed", project="test")
        logger.about_run({}, STAMP)
        for step in steps:
            logger.log_metrics({"progress/kimg": step / 10, "train/loss": 1 / step}, step)
            best = {"checkpoint": f"{100 * step:012d}", "value": 1 / step, "val/fid": 1 / step, "val/kid": 0.5}
            (tmp_path / "checkpoints").mkdir(exist_ok=True)
            canonical.write_best(tmp_path / "checkpoints", best)
        logger.finalize("success")
        logger.finalize("failed")  # a fault after the end changes nothing
        time.sleep(1.1)  # W&B names the folder by the second
    first, second = map(history, offline_folders(tmp_path))
    assert (list(first), list(second)) == ([1, 2, 3, 4], [3, 4, 5, 6])
    assert all(first[step]["train/loss"] == second[step]["train/loss"] == 1 / step for step in (3, 4))
    found = [summary(folder) for folder in offline_folders(tmp_path)]
    assert [run["best/val/fid"] for run in found] == [1 / 4, 1 / 6]
    assert [(run["best/kimg"], run["best/val/kid"]) for run in found] == [(0.4, 0.5), (0.6, 0.5)]


def test_ranks_but_the_first_are_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    loggers = [Wandb(str(tmp_path), "silent", project="test"), MetricsLog(str(tmp_path)), TensorBoard(str(tmp_path))]
    for logger in loggers:
        if hasattr(logger, "about_run"):
            logger.about_run({}, STAMP)
        _ = getattr(logger, "experiment", None)
        logger.log_metrics({"progress/kimg": 1.0, "train/loss": 1.0}, 1)
        logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


# TensorBoard


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_tensorboard_holds_the_metrics_of_all_starts(continued):
    found, log = events(continued), as_logged(continued)
    assert set(found.Tags()["scalars"]) == {metric for _, metric in log} | {"progress/kimg"}
    for metric in ("train/loss", "time/images_per_sec"):
        scalars = {event.step: event.value for event in found.Scalars(metric)}
        assert scalars == pytest.approx({batch: v for (batch, name), v in log.items() if name == metric}, rel=1e-6)


def test_tensorboard_holds_the_grids_and_the_configuration(continued):
    found = events(continued)
    assert [image.step for image in found.Images("pictures/samples")] == [2, 4]
    shown = np.asarray(Image.open(io.BytesIO(found.Images("pictures/samples")[1].encoded_image_string))).astype(int)
    written = np.asarray(Image.open(continued / "pictures" / "samples_000000000016.png").convert("RGB"))
    assert shown.shape == written.shape and abs(shown - written).max() <= 1
    text = found.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert json.loads(text) == canonical.read(continued / "checkpoints" / "000000000016")["config"]


def test_tensorboard_forgets_what_lies_beyond_the_checkpoint(tmp_path):
    for steps, seen in ((range(1, 5), 0), (range(3, 5), 2)):
        logger = TensorBoard(str(tmp_path))
        logger.about_run({"seed": 3}, STAMP)
        logger.rewind(seen)
        for step in steps:
            logger.log_metrics({"train/loss": float(step + 10 * seen)}, step)
        logger.finalize("success")
    scalars = [(event.step, event.value) for event in events(tmp_path).Scalars("train/loss")]
    assert scalars == [(1, 1), (2, 2), (3, 23), (4, 24)]


def test_loggers_leave_nothing_beside_the_run(continued):
    beside = {path.name for path in continued.parents[1].iterdir()} - {"runs", "cache"}
    assert not {name for name in beside if not name.startswith(".")}
    assert not (continued.parents[1] / ".netrc").exists()
    assert not (ROOT / "wandb").exists() and not (ROOT / "mlruns").exists()


# Time


def test_the_hours_of_all_starts_and_processes_add_up(continued):
    found = json.loads((continued / "time.json").read_text())
    assert found["starts"] == 2
    assert 0 < found["hours"] < found["device_hours"] < 2 * found["hours"]  # two processes, then one


def test_time_goes_on_over_a_crash_and_a_rewind(tmp_path):
    for start in (1, 2):
        log = MetricsLog(str(tmp_path))
        log.rewind(0)
        log.began -= 3600
        log.log_metrics({"progress/kimg": 1.0, "train/loss": 1.0}, 1)
        assert json.loads((tmp_path / "time.json").read_text())["hours"] == pytest.approx(start, abs=0.01)
        log.began -= 3600
        log.finalize("failed") if start == 2 else None  # the first is killed: what it took is known until its last row
    assert json.loads((tmp_path / "time.json").read_text())["hours"] == pytest.approx(3, abs=0.01)


# MLflow


def test_without_mlflow_a_sentence_says_what_to_install(monkeypatch, tmp_path):
    from src.loggers import mlflow

    monkeypatch.setattr(mlflow, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="logger=mlflow needs a package: pip install mlflow"):
        mlflow.Mlflow(str(tmp_path), "run", "fewstep").about_run({}, STAMP)


def test_mlflow_goes_on_with_the_run_of_the_name(tmp_path):
    pytest.importorskip("mlflow")
    from src.loggers.mlflow import Mlflow

    for start, steps in enumerate((range(1, 4), range(3, 6))):
        logger = Mlflow(str(tmp_path), "ddn-x", "fewstep", group="study")
        logger.about_run({"batch": 4, "model": {"widths": [8, 8]}, "total_kimg": start}, STAMP)
        for step in steps:
            logger.log_metrics({"progress/kimg": step / 10, "val/fid": step + start / 2}, step)
            logger.log_image("pictures/samples", [torch.full((3, 2, 2), step / 10)], step)
        logger.finalize("success" if start else "failed")
        assert logger.client.get_run(logger.run_id).info.status == ("FINISHED" if start else "FAILED")
    client = logger.client
    (run,) = client.search_runs([client.get_experiment_by_name("fewstep").experiment_id])
    assert run.info.run_name == "ddn-x"
    values = [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, "val/fid")]
    assert values == [(1, 1), (2, 2), (3, 3), (4, 4.5), (5, 5.5)]
    assert run.data.params == {"batch": "4", "model.widths": "[8, 8]", "total_kimg": "0"}
    assert (run.data.tags["group"], run.data.tags["mlflow.source.git.commit"]) == ("study", "c0ffee")
    kept = next(tmp_path.glob("artifacts/*/artifacts"))
    assert json.loads((kept / "config.json").read_text())["total_kimg"] == 1
    assert np.asarray(Image.open(kept / "pictures" / "samples" / "00000005.png")).max() == round(0.5 * 255)
