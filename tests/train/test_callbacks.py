"""Ready-made callbacks: early stopping, and loggers of other libraries."""

import dataclasses
import math
import re
import sys
import types

import gymnasium
import jax
import pytest

import polyak
from polyak.core.types import Progress
from polyak.train import callbacks
from tests.videos.drawn import AGENT, ENV

PROGRESS = Progress(100, 1000, 10, 2.0, 1.0, 50.0)


def answers(callback, values, tag="eval/mean_reward"):
    return [callback(PROGRESS, {} if value is None else {tag: value}, None) for value in values]


def test_training_stops_when_the_reward_is_reached():
    assert answers(callbacks.stop_at_reward(10), [None, 9.9, math.nan, 10.0]) == [True, True, True, False]
    assert answers(callbacks.stop_at_reward(10, "rollout/ep_rew_mean"), [11.0], "rollout/ep_rew_mean") == [False]


def test_training_stops_without_improvement_for_so_many_evaluations():
    callback = callbacks.stop_without_improvement(2)
    assert answers(callback, [1.0, 0.5, None, 2.0, 2.0, None, 1.9]) == [True] * 6 + [False]


@pytest.mark.parametrize("make", [callbacks.stop_at_reward, callbacks.stop_without_improvement])
@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("rollout/ep_rew_mea", "unknown metric 'rollout/ep_rew_mea'; did you mean 'rollout/ep_rew_mean'?"),
        ("eval/mean_reward", "evaluations need eval_every"),
    ],
)
def test_a_metric_that_no_report_has_is_warned_of_once(make, tag, message):
    callback, metrics = make(10, tag), {"rollout/ep_rew_mean": 11.0}
    assert callback(PROGRESS, metrics, None)
    late = dataclasses.replace(PROGRESS, env_steps=200)
    with pytest.warns(UserWarning, match=f"{make.__name__} has had no effect so far: .*{re.escape(message)}"):
        assert callback(late, metrics, None)
    assert callback(late, metrics, None)


def test_a_metric_may_be_missing_in_later_reports():
    callback = callbacks.stop_at_reward(10)
    assert callback(PROGRESS, {"eval/mean_reward": 1.0}, None)
    assert callback(dataclasses.replace(PROGRESS, env_steps=200), {}, None)


def test_a_metric_of_evaluations_is_not_missed_before_the_first_one():
    callback = callbacks.stop_at_reward(10)
    late = dataclasses.replace(PROGRESS, env_steps=200, eval_every=300)
    assert callback(late, {"rollout/ep_rew_mean": 11.0}, None)
    with pytest.warns(UserWarning, match="stop_at_reward has had no effect so far"):
        callback(dataclasses.replace(late, env_steps=300), {"rollout/ep_rew_mean": 11.0}, None)


def test_a_metric_of_evaluations_is_not_missed_before_the_first_one_of_a_resumed_run():
    callback = callbacks.stop_at_reward(10)
    resumed = dataclasses.replace(PROGRESS, env_steps=500, eval_every=300)
    assert callback(resumed, {"rollout/ep_rew_mean": 11.0}, None)
    with pytest.warns(UserWarning, match="stop_at_reward has had no effect so far"):
        callback(dataclasses.replace(resumed, env_steps=600), {"rollout/ep_rew_mean": 11.0}, None)


def test_early_stopping_ends_a_training():
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    agent = polyak.PPO(spec=env.spec, num_steps=8, num_epochs=1, num_minibatches=1, network=polyak.MLP((4,)))
    # The first evaluation comes after a fifth of the training.
    result = polyak.train.run(agent, env, env_steps=400, eval_every=200, callbacks=[callbacks.stop_at_reward(1)])
    assert result.stopped == "callback" and list(result.evaluations) == [result.progress.env_steps]


@pytest.mark.parametrize("log_to", [callbacks.log_to_wandb, callbacks.log_to_trackio])
def test_only_the_result_of_init_is_taken(log_to):
    with pytest.raises(TypeError, match=r"run must be the result of \w+.init\(...\), got None"):
        log_to(None)


def test_a_missing_library_names_its_pip_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"log_to_mlflow needs the package mlflow: pip install 'polyak\[mlflow\]'"):
        callbacks.log_to_mlflow()
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match=r"record_videos needs imageio-ffmpeg, .*: pip install 'polyak\[video\]'"):
        callbacks.record_videos(AGENT, ENV, tmp_path, every=10)
    agent = polyak.PPO(spec=polyak.envs.make("CartPole-v1").spec)
    with pytest.raises(ValueError, match="CartPole-v1 draws no images: its render_mode must be 'rgb_array', got None"):
        callbacks.record_videos(agent, gymnasium.make("CartPole-v1"), tmp_path, every=10)


def test_missing_action_masks_are_named_before_the_training(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    spec = dataclasses.replace(polyak.envs.make("CartPole-v1").spec, has_action_mask=True)
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    with pytest.raises(ValueError, match=r"record_videos: env: .*has_action_mask"):
        callbacks.record_videos(polyak.PPO(spec=spec), env, tmp_path, every=10)
    with pytest.raises(ValueError, match="make: action_mask_key='m'"):
        callbacks.record_videos(polyak.PPO(spec=spec), env, tmp_path, every=10, action_mask_key="m")


@pytest.mark.parametrize(("reports", "filmed"), [((4096, 8000), (4096, 8000)), ((2048, 4096, 6144, 8192), (4096, 8192))])
def test_a_video_is_recorded_at_every_multiple_and_of_the_last_policy(tmp_path, reports, filmed):
    pytest.importorskip("imageio_ffmpeg")
    agent = polyak.PPO(spec=polyak.envs.make("CartPole-v1").spec, network=polyak.MLP((4,)))
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=5)
    record = callbacks.record_videos(agent, env, tmp_path / "videos", every=4000)
    state = types.SimpleNamespace(agent=agent.init(jax.random.key(0)))
    for env_steps in reports:
        record(Progress(env_steps, 8000, 1, 1.0, 1.0, 1.0), {}, state)
    assert sorted(int(path.stem) for path in (tmp_path / "videos").iterdir()) == list(filmed)


def test_a_video_that_cannot_be_written_warns_once_and_ends_no_training(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / "videos").write_text("in the way")
    record = callbacks.record_videos(AGENT, ENV, tmp_path / "videos", every=10)
    state = types.SimpleNamespace(agent=AGENT.init(jax.random.key(0)))
    with pytest.warns(UserWarning, match="was not written: FileExistsError: .*; training goes on"):
        record(Progress(10, 30, 1, 1.0, 1.0, 1.0), {}, state)
    record(Progress(20, 30, 1, 1.0, 1.0, 1.0), {}, state)
