"""What environments report in `info`, as metrics of training and evaluation."""

import warnings

import jax
import numpy as np
import pytest

from polyak import envs, resume, train
from polyak.agents.ppo import PPO
from polyak.core.tags import RETURN, SUCCESS
from polyak.loops.episodes import EpisodeStatistics, InfoSums
from polyak.networks.feedforward import MLP
from polyak.policies.scripted import Uniform
from tests.envs import toys
from tests.loops.test_episodes import finished

KEY = jax.random.key(3)


def trained(make_env, **options):
    env = envs.make(make_env, num_envs=2, **options)
    agent = PPO(env.spec, network=MLP((4,)), num_steps=8, num_minibatches=1, num_epochs=1)
    reports = []

    def record(progress, metrics, state):
        reports.append(dict(metrics))

    return train.run(agent, env, env_steps=128, key=KEY, report_every=32, callbacks=[record]), reports


@pytest.mark.slow
def test_training_reports_success_the_recorded_return_and_named_metrics():
    result, reports = trained(toys.recorded, info_metrics=("force",))
    for metrics in reports:
        assert 0 <= metrics["env/force"] <= 3 and 0 < metrics["rollout/success_rate"] < 1
        assert metrics["rollout/ep_agent_rew_mean"] == pytest.approx(2 * metrics["rollout/ep_rew_mean"], rel=1e-4)
    assert result.metrics == reports[-1] and len(reports) >= 4


@pytest.mark.slow
def test_an_environment_that_reports_nothing_has_no_such_metrics():
    result, _ = trained(toys.Scripted)
    assert {tag for tag in result.metrics if tag.startswith(("rollout/", "env/"))} == {
        "rollout/ep_rew_mean",
        "rollout/ep_len_mean",
    }


def test_a_name_that_no_info_has_is_a_warning_once_an_episode_has_ended():
    with pytest.warns(UserWarning, match="info_metrics has 'forse', which no info of the environment has so far") as caught:
        trained(toys.recorded, info_metrics=("force", "forse"))
    assert len(caught) == 1


def test_a_resumed_training_does_not_warn_of_names_that_were_reported_before(tmp_path, recwarn):
    make = lambda: envs.make(toys.recorded, num_envs=2, info_metrics=("forse",))  # noqa: E731
    settings = {"num_steps": 8, "num_minibatches": 1, "num_epochs": 1}
    train.run("ppo", make(), env_steps=64, run_dir=tmp_path / "run", eval_episodes=0, progress=False, settings=settings)
    resume(tmp_path / "run", env=make(), env_steps=128, eval_episodes=0, progress=False)
    assert sum("info_metrics" in str(warning.message) for warning in recwarn) == 1


def test_metrics_of_info_do_not_change_training():
    plain, _ = trained(lambda: toys.Doubled(toys.Scripted()))
    reporting, _ = trained(toys.recorded, info_metrics=("force",))
    for a, b in zip(jax.tree.leaves(plain.state), jax.tree.leaves(reporting.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_named_metrics_are_means_over_the_report_and_episodes_over_the_window():
    statistics, first, second = EpisodeStatistics(), InfoSums(), InfoSums()
    first.add({"env/x": np.array([1.0, np.nan]), SUCCESS: np.array([1.0, 0.0]), RETURN: np.array([5.0, 7.0])})
    first.add({"env/x": np.array([2.0, 6.0])})
    statistics.add(finished(2, 20.0, 10), first)
    expected = {"rollout/ep_rew_mean": 6.0, "rollout/ep_agent_rew_mean": 10.0, "rollout/ep_len_mean": 5.0}
    assert statistics.metrics() == expected | {"rollout/success_rate": 0.5, "env/x": 3.0}
    assert statistics.metrics() == expected | {"rollout/success_rate": 0.5}
    second.add({"env/x": np.array([9.0]), SUCCESS: np.array([1.0, 1.0]), RETURN: np.array([5.0, 7.0])})
    statistics.add(finished(2, 20.0, 10), second)
    metrics = statistics.metrics()
    assert (metrics["env/x"], metrics["rollout/success_rate"]) == (9.0, 0.75)
    statistics.add(finished(100, 0.0, 100))
    assert statistics.metrics() == {"rollout/ep_rew_mean": 0.0, "rollout/ep_len_mean": 1.0}


def test_returns_have_one_unit_where_the_environment_records_only_some():
    statistics, info = EpisodeStatistics(), InfoSums()
    info.add({RETURN: np.array([5.0, np.nan])})
    statistics.add(finished(2, 20.0, 10), info)
    with pytest.warns(UserWarning, match=r"info\['episode'\] is missing at the end of some episodes"):
        assert statistics.metrics() == {"rollout/ep_rew_mean": 10.0, "rollout/ep_len_mean": 5.0}


def test_a_training_warns_once_of_returns_that_only_some_episodes_record():
    statistics, info = EpisodeStatistics(), InfoSums()
    info.add({RETURN: np.array([5.0, np.nan])})
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            statistics.add(finished(2, 20.0, 10), info)
            statistics.metrics()
    assert len(shown) == 1


class RecordsTerminations(toys.Scripted):
    """Reports 100 as the return of episodes that terminate."""

    def step(self, action):
        *result, info = super().step(action)
        return (*result, info | ({"episode": {"r": 100.0}} if result[2] else {}))


def test_evaluated_returns_have_one_unit_where_the_environment_records_only_some():
    env, plain = envs.make(RecordsTerminations), envs.make(toys.Scripted)
    with pytest.warns(UserWarning, match=r"info\['episode'\] is missing at the end of some episodes"):
        evaluation = train.evaluate(Uniform(env.spec), env, episodes=3, key=KEY)
    expected = train.evaluate(Uniform(plain.spec), plain, episodes=3, key=KEY)
    np.testing.assert_array_equal(evaluation.returns, expected.returns)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_evaluation_returns_what_the_environment_recorded(vectorization):
    env = envs.make(toys.recorded, num_envs=2, vectorization=vectorization)
    evaluation = train.evaluate(Uniform(env.spec), env, episodes=5, key=KEY)
    env.close()
    plain = envs.make(lambda: toys.Doubled(toys.Scripted()), num_envs=2)
    doubled = train.evaluate(Uniform(plain.spec), plain, episodes=5, key=KEY)
    np.testing.assert_allclose(2 * evaluation.returns, doubled.returns, rtol=1e-5)
    # Env 0 completes episodes 0, 1, 2, env 1 completes 0 and 1; the first ones succeed. (`reset(seed)` counts from 0.)
    assert evaluation.successes.tolist() == [1, 0, 0, 1, 0] and evaluation.success_rate == 0.4
    assert doubled.success_rate is None
