"""Optuna chooses the settings of one run after the other."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.utils import instantiate
from omegaconf import DictConfig

from hydra_plugins.sweeps._job import Job
from hydra_plugins.sweeps._launcher import ProcessLauncher

TARGET = "hydra_plugins.sweeps.optuna_study.OptunaSweeper"
NODE = {"_target_": TARGET, "_recursive_": False}  # so that Optuna is imported for a sweep alone
ConfigStore.instance().store(group="hydra/sweeper", name="optuna_study", node=NODE)


class OptunaSweeper(Sweeper):
    """A study whose trials are runs; it is kept in the sweep's folder and goes on when the command is repeated.

    While a run trains, the values of its metric go to the pruner, which may stop it. A run that fails, or that ends
    without a finite value, is a failed trial; a trial that was interrupted with the sweep goes on as the run it was.

    Args:
        n_trials: of the whole study, whatever became of them.
        params: setting -> values, as on the command line (which wins): interval(0, 1), tag(log, interval(1e-4, 1e-2)),
            choice(a, b), range(1, 9). Whole numbers at both ends of an interval mean whole numbers.
        direction: minimize or maximize, the first of config.metric that runs log.
        sampler, pruner: what builds Optuna's; the sampler's seed is moved on by the trials that there are already.
    """

    def __init__(
        self,
        n_trials: int,
        params: dict[str, str] | None = None,
        direction: str = "minimize",
        sampler: DictConfig | None = None,
        pruner: DictConfig | None = None,
    ):
        self.n_trials, self.params, self.direction = n_trials, dict(params or {}), direction
        self.sampler, self.pruner = sampler, pruner
        self.seen: dict[Job, tuple[int, int]] = {}  # bytes of a job's log, and images that its last value is of

    def setup(self, *, hydra_context, task_function, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        given = dict(hydra_context=hydra_context, task_function=task_function, config=config)
        self.launcher = Plugins.instance().instantiate_launcher(**given)
        if not isinstance(self.launcher, ProcessLauncher):
            raise ValueError("trials need a launcher that can stop them: launcher=local, slurm or ray")

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until the study has n_trials of them; ValueError if none has given a value."""
        from filelock import FileLock, Timeout

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        asked = parser.parse_overrides([*(f"{key}={values}" for key, values in self.params.items()), *arguments])
        by_key = {override.get_key_element(): override for override in asked}
        searched = {key: override for key, override in by_key.items() if override.is_sweep_override()}
        if not searched:
            raise ValueError("there is nothing to search: give settings several values, as in seed=0,1")
        self.fixed = [f"{k}={o.get_value_element_as_str()}" for k, o in by_key.items() if k not in searched]
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / "lock", timeout=0):
                self._continue(folder, searched)
        except Timeout as error:
            raise ValueError(f"another process is at work on the study in {folder}; wait for it") from error

    def _continue(self, folder: Path, searched: dict[str, Override]) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ValueError("a study needs Optuna: pip install -e '.[optuna]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.states = optuna.trial.TrialState
        self.space = {key: _distribution(override) for key, override in searched.items()}
        storage = optuna.storages.RDBStorage(f"sqlite:///{(folder / 'study.db').absolute()}")
        opened = dict(storage=storage, study_name="study", direction=self.direction, load_if_exists=True)
        self.study = optuna.create_study(**opened, pruner=self.pruner and instantiate(self.pruner))
        if (begun := self.study.direction.name.lower()) != self.direction:
            raise ValueError(f"the study in {folder} is to {begun}; set hydra.sweep.dir=OTHER to {self.direction}")
        if self.sampler:
            moved = {"seed": self.sampler.seed + len(self.study.trials)} if self.sampler.get("seed") is not None else {}
            self.study.sampler = instantiate(self.sampler, **moved)
        jobs: list[Job] = []
        self.launcher.run(self._jobs(jobs), jobs, self._hopeless, self._tell)
        self.launcher.report()
        print(f"\n{self._outcome()}\nstudy  {folder / 'study.db'}", flush=True)

    def _jobs(self, jobs: list[Job]) -> Iterator[Job]:
        """Trials that were interrupted, then new ones; each is appended to `jobs`."""
        from optuna.trial import Trial

        for left in self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
            if left.params.keys() == self.space.keys():
                jobs.append(self._job(Trial(self.study, left._trial_id), left.params))
                yield jobs[-1]
            else:  # interrupted while it was chosen, or another space was searched
                self.study.tell(left.number, state=self.states.FAIL)
        while len(self.study.get_trials(deepcopy=False)) < self.n_trials:
            trial = self.study.ask(self.space)
            jobs.append(self._job(trial, trial.params))
            yield jobs[-1]

    def _job(self, trial, chosen: dict[str, Any]) -> Job:
        texts = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in chosen.items()}
        job = self.launcher.job([*self.fixed, *(f"{key}={text}" for key, text in texts.items())])
        job.trial = trial
        trial.set_user_attr("run", job.name)
        trial.set_user_attr("settings", job.overrides[len(self.fixed) :])
        reported = self.study.trials[trial.number].intermediate_values
        self.seen[job] = (0, max(reported, default=0))
        return job

    def _hopeless(self, job: Job) -> bool:
        """Report what the run has logged since the last time; whether the pruner has seen enough."""
        log = job.folder / "metrics.csv"
        size, images = log.stat().st_size if log.exists() else 0, self.seen[job][1]
        if size == self.seen[job][0]:
            return False
        rows = next((rows for metric in job.config.metric if (rows := job.logged(metric))), [])
        fresh = [row for row in rows if images < row[0] < job.config.total_kimg * 1000]
        for images, value in fresh:
            job.trial.report(value, images)
        self.seen[job] = (size, images)
        return bool(fresh) and job.trial.should_prune()

    def _tell(self, job: Job) -> None:
        if job.state == "pruned":
            self.study.tell(job.trial, state=self.states.PRUNED)
        elif job.state != "failed" and job.value is not None and math.isfinite(job.value):
            self.study.tell(job.trial, job.value)
        else:
            job.state = "failed" if job.state == "failed" else "no value"
            self.study.tell(job.trial, state=self.states.FAIL)

    def _outcome(self) -> str:
        trials = self.study.get_trials(deepcopy=False)
        of = {state: [t for t in trials if t.state == state] for state in self.states}
        if not of[self.states.COMPLETE]:
            raise ValueError(f"none of {len(trials)} trials gave a value; their runs' log.txt say why")
        best = self.study.best_trial
        chosen = " ".join(best.user_attrs["settings"])
        counts = f"{len(of[self.states.PRUNED])} pruned, {len(of[self.states.FAIL])} failed"
        first = f"best of {len(trials)} trials ({counts})  {best.value:.5g}"
        return f"{first}\nrun    {best.user_attrs['run']}\nwith   {chosen}"


def _distribution(override: Override):
    """What Optuna draws from. A choice is one of the texts that may stand on the command line."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    values = override.value()
    if override.is_interval_sweep():
        whole = isinstance(values.start, int) and isinstance(values.end, int)
        kind = IntDistribution if whole else FloatDistribution
        return kind(values.start, values.end, log="log" in values.tags)
    if override.is_range_sweep():
        numbers = sorted(override.sweep_iterator())
        if len(numbers) > 1 and all(isinstance(number, int) for number in numbers):
            return IntDistribution(numbers[0], numbers[-1], step=numbers[1] - numbers[0])
    return CategoricalDistribution(list(override.sweep_string_iterator()))
