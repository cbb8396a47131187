"""The page: one HTML file with its style, plots and pictures inside, so that it opens anywhere."""

import io
from base64 import b64encode
from collections.abc import Iterable
from fnmatch import fnmatch
from html import escape
from pathlib import Path
from string import Template

from omegaconf import DictConfig
from PIL import Image

from src.compare.comparison import FACTS, SUMMED, Comparison, Row
from src.compare.plots import Line, curves, swatch, sweep
from src.compare.settings import common_start, short_names, shown
from src.files import replacing

LABEL = 6  # settings in a label
PICTURES = 2_400_000  # bytes of all pictures together; a third more once they are written as text
SIZES = ((768, 85), (512, 80), (384, 70), (256, 60), (128, 50), (64, 40))  # pixels of the longer side, quality of WebP


def write_page(path: Path, compared: Comparison, config: DictConfig) -> None:
    """Write the page; a file of that name is replaced whole."""
    short = short_names([*compared.keys, "seed"])
    labels = {id(row): _label(row, short) for row in [*compared.groups, *compared.runs]}
    seeds = len(compared.groups) < len(compared.runs)
    template = Template(Path(__file__).with_suffix(".html").read_text())
    direction = "lower" if compared.lower else "higher"
    page = template.substitute(
        title=f"{len(compared.runs)} run{'s' * (len(compared.runs) > 1)} compared",
        facts=f"ranked by <b>{escape(compared.metric)}</b>, {direction} is better" if compared.metric else "not ranked",
        best=_best(compared, labels),
        notes="".join(f"<p class='note'>{escape(note)}</p>" for note in compared.notes),
        groups=_section("Settings", _table(compared, compared.groups, short, False)) if seeds else "",
        runs=_section("Runs", _table(compared, compared.runs, short, True)),
        legend=_legend(compared, labels),
        curves=_section("Curves", _figures(_curves(compared, labels, config.curves))),
        sweeps=_section("Settings against the metric", _figures(_sweeps(compared, labels))),
        pictures=_pictures(compared, labels, list(config.pictures), config.pictures_kimg),
    )
    with replacing(path) as part:
        part.write_text(page, encoding="utf-8")


def _label(row: Row, short: dict[str, str]) -> str:
    """What tells a row from the others, in a line."""
    told = [f"{short[key]}={shown(value)}" for key, value in row.settings.items() if value is not None]
    told = [*told[:LABEL], "…"] if len(told) > LABEL else told
    return " ".join(told) or (row.runs[0].name if len(row.runs) == 1 else "all seeds")


def _best(compared: Comparison, labels: dict[int, str]) -> str:
    """Which run is the best, and how to draw from it."""
    scored = [(row.runs[0].best(compared.metric, compared.lower), row) for row in compared.runs]
    scored = [(found, row) for found, row in scored if found is not None]
    if not scored:
        return ""
    (value, kimg), row = min(scored, key=lambda pair: pair[0][0] * (1 if compared.lower else -1))
    which = "best" if row.runs[0].marked(value) else "newest"
    return (
        f"<p class='best'><b>{value:.4g}</b> at {kimg:g} kimg by {escape(labels[id(row)])}: "
        f"<code>python sample.py run={escape(_below(row.runs[0].folder))} checkpoint={which}</code></p>"
    )


def _below(folder: Path) -> str:
    """The folder as one would type it here."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def _table(compared: Comparison, rows: list[Row], short: dict[str, str], single: bool) -> str:
    """One row per run, or per setting; a click on a heading sorts."""
    keys = compared.shown_keys(single)
    heads = [(short[key], key, "") for key in keys] + ([] if single else [("runs", "how many seeds", "n")])
    heads += [(FACTS[column], _about(column, compared, single), "n") for column in compared.columns]
    common = common_start([row.runs[0].name for row in rows])
    if named := single or not keys:
        heads.insert(0, ("run", f"run folders, all of which begin with {common}" if common else "run folders", ""))
    head = "".join(
        f"<th scope='col' class='{kind}' title='{escape(about)}'><button>{escape(name)}</button></th>"
        for name, about, kind in heads
    )
    body = ""
    for row in rows:
        name = row.runs[0].name if single else ""
        cells = [(name.removeprefix(common) if single else "all seeds", "")] if named else []
        cells += [(row.cell(key), row.settings.get(key)) for key in keys]
        cells += [] if single else [(str(len(row.runs)), "")]
        cells += [(_of_budget(row, column, single), row.numbers.get(column)) for column in compared.columns]
        body += (
            f"<tr data-rank='{row.rank}'><th scope='row'><i class='{swatch(row.rank)}'></i>{escape(cells[0][0])}</th>"
        )
        for (text, value), (_, _, kind) in zip(cells[1:], heads[1:], strict=True):
            sorted_by = escape("" if value is None else str(value))
            body += f"<td class='{kind}' data-value='{sorted_by}'>{escape(text)}</td>"
        body += "</tr>"
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _of_budget(row: Row, column: str, single: bool) -> str:
    total = row.runs[0].settings.get("total_kimg")
    if column == "kimg" and single and isinstance(total, (int, float)) and not row.runs[0].finished:
        return f"{row.cell(column)} of {total:g}"
    return row.cell(column)


def _about(column: str, compared: Comparison, single: bool) -> str:
    """What a heading says when one stays on it."""
    several = ", mean over seeds ± standard deviation" if column in ("best", "newest") else ", mean over seeds"
    several = ", all seeds together" if column in SUMMED else several
    return {
        "best": f"best {compared.metric}",
        "newest": f"newest {compared.metric}",
        "kimg": "thousands of images seen",
        "images_per_sec": "median over the run, without validation",
        "hours": "over all starts, with validation",
        "device_hours": "hours times processes",
        "cost": "device-hours times price_per_device_hour",
    }[column] + several * (not single)


def _legend(compared: Comparison, labels: dict[int, str]) -> str:
    if len(compared.groups) < 2:
        return ""
    chips = "".join(
        f"<span data-rank='{row.rank}'><i class='{swatch(row.rank)}'></i>{escape(labels[id(row)])}</span>"
        for row in compared.groups
    )
    return f"<div class='legend'>{chips}</div>"


def _curves(compared: Comparison, labels: dict[int, str], patterns: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(title, plot) of what ranks the runs, and of every other metric that is asked for."""
    logged = list(dict.fromkeys(metric for row in compared.runs for metric in row.runs[0].log))
    asked = [metric for pattern in patterns for metric in logged if fnmatch(metric, pattern)]
    for metric in dict.fromkeys([*([compared.metric] if compared.metric else []), *asked]):
        there = [row for row in compared.runs if metric in row.runs[0].log]
        yield metric, curves(metric, [Line(r.runs[0].log[metric], labels[id(r)], r.rank) for r in there])


def _sweeps(compared: Comparison, labels: dict[int, str]) -> Iterable[tuple[str, str]]:
    for key in compared.keys if compared.metric else ():
        points = [
            (_plain(row.settings[key]), row.numbers["best"], labels[id(row)], row.rank)
            for row in compared.runs
            if row.numbers["best"] is not None
        ]
        if len({setting for setting, *_ in points}) > 1:
            yield key, sweep(key, f"best {compared.metric}", points)


def _plain(setting):
    return setting if isinstance(setting, (int, float)) and not isinstance(setting, bool) else shown(setting)


def _figures(plots: Iterable[tuple[str, str]]) -> str:
    drawn = [f"<figure><figcaption>{escape(title)}</figcaption>{plot}</figure>" for title, plot in plots if plot]
    return f"<div class='plots'>{''.join(drawn)}</div>" if drawn else ""


def _pictures(compared: Comparison, labels: dict[int, str], names: list[str], kimg: float | None) -> str:
    """Every run's picture at one moment: the newest that all of them have reached."""
    known: list[tuple[Row, dict[int, Path]]] = []
    for row in compared.runs:
        known += [(row, found) for name in names if (found := row.runs[0].pictures.get(name))][:1]
    if not known:
        return ""
    moment = min(max(found) for _, found in known) if kimg is None else kimg * 1000
    share, figures = PICTURES // len(known), ""
    for row, found in known:
        images = min(found, key=lambda seen: abs(seen - moment))
        source, width = embedded(found[images], share)
        label, small = escape(labels[id(row)]), " class='small'" if width < 400 else ""
        score = row.runs[0].value_at(compared.metric, images)
        told = f"{images / 1000:g} kimg" + (f", {score:.4g}" if score is not None else "")
        about = f"<i class='{swatch(row.rank)}'></i>{label}<small>{told}</small>"
        figures += f"<figure data-rank='{row.rank}'><img src='{source}' alt='samples of {label}'{small}>"
        figures += f"<figcaption>{about}</figcaption></figure>"
    return _section(f"Pictures at {moment / 1000:g} kimg", f"<div class='pictures'>{figures}</div>")


def embedded(path: Path, most: int) -> tuple[str, int]:
    """(data URI, pixels across) of a picture: as it is, or smaller and compressed until it has at most `most` bytes."""
    data, kind = path.read_bytes(), "png"
    with Image.open(path) as picture:
        picture.load()
    for size, quality in SIZES:
        if len(data) <= most:
            break
        smaller = picture.convert("RGB")
        smaller.thumbnail((size, size), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        smaller.save(file, "webp", quality=quality)
        data, kind, picture = file.getvalue(), "webp", smaller if smaller.width < picture.width else picture
    return f"data:image/{kind};base64,{b64encode(data).decode()}", picture.width


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>" if inner else ""
