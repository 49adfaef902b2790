"""Optuna's study in memory, built from the trials that ended: it draws settings, prunes trials and ranks settings.

The draws of a trial depend on the seed, its number, the setting and the trials that ended before it, and on no state of a
sampler. So a trial that was killed begins again with the same settings, and nothing of a sampler is stored. (Optuna's own
CMA-ES keeps itself as a pickle, which would run code where a study is continued.)
"""

import contextlib
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import cmaes
import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from polyak.studies.journal import Trial
from polyak.studies.space import Space

STARTUP_TRIALS = 10
"""Number of trials with random settings before TPE learns from them."""

SIGMA = 0.25
"""Initial standard deviation of CMA-ES around the middle of [0, 1]."""

MIN_RANKED = 4
"""Least number of complete trials whose settings are ranked."""

STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


class StatelessSampler(optuna.samplers.BaseSampler):
    """Draws each setting with a sampler of its own: ordered ones by CMA-ES, if `uses_cma`, and all others by TPE.

    Args:
        space: the space.
        seed: seed of the study.
        uses_cma: use CMA-ES.
    """

    def __init__(self, space: Space, seed: int, *, uses_cma: bool) -> None:
        self._space, self._seed = space, seed
        self._ordered = [name for name, dimension in space.items() if uses_cma and dimension.is_ordered]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return {}: no settings are drawn together by Optuna."""
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return {}."""
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw one setting."""
        if param_name in self._ordered:
            return self._draw_by_cma(study, trial.number)[param_name]
        own = self._own_seed(trial.number, param_name)
        sampler = optuna.samplers.TPESampler(seed=own, n_startup_trials=STARTUP_TRIALS, multivariate=False)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def _draw_by_cma(self, study: optuna.Study, number: int) -> dict[str, float]:
        """Draw all ordered settings: the generations are the complete trials in the order of their numbers."""
        names, count = self._ordered, len(self._ordered)
        bounds = np.tile([0.0, 1.0], (count, 1))
        optimizer = cmaes.CMA(np.full(count, 0.5), SIGMA, bounds, seed=self._own_seed(number, "cma-es"))
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        points = [
            (np.array([self._space[name].to_unit(trial.params[name]) for name in names]), -float(trial.values[0]))
            for trial in complete
            if trial.params
        ]
        size = optimizer.population_size
        for start in range(0, len(points) - size + 1, size):
            optimizer.tell(points[start : start + size])
        drawn = optimizer.ask()
        return {name: self._space[name].from_unit(float(x)) for name, x in zip(names, drawn, strict=True)}

    def _own_seed(self, number: int, name: str) -> int:
        return zlib.crc32(f"{self._seed} {number} {name}".encode())


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Hide Optuna's messages while the block runs."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


def build_study(
    trials: Mapping[int, Trial], space: Space, *, sampler: str, seed: int, pruner: str, evaluations: int
) -> optuna.Study:
    """Return a study with the trials that ended; numbers between them that did not end come first in `ask_trial`.

    Args:
        trials: the trials by number.
        space: the space.
        sampler: `"tpe"` or `"cma-es"`.
        seed: seed of the study.
        pruner: `"median"`, `"hyperband"` or `"none"`.
        evaluations: number of evaluations of a trial.
    """
    study = optuna.create_study(
        study_name="study",
        direction="maximize",
        sampler=StatelessSampler(space, seed, uses_cma=sampler == "cma-es"),
        pruner=_make_pruner(pruner, evaluations),
    )
    for number in range(max(trials, default=-1) + 1):
        if number not in trials:
            study.enqueue_trial({})
            continue
        trial = trials[number]
        study.add_trial(
            optuna.trial.create_trial(
                state=STATES[trial.state],
                value=trial.score,
                params={name: space[name].encode(value) for name, value in trial.settings.items()},
                distributions={name: space[name].distribution() for name in trial.settings},
                intermediate_values=dict(trial.evaluations),
                system_attrs=dict(trial.rungs),
            )
        )
    return study


def _make_pruner(name: str, evaluations: int) -> optuna.pruners.BasePruner:
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=evaluations // 3)
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=evaluations)
    return optuna.pruners.NopPruner()


def ask_trial(study: optuna.Study, space: Space) -> tuple[optuna.Trial, dict[str, Any]]:
    """Begin the next trial; returns it and its settings, which are `{}` for the baseline, trial 0."""
    known = study.get_trials(deepcopy=False)
    is_baseline = not known or known[0].state == TrialState.WAITING
    trial = study.ask({} if is_baseline else {name: dimension.distribution() for name, dimension in space.items()})
    return trial, {name: space[name].decode(number) for name, number in trial.params.items()}


def count_begun(study: optuna.Study) -> int:
    """Return the number of trials that ended or run."""
    return sum(trial.state != TrialState.WAITING for trial in study.get_trials(deepcopy=False))


def tell_trial(
    study: optuna.Study,
    trial: optuna.Trial,
    settings: Mapping[str, Any],
    state: str,
    scores: tuple[float, ...],
    error: str | None,
) -> Trial:
    """End a trial; returns it with all that `build_study` needs."""
    value = float(np.mean(scores)) if state == "complete" else None
    frozen = study.tell(trial, value, state=STATES[state])
    rungs = {name: float(value) for name, value in frozen.system_attrs.items() if name.startswith("completed_rung")}
    return Trial(trial.number, state, settings, frozen.value, scores, error, dict(frozen.intermediate_values), rungs)


def rank_settings(study: optuna.Study) -> dict[str, float]:
    """Return the importance of each setting for the score by PED-ANOVA, sums to 1; {} with too few or equal scores.

    Source: Watanabe et al. 2023, arXiv:2304.10255.
    """
    names = sorted({name for trial in study.get_trials(deepcopy=False) for name in trial.params})
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if sum(bool(trial.params) for trial in complete) < MIN_RANKED or len({tuple(trial.values) for trial in complete}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.importance.get_param_importances(study, evaluator=evaluator, params=names)
