"""The rules of the house: style, who may import whom, and what no file may contain."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from src.config import ROOT

BIN = Path(sys.executable).parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
ENTRIES = sorted(ROOT.glob("*.py"))
name_of = lambda path: str(path.relative_to(ROOT))  # noqa: E731


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["lint-imports"]])
def test_the_linters_find_nothing(command):
    words = [str(BIN / command[0]), *command[1:]]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_modules_leave_backward_to_the_strategy():
    """`loss.backward()` would go past precision, gradient exchange and sharding; `manual_backward` does not."""
    for path in (ROOT / "src" / "modules").rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not any(ast.unparse(call.func).endswith(".backward") for call in calls), path


DRAWS = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like")


def draws_from_a_global_generator(path):
    """(line, call) of each call of torch's, numpy's or Python's random functions that is given no generator."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        own = any(keyword.arg == "generator" for keyword in node.keywords)
        of_torch = function.startswith("torch.") and function.split(".")[-1] in DRAWS
        in_place = re.search(r"(?<!nn\.init)\.(random|normal|uniform|exponential|bernoulli)_$", function)
        of_numpy = re.match(r"(np|numpy)\.random\.(?!default_rng|Generator|SeedSequence)", function)
        of_python = re.match(r"random\.(?!Random\b)\w+$", function)
        if ((of_torch or in_place) and not own) or of_numpy or of_python:
            yield node.lineno, function


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=name_of)
def test_benchmarks_that_are_started_find_the_sources(path):
    text = path.read_text()
    if '__name__ == "__main__"' in text and re.search(r"^ *from (src|benchmarks)", text, re.MULTILINE):
        assert re.search(r"^ *sys\.path(\.insert\(0, |\[:0\] = \[)str\(", text, re.MULTILINE)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_code_draws_from_the_global_generators(path):
    assert list(draws_from_a_global_generator(path)) == []


def test_a_draw_would_be_found(tmp_path):
    (tmp_path / "a.py").write_text(
        "torch.randn(3)\ntorch.rand(3, generator=g)\nnp.random.rand()\nnp.random.default_rng(0)\nx.normal_()\n"
        "random.random()\nrandom.Random(3)\nnn.init.normal_(x)\nx.normal_(generator=g)\nnoise.normal('z', 3)\n"
    )
    assert [line for line, _ in draws_from_a_global_generator(tmp_path / "a.py")] == [1, 3, 5, 6]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_global_generator_is_seeded_only_inside_a_fork(path):
    """torch.manual_seed belongs under torch.random.fork_rng, which puts the generator back."""
    tree = ast.parse(path.read_text())
    seeded = {
        n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.manual_seed"
    }
    forks = [n for n in ast.walk(tree) if isinstance(n, ast.With) and "fork_rng" in ast.unparse(n.items[0])]
    inside = {line for fork in forks for line in range(fork.lineno, fork.end_lineno + 1)}
    assert seeded <= inside


@pytest.mark.parametrize("path", ENTRIES, ids=name_of)
def test_entries_are_short_and_import_torch_inside_main(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 50
    top = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {ast.unparse(node) for node in top} == {"from src.config import entry"}
    assert (ROOT / "conf" / f"{path.stem}.yaml").exists()


@pytest.mark.parametrize("path", SOURCES + ENTRIES, ids=name_of)
def test_every_file_with_code_says_in_a_docstring_what_it_is(path):
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name}"


def test_every_model_has_a_file_of_its_name_and_a_test():
    """A newcomer finds a model by the word that one types: model=NAME."""
    for path in (ROOT / "conf" / "model").glob("*.yaml"):
        target = re.search(r"^_target_: src\.modules\.(\w+)\.", path.read_text(), re.M)
        assert target, path
        assert path.stem.split("_")[0] == target[1]
        assert (ROOT / "src" / "modules" / f"{target[1]}.py").exists()
        assert list((ROOT / "tests").glob(f"test_{target[1]}*.py"))


def test_paths_are_written_in_one_place_only():
    """`paths` is the only group that names folders; everything else refers to it."""
    for path in (ROOT / "conf").rglob("*.yaml"):
        if path.parent.name not in ("paths", "hydra", "debug", "local"):
            for line in path.read_text().splitlines():
                key, _, value = line.split("#")[0].partition(":")
                if key.strip() in ("folder", "save_dir", "default_root_dir", "root") and value.strip():
                    assert value.strip().startswith("${paths."), f"{path}: {line}"


def test_the_log_of_a_command_is_no_part_of_the_project():
    tracked = subprocess.run(["git", "ls-files", "*.log"], cwd=ROOT, capture_output=True, text=True)
    assert tracked.stdout == ""
