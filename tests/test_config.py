"""Configurations: all of them compose, a run's name says what its weights depend on, mistakes end in one sentence."""

import json
import logging
import re
import runpy
import subprocess
import sys

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import OmegaConf

from src.config import CONF, ROOT, check_types, code_stamp, fast_precision, plain

CHOICES = sorted((path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name != "hydra")
SEVERAL = ("callbacks", "logger")  # groups of which one chooses a list
BUILT = ("callbacks", "data", "experiment", "logger", "model", "strategy")  # groups whose files are composed and built
ENTRIES = sorted(path.stem for path in ROOT.glob("*.py"))
CHANGE_WEIGHTS = ("ema", "r1", "rollback")  # of the callbacks; all others only watch


# Composition


@pytest.mark.parametrize(("group", "name"), [choice for choice in CHOICES if choice[0] not in (*BUILT, "ensemble")])
def test_every_file_of_every_other_group_composes(composed, group, name):
    assert OmegaConf.missing_keys(composed(f"{group}={name}")) == set()


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "ensemble"])
@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_every_strategy_of_an_ensemble_can_be_built(composed, name, command):
    config = composed("experiment=paris", f"ensemble={name}", command=command)
    assert callable(instantiate(config.model.strategy)) and config.folder.endswith(f"/paris-{name}")


@pytest.mark.parametrize("command", ENTRIES)
def test_every_command_composes(composed, command):
    assert "hydra" not in composed(command=command)


@pytest.mark.parametrize(("group", "name"), [choice for choice in CHOICES if choice[0] in SEVERAL])
def test_every_callback_and_logger_can_be_built_as_configured(composed, group, name):
    chosen = composed(f"{group}=[{name}]")[group]
    assert list(chosen) == [name]
    instantiate(chosen[name])


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "strategy"])
def test_every_strategy_can_be_built_as_configured(composed, name):
    assert instantiate(composed(f"strategy={name}").strategy) is not None


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "data"])
def test_every_data_set_can_be_built_as_configured(composed, name, tmp_path):
    paths = {"folder": [f"data.path={tmp_path}"], "latents": [f"data.source.path={tmp_path}"]}
    config = composed(f"data={name}", *paths.get(name, []))
    data = instantiate(config.data)
    assert (data.batch, data.seed) == (config.batch, config.seed)
    assert (data.channels, data.resolution) == (config.data.channels, config.data.resolution)


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "model"])
def test_every_model_builds_for_its_data(composed, name):
    config = composed(f"model={name}", *(["data=gaussians25"] if name == "ddgan_points" else []))
    with torch.device("meta"):
        model = instantiate(config.model)
    assert list(model.parallel_networks()) and model.describe()


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "experiment" and name != "paris"])
def test_every_experiment_composes_and_its_model_builds(composed, name):
    config = composed(f"experiment={name}")
    with torch.device("meta"):
        model = instantiate(config.model)
    assert all(parameter.is_meta for parameter in model.parameters())
    optimizers = model.configure_optimizers()
    assert len(optimizers) == len(model.parallel_networks())


def test_a_recipes_settings_give_way_to_the_command_lines(composed):
    config = composed("experiment=ddn_mnist", "batch=8", "model.optimizer.lr=0.5", "callbacks.metrics.every_kimg=3")
    assert (config.batch, config.model.optimizer.lr, config.callbacks.metrics.every_kimg) == (8, 0.5, 3)
    assert "ema" not in config.callbacks


def test_callbacks_are_taken_away_and_changed_by_name(composed):
    config = composed("~callbacks.ema", "callbacks.metrics.every_kimg=7")
    assert "ema" not in config.callbacks and config.callbacks.metrics.every_kimg == 7


def test_interface_values_come_from_the_data(composed):
    config = composed("data=emoji32", "model.decoder.classes=${data.classes}")
    assert (config.model.decoder.channels, config.model.decoder.classes) == (3, 10)


def test_the_plain_configuration_is_resolved_and_plain(composed):
    config = plain(composed("batch=64"))
    assert json.loads(json.dumps(config)) == config
    assert "${" not in json.dumps(config)
    assert config["data"]["batch"] == 64


@pytest.mark.parametrize(("kimg", "batch", "expected"), [("15", "32", 469), ("0.001", "32", 1), ("0.008", "4", 2)])
def test_validation_comes_after_as_many_batches_as_make_its_images(composed, kimg, batch, expected):
    assert composed(f"val_every_kimg={kimg}", f"batch={batch}").trainer.val_check_interval == expected


# The run's name


@pytest.fixture(scope="module")
def default_name(compose_in, tmp_path_factory):
    return compose_in(tmp_path_factory.mktemp("default")).name


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.devices=7", "trainer.num_nodes=2", "trainer.accelerator=cpu", "micro_batch=8"],
        ["logger=[csv]", "total_kimg=10", "val_every_kimg=1", "metric=[val/other]"],
        ["callbacks.metrics.every_kimg=7", "callbacks.distances.reference=7", "callbacks.checkpoint.every_kimg=7"],
        ["callbacks.pictures.count=7", "~callbacks.throughput", "~callbacks.progress"],
        ["data.workers=3", "data.val_batch=7", "paths.cache=elsewhere", "paths.runs=elsewhere"],
    ],
)
def test_what_changes_no_weight_does_not_change_the_name(composed, default_name, overrides):
    assert composed(*overrides).name == default_name


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "batch=48",
        "schedule_kimg=31.5",
        "data=emoji32",
        "strategy=ddp",
        "data.flip=true",
        "data.held_out=999",
        "model.optimizer.lr=0.0011",
        "model.optimizer._target_=torch.optim.AdamW",
        "model.decoder.chain_dropout=0.123",
        "model.decoder.leaves=[64,64,64,64,64,63]",
        "model.halflife_kimg=null",
        "model.schedule.warmup_kimg=0.654",
        "callbacks.ema.halflife_kimg=2.5",
        "~callbacks.ema",
    ],
)
def test_what_changes_weights_changes_the_name(composed, default_name, override):
    assert composed(override).name != default_name


def test_recipes_for_two_cores_use_bf16_where_the_processor_knows_it(composed):
    known = torch.cpu.get_capabilities()
    knows = any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    for name in ("ddn_small", "ddgan_small", "expert_small", "paris_expert", "paris_router"):
        on_cpu = composed(f"experiment={name}", "trainer.accelerator=cpu").trainer.precision
        assert on_cpu == fast_precision("cpu") == ("bf16-mixed" if knows else "32-true")
        assert composed(f"experiment={name}", "trainer.accelerator=gpu").trainer.precision == "bf16-mixed"


def test_precisions_and_loss_functions_change_the_name(composed):
    assert len({composed(f"trainer.precision={choice}").name for choice in ("32-true", "bf16-mixed")}) == 2
    settings = ("null", "{_target_: src.discrete.charbonnier, _partial_: true, softness: 0.3}")
    assert len({composed(f"model.decoder.loss_fn={choice}").name for choice in settings}) == 2


@pytest.mark.parametrize("callback", [name for group, name in CHOICES if group == "callbacks"])
def test_a_callback_is_part_of_the_name_where_it_changes_weights(composed, callback):
    without = composed("callbacks=[budget]").name
    changed = composed(f"callbacks=[budget,{callback}]").name != without
    assert changed == (callback in CHANGE_WEIGHTS)


def test_the_name_does_not_depend_on_how_it_was_asked_for(composed):
    assert composed("batch=32", "model.optimizer.lr=2e-3").name == composed("model.optimizer.lr=0.002", "batch=32").name
    assert composed("schedule_kimg=30.0").name == composed("schedule_kimg=30").name


def test_the_name_is_readable(composed):
    assert re.fullmatch(r"ddn-emoji32-ddp-s3-[0-9a-f]{6}", composed("data=emoji32", "strategy=ddp", "seed=3").name)


def test_the_run_folder_bears_the_name(composed, tmp_path):
    config = composed()
    assert config.paths.run == f"{tmp_path}/runs/{config.name}"


# The code stamp


def test_the_stamp_says_which_code_ran():
    stamp = code_stamp(["batch=8"])
    code = json.loads(stamp["code.json"])
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert code["commit"] == (commit.stdout.strip() or "unknown")
    assert code["overrides"] == ["batch=8"] and "dirty.patch" in stamp
    assert f"torch=={torch.__version__.split('+')[0]}" in " ".join(code["packages"])


def test_the_stamp_does_without_git(monkeypatch):
    """Containers often have none."""
    monkeypatch.setenv("PATH", "")
    assert json.loads(code_stamp([])["code.json"])["commit"] == "unknown"


# Answering at once


@pytest.mark.parametrize(
    ("entry", "question"), [*((entry, ["--help"]) for entry in ENTRIES), ("train", ["--cfg", "job"])]
)
def test_questions_are_answered_without_importing_torch(entry, question, tmp_path):
    command = [sys.executable, "-X", "importtime", ROOT / f"{entry}.py", *question]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode == 0 and answer.stdout
    imported = {
        line.rpartition("|")[2].strip() for line in answer.stderr.splitlines() if line.startswith("import time:")
    }
    assert "hydra" in imported and "src.config" in imported
    assert not imported & {"torch", "lightning", "numpy", "wandb", "src.run"}
    assert list(tmp_path.iterdir()) == []


# Mistakes; the slow ones are more of the same kind


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def mistake(monkeypatch, tmp_path, capsys):
    """mistake(*overrides) -> the sentence in which the command ends; a string given to sys.exit is printed as it is and
    makes the exit code 1."""
    handlers, level = logging.root.handlers[:], logging.root.level

    def of(*overrides, command="train"):
        own = [f"paths.runs={tmp_path / 'runs'}", f"paths.cache={tmp_path / 'cache'}"] if command == "train" else []
        own += ["debug=fast"] * (command == "train" and "debug" not in "".join(overrides))  # where nothing is noticed
        monkeypatch.setattr(sys, "argv", [f"{command}.py", *own, *overrides])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        monkeypatch.delenv("FEWSTEP_TRACEBACK", raising=False)
        monkeypatch.chdir(tmp_path)
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / f"{command}.py"), run_name="__main__")
        said = ended.value.code
        assert isinstance(said, str) and said.startswith(f"{command}: ")
        assert "\n" not in said.strip() and "Traceback" not in said and len(said) < 500
        assert "Traceback" not in capsys.readouterr().err
        return said.removeprefix(f"{command}: ")

    yield of
    GlobalHydra.instance().clear()
    logging.root.handlers[:], logging.root.level = handlers, level
    hydra.core.hydra_config.HydraConfig.instance().cfg = None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=dnn", "model=dnn does not exist; did you mean ddn"),
        ("data=fashion1k", "data=fashion1k does not exist; did you mean fashion10k"),
        slow("strategy=dpp", "strategy=dpp does not exist; did you mean ddp"),
        ("experiment=ddn_cifar", "experiment=ddn_cifar does not exist; did you mean ddn_cifar10"),
        slow("debug=fst", "debug=fst does not exist; did you mean fast"),
        ("callbacks=[budget,emma]", "callbacks=emma does not exist; did you mean ema"),
        ("logger=[cvs]", "logger=cvs does not exist; did you mean csv"),
        ("strategy=warp_drive", "strategy=warp_drive does not exist; there is .*ddp.*single"),
    ],
)
def test_an_unknown_choice_of_a_group_names_the_nearest(mistake, override, said):
    assert re.match(said, mistake(override))


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("modle=ddn", "model"),
        slow("strategie=ddp", "strategy"),
        ("batchs=3", "batch"),
        slow("sead=3", "seed"),
        ("model.decoder.widht=3", "model.decoder.widths"),
        slow("trainer.precison=32", "trainer.precision"),
        slow("callbacks.ema.halflive_kimg=1", "callbacks.ema.halflife_kimg"),
        ("model.lr=1", "model.optimizer.lr"),
        ("chain_dropout=0", "model.decoder.chain_dropout"),
    ],
)
def test_an_unknown_key_names_the_nearest(mistake, override, nearest):
    said = mistake(override)
    key = override.partition("=")[0]
    assert said.startswith(f"'{key}' is no key of the configuration; did you mean ")
    proposed = said.partition("did you mean ")[2].rstrip("?").split(" or ")
    assert nearest in proposed
    assert len(set(proposed)) == len(proposed)


def test_the_nearest_key_is_looked_for_in_what_was_chosen(mistake):
    assert "callbacks.r1.gamma" in mistake("callbacks=[budget,r1]", "callbacks.r1.gama=3")
    assert "data.path" in mistake("data=folder", "data.pat=x")


@pytest.mark.parametrize(
    "override",
    [
        "batch=abc",
        slow("batch="),
        slow("batch=[1,2]"),
        "batch=2.5",
        slow("batch=true"),
        "seed=abc",
        "total_kimg=abc",
        slow("val_every_kimg=x"),
        slow("schedule_kimg=long"),
        "micro_batch=x",
        "model.optimizer.lr=abc",
        "model.decoder.leaves=abc",
        slow("model.decoder.blocks=[1,a,1,1,1,1]"),
        slow("model.decoder.classes=x"),
        slow("model.schedule.warmup_kimg=x"),
        "data.flip=maybe",
        slow("data.workers=x"),
        slow("data.held_out=x"),
        "callbacks.metrics.every_kimg=x",
        slow("callbacks.checkpoint.keep=x"),
        slow("callbacks.ema.halflife_kimg=x"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_its_key(mistake, override):
    said = mistake(override)
    key, value = override.split("=")
    assert key in said and value in said
    assert "interpolation" not in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch=8", "seed=3", "total_kimg=0.5", "schedule_kimg=1e1", "micro_batch=null"],
        ["model=ddgan", "model.generator.attention=[]", "model.generator.multipliers=[1,2]"],
        ["model.decoder.loss_fn={_target_: src.discrete.charbonnier, _partial_: true, softness: 0.1}"],
        ["model.decoder.classes=${data.classes}", "callbacks.progress.shown=[]", "metric=[val/fid]"],
        ["callbacks=[budget,ema]", "callbacks.ema.halflife_kimg=null", "callbacks.ema.decay=0.999", "logger=[]"],
        ["experiment=ddgan_25gaussians", "metric=[val/modes]"],
        ["data=folder", "data.path=/some/where", "data.unreadable=skip", "+trainer.limit_val_batches=1", "~logger.csv"],
    ],
)
def test_settings_of_the_right_type_are_taken(composed, monkeypatch, overrides):
    composed(*overrides)
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    check_types("train")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.decoder.leaves=[64,64,1,64,64,64]"], r"leaves is \[64, 64, 1, 64, 64, 64\].*K >= 2"),
        slow(["model.decoder.blocks=[2,2]"], "blocks, widths and leaves need one number per stage"),
        slow(["model.decoder.start=2"], "resolution 32 is not reached.*change start, or the number of stages"),
        (["schedule_kimg=1", "total_kimg=2"], "total_kimg=2 goes beyond schedule_kimg=1"),
        slow(["total_kimg=0"], "total_kimg=0 must be greater than 0"),
        slow(["batch=0"], "batch=0 must be greater than 0"),
        slow(["batch=-4"], "batch=-4 must be greater than 0"),
        (["micro_batch=3"], "micro_batch=3 does not divide the 4 images"),
        (["trainer.precision=16-mixed"], "trainer.precision=16-mixed is not supported.*32-true or bf16-mixed"),
        slow(["trainer.precision=64-true"], "trainer.precision=64-true is not supported"),
        slow(["trainer.accelerator=abacus"], "accelerator.*abacus"),
        (["callbacks.ema.decay=0.9"], "callbacks.ema needs exactly one of halflife_kimg, decay and power"),
        slow(["callbacks.ema.halflife_kimg=null"], "callbacks.ema needs exactly one"),
        (
            ["callbacks.ema.halflife_kimg=null", "callbacks.ema.decay=2"],
            "callbacks.ema.decay=2 must lie between 0 and 1",
        ),
        (["callbacks.checkpoint.keep=0"], "callbacks.checkpoint.keep=0"),
        slow(["callbacks.distances.inception=/no/weights"], "no InceptionV3 weights at /no/weights"),
        slow(["model.schedule.decay=cosin"], "model.schedule.decay=cosin is unknown; it may be constant or cosine"),
        slow(["model.halflife_kimg=0"], "model.halflife_kimg is 0"),
        (["data.resolution=64"], "the images are 1 x 28 x 28, but data.channels=1, data.resolution=64"),
        slow(["data.held_out=99999"], "data.held_out=99999 must lie between 1 and 9999"),
        slow(["data=folder"], "data.path is not set"),
        slow(["data=folder", "data.path=/no/folder"], "/no/folder is not a folder"),
        slow(["data=cifar10", "paths.data=/no/data"], "CIFAR10 is not in /no/data.*cifar-10-batches-py.*paths.data="),
        (["+model.decoder.widht=3"], "model.decoder cannot be built: .*unexpected keyword argument 'widht'"),
        (["~callbacks.fid"], "callbacks.fid"),
    ],
)
def test_what_cannot_be_is_told_with_the_setting_to_change(mistake, overrides, said):
    assert re.search(said, mistake(*overrides))


@pytest.mark.parametrize(
    "words", [["batch"], ["batch", "3"], ["batch 3"], ["data.path=a=b=c,"], ["model.decoder.leaves=[1,2"]]
)
def test_what_is_no_setting_at_all_is_told_by_its_form(mistake, words):
    said = mistake(*words)
    assert words[0] in said and "key=value" in said


@pytest.mark.parametrize("command", [entry for entry in ENTRIES if entry not in ("train", "compare")])
def test_other_commands_tell_mistakes_alike(mistake, command, tmp_path):
    assert mistake("rum=3", command=command).startswith("'rum' is no key of the configuration; did you mean run")
    assert "is no run folder" in mistake(f"run={tmp_path / 'nowhere'}", command=command)
    assert "run=None" in mistake(command=command) or "run=" in mistake(command=command)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["experiment=paris", "store=x", "ensemble=tresh"], "ensemble=tresh does not exist; did you mean threshold"),
        (["ensemble=top1"], "ensemble is chosen with experiment=paris; add that"),
        (
            ["experiment=paris", "stroe=x", "ensemble=top1"],
            "'stroe' is no key of the configuration; did you mean store",
        ),
        (["experiment=paris", "store=x", "data=mnist"], "Could not override 'data'"),
    ],
)
def test_of_several_words_the_wrong_one_is_told(mistake, words, said):
    assert mistake(*words, command="sample").startswith(said)


def test_compare_tells_mistakes_alike(mistake, tmp_path):
    assert mistake("rum=3", command="compare").startswith("'rum' is no key of the configuration; did you mean run")
    assert "matches no run folder" in mistake(f"runs={tmp_path / 'nowhere'}", command="compare")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model=dnn"], "ddn"),
        slow(["model.decoder.leaves=[1,1,1,1,1,1]"], "K >= 2"),
    ],
)
def test_a_mistake_ends_the_process_with_one_line_and_exit_code_1(overrides, said, tmp_path):
    command = [sys.executable, ROOT / "train.py", f"paths.runs={tmp_path}", "logger=[csv]", *overrides]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("train: ") and said in line
    assert ended.stdout == ""


# One writer


def test_a_second_process_on_a_run_folder_is_refused(mistake, composed, tmp_path):
    folder = tmp_path / "runs" / composed("debug=fast").name
    folder.mkdir(parents=True)
    holding = (
        f"import filelock, sys; held = filelock.FileLock({str(folder / 'lock')!r}); held.acquire(); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        said = mistake("debug=fast")
        assert said.startswith(f"another process is writing to {folder}; wait for it")
        assert not (folder / "metrics.csv").exists() and not (folder / "checkpoints").exists()
    finally:
        holder.communicate()


def test_the_lock_goes_with_the_run(tiny_run):
    from filelock import FileLock

    lock = FileLock(tiny_run / "lock")
    lock.acquire(timeout=0)
    lock.release()


def test_settings_of_a_callback_that_was_not_chosen_are_no_callback(composed):
    """debug=fast sets how many pictures there are; a run without pictures has none all the same."""
    config = composed("debug=fast", "callbacks=[budget,checkpoint]")
    from src.run import _trainer

    names = [type(callback).__name__ for callback in _trainer(config).callbacks]
    assert "Budget" in names and "Pictures" not in names and "DictConfig" not in names
