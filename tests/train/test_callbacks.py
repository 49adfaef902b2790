"""Ready-made callbacks: early stopping, and loggers of other libraries."""

import dataclasses
import re
import sys
import types

import gymnasium
import jax
import numpy as np
import pytest

import polyak
from polyak.core.types import Progress
from polyak.envs.env_options import EnvOptions, adapt
from polyak.train import callbacks

PROGRESS = Progress(100, 1000, 10, 2.0, 1.0, 50.0)


def answers(callback, values, tag="eval/mean_reward"):
    return [callback(PROGRESS, {} if value is None else {tag: value}, None) for value in values]


def test_training_stops_when_the_reward_is_reached():
    assert answers(callbacks.stop_at_reward(10), [None, 9.9, 10.0]) == [True, True, False]
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


class Run:
    """A run of Weights & Biases, as far as it is used."""

    def __init__(self):
        self.rows = []

    def log(self, metrics, step):
        self.rows.append((step, metrics))


def test_wandb_gets_every_metric_on_the_axis_of_env_steps():
    run = Run()
    callbacks.log_to_wandb(run)(PROGRESS, {"train/loss": 0.5}, None)
    ((step, metrics),) = run.rows
    assert step == 100 and metrics["train/loss"] == 0.5 and metrics["time/fps"] == 50.0
    with pytest.raises(TypeError, match=r"log_to_wandb: run must be the result of wandb.init\(...\), got None"):
        callbacks.log_to_wandb(None)


def test_mlflow_gets_every_metric(monkeypatch):
    rows = []
    module = types.SimpleNamespace(log_metrics=lambda metrics, step: rows.append((step, metrics["train/loss"])))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    callbacks.log_to_mlflow()(PROGRESS, {"train/loss": 0.5}, None)
    assert rows == [(100, 0.5)]


def test_a_missing_library_names_its_pip_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="log_to_mlflow needs the package mlflow: pip install mlflow"):
        callbacks.log_to_mlflow()
    monkeypatch.setitem(sys.modules, "moviepy", None)
    env = polyak.envs.make("CartPole-v1")
    agent = polyak.PPO(spec=env.spec)
    with pytest.raises(ImportError, match=r"record_videos needs the package moviepy: pip install 'polyak\[video\]'"):
        callbacks.record_videos(agent, gymnasium.make("CartPole-v1", render_mode="rgb_array"), tmp_path, every=10)
    with pytest.raises(ValueError, match="env must have render_mode='rgb_array', got None"):
        callbacks.record_videos(agent, gymnasium.make("CartPole-v1"), tmp_path, every=10)


@pytest.mark.parametrize("convention", ["info", "method", "entry"])
def test_an_episode_for_a_video_respects_action_masks(convention):
    played, key = [], "action_mask" if convention == "entry" else None

    class Masked(gymnasium.Env):
        """Allows one action in each step, and ends when another is taken or after 30 steps."""

        action_space = gymnasium.spaces.Discrete(4, start=2)
        x = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        mask_space = gymnasium.spaces.MultiBinary(4)
        observation_space = gymnasium.spaces.Dict({"x": x} | ({"action_mask": mask_space} if key else {}))

        def state(self):
            self.allowed = len(played) * 7 % 4
            mask = np.eye(4, dtype=np.int8)[self.allowed]
            obs = {"x": np.zeros(2, np.float32)} | ({"action_mask": mask} if key else {})
            return obs, {"action_mask": mask} if convention == "info" else {}

        def reset(self, *, seed=None, options=None):
            played.clear()
            return self.state()

        def step(self, action):
            assert action - 2 == self.allowed
            played.append(action)
            obs, info = self.state()
            return obs, 0.0, len(played) == 30, False, info

    if convention == "method":
        Masked.action_masks = lambda self: np.eye(4, dtype=bool)[self.allowed]
    spec = polyak.envs.make(Masked, action_mask_key=key).spec
    assert spec.has_action_mask
    agent = polyak.PPO(spec=spec, network=polyak.MLP((4,)))
    env = adapt(Masked(), EnvOptions(drop_unsupported_obs=False, action_mask_key=key), "Masked")
    callbacks.play_episode(agent.policy(agent.init(jax.random.key(0))), spec, env)
    assert len(played) == 30


def test_an_episode_for_a_video_that_does_not_end_is_left_with_a_warning():
    env = gymnasium.make("MountainCar-v0", max_episode_steps=10_000)
    spec = polyak.envs.make("MountainCar-v0").spec
    policy = polyak.policies.Scripted(spec, [(10_000, 1)])
    with pytest.warns(UserWarning, match="record_videos: the episode was cut after 50 steps"):
        callbacks.play_episode(policy, spec, env, max_steps=50)


def test_missing_action_masks_are_named_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", object())
    spec = dataclasses.replace(polyak.envs.make("CartPole-v1").spec, has_action_mask=True)
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    with pytest.raises(ValueError, match="record_videos: env must have action masks, as the agent's environment has"):
        callbacks.record_videos(polyak.PPO(spec=spec), env, tmp_path, every=10)
    with pytest.raises(ValueError, match="make: action_mask_key='m'"):
        callbacks.record_videos(polyak.PPO(spec=spec), env, tmp_path, every=10, action_mask_key="m")


@pytest.mark.parametrize(("reports", "filmed"), [((4096, 8000), (4096, 8000)), ((2048, 4096, 6144, 8192), (4096, 8192))])
def test_a_video_is_recorded_at_every_multiple_and_of_the_last_policy(tmp_path, monkeypatch, reports, filmed):
    monkeypatch.setitem(sys.modules, "moviepy", object())
    videos = []
    monkeypatch.setattr(callbacks, "_record_episode", lambda policy, spec, env, video: videos.append(int(video.stem)))
    agent = polyak.PPO(spec=polyak.envs.make("CartPole-v1").spec, network=polyak.MLP((4,)))
    record = callbacks.record_videos(agent, gymnasium.make("CartPole-v1", render_mode="rgb_array"), tmp_path, every=4000)
    state = types.SimpleNamespace(agent=agent.init(jax.random.key(0)))
    for env_steps in reports:
        record(Progress(env_steps, 8000, 1, 1.0, 1.0, 1.0), {}, state)
    assert tuple(videos) == filmed


@pytest.mark.slow
def test_videos_are_recorded(tmp_path):
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    env = polyak.envs.make("CartPole-v1", num_envs=2)
    agent = polyak.PPO(spec=env.spec, num_steps=8, num_epochs=1, num_minibatches=1, network=polyak.MLP((4,)))
    one = gymnasium.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=20)
    record = callbacks.record_videos(agent, one, tmp_path, every=100)
    polyak.train.run(agent, env, env_steps=200, callbacks=[record])
    assert len(list(tmp_path.glob("*.mp4"))) == 2
