"""Plots as SVG, to stand in a page; colours come from its style sheet, by the rank of what is drawn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from statistics import mean
from typing import Any

COLOURS = 8  # ranks with a colour of their own; the others are grey
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 270, 58, 14, 14, 40
POINTS = 250  # of a curve at most


@dataclass
class Line:
    """One run's values over thousands of images."""

    points: Sequence[tuple[float, float]]
    label: str
    rank: int


@dataclass
class Axis:
    """Where values stand between two ends of a picture."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], start: float, end: float, log: bool = False, margin: float = 0.05):
        """An axis that shows all of these values, with some room beside them."""
        values = [log10(v) for v in values] if log else list(values)
        low, high = min(values), max(values)
        room = (high - low) * margin or abs(high) * margin or 1.0
        return cls(low - room, high + room, start, end, log)

    def at(self, value: float) -> float:
        """The place of a value."""
        value = log10(value) if self.log else value
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """About five round numbers between the ends."""
        if self.log:
            decades = range(floor(self.low), ceil(self.high) + 1)
            steps = (1,) if self.high - self.low > 3 else (1, 2, 5)
            found = [step * 10.0**decade for decade in decades for step in steps]
            inside = [value for value in found if self.low <= log10(value) <= self.high]
            if len(inside) > 1:
                return inside
            return [10**self.low, 10**self.high]
        step = 10.0 ** floor(log10((self.high - self.low) / 4))
        step = next(step * times for times in (1, 2, 2.5, 5, 10) if (self.high - self.low) / (step * times) <= 6)
        return [number * step for number in range(ceil(self.low / step), floor(self.high / step) + 1)]


def curves(metric: str, lines: list[Line]) -> str:
    """A metric over thousands of images, a line for each run."""
    kept = [Line(_thinned(line.points), line.label, line.rank) for line in lines]
    kept = [line for line in kept if line.points]
    if not kept:
        return ""
    values = [value for line in kept for _, value in line.points]
    x = Axis.around([kimg for line in kept for kimg, _ in line.points], LEFT, WIDTH - RIGHT, margin=0.02)
    y = Axis.around(values, HEIGHT - BOTTOM, TOP, log=min(values) > 0 and max(values) > 30 * min(values))
    drawn = []
    for line in sorted(kept, key=lambda line: -line.rank):  # the best on top
        path = " ".join(f"{x.at(kimg):.1f},{y.at(value):.1f}" for kimg, value in line.points)
        last = f"{line.label}: {_number(line.points[-1][1])} at {_number(line.points[-1][0])} kimg"
        ends = "".join(_dot(x.at(kimg), y.at(value), 2.5) for kimg, value in line.points[-1:])
        drawn.append(_group(line.rank, f'<polyline points="{path}"/>{ends}', last))
    ticks = _frame([(x.at(t), _number(t)) for t in x.ticks()], [(y.at(t), _number(t)) for t in y.ticks()])
    return _svg(f"{metric} over kimg", ticks + "".join(drawn), "kimg")


def sweep(key: str, metric: str, points: list[tuple[Any, float, str, int]]) -> str:
    """A metric against a setting: a dot for each run (setting, value, label, rank), a line through the means.

    Numbers stand where they belong, on a logarithmic scale where they span a factor of eight; words side by side.
    """
    settings = list(dict.fromkeys(setting for setting, *_ in points))
    numeric = all(isinstance(s, (int, float)) and not isinstance(s, bool) for s in settings)
    y = Axis.around([value for _, value, *_ in points], HEIGHT - BOTTOM, TOP)
    if numeric:
        settings.sort()
        x = Axis.around(settings, LEFT, WIDTH - RIGHT, settings[0] > 0 and settings[-1] >= 8 * settings[0], 0.12)
        places = {setting: x.at(setting) for setting in settings}
    else:
        each = (WIDTH - RIGHT - LEFT) / len(settings)
        places = {setting: LEFT + each * (number + 0.5) for number, setting in enumerate(settings)}
    means = [(places[s], y.at(mean(value for setting, value, *_ in points if setting == s))) for s in settings]
    through = " ".join(f"{left:.1f},{top:.1f}" for left, top in means)
    line = f'<polyline class="mean" points="{through}"/>' if numeric else ""
    line += "".join(f'<path class="mean" d="M{left - 9:.1f} {top:.1f}h18"/>' for left, top in means)
    dots = [
        _group(rank, _dot(places[setting], y.at(value), 4.5), f"{label}: {_number(value)}")
        for setting, value, label, rank in sorted(points, key=lambda point: -point[3])
    ]
    names = {setting: _number(setting) if numeric else str(setting) for setting in settings}
    room = max(4, 64 // len(settings))
    shortened = [(places[s], name if len(name) <= room else f"{name[: room - 1]}…") for s, name in names.items()]
    ticks = _frame(_apart(shortened), [(y.at(t), _number(t)) for t in y.ticks()])
    return _svg(f"{metric} by {key}", ticks + line + "".join(dots), key)


def swatch(rank: int) -> str:
    """The class of what is drawn in the colour of a rank."""
    return f"s{rank}" if rank < COLOURS else "rest"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    kept = [point for point in points if isfinite(point[1])]
    if len(kept) <= POINTS:
        return kept
    return [kept[round(number * (len(kept) - 1) / (POINTS - 1))] for number in range(POINTS)]


def _apart(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Without those that would be written over one before."""
    kept: list[tuple[float, str]] = []
    for place, text in ticks:
        if not kept or place - kept[-1][0] > 3.2 * (len(text) + len(kept[-1][1])) + 4:
            kept.append((place, text))
    return kept


def _frame(across: list[tuple[float, str]], up: list[tuple[float, str]]) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>']
    for place, text in up:
        parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{right}"/>')
        parts.append(f'<text class="up" x="{LEFT - 7}" y="{place + 4:.1f}">{escape(text)}</text>')
    for place, text in across:
        parts.append(f'<path class="axis" d="M{place:.1f} {bottom}v4"/>')
        parts.append(f'<text class="across" x="{place:.1f}" y="{bottom + 17}">{escape(text)}</text>')
    return "".join(parts)


def _svg(title: str, inner: str, below: str) -> str:
    label = f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}">{escape(below)}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{inner}{label}</svg>'


def _group(rank: int, inner: str, title: str) -> str:
    return f'<g class="{swatch(rank)}" data-rank="{rank}"><title>{escape(title)}</title>{inner}</g>'


def _dot(left: float, top: float, radius: float) -> str:
    return f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{radius}"/>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"
