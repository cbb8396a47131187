"""Runs side by side: a table here, and one page with curves and samples that opens from disk without a network."""

import os
from pathlib import Path

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from src.compare.comparison import FACTS, Comparison, Row, comparison
from src.compare.page import write_page
from src.compare.settings import common_start, short_names

FEW = 4  # settings, in a narrow terminal


def compare(config: DictConfig) -> None:
    """Print the tables and write the page. Raises ValueError for what the user can mend."""
    compared, console = comparison(config), Console()
    if len(compared.groups) < len(compared.runs):
        console.print(_fitting(console, compared, compared.groups, single=False))
    console.print(_fitting(console, compared, compared.runs, single=True))
    for note in compared.notes:
        console.print(note, highlight=False, soft_wrap=True)
    folders = [row.runs[0].folder.parent for row in compared.runs]
    out = Path(config.out or Path(os.path.commonpath(folders)) / "compare.html")
    write_page(out, compared, config)
    console.print(f"page  {out}", highlight=False, soft_wrap=True)


def _fitting(console: Console, compared: Comparison, rows: list[Row], single: bool) -> Table:
    """The table with as many settings as there is room for; where there is little, with fewer facts as well."""
    keys, facts = compared.shown_keys(single), compared.columns
    fewer = [(keys[:count], facts) for count in range(len(keys), FEW, -1)]
    fewer += [(keys[:FEW], facts[:count]) for count in range(len(facts), 0, -1)]
    fewer += [(keys[:count], facts[:1]) for count in range(FEW - 1, -1, -1)]
    boundless = console.options.update(max_width=100_000)
    for kept, columns in fewer:
        table = _table(compared, rows, single, kept, columns)
        if Measurement.get(console, boundless, table).maximum <= console.width:
            break
    if left := len(keys) - len(kept) + len(facts) - len(columns):
        table.caption = f"{left} more column{'s' * (left > 1)} on the page"
    return table


def _table(compared: Comparison, rows: list[Row], single: bool, keys: list[str], columns: list[str]) -> Table:
    """Of single runs, or of settings."""
    common = common_start([row.runs[0].name for row in rows]) if single else ""
    ranked = f" by {compared.metric}, {'lower' if compared.lower else 'higher'} is better" if compared.metric else ""
    title = f"{'Runs' if single else 'Settings'}{ranked}" + (f"; names begin with {common}" if common else "")
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    short = short_names(compared.shown_keys(single))
    if single:
        table.add_column("run", no_wrap=True)
    for key in keys:
        table.add_column(short[key], no_wrap=True)
    if not single:
        table.add_column("runs", justify="right")
    for column in columns:
        table.add_column(FACTS[column], justify="right", no_wrap=True)
    for row in rows:
        cells = [row.runs[0].name.removeprefix(common)] if single else []
        cells += [row.cell(key) for key in keys] + ([] if single else [str(len(row.runs))])
        table.add_row(*cells, *(row.cell(column) for column in columns))
    return table
