"""Every command of the README runs, tiny; where its data is not here, its configuration composes."""

import re
import shlex

import pytest
from conftest import compose_config, run_command

from src.config import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.split("#")[0].strip()
]
RECIPES = re.findall(r"^\| `(\w+)`(?: \(`[^`]*`\))? \| ", README.split("## Recipes")[1].split("##")[0], re.M)


def test_the_readme_names_its_commands_and_recipes():
    assert {"make train", "make test"} <= set(COMMANDS)
    assert set(RECIPES) == {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_of_the_readme_composes(recipe, tmp_path):
    assert compose_config(tmp_path, f"experiment={recipe}", "data.path=." if "path" in recipe else "seed=0").batch > 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python train.py") and "paris" not in c])
def test_every_training_command_of_the_readme_runs(command, tmp_path):
    words = [w for w in shlex.split(command)[1:] if not w.startswith("batch=")]
    words += ["model.steps=1"] if "model=expert" in words else []  # of samples
    done = run_command(*words, "debug=fast", f"paths.runs={tmp_path}", f"paths.cache={tmp_path}/cache", timeout=300)
    assert done.returncode == 0, done.stderr
    assert ("finished" if "-m" in words else "Run folder") in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if "run=runs/NAME" in c])
def test_every_command_of_the_readme_on_a_run_works(command, tiny_run):
    words = [w.replace("runs/NAME", str(tiny_run)) for w in shlex.split(command)[1:]]
    words = [re.sub(r"^num=.*", "num=8", w) for w in words]
    extra = ["reference=16"] if "evaluate.py" in command else []
    done = run_command(*words, *extra, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_comparing_command_of_the_readme_works(tmp_path):
    places = [f"paths.runs={tmp_path}", f"paths.cache={tmp_path}/cache"]
    trained = run_command("train.py", "model=expert", "model.steps=1", "debug=fast", *places)
    assert trained.returncode == 0, trained.stderr
    (command,) = [c for c in COMMANDS if c.startswith("python compare.py")]
    done = run_command(*(w.replace("runs/*", f"{tmp_path}/*") for w in shlex.split(command)[1:]))
    assert done.returncode == 0 and "expert-fashion10k-single-s0-" in done.stdout, done.stderr
    assert (tmp_path / "compare.html").exists()


@pytest.mark.slow
def test_the_partitioning_command_of_the_readme_works(tmp_path):
    (command,) = [c for c in COMMANDS if "task=partition" in c]
    done = run_command(*shlex.split(command)[1:], "fine=32", f"store={tmp_path}")
    assert done.returncode == 0 and "9000 images in 8 clusters" in done.stdout, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["partition.json", "partition.npz", "partition.png"]


@pytest.mark.slow
def test_the_four_commands_of_the_readme_make_an_ensemble(tmp_path):
    """With two experts instead of eight."""
    commands = [c for c in COMMANDS if "task=partition" in c or "experiment=paris" in c]
    assert len(commands) == 4 and [shlex.split(c)[1] for c in commands][1:] == ["train.py", "train.py", "sample.py"]
    places = [f"store={tmp_path}/store", f"paths.runs={tmp_path}/runs"]
    extra = [
        ["fine=32"],
        ["debug=fast", "~callbacks.clusters"],
        ["debug=fast", "model.network.clusters=2"],
        ["num=4", "model.steps=2"],
    ]
    for command, more in zip(commands, extra, strict=True):
        words = [w.replace("clusters=8", "clusters=2").replace("range(8)", "0,1") for w in shlex.split(command)[1:]]
        done = run_command(*words, *places, *more, timeout=300)
        assert done.returncode == 0, done.stderr
    assert "of 2 experts a step" in done.stdout and "4 samples of paris-threshold" in done.stdout
    assert list((tmp_path / "runs" / "paris-threshold" / "samples").glob("*.png"))
