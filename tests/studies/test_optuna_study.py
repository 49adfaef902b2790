import random

import numpy as np
import pytest

from polyak.studies.journal import Trial
from polyak.studies.space import Choices, Range

optuna_study = pytest.importorskip("polyak.studies.optuna_study")

SPACE = {
    "rate": Range(1e-5, 1e-1, True),
    "units": Range(1, 64),
    "gamma": Choices((0.9, 0.99, 0.999)),
    "kind": Choices(("a", "b")),
}


def score(settings):
    return -abs(np.log10(settings.get("rate", 1e-5)) + 3) - abs(settings.get("units", 1) - 20) / 60


def search(trials, until, sampler, pruner="none"):
    """Continue a study from the trials that ended."""
    study = optuna_study.build_study(trials, SPACE, sampler=sampler, seed=3, pruner=pruner, evaluations=4)
    while optuna_study.count_begun(study) < until:
        trial, settings = optuna_study.ask_trial(study, SPACE)
        state = "failed" if trial.number % 7 == 6 else "complete"
        for step in range(1, 5):
            trial.report(score(settings) * step / 4 - 1, step)
            if trial.should_prune() and step < 4:
                state = "pruned"
                break
        scores = (score(settings),) if state == "complete" else ()
        error = "NaN" if state == "failed" else None
        trials = trials | {trial.number: optuna_study.tell_trial(study, trial, settings, state, scores, error)}
    return trials


@pytest.mark.parametrize(("sampler", "pruner"), [("tpe", "median"), ("tpe", "hyperband"), ("cma-es", "none")])
def test_a_study_that_is_rebuilt_after_every_trial_draws_and_prunes_as_one_that_is_not(sampler, pruner):
    whole = search({}, 26, sampler, pruner)
    assert whole[0].settings == {} and len({str(trial.settings) for trial in whole.values()}) == 26
    cut = {}
    for until in range(1, 27):
        cut = search(cut, until, sampler, pruner)
    assert cut == whole
    states = {trial.state for trial in whole.values()}
    assert "failed" in states and ("pruned" in states) == (pruner != "none")


def test_a_number_that_did_not_end_comes_first():
    trials = search({}, 12, "tpe")
    gap = {number: trial for number, trial in trials.items() if number != 5}
    study = optuna_study.build_study(gap, SPACE, sampler="tpe", seed=3, pruner="none", evaluations=4)
    assert [optuna_study.ask_trial(study, SPACE)[0].number for _ in range(2)] == [5, 12]
    without_baseline = optuna_study.build_study({1: trials[1]}, SPACE, sampler="tpe", seed=3, pruner="none", evaluations=4)
    trial, settings = optuna_study.ask_trial(without_baseline, SPACE)
    assert (trial.number, settings) == (0, {})


def test_cma_es_finds_better_settings_than_random_ones():
    found = search({}, 80, "cma-es")
    late = [trial.score for trial in found.values() if trial.number >= 60 and trial.score is not None]
    early = [trial.score for trial in found.values() if 1 <= trial.number < 20 and trial.score is not None]
    assert np.median(late) > np.median(early) + 0.3
    importances = optuna_study.rank_settings(
        optuna_study.build_study(found, SPACE, sampler="cma-es", seed=3, pruner="none", evaluations=4)
    )
    assert sum(importances.values()) == pytest.approx(1) and max(importances, key=importances.get) in ("rate", "units")


def test_few_or_equal_scores_rank_nothing():
    equal = {n: Trial(n, "complete", _settings(n), 1.0, (1.0,)) for n in range(1, 9)}
    equal[0] = Trial(0, "complete", {}, 1.0, (1.0,))
    for trials in ({}, equal, search({}, 3, "tpe")):
        study = optuna_study.build_study(trials, SPACE, sampler="tpe", seed=0, pruner="none", evaluations=4)
        assert optuna_study.rank_settings(study) == {}


def _settings(number):
    draw = random.Random(number)
    return {"rate": 10 ** draw.uniform(-5, -1), "units": draw.randint(1, 64), "gamma": 0.99, "kind": draw.choice("ab")}
