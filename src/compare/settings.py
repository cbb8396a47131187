"""Settings of runs: which differ, which runs have some, and how people read them."""

import json
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from src.compare.runs import Run

CHOSEN = ("model", "data", "strategy", "trainer", "experiment", "debug")  # groups whose choice is a setting


def matching(runs: list["Run"], where: dict[str, Any]) -> list["Run"]:
    """The runs with these settings; a list means any of its values, and words may hold * and ?.

    Raises ValueError for a setting that no run has, and where no run is left.
    """
    for key, wanted in flat(where):
        known = {name for run in runs for name in run.settings} | {"name"}
        if key not in known:
            raise ValueError(f"where: '{key}' is no setting of these runs; {nearest(key, known)}")
        wanted = wanted if isinstance(wanted, list) else [wanted]
        has = [run.name if key == "name" else run.settings.get(key) for run in runs]
        kept = [run for run, value in zip(runs, has, strict=True) if any(_same(value, one) for one in wanted)]
        if not kept:
            there = sorted({shown(value) for value in has})
            raise ValueError(f"where: no run has {key}={shown(wanted)}; there is {', '.join(there[:8])}")
        runs = kept
    return runs


def differing(runs: list["Run"]) -> list[str]:
    """The settings in which runs differ: group choices first, then what was set in its own right.

    Of a part that only some runs have, such as a callback, its name. What a group's choice decides goes without saying.
    """
    choices = [group for group in CHOSEN if len({run.settings.get(group) for run in runs}) > 1]
    found: dict[str, None] = dict.fromkeys(choices)
    seen: list[list[str]] = []
    for key in dict.fromkeys(key for run in runs for key in run.settings if key not in CHOSEN):
        parts = key.split(".")
        if not any(key in run.own for run in runs) or parts[-1] == "_target_":
            continue
        values = [json.dumps(_number(run.settings.get(key))) for run in runs]
        if values in seen and not all(key in run.own for run in runs):
            continue  # a copy in most runs, such as the budget of the schedule's length
        chosen = [run.settings[parts[0]] if parts[0] in choices else None for run in runs]
        if len(set(zip(chosen, values, strict=True))) == len(set(chosen)):
            continue  # equal, or equal wherever the choice is
        varied = len({value for run, value in zip(runs, values, strict=True) if key in run.settings}) > 1
        names = [] if varied or parts[0] in choices else [".".join(parts[: end + 1]) for end in range(len(parts))]
        found[next((name for name in names if not all(_has(run, name) for run in runs)), key)] = None
        seen.append(values)
    return list(found)


def value_of(run: "Run", key: str) -> Any:
    """A run's value of what `differing` named; None where it has no such part."""
    return run.settings[key] if key in run.settings else ("yes" if _has(run, key) else None)


def short_names(keys: list[str]) -> dict[str, str]:
    """Each dotted name -> as many of its last words as tell it from the others."""
    found = {}
    for key in keys:
        parts = key.split(".")
        tails = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        found[key] = next((t for t in tails if sum(k == t or k.endswith(f".{t}") for k in keys) == 1), key)
    return found


def common_start(names: list[str]) -> str:
    """With which words all of several names begin, such as ddn-fashion10k-single-"""
    first, last = min(names), max(names)
    same = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return first[: first[:same].rfind("-") + 1]


def shown(value: Any) -> str:
    """A setting or a number, for people."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ",".join(shown(v) for v in value)
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def nearest(word: str, names: Iterable[str]) -> str:
    """What somebody may have meant."""
    names = sorted(names)
    same = [name for name in names if name.rpartition(".")[2] == word.rpartition(".")[2]]
    near = list(dict.fromkeys([*same, *get_close_matches(word, names, n=3, cutoff=0.5)]))[:3] or names[:8]
    return f"there is {', '.join(near)}"


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{"model": {"width": 8}} -> ("model.width", 8)"""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _has(run: "Run", name: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for key in run.settings)


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and not isinstance(value, bool):
        return fnmatch(str(value), wanted)
    return _number(value) == _number(wanted)


def _number(value: Any) -> Any:
    """30 is 30.0, but true is no 1."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
