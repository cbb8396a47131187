"""The commands as commands: what they leave behind, and that nothing which interrupts or divides them changes it."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from math import log2
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, compose_config, run_command, start_command
from PIL import Image

from src import checkpoint as canonical
from src.report import read_log
from src.results import sample
from src.run import train

pytestmark = pytest.mark.slow

# 300 batches of 4 images, judged twice; long enough to be interrupted in the middle
LONGER = [
    *TINY,
    "data=emoji32",
    "logger=[csv]",
    "callbacks=[budget,ema,metrics,throughput,pictures,checkpoint]",
    "batch=4",
    "schedule_kimg=1.2",
    "val_every_kimg=0.6",
    "data.val_batch=4",
    "data.flip=true",
    "+trainer.limit_val_batches=2",
    "callbacks.metrics.every_kimg=0.04",
    "callbacks.throughput.every_kimg=0.04",
    "callbacks.pictures.count=8",
    "callbacks.checkpoint.every_kimg=0.1",
    "callbacks.ema.halflife_kimg=0.1",
]
LAST = "000000001200"


def below(folder: Path) -> list[str]:
    """Everything that a training command writes, below this folder."""
    return [f"paths.runs={folder / 'runs'}", f"paths.cache={folder / 'cache'}"]


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def succeeded(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def flat(tree, prefix="") -> dict[str, torch.Tensor]:
    """Every tensor and number of a checkpoint's state by its path."""
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}/{key}").items()}
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return {prefix: torch.tensor(float(tree))}
    return {prefix: tree} if torch.is_tensor(tree) else {}


def state_of(run: Path, checkpoint: str = LAST) -> dict[str, torch.Tensor]:
    state = canonical.read(run / "checkpoints" / checkpoint)
    return flat({part: state[part] for part in ("weights", "optimizers", "callbacks", "position")})


def differing(ours: dict, theirs: dict) -> list[str]:
    """Names whose bits differ."""
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def log_of(run: Path) -> list[str]:
    """The rows of metrics.csv, but for those that measure the machine."""
    return [row for row in (run / "metrics.csv").read_text().splitlines() if not re.search(",(time|memory)/", row)]


# One whole run, and the commands that use it


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A debug run from the command line: (its folder, what it said, the words)."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["train.py", "debug=fast", *below(folder), "model.decoder.classes=0"]
    said = succeeded(run_command(*words))
    return only_run(folder), said, words


def test_a_run_says_what_it_trains_and_where_everything_is(finished):
    run, said, _ = finished
    lines = said.splitlines()
    decoder = canonical.read(run / "checkpoints" / "000000000016")["config"]["model"]["decoder"]
    bits = sum(count * log2(leaves) for count, leaves in zip(decoder["blocks"], decoder["leaves"], strict=True))
    described = rf"{sum(decoder['blocks'])} layers, codes of {bits:.0f} bits, decoder \d+\.\d\d M parameters"
    assert re.fullmatch(rf"{run.name}: {described}, 9000 training images", lines[0])
    assert re.search(rf"^Run folder +{re.escape(str(run))}$", said, re.M)
    assert re.search(r"^val/fd_efflite0 +[\d.]+ at 0.008 kimg -> [\d.]+ at 0.016 kimg$", said, re.M)
    assert re.search(r"^choices +KL against uniform [\d.]+ nats, (inside|outside) the band < 0.1$", said, re.M)
    named = [Path(word) for word in said.split() if word.startswith(str(run)) and not word.endswith(run.name)]
    assert {path.name for path in named} >= {
        "samples_000000000016.png",
        "reconstructions_000000000016.png",
        "tree_000000000016.png",
        "000000000016",
    }
    assert all(path.exists() for path in named)
    for command in ("sample.py", "evaluate.py"):
        assert f"{command} run={run}" in said


def test_its_metrics_are_tidy(finished):
    run, _, _ = finished
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    assert header == "batch,kimg,metric,value"
    cells = [row.split(",") for row in rows]
    assert {len(row) for row in cells} == {4}
    assert [int(row[0]) for row in cells] == sorted(int(row[0]) for row in cells)
    assert all(float(kimg) * 1000 == int(batch) * 4 for batch, kimg, _, _ in cells)
    assert len({(batch, metric) for batch, _, metric, _ in cells}) == len(cells)
    assert np.isfinite([float(row[3]) for row in cells]).all()
    log = read_log(run)
    assert [kimg for kimg, _ in log["train/loss"]] == [0.004, 0.008, 0.012, 0.016]
    assert [kimg for kimg, _ in log["val/fd_efflite0"]] == [0.008, 0.016]
    layers = [log[name] for name in log if name.startswith("train/loss_layer/")]
    assert np.allclose(np.mean(layers, 0), log["train/loss"], rtol=1e-5)
    assert {"time/images_per_sec", "memory/peak_rss_mb", "train/lr_decoder", "train/grad_norm_decoder"} <= log.keys()


def test_its_pictures_can_be_seen(finished):
    run, _, _ = finished
    sizes = {path.name: Image.open(path).size for path in (run / "pictures").glob("*.png")}
    assert sizes["samples_000000000016.png"] == (2 + 8 * 34, 2 + 34)
    assert {name.rpartition("_")[0] for name in sizes} == {"samples", "reconstructions", "tree"}
    assert len(sizes) == 6 and not list((run / "pictures").glob("*.part"))
    reconstructions = np.asarray(Image.open(run / "pictures" / "reconstructions_000000000016.png"))
    assert reconstructions.std() > 20


def test_its_checkpoint_is_whole_and_says_which_code_ran(finished):
    run, _, words = finished
    newest, rejected = canonical.newest(run / "checkpoints")
    assert newest.name == "000000000016" and rejected == []
    assert {path.name for path in newest.iterdir()} == {"state.pt", "manifest.json", "code.json", "dirty.patch"}
    stamp = json.loads((newest / "code.json").read_text())
    assert stamp["overrides"] == words[1:]
    assert canonical.read(newest)["config"]["name"] == run.name


def test_its_result_is_written(finished):
    run, _, _ = finished
    result = json.loads((run / "result.json").read_text())
    assert (result["name"], result["kimg"]) == (run.name, 0.016)
    log = read_log(run)
    for metric in ("val/fd_efflite0", "val/kid_efflite0"):
        assert result["metrics"][metric] == pytest.approx(log[metric][-1][1])


def test_the_same_command_again_says_that_it_is_done_and_changes_nothing(finished):
    run, _, words = finished
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and ".hydra" not in path.parts}
    said = succeeded(run_command(*words))
    assert f"{run.name} is finished; raise total_kimg to go on" in said and f"Run folder        {run}" in said
    assert {path: path.read_bytes() for path in kept} == kept


def test_samples_are_drawn_into_one_picture_and_files(finished, tmp_path):
    run, _, _ = finished
    out = tmp_path / "out"
    said = succeeded(run_command("sample.py", f"run={run}", "num=6", "first=2", "batch=4", "files=true", f"out={out}"))
    picture = out / "000000000016_s0_2-7.png"
    assert str(picture) in said and Image.open(picture).size == (2 + 2 * 34, 2 + 3 * 34)
    files = sorted((out / "images").iterdir())
    assert [path.name for path in files] == [f"{number:06d}.png" for number in range(2, 8)]
    again = tmp_path / "again"
    succeeded(
        run_command("sample.py", f"run={run}", "num=1", "first=5", "files=true", f"out={again}", "checkpoint=best")
    )
    ours, theirs = (np.asarray(Image.open(f / "images" / "000005.png")).astype(int) for f in (out, again))
    assert abs(ours - theirs).max() <= 1  # number 5 is number 5
    grid = np.asarray(Image.open(picture)).astype(int)
    shown = grid[2 + 34 : 2 + 34 + 32, 2 + 34 : 2 + 34 + 32]
    assert np.array_equal(shown.reshape(32, 32, -1)[:, :, 0], ours.reshape(32, 32, -1)[:, :, 0])


def test_sampling_leaves_nothing_where_it_was_called(finished, tmp_path):
    run, _, _ = finished
    (tmp_path / "here").mkdir()
    succeeded(run_command("sample.py", f"run={run}", "num=1", f"out={tmp_path / 'out'}", cwd=tmp_path / "here"))
    assert list((tmp_path / "here").iterdir()) == []


def test_a_run_is_evaluated_against_its_training_images(finished, tmp_path):
    run, _, _ = finished
    words = ["evaluate.py", f"run={run}", "num=8", "reference=16", f"cache={run.parents[1] / 'cache'}"]
    said = succeeded(run_command(*words))
    found = json.loads((run / "metrics.json").read_text())
    assert (found["sample_images"], found["held_out_images"]) == (8, 8)
    assert (found["real"], found["extractor"]) == ("the first 16 training images", "efficientnet-lite0@128")
    scored = found["checkpoints"]["000000000016"]
    assert 0 < found["held_out"]["fd_efflite0"] != scored["fd_efflite0"]
    validated = json.loads((run / "result.json").read_text())["metrics"]["val/fd_efflite0"]
    assert scored["fd_efflite0"] == pytest.approx(validated, rel=1e-3)  # the same eight samples
    assert "fd_efflite0" in said and str(run / "metrics.json") in said
    assert len(list((run.parents[1] / "cache").glob("real-*.pt"))) == 1  # the statistics that training had made


def test_what_a_run_does_not_have_is_told_in_a_sentence(finished):
    run, _, _ = finished
    there = ", ".join(path.name for path in canonical.committed(run / "checkpoints"))
    done = run_command("sample.py", f"run={run}", "num=1", "checkpoint=000000000099")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == f"sample: {run} has no checkpoint '000000000099'; there is newest, best, {there}"


def test_a_label_for_a_model_without_labels_is_refused(tiny_run, tmp_path):
    """Its data has ten classes, but the network was trained without: it would draw anything."""
    config = compose_config(tmp_path, f"run={tiny_run}", "label=3", "num=1", f"out={tmp_path}", command="sample")
    with pytest.raises(ValueError, match=r"label=3.*without labels"):
        sample(config)


@pytest.mark.parametrize("word, least", [("num=0", 1), ("batch=0", 1), ("first=-1", 0)])
def test_samples_that_cannot_be_are_refused(word, least, tiny_run, tmp_path):
    with pytest.raises(ValueError, match=f"^{word} must be at least {least}$"):
        sample(compose_config(tmp_path, f"run={tiny_run}", f"out={tmp_path}", word, command="sample"))


def test_samples_of_a_label_are_drawn_from_a_model_with_labels(tmp_path):
    words = [*TINY, "model.decoder.classes=10", "callbacks=[budget,checkpoint]", "logger=[csv]", "total_kimg=0.001"]
    config = compose_config(tmp_path, *words)
    train(config)
    asked = [f"run={config.paths.run}", "num=2", "files=true"]
    sample(compose_config(tmp_path, *asked, "label=9", f"out={tmp_path / 'nine'}", command="sample"))
    assert len(list((tmp_path / "nine" / "images").iterdir())) == 2
    with pytest.raises(ValueError, match="label=10 is none of the 10 classes"):
        sample(compose_config(tmp_path, *asked, "label=10", command="sample"))


# Interruptions


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    succeeded(run_command("train.py", *LONGER, *below(folder)))
    return only_run(folder)


def interrupted(folder: Path, send: signal.Signals, *options: str, to=os.kill) -> tuple[subprocess.Popen, Path]:
    """A run that gets the signal in its middle, at no particular moment."""
    process = start_command("train.py", *LONGER, *below(folder), *options)
    try:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and process.poll() is None:
            saved = list(folder.glob("runs/*/checkpoints/000000000[4-9]*"))
            if saved and not any(path.suffix for path in saved):
                break
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
        to(process.pid, send)
        process.wait(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    run = only_run(folder)
    assert not (run / "checkpoints" / LAST).exists() and not (run / "result.json").exists()
    return process, run


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_ends_in_the_same_bits_when_its_command_is_repeated(uninterrupted, tmp_path, workers):
    process, run = interrupted(tmp_path, signal.SIGKILL, f"data.workers={workers}")
    assert process.returncode == -signal.SIGKILL
    said = succeeded(run_command("train.py", *LONGER, *below(tmp_path), f"data.workers={workers}"))
    assert "Continuing from checkpoint" in said
    assert run.name == uninterrupted.name
    assert differing(state_of(run), state_of(uninterrupted)) == []
    assert log_of(run) == log_of(uninterrupted)
    for picture in (uninterrupted / "pictures").iterdir():
        assert (run / "pictures" / picture.name).read_bytes() == picture.read_bytes()
    assert canonical.read_best(run / "checkpoints") == canonical.read_best(uninterrupted / "checkpoints")
    assert not list(run.rglob("*.tmp")) and not list(run.rglob("*.part"))


@pytest.mark.parametrize(
    "warning, workers, to",
    [(signal.SIGTERM, 0, os.kill), (signal.SIGTERM, 2, os.killpg), (signal.SIGUSR1, 2, os.killpg)],
)
def test_a_warning_saves_and_the_same_command_goes_on_to_the_same_bits(uninterrupted, tmp_path, warning, workers, to):
    """Also one that reaches the processes that load images."""
    process, run = interrupted(tmp_path, warning, f"data.workers={workers}", to=to)
    assert process.returncode == 143
    assert "Traceback" not in process.communicate()[1]
    stopped_at = int(canonical.newest(run / "checkpoints")[0].name)
    last_row = (run / "metrics.csv").read_text().splitlines()[-1]
    assert int(last_row.split(",")[0]) * 4 <= stopped_at < int(last_row.split(",")[0]) * 4 + 40
    said = succeeded(run_command("train.py", *LONGER, *below(tmp_path), f"data.workers={workers}"))
    assert f"Continuing from checkpoint {stopped_at:012d}" in said
    assert differing(state_of(run), state_of(uninterrupted)) == []
    assert log_of(run) == log_of(uninterrupted)


def test_while_a_run_trains_a_second_one_on_its_folder_is_refused(tmp_path):
    process = start_command("train.py", *LONGER, *below(tmp_path), "schedule_kimg=1000")
    try:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and not list(tmp_path.glob("runs/*/metrics.csv")):
            time.sleep(0.05)
        second = run_command("train.py", *LONGER, *below(tmp_path), "schedule_kimg=1000")
        assert process.poll() is None
        assert second.returncode == 1
        (line,) = second.stderr.splitlines()
        assert line.startswith(f"train: another process is writing to {only_run(tmp_path)}; wait for it")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_full_disk_ends_the_run_in_a_sentence_and_leaves_the_older_checkpoint(tmp_path):
    small = tmp_path / "runs"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        done = run_command("train.py", *LONGER, *below(tmp_path), "callbacks.checkpoint.keep=100")
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert re.match(r"train: .*No space left on device", line)
        newest, rejected = canonical.newest(only_run(tmp_path) / "checkpoints")
        assert newest is not None and rejected == []
        assert not list(only_run(tmp_path).rglob("*.tmp"))
    finally:
        subprocess.run(["umount", small], check=True)


# Two processes


JUDGED = [
    *TINY,
    "data=emoji32",
    "logger=[csv]",
    "callbacks=[budget,ema,metrics,distances,pictures,checkpoint]",
    "model.decoder.classes=10",
    "model.schedule.warmup_kimg=0",
    "+model.optimizer.eps=1e-4",  # 1e-8 would make whole steps of rounding errors, where a gradient is all but zero
    "batch=8",
    "schedule_kimg=0.064",
    "val_every_kimg=0.032",
    "+trainer.limit_val_batches=2",
    "callbacks.metrics.every_kimg=0.016",
    "callbacks.distances.reference=24",
    "callbacks.pictures.count=8",
    "callbacks.checkpoint.every_kimg=0.032",
    "callbacks.checkpoint.keep=9",
    "strategy=ddp",
    "trainer.accelerator=cpu",
]


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """The same global batches by one process, and by two that take each share in two micro-batches."""
    runs = []
    for devices, options in ((1, ["data.val_batch=8"]), (2, ["data.val_batch=4", "micro_batch=2"])):
        folder = tmp_path_factory.mktemp(f"devices{devices}")
        said = succeeded(run_command("train.py", *JUDGED, *below(folder), f"trainer.devices={devices}", *options))
        assert said.count("Run folder") == 1
        runs.append(only_run(folder))
    return runs


def test_two_processes_write_one_run_of_the_same_name(one_and_two):
    one, two = one_and_two
    assert one.name == two.name
    ours, theirs = ({str(path.relative_to(run)) for path in run.rglob("*")} for run in one_and_two)
    assert {name for name in ours ^ theirs if not name.endswith(".log") and ".hydra" not in name} == set()


def test_two_processes_make_the_choices_of_one(one_and_two):
    """Equal counts at every layer mean the same images in the same order, and splits that were decided alike."""
    for moment in ("000000000032", "000000000064"):
        one, two = (state_of(run, moment) for run in one_and_two)
        assert torch.equal(two["/weights/tally"][0], one["/weights/tally"][0])
    logs = [read_log(run) for run in one_and_two]
    assert logs[0]["train/splits"] == logs[1]["train/splits"]
    assert sum(value for _, value in logs[0]["train/splits"]) > 0
    assert logs[0]["train/used_leaves"] == logs[1]["train/used_leaves"]


def test_two_processes_end_in_the_weights_of_one(one_and_two):
    one, two = (state_of(run, "000000000064") for run in one_and_two)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    begun = state_of(one_and_two[0], "000000000032")
    moved = [(one[name] - begun[name]).abs().max() for name in one if name.startswith("/weights/decoder")]
    assert min(moved) > 1e-4  # ten times what is allowed to differ


def test_two_processes_measure_what_one_measures(one_and_two):
    one, two = (read_log(run) for run in one_and_two)
    assert one.keys() == two.keys()
    assert [kimg for kimg, _ in two["val/fd_efflite0"]] == [0.032, 0.064]
    for name, tolerance in (("val/fd_efflite0", 1e-3), ("val/kid_efflite0", 0.05)):  # KID's subsets are other ones
        assert [value for _, value in two[name]] == pytest.approx([value for _, value in one[name]], rel=tolerance)
    for name in ("train/loss", "train/loss_layer/05", "train/grad_norm_decoder", "train/perplexity"):
        assert [value for _, value in two[name]] == pytest.approx([value for _, value in one[name]], rel=1e-4)


def test_two_processes_draw_the_pictures_of_one(one_and_two):
    one, two = one_and_two
    for picture in (one / "pictures").glob("samples_*.png"):
        ours, theirs = (np.asarray(Image.open(run / "pictures" / picture.name)).astype(int) for run in (two, one))
        assert abs(ours - theirs).max() <= 1


def test_what_two_processes_saved_one_goes_on_with(one_and_two, tmp_path):
    one, two = one_and_two
    run = shutil.copytree(two, tmp_path / "runs" / two.name)
    shutil.rmtree(run / "checkpoints" / "000000000064")
    said = succeeded(run_command("train.py", *JUDGED, *below(tmp_path), "trainer.devices=1", "data.val_batch=8"))
    assert "Continuing from checkpoint 000000000032" in said
    ours, theirs = state_of(run, "000000000064"), state_of(one, "000000000064")
    assert torch.equal(ours["/weights/tally"][0], theirs["/weights/tally"][0])
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)


def test_a_batch_that_processes_cannot_share_ends_in_a_sentence(tmp_path):
    done = run_command("train.py", *JUDGED, *below(tmp_path), "trainer.devices=3")
    assert done.returncode == 1
    assert "train: batch=8 does not divide among 3 processes; choose a multiple of 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_ends_two_processes_together_with_a_checkpoint(tmp_path):
    words = ["train.py", *JUDGED, *below(tmp_path), "trainer.devices=2", "data.val_batch=4", "schedule_kimg=1000"]
    process = start_command(
        *words, "~callbacks.distances", "val_every_kimg=1000", "callbacks.checkpoint.every_kimg=0.08"
    )
    try:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and not canonical.committed(_checkpoints(tmp_path)):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 143
        with pytest.raises(ProcessLookupError):  # the other one is gone as well
            for _ in range(100):
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        newest, rejected = canonical.newest(_checkpoints(tmp_path))
        assert newest is not None and rejected == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _checkpoints(folder: Path) -> Path:
    found = list(folder.glob("runs/*/checkpoints"))
    return found[0] if found else folder / "none"
