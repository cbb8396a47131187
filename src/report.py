"""What a run tells people at its end: how the distance went, where everything is, and what to run next."""

import shlex
from pathlib import Path

from src import checkpoint as canonical


def summary(folder: Path, overrides: list[str]) -> str:
    """The closing lines of a run, from what lies in its folder and what was asked for on the command line."""
    log = read_log(folder)
    lines = ["", f"Run folder        {folder}"]
    for key in sorted(k for k in log if k.startswith("val/")):
        (first_kimg, first), (last_kimg, last) = log[key][0], log[key][-1]
        lines.append(f"{key:17} {first:.4g} at {first_kimg:g} kimg -> {last:.4g} at {last_kimg:g} kimg")
    if "train/choice_kl" in log:
        value = log["train/choice_kl"][-1][1]
        band = "inside" if value < 0.1 else "outside"
        lines.append(f"choices           KL against uniform {value:.3f} nats, {band} the band < 0.1")
    newest: dict[str, Path] = {}
    for picture in sorted((folder / "pictures").glob("*.png")):
        newest[picture.stem.rpartition("_")[0] or picture.stem] = picture
    lines += [f"{name:17} {path}" for name, path in newest.items()]
    saved = canonical.committed(folder / "checkpoints")
    lines += [f"checkpoint        {saved[-1]}"] if saved else []
    seeds = [int(word[5:]) for word in overrides if word.startswith("seed=")]
    others = [word for word in overrides if not word.startswith("seed=")]
    again = shlex.join([*others, f"seed={max(seeds, default=0) + 1}"])
    lines += ["", "Next:"]
    if (folder / "router.png").exists():
        draw = shlex.join(["experiment=paris", *(word for word in overrides if word.startswith("store="))])
        lines.append(f"  .venv/bin/python sample.py {draw}  # once experts are published as well")
    elif "modes" not in newest:  # points are no images
        lines.append(f"  .venv/bin/python sample.py run={folder}    # more samples")
    if not (folder / "router.png").exists():
        lines.append(f"  .venv/bin/python evaluate.py run={folder}  # its distances, with more images")
    lines += [
        f"  .venv/bin/python train.py {again}  # from another seed; any changed setting has a folder of its own",
    ]
    return "\n".join(lines)


def read_log(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """metric -> [(kimg, value), ...] of a run's metrics.csv; empty where nothing was logged."""
    found: dict[str, list[tuple[float, float]]] = {}
    if (path := folder / "metrics.csv").exists():
        for line in path.read_text().splitlines()[1:]:
            _, kimg, metric, value = line.split(",")
            if kimg:
                found.setdefault(metric, []).append((float(kimg), float(value)))
    return found
