import dataclasses
import math
from types import SimpleNamespace

import pytest

from polyak.studies.study import flags_of
from polyak.studies.training import Bench, Task, _Evaluations

TASK = Task("ppo", "jax/CartPole-v1", env_steps=1000, num_envs=8, evaluations=4, eval_episodes=2)


class Progress:
    def __init__(self, env_steps):
        self.env_steps, self.target_env_steps = env_steps, 1000


def reports_of(evaluations, rewards):
    """Call the callbacks of seeds with (seed, env_steps, reward), and stop as a training does."""
    callbacks = {}
    for seed, env_steps, reward in rewards:
        (callback,) = callbacks.setdefault(seed, evaluations.callbacks(seed))
        callback(Progress(env_steps), {}, None)
        callback(Progress(env_steps), {"eval/mean_reward": reward}, None)


def test_seeds_in_parallel_report_their_mean_at_equal_steps():
    reports = []
    evaluations = _Evaluations(TASK, [3, 7], lambda *report: reports.append(report) or report == (2, 5.0))
    reports_of(evaluations, [(3, 250, 1.0), (7, 260, 3.0), (3, 500, 4.0), (7, 505, 6.0), (3, 750, 9.0), (7, 750, 9.0)])
    assert reports == [(1, 2.0), (2, 5.0)] and evaluations.is_pruned


def test_the_end_of_a_training_prunes_nothing():
    evaluations = _Evaluations(TASK, [0], lambda step, reward: step == 4)
    reports_of(evaluations, [(0, 900, 1.0), (0, 1010, 3.0)])
    assert not evaluations.is_pruned


def test_seeds_in_turn_report_the_mean_so_far():
    reports = []
    evaluations = _Evaluations(
        dataclasses.replace(TASK, env="CartPole-v1"), [0, 1], lambda *report: reports.append(report) or report[0] == 6
    )
    reports_of(evaluations, [(0, 500, 1.0), (0, 1000, 3.0), (1, 250, 5.0), (1, 500, 1.0)])
    assert reports == [(2, 1.0), (4, 3.0), (5, 4.0), (6, 2.0)] and evaluations.is_pruned


def test_a_seed_without_a_score_ends_its_trial_as_failed(tmp_path, monkeypatch):
    trained = []

    def run(*names, seed, **options):
        trained.append(seed)
        return SimpleNamespace(stopped=None, diagnosis=None, evaluation=SimpleNamespace(mean_return=math.nan))

    monkeypatch.setattr("polyak.studies.training.run", run)
    with Bench(dataclasses.replace(TASK, env="CartPole-v1")) as bench:
        outcome = bench.train({}, [0, 1], tmp_path / "a", lambda *report: False)
    assert trained == [0] and outcome.error.startswith("no score: ")


def test_settings_of_rnd_surround_the_agent_that_is_trained(tmp_path, monkeypatch):
    trained = []

    def run_seeds(agent, env, *, settings, **options):
        trained.append((agent, settings))
        return [SimpleNamespace(stopped=None, diagnosis=None, evaluation=SimpleNamespace(mean_return=1.0))]

    monkeypatch.setattr("polyak.studies.training.run_seeds", run_seeds)
    with Bench(TASK) as bench:
        outcomes = [
            bench.train(settings, [0], tmp_path / "a", lambda *report: False)
            for settings in ({"gamma": 0.9}, {"gamma": 0.9, "rnd_coefficient": 0.25}, {"rnd_coefficient": -1.0})
        ]
    (name, fields), (agent, none) = trained
    assert (name, fields, none) == ("ppo", {"gamma": 0.9}, None)
    assert (type(agent).__name__, agent.coefficient, agent.agent.gamma) == ("RND", 0.25, 0.9)
    assert [outcome.state for outcome in outcomes] == ["complete", "complete", "failed"]
    length = {"env_steps": 1000, "num_envs": 8}
    assert flags_of(TASK, {"gamma": 0.9}) == {**length, "gamma": 0.9}
    assert flags_of(TASK, {"rnd_coefficient": 0.25}) == {**length, "intrinsic_reward": "rnd", "rnd_coefficient": 0.25}


def test_invalid_settings_fail_and_errors_of_the_machine_do_not(tmp_path):
    with Bench(TASK) as bench:
        outcome = bench.train({"num_minibatches": 7}, [0], tmp_path / "a", lambda *report: False)
        assert outcome.state == "failed" and "num_minibatches=7 must divide" in outcome.error
        assert not (tmp_path / "a").exists()
        assert bench.make_fields({"hidden": [8], "learning_rate": "linear:0.1"})["network"].hidden == (8,)
        (tmp_path / "file").touch()
        with pytest.raises(Exception, match="file"):
            bench.train({}, [0], tmp_path / "file" / "b", lambda *report: False)
