"""Sweeps as commands: jobs are processes, a sweep is just runs, and a study goes on. Most jobs are sweep_worker.py."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from conftest import TINY, run_command, start_command
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from src.config import CONF, ROOT

pytestmark = pytest.mark.slow
WORKER = "tests/sweep_worker.py"
SHORT = ["hydra.launcher.grace_seconds=20"]


def below(folder: Path) -> list[str]:
    return [f"paths.runs={folder / 'runs'}", f"paths.cache={folder / 'cache'}"]


def sweep(folder: Path, *words: str, script: str = WORKER, **environment: str) -> subprocess.CompletedProcess:
    return run_command(script, "-m", *below(folder), *words, PYTHONPATH=str(ROOT), **environment)


def begun(folder: Path, *words: str, script: str = WORKER, **environment: str) -> subprocess.Popen:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a command that ignores it would not be stopped by it
    return start_command(script, "-m", *below(folder), *words, PYTHONPATH=str(ROOT), **environment)


def run_of(folder: Path, seed: int) -> Path:
    (run,) = (folder / "runs").glob(f"*-s{seed}-*")
    return run


def attempts(run: Path) -> list[dict]:
    path = run / "attempts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(run: Path) -> list[int]:
    return [int(line.split(",")[0]) for line in (run / "metrics.csv").read_text().splitlines()[1:]]


def wait_for(what, seconds: float = 300):
    """What `what` gives, once it is true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it never happened")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes() -> dict[int, str]:
    """id -> command line of all that are alive."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return {pid: line for pid, line in found.items() if is_alive(pid)}


def states(folder: Path) -> dict[str, str]:
    (path,) = (folder / "runs" / "sweeps").glob("*/sweep.json")
    return {run["overrides"][-1]: run["state"] for run in json.loads(path.read_text())}


# A sweep is its runs


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Three jobs side by side, of which one fails; each has two of six GPUs: (folder, what was said)."""
    folder = tmp_path_factory.mktemp("swept")
    ranked = dict(LOCAL_RANK="1", MASTER_PORT="29500", SLURM_PROCID="1", CUDA_VISIBLE_DEVICES="4,5,6,7,2,3")
    words = ["batch=8", "hydra.launcher.jobs=3", "hydra.launcher.gpus_per_job=2", "seed=0,3,1"]
    return folder, sweep(folder, *words, **ranked), words


def test_jobs_lie_where_single_runs_lie_and_the_table_says_so(swept, composed):
    folder, done, _ = swept
    for seed in (0, 1):
        name = composed("batch=8", f"seed={seed}").name
        assert (folder / "runs" / name / "result.json").exists()
        assert re.search(rf"^{name} +seed={seed} +{seed}\.1 +\d+ +finished$", done.stdout, re.M)
    assert {path.name for path in (folder / "runs").iterdir()} == {
        *(composed("batch=8", f"seed={seed}").name for seed in (0, 1, 3)),
        "sweeps",
    }


def test_a_failed_job_is_told_at_the_end_with_its_last_words(swept, composed):
    folder, done, _ = swept
    name = composed("batch=8", "seed=3").name
    assert done.returncode == 1
    assert done.stderr == "train: 1 of 3 runs failed; the same command tries them again\n"
    log = folder / "runs" / name / "log.txt"
    assert done.stdout.endswith(f"\n{name}: exit code 1; {log} ends with\n  | train: seed 3 does not fit\n")
    assert f"{WORKER} batch=8 seed=3 hydra.mode=RUN\n" in re.sub(r" paths\.\S+", "", log.read_text())


def test_jobs_know_nothing_of_ranks_around_the_sweep_and_share_no_gpu(swept):
    folder, _, _ = swept
    told = [attempts(run_of(folder, seed))[0] for seed in (0, 1, 3)]
    for name in ("LOCAL_RANK", "MASTER_PORT", "SLURM_PROCID"):
        assert {job[name] for job in told} == {None}
    assert {job["CUDA_VISIBLE_DEVICES"] for job in told} == {"4,5", "6,7", "2,3"}
    (group,) = {job["WANDB_RUN_GROUP"] for job in told}
    assert (folder / "runs" / "sweeps" / group / "sweep.json").exists()


def test_nothing_that_a_job_started_outlives_it(swept):
    """The job that failed had not ended its child."""
    folder, _, _ = swept
    assert not is_alive(attempts(run_of(folder, 3))[0]["child"])


def test_the_same_sweep_again_starts_only_what_is_not_finished(swept):
    folder, _, words = swept
    again = sweep(folder, *words, CUDA_VISIBLE_DEVICES="4,5,6,7,2,3")
    assert [len(attempts(run_of(folder, seed))) for seed in (0, 1, 3)] == [1, 1, 2]
    assert states(folder) == {"seed=0": "was finished", "seed=3": "failed", "seed=1": "was finished"}
    assert again.returncode == 1 and again.stdout.count("does not fit") == 1


def test_more_jobs_than_there_are_gpus_for_are_refused(tmp_path):
    words = ["seed=0,1", "hydra.launcher.jobs=2", "hydra.launcher.gpus_per_job=2"]
    done = sweep(tmp_path, *words, CUDA_VISIBLE_DEVICES="0,1,2")
    assert done.returncode == 1
    assert "2 jobs at once with hydra.launcher.gpus_per_job=2 need 4 GPUs, but 3 can be seen" in done.stderr
    assert not list(tmp_path.glob("runs/ddn*"))


# Stopping


@pytest.mark.parametrize("send", [signal.SIGINT, signal.SIGTERM])
def test_stopping_a_sweep_stops_all_that_runs_and_repeating_it_goes_on(tmp_path, send):
    words = ["seed=0,1,2", "hydra.launcher.jobs=2", *SHORT]
    process = begun(tmp_path, *words, STEP_SECONDS="0.3")
    try:
        wait_for(lambda: all(list(tmp_path.glob(f"runs/*-s{seed}-*/metrics.csv")) for seed in (0, 1)))
        process.send_signal(send)
        said, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 128 + send
    told = [attempts(run_of(tmp_path, seed))[0] for seed in (0, 1)]
    assert not any(is_alive(job[which]) for job in told for which in ("pid", "child"))
    assert states(tmp_path) == {"seed=0": "stopped", "seed=1": "stopped", "seed=2": "waiting"}
    assert re.search(r"seed=2 +0 +waiting$", said, re.M)
    if send == signal.SIGINT:
        assert sweep(tmp_path, *words).returncode == 0
        for seed, times in ((0, 2), (1, 2), (2, 1)):
            assert len(attempts(run_of(tmp_path, seed))) == times
            assert steps(run_of(tmp_path, seed)) == [*range(1, 11)]  # each once: the second attempt went on


def test_a_job_that_does_not_hear_is_killed_when_its_grace_is_over(tmp_path):
    process = begun(tmp_path, "seed=0", "hydra.launcher.grace_seconds=1", STEP_SECONDS="5", DEAF="1")
    try:
        run = wait_for(lambda: list(tmp_path.glob("runs/*/attempts")))[0].parent
        job = wait_for(lambda: attempts(run))[0]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 143
    assert not is_alive(job["pid"]) and not is_alive(job["child"])


# Several at once


def test_two_sweeps_at_once_share_their_work(tmp_path):
    """Each run is trained once, and both tables have every value."""
    processes = [begun(tmp_path, "seed=0,1", STEP_SECONDS="0.2") for _ in range(2)]
    said = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [len(attempts(run_of(tmp_path, seed))) for seed in (0, 1)] == [1, 1]
    for text in said:
        assert len(re.findall(r"seed=(\d) +\1\.1 +\d+ +(?:was )?finished$", text, re.M)) == 2
    assert {"finished", "was finished"} == set(re.findall(r" ((?:was )?finished)$", said[0] + said[1], re.M))


# Studies


STUDY = [
    "sweep=optuna_ddn",
    "hydra.sweeper.n_trials=7",
    "model.decoder.chain_dropout=0.1",
    "callbacks.ema.halflife_kimg=1",
    "hydra.sweeper.sampler.n_startup_trials=4",
    "hydra.sweeper.pruner.n_startup_trials=2",
    "model.optimizer.lr=tag(log,interval(1e-5,1e-1))",
    "seed=choice(0,4)",
]


def test_a_study_is_interrupted_and_continued(tmp_path):
    """It counts trials over both commands, prunes, and calls a run without a finite value failed."""
    optuna = pytest.importorskip("optuna")
    process = begun(tmp_path, *STUDY, *SHORT, STEP_SECONDS="0.1")
    try:
        wait_for(lambda: len(list(tmp_path.glob("runs/ddn*/metrics.csv"))) == 3)
        process.send_signal(signal.SIGINT)
        _, wrong = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130, wrong
    (path,) = tmp_path.glob("runs/sweeps/optuna_ddn-*/study.db")
    before = optuna.load_study(study_name="study", storage=f"sqlite:///{path}").trials
    assert len(before) == 3 and not before[2].state.is_finished()
    done = sweep(tmp_path, *STUDY, STEP_SECONDS="0.1")
    assert done.returncode == 0, done.stderr
    trials = optuna.load_study(study_name="study", storage=f"sqlite:///{path}").trials
    assert len(trials) == 7 and all(trial.state.is_finished() for trial in trials)
    assert [trial.params for trial in trials[:3]] == [trial.params for trial in before]
    assert len({trial.params["model.optimizer.lr"] for trial in trials}) == 7  # the sampler did not begin again
    resumed = tmp_path / "runs" / trials[2].user_attrs["run"]
    assert len(attempts(resumed)) == 2 and steps(resumed) == sorted(set(steps(resumed)))
    of = {name: [t for t in trials if t.state.name == name] for name in ("COMPLETE", "PRUNED", "FAIL")}
    assert all(trial.params["seed"] == "4" for trial in of["FAIL"])
    assert of["PRUNED"] and all(len(steps(tmp_path / "runs" / trial.user_attrs["run"])) < 10 for trial in of["PRUNED"])
    for trial in of["COMPLETE"]:
        result = json.loads((tmp_path / "runs" / trial.user_attrs["run"] / "result.json").read_text())
        assert trial.value == result["metrics"]["val/fid"]
    best = min(of["COMPLETE"], key=lambda trial: trial.value)
    assert f"run    {best.user_attrs['run']}\n" in done.stdout
    repeated = sweep(tmp_path, *STUDY)
    assert repeated.returncode == 0 and f"run    {best.user_attrs['run']}\n" in repeated.stdout
    assert "started" not in repeated.stdout
    listed = json.loads((path.parent / "sweep.json").read_text())  # of all three commands, for compare.py
    assert sorted(run["name"] for run in listed) == sorted(trial.user_attrs["run"] for trial in trials)


# Clusters


SLURM = ["launcher=slurm", "hydra.launcher.minutes=5"]


def test_submitit_runs_jobs_on_this_machine(tmp_path):
    pytest.importorskip("submitit")
    words = [*SLURM, "hydra.launcher.cluster=local", "trainer.accelerator=cpu", "seed=0,3"]
    done = sweep(tmp_path, *words, LOCAL_RANK="1")
    assert done.returncode == 1 and "1 of 2 runs failed" in done.stderr
    assert states(tmp_path) == {"seed=0": "finished", "seed=3": "failed"}
    assert "  | train: seed 3 does not fit\n" in done.stdout
    assert attempts(run_of(tmp_path, 0))[0]["LOCAL_RANK"] is None


def test_a_task_whose_time_is_over_saves_and_is_queued_again(tmp_path):
    """submitit tells its task by a signal, some time before."""
    pytest.importorskip("submitit")
    words = [*SLURM, "hydra.launcher.cluster=local", "trainer.accelerator=cpu", "seed=0"]
    process = begun(tmp_path, *words, STEP_SECONDS="0.4")
    try:
        wait_for(lambda: list(tmp_path.glob("runs/ddn*/metrics.csv")))
        (task,) = (
            pid for pid, line in processes().items() if "submitit.core._submit" in line and str(tmp_path) in line
        )
        wait_for(lambda: len(steps(run_of(tmp_path, 0))) > 2)
        os.kill(task, signal.SIGUSR2)
        said, wrong = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, said + wrong
    run = run_of(tmp_path, 0)
    assert len(attempts(run)) == 2 and steps(run) == [*range(1, 11)]
    assert not any(is_alive(attempt["pid"]) for attempt in attempts(run))


# SLURM's commands for one machine: sbatch starts the file that it is given at once, srun one process per task.
FAKE_SLURM = {
    "sbatch": """
import pathlib, subprocess, sys, os
here = pathlib.Path(__file__).parent
text = pathlib.Path(sys.argv[-1]).read_text()
(here / "submitted").write_text(text)
job = str(100 + len(list(here.glob("job-*"))))
(here / f"job-{job}").mkdir()
tasks = text.split("--ntasks-per-node=")[1].split()[0]
env = os.environ | {"SLURM_JOB_ID": job, "SLURM_NTASKS": tasks}
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
(here / f"job-{job}" / "pid").write_text(str(subprocess.Popen(["bash", sys.argv[-1]], env=env, **quiet).pid))
print("Submitted batch job", job)
""",
    "srun": """
import os, subprocess, sys
command = [a for a in sys.argv[1:] if not a.startswith("--")]
command = command[command.index(next(a for a in command if "python" in a)):]
tasks = int(os.environ["SLURM_NTASKS"])
ranked = lambda n: os.environ | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "SLURM_NODEID": "0"}
running = [subprocess.Popen(command, env=ranked(n)) for n in range(tasks)]
sys.exit(max(abs(process.wait()) for process in running))
""",
    "sacct": "print('JobID|State|NodeList')",
    "squeue": "",
    "scancel": """
import os, pathlib, signal, sys, time
pid = int((pathlib.Path(__file__).parent / f"job-{sys.argv[-1]}" / "pid").read_text())
os.killpg(pid, signal.SIGTERM); time.sleep(1); os.killpg(pid, signal.SIGKILL)
""",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in FAKE_SLURM.items():
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(
    ("restarts", "tasks", "cpus"), [("null", ["0", "1"], "cpus-per-task=3"), ("4", ["0"], "cpus-per-task=6")]
)
def test_slurm_gets_an_agent_per_node_or_a_task_per_device_that_is_queued_again(slurm, tmp_path, restarts, tasks, cpus):
    pytest.importorskip("submitit")
    words = [*SLURM, "trainer.devices=2", "strategy=ddp", "hydra.launcher.partition=long", "seed=0"]
    words += [f"hydra.launcher.max_restarts={restarts}", "hydra.launcher.cpus_per_task=3"]
    words.append("+hydra.launcher.options.slurm_comment=tried")
    done = sweep(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(tmp_path) == {"seed=0": "finished"}
    flags = set(re.findall(r"^#SBATCH --(\S+)", (slurm / "submitted").read_text(), re.M))
    assert {
        f"ntasks-per-node={len(tasks)}",
        cpus,
        "nodes=1",
        "gpus-per-node=2",
        "requeue",
        "partition=long",
        "time=5",
        "comment=tried",
    } <= flags
    told = attempts(run_of(tmp_path, 0))
    assert sorted(job["SLURM_PROCID"] for job in told) == tasks
    assert {job["SLURM_NTASKS"] for job in told} == {str(len(tasks))}


def test_stopping_a_sweep_cancels_its_slurm_jobs(slurm, tmp_path):
    pytest.importorskip("submitit")
    words = [*SLURM, "trainer.accelerator=cpu", "hydra.launcher.grace_seconds=1", "seed=0"]
    process = begun(tmp_path, *words, STEP_SECONDS="5")
    try:
        (job,) = wait_for(lambda: [a for run in tmp_path.glob("runs/ddn*") for a in attempts(run)])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 143 and states(tmp_path) == {"seed=0": "stopped"}
    assert not is_alive(job["pid"])


def test_a_job_that_waits_in_the_queue_is_not_queued_twice(slurm, tmp_path, composed):
    pytest.importorskip("submitit")
    name = composed("seed=0").name
    (slurm / "squeue").write_text(f"#!{sys.executable}\nimport sys\nprint(77 if '--name={name}' in sys.argv else '')")
    (slurm / "sacct").write_text(f"#!{sys.executable}\nprint('JobID|State|NodeList')\nprint('77|COMPLETED|')")
    done = sweep(tmp_path, *SLURM, "seed=0")
    assert not (slurm / "submitted").exists()
    assert done.returncode == 1 and "1 of 1 runs failed" in done.stderr  # it has ended, and left no result


def test_ray_runs_jobs_on_this_machine(tmp_path):
    pytest.importorskip("ray")
    done = sweep(tmp_path, "launcher=ray", "seed=0,3", LOCAL_RANK="1")
    if "timed out during startup" in done.stderr:
        pytest.skip("Ray gives itself 30 seconds to start, which a busy machine does not keep")
    assert done.returncode == 1 and "1 of 2 runs failed" in done.stderr
    assert states(tmp_path) == {"seed=0": "finished", "seed=3": "failed"}
    assert attempts(run_of(tmp_path, 0))[0]["LOCAL_RANK"] is None


# Real runs


REAL = [
    *TINY,
    "callbacks=[budget,ema,metrics,checkpoint]",
    "logger=[csv]",
    "batch=8",
    "val_every_kimg=4",
    "data.val_batch=8",
    "+trainer.limit_val_batches=1",
    "callbacks.metrics.every_kimg=0.08",
    "callbacks.checkpoint.every_kimg=0.08",
    "metric=[train/loss]",
    "strategy=ddp",
    "trainer.devices=2",
    "trainer.accelerator=cpu",
]


def ranks(folder: Path) -> dict[int, str]:
    """Processes that train below this folder: id -> command line."""
    return {pid: line for pid, line in processes().items() if str(folder) in line and "hydra.mode=RUN" in line}


def test_a_run_of_two_processes_is_killed_and_goes_on_when_the_sweep_is_repeated(tmp_path):
    """Lightning starts each rank with its own command line, which is a single run's: no rank starts a sweep."""
    process = begun(tmp_path, *REAL, "schedule_kimg=1.2", script="train.py")
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/checkpoints/000000000[2-9]??/manifest.json")), 500)
        running = ranks(tmp_path)
        (first,) = [pid for pid, line in running.items() if "train_ddp_process" not in line]
        assert len(running) == 2
        os.kill(first, signal.SIGKILL)
        said, wrong = process.communicate(timeout=200)
    finally:
        process.kill()
        for pid in ranks(tmp_path):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 1 and "1 of 1 runs failed" in wrong
    assert "killed by SIGKILL" in said and ranks(tmp_path) == {}
    assert states(tmp_path) == {"schedule_kimg=1.2": "failed"}
    again = sweep(tmp_path, *REAL, "schedule_kimg=1.2", script="train.py")
    assert again.returncode == 0, again.stdout
    assert states(tmp_path) == {"schedule_kimg=1.2": "finished"}
    assert len(list(tmp_path.glob("runs/*"))) == 2  # the run and the sweep
    (log,) = tmp_path.glob("runs/*/log.txt")
    assert "Continuing from checkpoint" in log.read_text()
    rows = [line.split(",") for line in (log.parent / "metrics.csv").read_text().splitlines()]
    loss = [float(row[3]) for row in rows if row[2] == "train/loss"]
    assert len(loss) == 15
    assert re.search(rf" +{loss[-1]:.5g} +\d+ +finished$", again.stdout, re.M)


# Settings of sweeps, and answers


def test_a_sweep_of_weights_and_biases_asks_for_runs_that_compose(composed):
    """The command that its agent makes of the file."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    asked = yaml.safe_load((ROOT / "docs" / "wandb_sweep.yaml").read_text())
    drawn = {"experiment": "ddn_small", "model.optimizer.lr": 0.00123, "model.decoder.chain_dropout": 0.25, "seed": 1}
    assert drawn.keys() == asked["parameters"].keys()
    words = create_sweep_command_args({"args": {key: {"value": value} for key, value in drawn.items()}})
    command = create_sweep_command(asked["command"])
    assert command[-2:] == ["${program}", "${args_no_hyphens}"] and asked["program"] == "train.py"
    config = composed(*words["args_no_hyphens"])
    assert (config.seed, config.model.optimizer.lr, config.model.decoder.chain_dropout) == (1, 0.00123, 0.25)
    assert config.model.decoder.widths == composed("experiment=ddn_small").model.decoder.widths
    assert asked["metric"]["name"] in config.metric


@pytest.mark.parametrize("path", sorted((CONF / "sweep").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_setting_that_a_sweep_varies_exists(composed, path):
    composed(f"sweep={path.stem}")
    params = HydraConfig.get().sweeper.params
    chosen = {key: "0" if "range" in values else re.findall(r"\d[\d.e-]*", values)[0] for key, values in params.items()}
    config = composed(f"sweep={path.stem}", *(f"{key}={value}" for key, value in chosen.items()))
    for key, value in chosen.items():
        assert OmegaConf.select(config, key) == float(value)


def test_a_sweeps_settings_give_way_to_the_command_lines(composed):
    config = composed("sweep=optuna_ddn", "experiment=ddn_mnist", "val_every_kimg=1")
    assert config.batch == composed("experiment=ddn_mnist").batch and config.val_every_kimg == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=0,1"], "'seed=0,1' is several values; add -m to run each, or write seed=[0,1] for a list"),
        (["-m", "model=ddn,ddgann"], "model=ddgann does not exist; did you mean ddgan"),
        (
            ["-m", "seed=0,1", "hydra.launcher.job=2"],
            "'hydra.launcher.job' is no key of the configuration; did you mean",
        ),
        (["-m", "seed=0,1", "launcher=slrum"], "launcher=slrum does not exist; did you mean slurm?"),
        (["sweep=optuna"], "sweep=optuna does not exist; did you mean optuna_ddn?"),
        (["-m", "seed=0,1", "hydra.launcher.jobs=0"], "hydra.launcher.jobs=0 must be a number greater than 0"),
        (["sweep=optuna_ddn", "~launcher"], "trials need a launcher that can stop them: launcher=local"),
        (["-m", "experiment=ddgan_small", "model.lr_generator=1e-4,2e-4"], "model.optimizer_generator.lr"),
        (["-m", "launcher=slurm", "seed=0"], 'launcher=slurm: Could not detect "srun"'),
        (["-m", "launcher=slurm", "seed=0", "trainer.devices=auto"], "trainer.devices=auto must be a number"),
    ],
)
def test_mistakes_end_in_a_sentence(tmp_path, words, said):
    done = run_command(WORKER, *below(tmp_path), *words, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("train: ") and said in line


def test_help_names_every_group_and_setting():
    said = run_command("train.py", "--help").stdout
    for group in (path.name for path in CONF.iterdir() if path.is_dir() and path.name not in ("hydra", "local")):
        (line,) = re.findall(rf"^{group}: (.+)$", said, re.M)
        assert line.split(", ") == sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    assert "# images per step over all processes" in said and "python train.py -m" in said and "Hydra" not in said
    assert "# 0, 1 or 2" not in said and "$$" not in said


def test_other_commands_explain_their_settings():
    said = run_command("sample.py", "--help").stdout
    assert said.startswith("python sample.py [KEY=VALUE ...]\n")
    assert "# sample number of the first; a number always names the same noise" in said


@pytest.mark.parametrize("question", [["--help"], ["--cfg", "job"], ["--help", "experiment=ddgan_small"]])
def test_questions_are_answered_at_once(question):
    """Of processor time, since others may be using the machine."""
    before = os.times()
    assert run_command("train.py", *question).returncode == 0
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.5


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("python train.py model=d", {"model=ddgan", "model=ddgan_points", "model=ddn"}),
        ("python train.py launcher=", {"launcher=local", "launcher=ray", "launcher=slurm"}),
        ("python train.py hydra.launcher.", {"hydra.launcher.jobs=", "hydra.launcher.gpus_per_job="}),
        ("python train.py model=ddgan model.generator.wi", {"model.generator.width="}),
    ],
)
def test_the_shell_completes(line, offered):
    said = run_command("train.py", "--shell-completion", "query=bash", COMP_LINE=line)
    assert offered <= set(said.stdout.split()), said.stderr


def test_the_shell_completes_in_bash():
    script = """
eval "$(python train.py --shell-completion install=bash)"
COMP_LINE="python train.py sweep=s" COMP_POINT=23 COMP_WORDS=(python train.py sweep=s) COMP_CWORD=2
hydra_bash_completion; echo "${COMPREPLY[@]}"
"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "sweep=seeds\n", done.stderr


# Debugging


def debugged(folder: Path, *words: str) -> Path:
    done = run_command("train.py", *TINY, "callbacks=[budget,metrics,checkpoint]", f"paths.runs={folder}/runs", *words)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    return run


def rows_of(run: Path, metric: str) -> list[tuple[float, float]]:
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()[1:]]
    return [(float(kimg), float(value)) for _, kimg, name, value in rows if name == metric]


def test_one_batch_is_one_batch_of_its_own_size(tmp_path):
    run = debugged(tmp_path, "debug=one_batch", "batch=24", "data.val_batch=8")
    assert [kimg for kimg, _ in rows_of(run, "train/loss")] == [0.024]
    assert [path.name for path in run.glob("checkpoints/0*")] == ["000000000024"]


def test_overfitting_shows_the_same_images_again(tmp_path):
    """A network that does not learn has the same loss every time, once its leaves have been split."""
    run = debugged(tmp_path, "debug=overfit", "model.optimizer.lr=0", "model.halflife_kimg=null", "total_kimg=0.4")
    loss = [value for _, value in rows_of(run, "train/loss")]
    assert len(loss) == 5 and max(loss[1:]) - min(loss[1:]) < 1e-6


def test_a_profile_names_the_operations(tmp_path):
    run = debugged(tmp_path, "debug=profile", "batch=4")
    (table,) = run.glob("*profile*.txt")
    assert re.search(r"aten::\S*conv", table.read_text())
    assert list(run.glob("*.json"))
