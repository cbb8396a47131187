"""Configuration without torch: resolvers, the run's name, the code stamp, and mistakes told in one sentence."""

import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import distributions
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
AGENT = "FEWSTEP_AGENT"  # in the environment of processes that `elastic.supervise` starts: its process

SCIENCE = ("model", "data", "callbacks", "seed", "batch", "schedule_kimg", "start", "expert")
WATCHERS = (
    "budget",
    "metrics",
    "throughput",
    "distances",
    "pictures",
    "modes",
    "progress",
    "checkpoint",
    "consistency",
    "health",
    "clusters",
    "publish",
    "calibration",
)  # change no weight
ENGINEERING = ("data.workers", "data.share_unit", "data.root", "data.cache", "data.val_batch")


def digest(*, _root_: DictConfig) -> str:
    """Six hexadecimal digits over everything that the trained weights depend on; part of the run's name.

    Devices, nodes, paths, loggers, micro-batches and the budget are left out, so that they may change between restarts.
    """
    config = OmegaConf.to_container(OmegaConf.masked_copy(_root_, [k for k in SCIENCE if k in _root_]), resolve=False)
    config["precision"] = _root_.trainer.precision
    chosen = {k: v for k, v in (config.get("callbacks") or {}).items() if "_target_" in v}
    config["callbacks"] = {k: v for k, v in chosen.items() if k not in WATCHERS}
    for group, key in (name.split(".") for name in ENGINEERING):
        config[group].pop(key, None)
    if config["data"].get("partition") is not None:
        config["data"]["partition"] = _lineage(_root_.data.partition)
    return hashlib.sha256(json.dumps(_plain_numbers(config), sort_keys=True).encode()).hexdigest()[:6]


def sweep_name(*, _root_: DictConfig) -> str:
    """What a sweep is called: the same for the same settings, wherever and however many at once its jobs run."""
    chosen, asked = _root_.hydra.runtime.choices, _root_.hydra.overrides.task
    told = {"asked": sorted(o for o in asked if not o.startswith("launcher=")), "params": None}
    if _root_.hydra.sweeper.get("params"):
        told["params"] = OmegaConf.to_container(_root_.hydra.sweeper.params)
    six = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:6]
    return f"{chosen.get('sweep') or chosen.get('experiment') or 'grid'}-{six}"


def _lineage(store: str) -> str | None:
    """The base of the partition in a store, which stays the same where it lies elsewhere and when it is extended."""
    import fsspec

    try:
        with fsspec.open(f"{store}/partition.json", "rt") as file:
            return json.load(file)["base"]
    except (OSError, ValueError, KeyError):  # told when the data is loaded
        return None


def _plain_numbers(value):
    """30.0 is 30."""
    if isinstance(value, dict):
        return {key: _plain_numbers(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def batches(kimg: float, batch: int) -> int:
    """How many batches make `kimg` thousand images, at least one."""
    return max(1, round(kimg * 1000 / max(1, batch)))


def fast_precision(accelerator: str = "auto") -> str:
    """bf16-mixed where the processor that computes has instructions for it, or else 32-true, which is then faster."""
    if accelerator != "cpu" and (shutil.which("nvidia-smi") or accelerator not in ("auto", "mps")):
        return "bf16-mixed"
    information = Path("/proc/cpuinfo")
    known = information.read_text().split() if information.exists() else []
    return "bf16-mixed" if {"avx512_bf16", "amx_bf16", "bf16"}.intersection(known) else "32-true"


def told(name: str) -> str:
    """conf/`name`.yaml without its list of defaults: every setting with its comment, for --help."""
    text = re.sub(r"^defaults:\n( .*\n)*\n?", "", (CONF / f"{name}.yaml").read_text(), flags=re.M)
    return text.replace("$", "$$")  # the help is a template


OmegaConf.register_new_resolver("told", told, replace=True)
OmegaConf.register_new_resolver("digest", digest, replace=True)
OmegaConf.register_new_resolver("sweep_name", sweep_name, replace=True)
OmegaConf.register_new_resolver("batches", batches, replace=True)
OmegaConf.register_new_resolver("fast_precision", fast_precision, replace=True)


def plain(config: DictConfig) -> dict:
    """The resolved configuration as a plain dict, which checkpoints and loggers keep; `hydra` is not part of it."""
    return OmegaConf.to_container(config, resolve=True)


def code_stamp(overrides: list[str]) -> dict[str, str]:
    """What is needed to run this again, as file name -> text: overrides, commit, uncommitted changes, packages."""

    def git(*arguments: str) -> str:
        try:
            command = ["git", "-C", str(ROOT), *arguments]
            found = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError:  # no git here
            return ""
        return found.stdout if found.returncode == 0 else ""

    packages = sorted({f"{p.metadata['Name']}=={p.version}" for p in distributions()}, key=str.lower)
    stamp = {"commit": git("rev-parse", "HEAD").strip() or "unknown", "overrides": overrides}
    stamp |= {"python": sys.version.split()[0], "packages": packages}
    return {"code.json": json.dumps(stamp, indent=1), "dirty.patch": git("diff", "HEAD")}


def entry(name: str) -> Callable:
    """Make `main(config)` a command configured by conf/`name`.yaml.

    What the user can mend (ValueError, OSError, errors of the configuration) ends in one sentence and exit code 1;
    FEWSTEP_TRACEBACK=1 shows where it came from. Everything else is a fault of ours and keeps its traceback.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)
        def composed(config: DictConfig) -> None:
            with _mistakes_in_a_sentence(name):
                check_types(name)
                OmegaConf.resolve(config)
                OmegaConf.set_readonly(config, True)
                main(config)

        def command() -> None:
            if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed agent leaves nobody training on
                if os.environ.get(AGENT, str(os.getppid())) != str(os.getppid()):
                    sys.exit(f"{name}: the agent that started this process was killed meanwhile")
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands over what it finds while composing
            sys.argv[1:] = sorted(
                sys.argv[1:], key=lambda word: word not in ("-m", "--multirun")
            )  # anywhere, for users
            with _mistakes_in_a_sentence(name):
                composed()

        return command

    return decorate


@contextmanager
def _mistakes_in_a_sentence(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        if os.environ.get("FEWSTEP_TRACEBACK"):
            raise
        sys.exit(f"{name}: {sentence(error, name)}")
    except KeyboardInterrupt:
        sys.exit(130)


def sentence(error: BaseException, name: str) -> str:
    """What went wrong and what to change, in one sentence."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        cause, where = error.__cause__, str(error).rpartition("full_key: ")[2]
        if isinstance(cause, ValueError):
            return str(cause)
        return f"{where or 'the configuration'} cannot be built: {cause}"
    if isinstance(error, HydraException):
        return _wrong_override(name) or _several(error) or _first_line(error)
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _several(error: BaseException) -> str | None:
    """Of one setting, without -m."""
    said = re.match("Ambiguous value for argument '([^=]*)=(.*)'", str(error))
    key, values = said.groups() if said else (None, None)
    return said and f"'{key}={values}' is several values; add -m to run each, or write {key}=[{values}] for a list"


def _wrong_override(name: str) -> str | None:
    """The first override on the command line that does not fit, with the nearest names that do."""
    groups = {str(p.relative_to(CONF)): sorted(f.stem for f in p.glob("*.yaml")) for p in CONF.rglob("*") if p.is_dir()}
    overrides = []
    for text in (a for a in sys.argv[1:] if not a.startswith("-")):
        try:
            overrides.append(OverridesParser.create().parse_override(text))
        except HydraException:
            return f"'{text}' is not of the form key=value (quote values that hold spaces, commas or equal signs)"
    chosen = [o for o in overrides if o.key_or_group in groups and not o.key_or_group.startswith("hydra/")]
    for override in chosen:  # before the keys, which choices bring
        key = override.key_or_group
        if override.value() is None and not override.is_delete():
            return f"{key}=null is no choice; ~{key} takes the group away, and there is {', '.join(groups[key])}"
        for choice in (c for c in _choices(override) if c not in groups[key]):
            return f"{key}={choice} does not exist; {_nearest(choice, groups[key])}"
    known = _known_keys(name)
    for override in (o for o in overrides if o not in chosen):
        key = override.key_or_group
        if not (override.is_add() or override.is_delete() or key in known or _of_hydra(key)):
            return f"'{key}' is no key of the configuration; {_nearest(key, [*known, *groups])}"
    for key in (o.key_or_group for o in chosen if not o.is_add() and o.key_or_group not in known):
        having = [f.stem for f in sorted((CONF / "experiment").glob("*.yaml")) if f"- /{key}:" in f.read_text()]
        if having and name != "train":
            return f"{key} is chosen with experiment={' or experiment='.join(having)}; add that"
    return None


def _choices(override: Override) -> list[str]:
    """The options of a group that an override names: one, a list, or several to sweep over."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    flat = [choice for v in values for choice in (v if isinstance(v, list) else [v])]
    return [str(getattr(choice, "text", choice)) for choice in flat if choice is not None]


def _of_hydra(key: str) -> bool:
    """Settings of Hydra's own, of which only those of sweeps are looked up."""
    return key.startswith("hydra") and not re.match(r"hydra\.(launcher|sweeper)\.(?!params\b)", key)


def check_types(name: str) -> None:
    """Raise ValueError where the command line gives a setting another type than its YAML does: a word for a number."""
    asked = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    changes = [OverridesParser.create().parse_override(a) for a in asked]
    plain_changes = [o for o in changes if not (o.is_add() or o.is_delete() or o.is_force_add())]
    if not plain_changes:
        return
    before = _chosen(name)
    for key, value in ((o.key_or_group, o.value()) for o in plain_changes):
        if (CONF / key).is_dir() or (isinstance(value, str) and "${" in value):
            continue
        default = OmegaConf.select(before, key, throw_on_resolution_failure=False)
        if default is not None and value is not None and (asked := _kind(default)) not in ("text", _kind(value)):
            if asked.startswith("a list") and isinstance(value, list) and not (value and default):
                continue  # nothing to compare
            raise ValueError(f"{key}={_shown(value)} must be {asked}, such as {_shown(default)}")


def _kind(value) -> str:
    if isinstance(value, (list, ListConfig)):
        kinds = {_kind(v) for v in value}
        return f"a list of {kinds.pop().removeprefix('a ')}s" if len(kinds) == 1 else "a list"
    if isinstance(value, (dict, DictConfig)):
        return "a group of settings"
    return "true or false" if isinstance(value, bool) else "a number" if isinstance(value, (int, float)) else "text"


def _shown(value) -> str:
    text = json.dumps(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)
    return text.replace('"', "").replace(" ", "")


def _known_keys(name: str) -> list[str]:
    """Every key of the configuration that the command line's valid group choices compose."""
    keys = _keys(OmegaConf.to_container(_chosen(name, hydra_too=True), resolve=False))
    return [key for key in keys if not _of_hydra(key)]


def _chosen(name: str, hydra_too: bool = False) -> DictConfig:
    """The configuration that the command line's valid group choices compose, without its other settings.

    Of several options to sweep over, the first.
    """
    groups = {p.name for p in CONF.iterdir() if p.is_dir()}
    choices = [a for a in sys.argv[1:] if a.partition("=")[0] in groups]
    choices = [a if "[" in a else a.split(",")[0] for a in choices]
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return compose(name, choices, return_hydra_config=hydra_too)
        except HydraException:
            choices = [a for a in choices if a.startswith("experiment=")]
            return compose(name, choices, return_hydra_config=hydra_too)


def _keys(node: dict, prefix: str = "") -> Iterator[str]:
    for key, child in node.items():
        yield f"{prefix}{key}"
        if isinstance(child, dict):
            yield from _keys(child, f"{prefix}{key}.")


def _nearest(word: str, names: list[str]) -> str:
    parts = {name: set(re.split("[._]", name)) for name in (word, *names)}
    same = [n for n in names if n.rpartition(".")[2] == word.rpartition(".")[2]]
    same += [n for n in names if parts[word] <= parts[n]]  # lr_generator in optimizer_generator.lr
    near = list(dict.fromkeys([*same, *get_close_matches(word, names, n=3, cutoff=0.5)]))[:3]
    if not near and len(names) > 12:
        return "`--cfg job` shows all of it"
    return f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(names)}"
