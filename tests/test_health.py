"""What the health callback logs, says and ends; and the diversity noise of a DDN."""

import math
import os
import re
import signal
import socket
import statistics
import sys
import time

import lightning
import pytest
import torch
from conftest import TINY
from hydra.utils import instantiate
from test_ddn_training import BATCH, SMALL, Four, Ramp, Watching, built, fit, four

from src import checkpoint as canonical
from src.callbacks import health as health_module
from src.callbacks.budget import Budget
from src.callbacks.checkpoint import Checkpoint
from src.callbacks.health import Health
from src.datamodules.base import Images
from src.loggers.csv import MetricsLog
from src.modules.ddn import DDN
from src.noise import Noise
from src.report import read_log
from src.run import train
from src.strategies.ddp import DDP

# What it sees and says


def test_it_logs_the_means_since_the_last_look(composed, tmp_path):
    module, data = built(composed(*SMALL))
    outputs = []
    health, watching = Health(check_every=3), Watching(after=lambda _, found: outputs.append(found))
    fit(module, data, 7, health, watching, logger=MetricsLog(str(tmp_path)))
    log = read_log(tmp_path)
    assert [kimg for kimg, _ in log["health/outside"]] == [0.036, 0.072]
    for look, steps in enumerate((outputs[:3], outputs[3:6])):
        for key in ("grad_norm_decoder", "choice_kl", "selection_rate"):
            mean = statistics.mean(float(step[f"train/{key}"]) for step in steps)
            assert log[f"health/{key}"][look][1] == pytest.approx(mean, rel=1e-5)
        losses = torch.stack([step["train/loss_layer"] for step in steps]).mean(0).tolist()
        ratios = [loss / statistics.median(losses[:n] + losses[n + 1 :]) for n, loss in enumerate(losses)]
        assert log["health/layer_loss"][look][1] == pytest.approx(max(ratios), rel=1e-5)
    assert not any("device" in key for key in log)  # there is none


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("health")]


def test_what_is_out_of_bounds_is_said_once_and_logged_each_time(composed, tmp_path, capsys):
    module, data = built(composed(*SMALL))
    health = Health(check_every=1, gradient_norm={"decoder": [1e3, 1e4]}, choice_kl=0.0, selection_rate=[0, 1])
    fit(module, data, 4, health, logger=MetricsLog(str(tmp_path)))
    lines = said(capsys)
    assert len(lines) == 2
    assert re.match(
        r"health, at 0\.012 kimg: grad_norm_decoder is \S+, but callbacks\.health\.gradient_norm\.decoder wants at "
        r"least 1000 and at most 10000; look at the learning rate",
        lines[0],
    )
    assert re.search(r"choice_kl is \S+, but callbacks\.health\.choice_kl wants at most 0; .*halflife_kimg", lines[1])
    assert [value for _, value in read_log(tmp_path)["health/outside"]] == [2, 2, 2, 2]


def test_networks_without_a_band_and_bounds_of_none_are_silent(composed, capsys):
    module, data = built(composed(*SMALL))
    fit(module, data, 2, Health(check_every=1, gradient_norm={"decoder": None, "generator": [1, 2]}))
    assert said(capsys) == []


def test_as_configured_it_runs_in_a_run_of_its_own(composed, tmp_path, capsys):
    words = [*TINY, "batch=8", "schedule_kimg=0.048", "val_every_kimg=0.024", "data.val_batch=8"]
    words += ["+trainer.limit_val_batches=1", "logger=[csv]", "callbacks=[budget,ema,checkpoint,health]"]
    config = composed(*words, "callbacks.health.check_every=2", "callbacks.health.gradient_norm.decoder=[1e-9,1e-8]")
    train(config)
    log = read_log(tmp_path / "runs" / config.name)
    assert len(log["health/grad_norm_decoder"]) == 3
    assert any("gradient_norm.decoder wants at least 1e-09" in line for line in said(capsys))


class Layers(Ramp):
    """Logs these losses of its layers."""

    def __init__(self, losses):
        super().__init__()
        self.losses = torch.tensor(losses)

    def learn(self, batch):
        return {"train/loss_layer": self.losses, "train/loss": self.losses.mean()}


@pytest.mark.parametrize(
    ("losses", "ratio", "outside"),
    [
        ([1.0, 2.0, 3.0], 2.0, 0),
        ([1.0, 2.0, 3.0, 21.0], 10.5, 1),
        ([1.0, math.nan, 1.0], math.inf, 1),
        ([1.0, 1.0, math.inf], math.inf, 1),
        ([4.0], 1.0, 0),
    ],
)
def test_a_layer_whose_loss_stands_out_or_is_not_finite_is_told(tmp_path, capsys, losses, ratio, outside):
    fit(Layers(losses), four(), 1, Health(check_every=1, layer_loss=10), logger=MetricsLog(str(tmp_path)))
    assert read_log(tmp_path)["health/layer_loss"] == [(0.004, ratio)]
    assert len(said(capsys)) == outside


class Timed(Ramp):
    """Its steps and validations take so many seconds, by their number."""

    def __init__(self, steps, validation=0.0, wait=time.sleep):
        super().__init__()
        self.steps, self.validation, self.wait = steps, validation, wait

    def learn(self, batch):
        self.wait(self.steps(self.batches_seen))
        return super().learn(batch)

    def validation_step(self, batch, batch_idx):
        self.wait(self.validation)
        return super().validation_step(batch, batch_idx)


class Clock:
    """In the place of the host's, for what the callback measures: it goes on by `wait` alone."""

    def __init__(self):
        self.now = 0.0

    def wait(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(health_module, "time", made)
    return made


@pytest.mark.parametrize(("loader", "step", "told"), [(0.03, 0.01, 1), (0.01, 0.03, 0)])
def test_waiting_for_images_is_told_by_its_share(tmp_path, capsys, clock, loader, step, told):
    data, read = four(), Images.__getitem__

    class Slow(Images):
        def __getitem__(self, numbers):
            clock.wait(loader)
            return read(self, numbers)

    data.train.__class__ = Slow
    module = Timed(lambda _: step, wait=clock.wait)
    fit(module, data, 8, Health(check_every=8, loader_wait=0.5), logger=MetricsLog(str(tmp_path)))
    log = read_log(tmp_path)
    assert log["health/loader_wait"] == [(0.032, pytest.approx(loader / 0.04, rel=1e-5))]
    assert log["health/step_seconds"] == [(0.032, pytest.approx(0.04, rel=1e-5))]
    assert sum("raise data.workers" in line for line in said(capsys)) == told


def test_slow_steps_are_counted_against_the_median_and_validation_is_no_step(tmp_path, capsys, clock):
    module = Timed(lambda number: 0.3 if number in (4, 9) else 0.02, validation=0.4, wait=clock.wait)
    health = Health(check_every=11, slow_step=4, slow_steps=0.1)
    fit(module, four(), 11, health, logger=MetricsLog(str(tmp_path)), val_every=3)
    assert len(module.validated_with) >= 3
    log = {key: values[0][1] for key, values in read_log(tmp_path).items()}
    assert log["health/slow_steps"] == pytest.approx(2 / 10)  # the first has no beginning
    assert log["health/slowest_step_seconds"] == pytest.approx(0.3)
    assert log["health/step_seconds"] == pytest.approx(0.02)
    assert "slow_steps is 0.2" in said(capsys)[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"check_every": 0}, r"callbacks\.health\.check_every=0 must be greater than 0"),
        ({"stop_when_idle_minutes": 0}, r"callbacks\.health\.stop_when_idle_minutes=0 must be greater than 0"),
        (
            {"gradient_norm": {"decoder": [1.0]}},
            r"gradient_norm\.decoder=\[1\.0\] must be the lowest",
        ),
        ({"selection_rate": [1, 0]}, r"selection_rate=\[1, 0\] must be the lowest"),
    ],
)
def test_bounds_that_are_none_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        Health(**options)


def test_every_bound_of_the_configuration_is_taken(composed):
    """Also the numbers that YAML might read as text."""
    health = instantiate(composed("callbacks=[health]").callbacks.health)
    assert health.bounds["grad_norm_decoder"][:2] == (1e-3, 1e-1)
    assert health.bounds["grad_norm_generator"][:2] == (None, None)
    assert health.bounds["choice_kl"].high == 0.1 and health.idle_minutes is None


# A run that stands still. Each in a process of its own, since it is ended.

IDLE = 2.0  # seconds


class Stuck(Images):
    """Waits so long before it gives the images from `at` on."""

    at, seconds = 16, 60.0

    def __getitem__(self, numbers):
        if numbers.start <= self.at < numbers.stop:
            time.sleep(self.seconds)
        return super().__getitem__(numbers)


def idle(folder, steps=lambda _: 0.0, seconds=0.0, rank=None, batches=8):
    """Training that is watched; the images of the fifth batch stand still for `seconds`, in one process alone. They are
    asked for before the fourth is trained."""
    data = Four(channels=1, resolution=1, classes=0, batch=4, seed=0, val_batch=4)
    data.setup()
    if seconds:
        data.train.__class__ = type("StuckFor", (Stuck,), {"seconds": seconds})
    saving = Checkpoint(str(folder), every_kimg=0.008, keep=9)
    health = Health(check_every=2, stop_when_idle_minutes=IDLE / 60)
    if rank is None:
        fit(Timed(steps), data, batches, saving, health)
        return
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDP(process_group_backend="gloo", connection={"timeout_minutes": 1}),
        max_epochs=-1,
        callbacks=[Budget(batches * 4 / 1000), saving, health],
        logger=False,
        check_val_every_n_epoch=None,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Trained(), data)


class Trained(Ramp):
    """With a turn, which exchanges gradients."""

    def learn(self, batch):
        return self.turn("network", batch, lambda part: (self.network(part.images).mean(), {}))


def start(folder, after=0.0, **options):
    """A child that trains and then waits; its exit code is asked for by `code`."""
    folder.mkdir(exist_ok=True)
    if child := os.fork():
        return child
    code = 1
    try:
        with open(folder / f"said{options.get('rank') or 0}", "w") as sys.stdout:
            sys.stderr = sys.stdout
            idle(folder, **options)
            time.sleep(after)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        os.write(2, repr(error).encode())
    os._exit(code)


def code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def saved(folder):
    found = canonical.committed(folder / "checkpoints")
    assert all(canonical.fault(path) is None for path in found)
    return [int(path.name) for path in found]


def test_a_run_that_waits_for_images_saves_and_ends_as_after_a_signal(tmp_path):
    began = time.monotonic()
    assert code(start(tmp_path, seconds=60)) == 143
    assert time.monotonic() - began < 20
    assert saved(tmp_path) == [8, 12]  # the second beside the cadence
    state = canonical.read(canonical.committed(tmp_path / "checkpoints")[-1])
    assert float(state["weights"]["network.weight"]) == 3
    assert (state["position"]["images"], state["position"]["batches"]) == (12, 3)
    text = (tmp_path / "said0").read_text()
    assert re.search(
        r"health: nothing has moved for 0\.0\d+ minutes in process 0, which stands in __getitem__ \(\S+test_health\.py:"
        r"\d+\); it ends with exit code 143",
        text,
    )


def test_a_run_that_stands_within_a_batch_ends_without_saving(tmp_path):
    assert code(start(tmp_path, steps=lambda number: 60.0 if number == 3 else 0.0)) == 75
    assert saved(tmp_path) == [8]
    assert "stands in learn" in (tmp_path / "said0").read_text()


def test_a_process_that_was_stopped_is_killed_by_its_guard(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys.modules[__name__], "IDLE", 0.75)
    child = start(tmp_path, steps=lambda _: 0.05, batches=200)
    while not (tmp_path / "checkpoints").exists():
        time.sleep(0.05)
    time.sleep(1.5)  # so that its guard has started
    os.kill(child, signal.SIGSTOP)
    assert code(child) == -signal.SIGKILL
    assert f"process {child} gave no sign of life for 0.05 minutes; it is killed" in capfd.readouterr().err


def test_a_run_that_moves_goes_on_to_its_end_and_is_not_watched_after_it(tmp_path):
    """Batches of less than the limit, which together are more."""
    assert code(start(tmp_path, steps=lambda _: IDLE / 5, batches=6, after=1.3 * IDLE)) == 0
    assert saved(tmp_path)[-1] == 24


def two(tmp_path, monkeypatch, seconds):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    children = []
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("NODE_RANK", "0")
        children.append(start(tmp_path, rank=rank, seconds=seconds))
    return [code(child) for child in children]


@pytest.mark.slow
def test_of_several_processes_all_end_when_one_waits_for_ever(tmp_path, monkeypatch):
    codes = two(tmp_path, monkeypatch, seconds=60)
    assert 75 in codes and 0 not in codes
    assert saved(tmp_path) == [8]


@pytest.mark.slow
def test_several_processes_save_when_the_images_come_after_all(tmp_path, monkeypatch):
    """Between the limit and twice the limit; they were asked to stop by then, and stop together."""
    assert two(tmp_path, monkeypatch, seconds=1.5 * IDLE) == [143, 143]
    assert saved(tmp_path) == [8, 12]


# Diversity noise


def passes(composed, *words, batches=4):
    """The batches of a run: (numbers, which samples go on with a random leaf in which layer); and its weights."""
    module, data = built(composed(*SMALL, *words))
    seen = []

    def before(_, given):
        seen.append(given[2].clone())

    module.decoder.register_forward_pre_hook(before)
    numbers = []
    fit(module, data, batches, Watching(before=lambda _, batch: numbers.append(batch.numbers)))
    return list(zip(numbers, seen, strict=True)), module.state_dict()


def test_every_so_many_batches_more_samples_go_on_with_a_random_leaf(composed):
    found, _ = passes(composed, "model.diversity_noise=0.4", "model.diversity_every=2")
    more = 0
    for place, (numbers, dropped) in enumerate(found):
        noise = Noise(0, numbers)
        expected = noise.uniform("chain_dropout", 6) < 0.05
        if place in (1, 3):
            extra = noise.uniform("diversity_noise", 6) < 0.4
            more += int((extra & ~expected).sum())
            expected |= extra
        assert torch.equal(dropped, expected)
    assert 0.2 < more / (2 * BATCH * 6) < 0.55


def test_by_default_there_is_none(composed):
    found, weights = passes(composed)
    noisy, others = passes(composed, "model.diversity_noise=0.4", "model.diversity_every=5")
    assert all(torch.equal(a[1], b[1]) for a, b in zip(found, noisy, strict=True))
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    assert composed().model.diversity_noise == 0


@pytest.mark.parametrize("setting", [{"diversity_noise": 1}, {"diversity_noise": -0.1}, {"diversity_every": 0}])
def test_noise_that_cannot_be_is_refused(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=rf"model\.{name} is {value}, but must be"):
        DDN(None, None, seed=0, **setting)
