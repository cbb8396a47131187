"""Experts that never met against one network: `python benchmarks/paris_vs_monolithic.py`.

40 minutes of two idle cores that compute in bfloat16; elsewhere, take --images 8000.

Trains with the commands that everybody uses, --jobs at a time, so that repeating it continues: eight experts of a
partition by pixels and eight of one by chance, a router for each; the monolith, which is the same network on as many
images as the experts together; and one of eight times the parameters on an eighth of the images, at about equal cost.

Then, each drawn from the same noise and labels:
* held-out squared error of the velocity, by noise bin and by cluster, and of each expert on each cluster;
* Frechet and kernel distance to training images, beside what held-out images score (their bootstrap: the floor);
* total variation distance of the clusters' shares from those of the training images, experts asked per evaluation,
  and seconds per image.

Writes results.jsonl (rows that are there are not computed again), a table, errors.png and samples.png into --out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from src import flow
from src import store as stores
from src.config import CONF, ROOT
from src.distances import find_extractor, scores
from src.images import grid, to_uint8, write_png
from src.modules.paris import Paris
from src.noise import Noise
from src.partition import Partition
from src.results import draw
from src.routing import Full, Oracle, Sample, Threshold, TopK

EXPERTS, BINS, SEED = 8, 10, 1
STRATEGIES = {"full": Full(), "top-1": TopK(1), "top-2": TopK(2), "threshold 0.05": Threshold(0.05)}
STRATEGIES |= {"sample": Sample(), "oracle": Oracle()}
ROWS = ["monolith", "monolith, 8x parameters", *(f"experts, {name}" for name in STRATEGIES)]
ROWS += ["by chance, full", "by chance, top-1"]


class Monolith:
    """A published network that is drawn from alone, as an ensemble is."""

    def __init__(self, store: str, kind: str, steps: int):
        self.device, self.steps = torch.device("cpu"), steps
        card, _ = stores.newest(store, kind)
        self.network, self.images = stores.network_of(store, card), card["images"]

    def velocity(self, x, t, labels):
        return self.network(x, flow.TIME_SCALE * t, labels)

    @torch.no_grad()
    def sample(self, noise, labels):
        x = noise.normal("sample/x", *self.network.shape)
        return flow.heun(lambda x, t: self.velocity(x, t, labels), x, flow.times(self.steps)).clamp(-1, 1)


def model_of(row: str, given: argparse.Namespace):
    if row == "monolith":
        return Monolith(f"{given.out}/pixels", "monolith", given.steps)
    if row.startswith("monolith"):
        return Monolith(f"{given.out}/pixels", "large", given.steps)
    partition, _, strategy = row.partition(", ")
    store = f"{given.out}/{'pixels' if partition == 'experts' else 'chance'}"
    return Paris(store, STRATEGIES[strategy], solver="heun", steps=given.steps, check_seconds=1e9)


def commands(given: argparse.Namespace) -> tuple[list[list[str]], list[list[str]]]:
    """The partitions, and what is trained on them, longest first."""
    kimg, common = (
        given.images / 1000,
        ["logger=[csv]", f"paths.runs={given.out}/runs", f"trainer.precision={given.precision}", *given.set],
    )
    train, prepared = [], []
    quick = ["~callbacks.pictures", "~callbacks.clusters", "++trainer.limit_val_batches=1", "data.val_batch=8"]
    expert = [*common, *quick, f"data={given.data}", "experiment=paris_expert"]
    whole = [*expert, f"store={given.out}/pixels", "data.cluster=null"]
    total, large = EXPERTS * kimg, kimg
    train.append([*whole, "callbacks.publish.kind=monolith", f"schedule_kimg={total}", f"val_every_kimg={total}"])
    size = [f"model.network.width={given.large_width}", "model.network.heads=6", "model.optimizer.lr=5e-4"]
    train.append([*whole, *size, "callbacks.publish.kind=large", f"schedule_kimg={large}", f"val_every_kimg={large}"])
    for kind in ("pixels", "chance"):
        store = f"{given.out}/{kind}"
        task = ["task=partition", f"data={given.data}", f"clusters={EXPERTS}", f"store={store}", f"features={kind}"]
        prepared.append(task)
        router = [*common, f"data={given.data}", "experiment=paris_router", f"store={store}"]
        train.append(
            [*router, f"schedule_kimg={given.router_images / 1000}", f"val_every_kimg={given.router_images / 1000}"]
        )
        for k in range(EXPERTS):
            train.append([*expert, f"store={store}", f"expert={k}", f"schedule_kimg={kimg}", f"val_every_kimg={kimg}"])
    return prepared, train


def run(words: list[str]) -> None:
    script = "prepare.py" if words[0].startswith("task=") else "train.py"
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
    )
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(words)}\n{done.stderr[-3000:]}")


def data_of(given: argparse.Namespace):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("evaluate", [f"data={given.data}"])
    data = instantiate(config.data)
    data.setup()
    return data


def held_out(given: argparse.Namespace):
    """Images, labels and clusters (by pixels) of the held-out images that errors are measured on."""
    data = data_of(given)
    _, clusters = Partition.load(f"{given.out}/pixels").of(*data.clustered())
    rows = np.arange(min(given.held_out, len(data.held_out)))
    images = data.as_seen(data.held_out.read(rows))
    labels = torch.from_numpy(data.held_out.labels[rows].astype(np.int64))
    return images, labels, torch.from_numpy(clusters[rows].astype(np.int64))


@torch.no_grad()
def by_bin(given: argparse.Namespace, velocities: Callable) -> list[dict[str, torch.Tensor]]:
    """In each noise bin the squared error of each image (n,) for every name that velocities(x, t, labels, clusters)
    gives, on fixed images, times and noise."""
    images, labels, clusters = held_out(given)
    found, noise = [], Noise(SEED, torch.arange(len(images)))
    for number in range(BINS):
        t = (number + noise.uniform(f"error/t/{number}")) / BINS
        x_1, parts = noise.normal(f"error/x/{number}", *images.shape[1:]), []
        for rows in torch.arange(len(images)).split(100):
            x = flow.path(images[rows], x_1[rows], t[rows])
            target = flow.velocity(images[rows], x_1[rows])
            said = velocities(x, t[rows], labels[rows], clusters[rows])
            parts.append({name: (u - target).square().flatten(1).mean(1) for name, u in said.items()})
        found.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return found


def errors_of(partition: str, given: argparse.Namespace) -> list[dict]:
    """Rows of errors: of both monoliths, or of a partition's strategies and experts."""
    torch.set_num_threads(1)
    if partition == "monoliths":
        models = {row: model_of(row, given) for row in ROWS[:2]}
        found = by_bin(given, lambda x, t, y, k: {row: m.velocity(x, t, y) for row, m in models.items()})
    else:
        name = "experts" if partition == "pixels" else "by chance"
        model = Paris(f"{given.out}/{partition}", Full(), check_seconds=1e9)

        def velocities(x, t, labels, clusters):
            """Every expert once; the strategies weight what they said."""
            alone = torch.stack([model.experts.ask(k, x, t, labels) for k in range(EXPERTS)], 1)  # (n, k, c, h, w)
            said = {f"{name}/{k}": alone[:, k] for k in range(EXPERTS)}
            draw_one = lambda: Noise(SEED, torch.arange(len(x))).uniform("error/draw")  # noqa: E731
            for strategy, chosen in STRATEGIES.items():
                if partition == "chance" and strategy == "oracle":  # clusters here are those of pixels
                    continue
                w = model.weights(x, t, labels, chosen, draw_one, clusters)
                said[f"{name}, {strategy}"] = (w[:, :, None, None, None] * alone).sum(1)
            return said

        found = by_bin(given, velocities)
    clusters = held_out(given)[2]
    rows = []
    for row in found[0]:
        errors = torch.stack([part[row] for part in found], 1)  # (n, bins)
        of_cluster = [errors[clusters == k].mean().item() for k in range(EXPERTS)]
        rows.append({"what": "error", "row": row, "mean": errors.mean().item(), "by_bin": errors.mean(0).tolist()})
        rows[-1] |= {"by_cluster": of_cluster}
    return rows


class Uint8:
    """Samples as the partition reads images."""

    def __init__(self, images: torch.Tensor):
        self.images = to_uint8(images)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, rows) -> torch.Tensor:
        return self.images[rows]


def shares_of(images: torch.Tensor, given: argparse.Namespace) -> np.ndarray:
    found = Partition.load(f"{given.out}/pixels").assign(Uint8(images))
    return np.bincount(found, minlength=EXPERTS) / len(images)


def features_of(images: torch.Tensor, extractor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([extractor(part).float() for part in to_uint8(images).split(100)])


def real_features(given: argparse.Namespace, extractor) -> torch.Tensor:
    data = data_of(given)
    return features_of(data.as_seen(torch.cat(list(data.reference(given.reference, 0, 1)))), extractor)


def samples_of(row: str, given: argparse.Namespace) -> dict:
    """Draw a row's images and score them."""
    torch.set_num_threads(1)
    model, began = model_of(row, given), time.perf_counter()
    images = torch.cat(list(draw(model, SEED, torch.arange(given.num), 64, None, data_of(given).classes)))
    seconds = (time.perf_counter() - began) / given.num
    extractor = find_extractor(None)
    found = {"what": "samples", "row": row, "seconds_per_image": seconds}
    found |= {"experts": sum(model.asked) / sum(model.drawn) if isinstance(model, Paris) else 1.0}
    found |= scores(features_of(images, extractor), real_features(given, extractor), extractor)
    target = Partition.load(f"{given.out}/pixels").sizes
    found["shares"] = shares_of(images, given).tolist()
    found["tv"] = float(np.abs(shares_of(images, given) - target / target.sum()).sum() / 2)
    write_png(Path(given.out) / "rows" / f"{ROWS.index(row):02d}.png", grid(images[:16], columns=16))
    return found


def floor_of(given: argparse.Namespace) -> dict:
    """What held-out images score themselves: drawn --num at a time with replacement, mean and deviation of ten."""
    torch.set_num_threads(1)
    data, extractor, draws = data_of(given), find_extractor(None), np.random.default_rng(SEED)
    images = data.as_seen(data.held_out.read(slice(0, len(data.held_out))))
    features, real = features_of(images, extractor), real_features(given, extractor)
    _, clusters = Partition.load(f"{given.out}/pixels").of(*data.clustered())
    target = Partition.load(f"{given.out}/pixels").sizes
    target = target / target.sum()
    found: dict[str, list[float]] = {}
    for _ in range(10):
        rows = draws.integers(0, len(images), given.num)
        drawn = scores(features[torch.from_numpy(rows)], real, extractor)
        shares = np.bincount(clusters[rows], minlength=EXPERTS) / given.num
        for key, value in (drawn | {"tv": float(np.abs(shares - target).sum() / 2)}).items():
            found.setdefault(key, []).append(value)
    return (
        {"what": "samples", "row": "held-out images", "experts": 0.0, "seconds_per_image": 0.0}
        | {key: mean(values) for key, values in found.items()}
        | {"deviation": {key: stdev(values) for key, values in found.items()}}
    )


def table(found: list[dict]) -> str:
    errors = {r["row"]: r for r in found if r["what"] == "error"}
    drawn = {r["row"]: r for r in found if r["what"] == "samples"}
    fd, kid = (next(k for k in drawn["held-out images"] if k.startswith(name)) for name in ("f", "kid"))
    lines = [f"{'':26} error   t<.3    t>.7    {fd:12} {kid:13} TV     experts  s/image"]
    for row in [*ROWS, "held-out images"]:
        error = errors.get(row)
        said = " " * 24
        if error:
            bins = error["by_bin"]
            said = f"{error['mean']:.4f}  {mean(bins[:3]):.4f}  {mean(bins[7:]):.4f}  "
        d = drawn[row]
        lines.append(
            f"{row:26} {said}{d[fd]:<12.4g} {d[kid]:<13.4g} {d['tv']:.3f}  {d['experts']:<7.2f}  "
            f"{d['seconds_per_image']:.3f}"
        )
    deviation = drawn["held-out images"]["deviation"]
    lines.append(f"{'  its deviation':50} {deviation[fd]:<12.2g} {deviation[kid]:<13.2g} {deviation['tv']:.3f}")
    lines.append("\nError of expert (row) on cluster (column), over all times:")
    lines += [
        f"  {k}  "
        + "  ".join(f"{e:.3f}" + ("*" if j == k else " ") for j, e in enumerate(errors[f"experts/{k}"]["by_cluster"]))
        for k in range(EXPERTS)
    ]
    best = f"  -  {'  '.join(f'{e:.3f} ' for e in errors['monolith']['by_cluster'])}  the monolith"
    return "\n".join([*lines, best])


def pictures(found: list[dict], out: Path) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from PIL import Image

    errors = {r["row"]: r for r in found if r["what"] == "error"}
    drawn = {r["row"]: r for r in found if r["what"] == "samples"}
    figure = Figure(figsize=(17, 5.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    base, x = errors["monolith"]["by_bin"], [(n + 0.5) / BINS for n in range(BINS)]
    metric = next(k for k in drawn["held-out images"] if k.startswith("f"))
    for row, marker in zip(ROWS, "sDo^v<>P*X", strict=True):
        right.plot(drawn[row]["seconds_per_image"], drawn[row][metric], marker, label=row, ms=7)
        left.plot(x, [a / b for a, b in zip(errors[row]["by_bin"], base, strict=True)], marker + "-", ms=4)
    left.set(title="held-out error over the monolith's", xlabel="t (0: image, 1: noise)")
    matrix = np.array([errors[f"experts/{k}"]["by_cluster"] for k in range(EXPERTS)])
    matrix /= np.array(errors["monolith"]["by_cluster"])
    far = np.abs(np.log(matrix)).max()
    middle.imshow(matrix, cmap="RdBu_r", norm=LogNorm(np.exp(-far), np.exp(far)))
    middle.set(title="error of expert (row) on cluster, over the monolith's")
    for place, ratio in np.ndenumerate(matrix):
        middle.text(*place[::-1], f"{ratio:.1f}", ha="center", va="center", fontsize=7)
    right.axhline(drawn["held-out images"][metric], color="grey", linestyle="--")
    right.set(title=f"{metric} (dashed: held-out images)", xlabel="seconds per image", xscale="log")
    figure.legend(loc="outside lower center", ncols=5)
    figure.savefig(out / "errors.png", dpi=110)
    strips = [Image.open(path) for path in sorted((out / "rows").glob("*.png"))]
    sheet = Image.new(strips[0].mode, (strips[0].width, sum(s.height for s in strips)))
    for n, strip in enumerate(strips):
        sheet.paste(strip, (0, n * strip.height))
    sheet.save(out / "samples.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion10k")
    parser.add_argument(
        "--images", type=int, default=24000, help="for each expert; the monolith sees eight times as many"
    )
    parser.add_argument("--router-images", type=int, default=48000)
    parser.add_argument("--large-width", type=int, default=360, help="of the network with eight times the parameters")
    parser.add_argument("--num", type=int, default=512, help="samples of each row")
    parser.add_argument("--steps", type=int, default=8, help="of Heun's method, two evaluations each")
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--reference", type=int, default=2000)
    fast = "avx512_bf16" in Path("/proc/cpuinfo").read_text()  # elsewhere it is ten times slower than float32
    parser.add_argument("--precision", default="bf16-mixed" if fast else "32-true", help="of training")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", default="runs/paris_vs_monolithic")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings of every training")
    given = parser.parse_args()
    out, began = Path(given.out).absolute(), time.monotonic()
    given.out = str(out)
    prepared, trained = commands(given)
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.jobs) as pool:
        list(pool.map(run, prepared))
        for _ in track(pool.map(run, trained), "Training", total=len(trained)):
            pass
        print(f"Trained after {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
        log = out / "results.jsonl"
        settings = {k: v for k, v in vars(given).items() if k not in ("jobs", "out")}
        found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        found = [row for row in found if row["settings"] == settings]
        known = {(row["what"], row["row"]) for row in found}
        jobs = [pool.submit(samples_of, row, given) for row in ROWS if ("samples", row) not in known]
        jobs += [pool.submit(floor_of, given)] if ("samples", "held-out images") not in known else []
        for name, row in (("monoliths", "monolith"), ("pixels", "experts, full"), ("chance", "by chance, full")):
            jobs += [pool.submit(errors_of, name, given)] if ("error", row) not in known else []
        for job in track(jobs, "Drawing and scoring"):
            rows = job.result()
            for row in rows if isinstance(rows, list) else [rows]:
                found.append(row | {"settings": settings})
                with log.open("a") as file:
                    file.write(json.dumps(found[-1]) + "\n")
    pictures(found, out)
    print(table(found))
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes; {log}, {out / 'errors.png'}, {out / 'samples.png'}")


if __name__ == "__main__":
    main()
