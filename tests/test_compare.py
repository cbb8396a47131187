"""compare.py: the right numbers out of run folders, in the terminal and on a page that needs nothing but itself."""

import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import TINY, run_command
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from PIL import Image

from src.compare import compare
from src.compare.comparison import comparison
from src.compare.page import embedded
from src.compare.plots import Axis, Line, curves, sweep
from src.compare.runs import find, read, read_metrics
from src.compare.settings import differing, shown, value_of
from src.config import CONF

FD = "val/fd_efflite0"


def write_run(folder: Path, *overrides: str, log: dict | None = None, times=None, pictures: dict | None = None) -> Path:
    """A run folder as training leaves it: `log` is metric -> [(kimg, value)], `pictures` is images seen -> array."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"paths.runs={folder.parent}", *overrides], return_hydra_config=True)
    OmegaConf.set_struct(config, False)
    config.hydra.runtime.output_dir = str(folder)
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create({"hydra": config.pop("hydra")}), folder / ".hydra" / "hydra.yaml")
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    rows = sorted((kimg, name, value) for name, series in (log or {}).items() for kimg, value in series)
    if rows:
        lines = [f"{round(kimg * 1000)},{kimg:g},{name},{value!r}\n" for kimg, name, value in rows]
        (folder / "metrics.csv").write_text("batch,kimg,metric,value\n" + "".join(lines))
    if times:
        hours, processes = times
        (folder / "time.json").write_text(json.dumps({"hours": hours, "device_hours": hours * processes, "starts": 1}))
    for images, pixels in (pictures or {}).items():
        (folder / "pictures").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / "pictures" / f"samples_{images:012d}.png")
    return folder


def falling(start: float, last: float, kimg: int = 30) -> list[tuple[float, float]]:
    """A metric at every 10 kimg, on a line down."""
    return [(float(k), start + (last - start) * k / kimg) for k in range(10, kimg + 1, 10)]


def asked(runs: Path | str, **changes):
    """The configuration of compare.py, as its main gets it."""
    pattern = f"{runs}/*" if isinstance(runs, Path) else runs
    config = OmegaConf.load(CONF / "compare.yaml")
    return OmegaConf.merge(config, {"runs": pattern}, changes)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """Two learning rates with two seeds each; the second seed of the second stopped after 20 of 30 kimg."""
    folder = tmp_path_factory.mktemp("study") / "runs"
    for lr, seed, best, kimg in (("1e-3", 0, 10, 30), ("1e-3", 1, 14, 30), ("2e-3", 0, 20, 30), ("2e-3", 1, 30, 20)):
        pixels = np.random.default_rng(seed).integers(0, 255, (36, 36), np.uint8)
        log = {FD: falling(50, best, kimg), "train/loss": falling(1, 0.1, kimg), "train/loss_layer/00": [(1.0, 5.0)]}
        log["time/images_per_sec"] = [(1.0, 10.0), (2.0, 100.0 + seed), (3.0, 200.0)]
        write_run(
            folder / f"ddn-fashion10k-ddp-s{seed}-{lr}",
            f"model.optimizer.lr={lr}",
            f"seed={seed}",
            "strategy=ddp",
            log=log,
            times=(kimg / 10, 2),
            pictures={images: pixels + np.uint8(images // 10000) for images in range(10000, kimg * 1000 + 1, 10000)},
        )
    return folder


# Numbers


def test_runs_are_ranked_and_the_seeds_of_a_setting_put_together(study):
    found = comparison(asked(study, price_per_device_hour=2.0))
    assert (found.keys, found.metric, found.notes) == (["model.optimizer.lr"], FD, [])
    assert [row.settings for row in found.groups] == [{"model.optimizer.lr": 0.001}, {"model.optimizer.lr": 0.002}]
    best, other = (row.numbers for row in found.groups)
    assert (best["best"], other["best"]) == (12, 25)
    assert found.groups[0].deviations["best"] == pytest.approx(8**0.5)
    assert (best["kimg"], other["kimg"]) == (30, 25)
    assert best["images_per_sec"] == 100.5  # the median of each
    assert (best["hours"], best["device_hours"], best["cost"]) == (3, 12, 24)
    assert (other["hours"], other["device_hours"], other["cost"]) == (2.5, 10, 20)
    assert [row.numbers["best"] for row in found.runs] == pytest.approx([10, 14, 20, 30])
    assert [row.rank for row in found.runs] == [0, 0, 1, 1]
    assert found.columns == ["best", "newest", "kimg", "images_per_sec", "cost", "device_hours", "hours"]


def test_settings_that_look_alike_are_not_put_together(tmp_path):
    for number, rate in enumerate(("1e-3", "1.0000001e-3")):
        write_run(tmp_path / str(number), f"model.optimizer.lr={rate}", f"seed={number}", log={FD: falling(5, 1)})
    assert len(comparison(asked(tmp_path)).groups) == 2


def test_what_was_logged_with_a_picture_is_found_beyond_a_million_images(tmp_path):
    run = read(write_run(tmp_path / "a", log={FD: [(1234.567, 3.0), (1300.0, 2.0)]}))
    assert [run.value_at(FD, images) for images in (1234567, 1300000, 1250000)] == [3, 2, None]


def test_without_a_price_nothing_has_a_cost(study):
    assert "cost" not in comparison(asked(study)).columns


def test_the_newest_value_is_not_the_best_and_no_number_is_never_best(tmp_path):
    log = {FD: [(10.0, 30.0), (20.0, 20.0), (30.0, float("nan")), (40.0, 25.0)]}
    run = read(write_run(tmp_path / "a", log=log))
    assert (run.best(FD), run.best(FD, lower=False), run.newest(FD)) == ((20, 20), (30, 10), 25)


def test_a_higher_value_can_be_the_better_one(study):
    found = comparison(asked(study, metric="time/images_per_sec", best="max"))
    assert found.runs[0].numbers["best"] == 200
    assert not found.lower
    found = comparison(asked(study, metric=FD, best="max"))
    assert [row.numbers["best"] for row in found.runs] == sorted([row.numbers["best"] for row in found.runs])[::-1]


@pytest.mark.parametrize(
    ("sort", "seeds"),
    [("-best", [1, 0, 1, 0]), ("hours", [1, 0, 0, 1]), ("seed", [0, 0, 1, 1]), ("name", [0, 0, 1, 1])],
)
def test_rows_are_sorted_by_any_column(study, sort, seeds):
    found = comparison(asked(study, sort=sort))
    assert [row.settings["seed"] for row in found.runs] == seeds


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "batch,kimg,metric,value\n1,0.1,train/loss,5.0\n2,,lr,1.0\n2,0.2,train/loss,4"
    )
    assert read_metrics(tmp_path / "metrics.csv") == {"train/loss": [(0.1, 5)]}


def test_single_layers_are_left_out(study):
    assert set(find(f"{study}/*")[0].log) == {FD, "train/loss", "time/images_per_sec"}


# Settings


def differ(folder: Path, *runs: list[str]) -> dict[str, list]:
    """What differs between runs with these overrides."""
    found = [read(write_run(folder / str(number), *overrides)) for number, overrides in enumerate(runs)]
    return {key: [value_of(run, key) for run in found] for key in differing(found)}


def test_copies_of_a_setting_do_not_differ_on_their_own(tmp_path):
    """The seed, the batch and the length of the schedule stand in several places."""
    runs = (["seed=0", "batch=32", "schedule_kimg=30"], ["seed=1", "batch=64", "schedule_kimg=60", "total_kimg=60"])
    assert differ(tmp_path, *runs) == {"seed": [0, 1], "batch": [32, 64], "schedule_kimg": [30, 60]}


def test_a_budget_of_its_own_differs(tmp_path):
    assert differ(tmp_path, ["total_kimg=10"], []) == {"total_kimg": [10, 30]}


def test_a_choice_says_all_that_it_decides(tmp_path):
    found = differ(tmp_path, ["data=emoji32", "model=ddn"], ["data=fashion10k", "model=expert"])
    assert found == {"model": ["ddn", "expert"], "data": ["emoji32", "fashion10k"]}


def test_what_was_set_below_a_choice_differs_too(tmp_path):
    runs = [["model=ddn"], ["model=ddn", "model.optimizer.lr=1"], ["model=expert"]]
    found = differ(tmp_path, *runs)
    assert list(found) == ["model", "model.optimizer.lr"]
    assert found["model.optimizer.lr"][1] == 1 != found["model.optimizer.lr"][0]


def test_a_callback_that_only_some_runs_have_is_one_setting(tmp_path):
    assert differ(tmp_path, [], ["~callbacks.ema"]) == {"callbacks.ema": ["yes", None]}


def test_where_things_are_written_does_not_differ(tmp_path):
    assert differ(tmp_path, ["logger=[csv]", "paths.cache=here"], ["logger=[csv,wandb]", "paths.cache=there"]) == {}


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({"seed": 1}, 2),
        ({"model": {"optimizer": {"lr": 1e-3}}}, 2),
        ({"model.optimizer.lr": [0.001, 0.002], "seed": 0}, 2),
        ({"name": "*-s1-*"}, 2),
        ({"strategy": "ddp*"}, 4),
        ({"total_kimg": 30}, 4),
    ],
)
def test_runs_are_chosen_by_their_settings(study, where, kept):
    assert len(comparison(asked(study, where=where)).runs) == kept


# Sentences


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"runs": "nowhere/*"}, r"runs=nowhere/\* matches no run folder; name others, such as runs='runs/\*'"),
        ({"where": {"batc": 4}}, "where: 'batc' is no setting of these runs; there is batch"),
        ({"where": {"seed": 7}}, "where: no run has seed=7; there is 0, 1"),
        (
            {"metric": "val/fd_eflite0"},
            "metric=val/fd_eflite0 was logged by none of these runs; there is val/fd_efflite0",
        ),
        ({"sort": "prize"}, "sort=prize is no column; there is .*best"),
        ({"best": "low"}, "best=low must be min, or max where a higher value is better"),
    ],
)
def test_what_cannot_be_compared_ends_in_a_sentence(study, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        comparison(OmegaConf.merge(asked(study), changes))


def test_a_run_without_metrics_is_named_and_comes_last(tmp_path):
    write_run(tmp_path / "a", "seed=1")
    write_run(tmp_path / "b", "seed=2", log={FD: falling(5, 1)})
    found = comparison(asked(tmp_path))
    assert [row.runs[0].name for row in found.runs] == ["b", "a"]
    assert found.notes == ["without metrics yet: a; they have not logged, or not to metrics.csv"]
    assert found.runs[1].cell("best") == found.runs[1].cell("images_per_sec") == "–"


def test_runs_of_different_metrics_are_ranked_by_what_most_of_them_logged(tmp_path):
    for name, metric in (("a", FD), ("b", "val/fid"), ("c", "val/fid"), ("d", "val/share")):
        write_run(tmp_path / name, log={metric: falling(5, 1)})
    found = comparison(asked(tmp_path))
    assert found.metric == "val/fid"
    assert [row.cell("best") for row in found.runs] == ["1", "1", "–", "–"]
    assert found.notes == [
        "only 2 of 4 runs are ranked by val/fid, which a, d did not log; they logged val/fd_efflite0, val/share, which "
        "metric= may name instead"
    ]
    (note,) = comparison(asked(tmp_path, where={"name": "d"})).notes
    assert note == "none of the runs logged val/fid or val/fd_efflite0; metric=val/share would rank them"


def test_a_folder_of_another_kind_is_no_run(study, tmp_path):
    moved = shutil.copytree(study, tmp_path / "runs")
    (moved / "mlflow").mkdir()
    (moved / "compare.html").write_text("")
    assert len(find(f"{moved}/*")) == 4


def test_a_sweeps_folder_stands_for_its_runs_also_where_all_was_moved(study, tmp_path):
    moved = shutil.copytree(study, tmp_path / "runs")
    sweep_ = moved / "sweeps" / "grid-abc"
    sweep_.mkdir(parents=True)
    names = [path.name for path in study.iterdir() if path.name.startswith("ddn") and "s0" in path.name]
    (sweep_ / "sweep.json").write_text(json.dumps([{"folder": f"gone/runs/{name}"} for name in names]))
    assert {run.folder for run in find(str(sweep_))} == {moved / name for name in names}


# The page


class Elements(HTMLParser):
    """Every element with its attributes, and the text in it."""

    def __init__(self, page: str):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append(SimpleNamespace(tag=tag, at=dict(attributes), text=""))
        if tag not in ("meta", "img"):
            self.open.append(self.found[-1])

    def handle_startendtag(self, tag, attributes):
        self.found.append(SimpleNamespace(tag=tag, at=dict(attributes), text=""))

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        for element in self.open:
            element.text += data

    def all(self, tag):
        return [element for element in self.found if element.tag == tag]


def page_of(study: Path, out: Path, **changes) -> Elements:
    compare(asked(study, out=str(out), **changes))
    elements = Elements(out.read_text())
    assert elements.open == []
    return elements


def test_the_page_needs_nothing_but_itself(study, tmp_path):
    page = page_of(study, tmp_path / "page.html")
    for element in page.found:
        assert element.tag not in ("link", "iframe", "object") and "href" not in element.at
        assert element.at.get("src", "data:").startswith("data:")
    assert "://" not in (tmp_path / "page.html").read_text()
    (policy,) = [e.at["content"] for e in page.all("meta") if "http-equiv" in e.at]
    assert policy.startswith("default-src 'none'")
    assert not list(tmp_path.glob("*.part"))


def test_the_page_shows_the_table_and_the_best_run(study, tmp_path):
    page = page_of(study, tmp_path / "page.html", price_per_device_hour=2.0)
    rows = [row.text for row in page.all("tr")]
    assert rows[0] == "lrrunsbestnewestkimgimages/scostdevice-hourshours"
    assert rows[1].startswith("0.001212 ± 2.812 ± 2.8")
    assert "s1-2e-3" in rows[-1] and "20 of 30" in rows[-1]
    assert [row.at["data-rank"] for row in page.all("tr") if row.at] == ["0", "1", "0", "0", "1", "1"]
    best = study / "ddn-fashion10k-ddp-s0-1e-3"
    assert page.all("code")[0].text == f"python sample.py run={best} checkpoint=newest"
    (best / "checkpoints").mkdir()
    for value, which in ((10.0, "best"), (11.0, "newest")):
        (best / "checkpoints" / "best.json").write_text(json.dumps({"checkpoint": "000000030000", "value": value}))
        page = page_of(study, tmp_path / "page.html")
        assert page.all("code")[0].text == f"python sample.py run={best} checkpoint={which}"
    shutil.rmtree(best / "checkpoints")


def test_pictures_stand_side_by_side_at_the_newest_moment_of_all(study, tmp_path):
    for kimg, moment in ((None, 20), (10, 10)):
        page = page_of(study, tmp_path / "page.html", pictures_kimg=kimg)
        shown_ = [b64decode(image.at["src"].removeprefix("data:image/png;base64,")) for image in page.all("img")]
        files = [
            row.runs[0].folder / "pictures" / f"samples_{moment * 1000:012d}.png"
            for row in comparison(asked(study)).runs
        ]
        assert shown_ == [file.read_bytes() for file in files]
        assert f"Pictures at {moment} kimg" in [heading.text for heading in page.all("h2")]


def test_there_is_a_plot_for_each_metric_and_for_each_setting(study, tmp_path):
    page = page_of(study, tmp_path / "page.html")
    plots = [plot.at["aria-label"] for plot in page.all("svg")]
    assert plots == [
        f"{FD} over kimg",
        "train/loss over kimg",
        "time/images_per_sec over kimg",
        f"best {FD} by model.optimizer.lr",
    ]
    lines = [line for line in page.all("polyline") if line.at.get("class") != "mean"]
    assert len(lines) == 12 and len(page.all("circle")) == 12 + 4


def test_names_from_outside_are_text_and_no_markup(tmp_path):
    write_run(tmp_path / "a", "metric=['val/<b>']", "+data.note='<script>x'", log={"val/<b>": falling(5, 1)})
    write_run(tmp_path / "b", "metric=['val/<b>']", log={"val/<b>": falling(5, 2)})
    page = page_of(tmp_path, tmp_path / "page.html")
    assert len(page.all("script")) == 1
    assert "<script>x" in "".join(cell.text for cell in page.all("td"))
    assert page.all("svg")[0].at["aria-label"] == "val/<b> over kimg"


def test_big_pictures_are_made_small(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (600, 900, 3), np.uint8)  # noise, the hardest to compress
    Image.fromarray(pixels).save(tmp_path / "a.png")
    source, width = embedded(tmp_path / "a.png", 60_000)
    assert len(source) < 60_000 * 4 / 3 + 100 and source.startswith("data:image/webp") and width < 900
    Image.fromarray(pixels[:40, :40]).save(tmp_path / "b.png")
    source, width = embedded(tmp_path / "b.png", 60_000)
    assert source.startswith("data:image/png") and width == 40


def test_the_page_of_twenty_runs_stays_below_five_megabytes(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)  # 270 kB, which 20 runs may not all have
    loss = [(k / 10, 1 / (1 + k)) for k in range(1, 3000)]
    first = write_run(tmp_path / "r00", log={FD: falling(9, 1), "train/loss": loss}, pictures={30000: noise})
    for number in range(1, 20):
        copy = shutil.copytree(first, tmp_path / f"r{number:02d}")
        config = (copy / ".hydra" / "config.yaml").read_text()
        (copy / ".hydra" / "config.yaml").write_text(config.replace("batch: 32", f"batch: {32 + number}"))
    page = page_of(tmp_path, tmp_path / "page.html")
    assert len(page.all("img")) == 20
    assert 1_000_000 < (tmp_path / "page.html").stat().st_size < 5_000_000


# Plots


@pytest.mark.parametrize(
    ("values", "log", "ticks"),
    [
        ([0, 10], False, [0, 2, 4, 6, 8, 10]),
        ([31, 39], False, [32, 34, 36, 38]),
        ([0.001, 0.1], True, [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]),
        ([5, 5], False, [4.8, 4.9, 5, 5.1, 5.2]),
    ],
)
def test_axes_have_round_numbers(values, log, ticks):
    axis = Axis.around(values, 0, 100, log)
    assert axis.ticks() == pytest.approx(ticks)
    assert all(0 < axis.at(value) < 100 for value in values)


def test_a_curve_goes_where_its_values_go():
    drawn = curves("m", [Line([(0, 4.0), (1, float("inf")), (2, 2.0), (4, 2.0)], "a", 0)])
    points = [tuple(map(float, p.split(","))) for p in re.search('polyline points="([^"]*)"', drawn)[1].split()]
    assert len(points) == 3  # what is no number is left out
    (a, up), (b, down), (c, same) = points
    assert c - b == pytest.approx(b - a, abs=0.11) and down == same > up  # down is further from the top
    assert curves("m", [Line([(0, float("nan"))], "a", 0)]) == ""


def test_long_curves_are_thinned_and_keep_their_ends():
    drawn = curves("m", [Line([(k, float(k)) for k in range(10_000)], "a", 0)])
    assert len(re.search('polyline points="([^"]*)"', drawn)[1].split()) == 250
    assert "a: 9,999 at 9,999 kimg" in drawn


def test_numbers_are_in_their_order_and_words_side_by_side():
    numbers = sweep("lr", "m", [(0.1, 1.0, "a", 0), (0.001, 2.0, "b", 1), (0.01, 3.0, "c", 2)])
    places = {label: float(x) for label, x in re.findall(r"<title>(\w).*?cx=\"([\d.]+)\"", numbers)}
    assert places["c"] - places["b"] == pytest.approx(places["a"] - places["c"], abs=0.2)  # decades
    assert places["b"] < places["a"]
    words = sweep("strategy", "m", [("fsdp", 1.0, "a", 0), ("ddp", 2.0, "b", 1)])
    assert re.findall(r"class=\"across\"[^>]*>(\w+)<", words) == ["fsdp", "ddp"]


def test_settings_are_shown_as_one_writes_them():
    told = [shown(v) for v in (True, None, 1e-4, 30, [1, 2.5], "ddp")]
    assert told == ["true", "–", "0.0001", "30", "1,2.5", "ddp"]


# The command


def test_the_terminal_shows_as_much_as_fits(study, capsys, monkeypatch):
    for columns, more in (("200", 0), ("60", 1)):
        monkeypatch.setenv("COLUMNS", columns)
        compare(asked(study, out=str(study.parent / "page.html")))
        said = capsys.readouterr().out
        assert max(map(len, said.split("page  ")[0].splitlines())) <= int(columns)
        lines = [line.split() for line in said.splitlines()]
        assert ["s0-1e-3", "0", "0.001", "10"] in [line[:4] for line in lines]
        assert ["0.001", "2", "12", "±", "2.8"] in [line[:5] for line in lines]
        assert ("more column" in said) == bool(more)
        assert said.splitlines()[-1] == f"page  {study.parent / 'page.html'}"


def test_the_page_lies_beside_the_runs(study):
    compare(asked(study))
    assert (study / "compare.html").exists()


@pytest.mark.slow
def test_the_command_compares_what_training_left(tmp_path):
    """A tiny run as a command, a copy of it with another learning rate, and the command on their folders."""
    words = [
        *TINY,
        "debug=fast",
        "callbacks=[budget,ema,metrics,throughput,pictures,checkpoint]",
        "metric=[train/loss]",
    ]
    words += [f"paths.runs={tmp_path / 'runs'}", "callbacks.ema.halflife_kimg=0.01", "~callbacks.consistency"]
    done = run_command("train.py", *words)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    config = shutil.copytree(run, run.with_name(f"{run.name[:-6]}c0ffee")) / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.002"))
    done = run_command("compare.py", f"runs={tmp_path / 'runs'}/*", "where={batch:4}", "price_per_device_hour=3600")
    assert done.returncode == 0, done.stderr
    assert "Runs by train/loss, lower is better; names begin with ddn-fashion10k-single-s0-" in done.stdout
    header, *rows = [line.split() for line in done.stdout.splitlines() if re.match("  [a-z0-9]", line)]
    assert header == ["run", "lr", "best", "newest", "kimg", "images/s", "cost", "device-hours", "hours"]
    runs = {run.name: run for run in find(f"{tmp_path / 'runs'}/*")}
    assert len(rows) == len(runs) == 2
    for row in rows:
        run = runs[f"ddn-fashion10k-single-s0-{row[0]}"]
        assert float(row[1]) == run.settings["model.optimizer.lr"]
        assert float(row[2]) == pytest.approx(min(v for _, v in run.log["train/loss"]), rel=1e-3)
        assert float(row[4]) == 0.016 and run.finished
        assert 0 < float(row[6]) == pytest.approx(3600 * run.device_hours, rel=1e-2)
    page = Elements((tmp_path / "runs" / "compare.html").read_text())
    assert len(page.all("img")) == 2 and "checkpoint=best" in page.all("code")[0].text
    done = run_command("compare.py", f"runs={tmp_path}/none/*")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"compare: runs={tmp_path}/none/* matches no run folder")


def test_it_answers_without_torch(study):
    code = "import sys; sys.argv=['x']; import src.compare; assert not {'torch','lightning','wandb'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONF.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser `chromium`")
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_shows_all_of_it_and_sorts_by_a_click(study, tmp_path, width):
    page_of(study, tmp_path / "page.html", price_per_device_hour=2.0)
    probe = """<script>
      const table = [...document.querySelectorAll("table")].at(-1);
      const button = [...table.querySelectorAll("button")].find(b => b.textContent === "hours");
      button.click();
      const up = [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
      button.click();
      const down = [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
      const tall = [...document.querySelectorAll("svg, img")].every(e => e.getBoundingClientRect().height > 30);
      const images = [...document.images].every(image => image.complete && image.naturalWidth > 0);
      const wide = document.documentElement.scrollWidth > window.innerWidth;
      document.body.innerHTML = `<pre>${JSON.stringify({up, down, tall, images, wide})}</pre>`;
    </script></html>"""
    (tmp_path / "probed.html").write_text((tmp_path / "page.html").read_text().replace("</html>", probe))
    browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words = [*browser, f"--window-size={width},3000", "--dump-dom", (tmp_path / "probed.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    found = json.loads(re.search("<pre>(.*)</pre>", done.stdout)[1])
    assert found["up"][0] == "s1-2e-3" and found["down"][-1] == "s1-2e-3"
    assert found["tall"] and found["images"] and not found["wide"]
