"""How many devices a training takes where nobody says: those of images, and those of many environments in JAX."""

import dataclasses
import os
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.train.devices import DEVICES, configure_devices_for_images, default_devices, splits_images
from polyak.train.new_training import make_envs
from tests.loops.setting import AGENT, ENV, KEY

IMAGES = EnvSpec(Box(np.zeros((36, 36, 1)), np.full((36, 36, 1), 255.0), dtype=np.uint8), Discrete(2))


@pytest.mark.parametrize(("num_envs", "num_minibatches", "devices"), [(32, 1, 1), (64, 1, 2), (65, 1, 1), (64, 64 * 8, 1)])
def test_default_is_two_devices_where_they_pay(num_envs, num_minibatches, devices):
    agent = dataclasses.replace(AGENT, num_minibatches=num_minibatches)
    assert default_devices(agent, AutoReset(ENV.dynamics, num_envs)) == devices
    assert default_devices(agent, AutoReset(ENV.dynamics, num_envs), "host") == 1
    assert default_devices(agent, JaxEnvOnHost(AutoReset(ENV.dynamics, num_envs), KEY)) == 1


@pytest.mark.parametrize(
    ("agent", "num_envs", "devices"),
    [
        (polyak.PPO(IMAGES, num_minibatches=1), 8, 2),
        (polyak.A2C(IMAGES), 8, 2),
        (polyak.PPO(IMAGES, num_minibatches=1), 7, 1),
        (polyak.PPO(IMAGES, num_minibatches=8 * 256), 8, 1),
        (polyak.DQN(IMAGES), 8, 1),
    ],
)
def test_updates_of_rollouts_of_images_are_split_over_two_cores(agent, num_envs, devices, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert splits_images(agent, num_envs) is (devices == 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not splits_images(agent, num_envs)


def test_jax_gets_two_devices_for_images_unless_it_has_more(monkeypatch):
    seen = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    config = SimpleNamespace(**{DEVICES: -1}, update=lambda *change: seen.append(change))
    monkeypatch.setattr("polyak.train.devices.jax.config", config)
    seven, eight = (host_env(num_envs) for num_envs in (7, 8))
    configure_devices_for_images(seven, "auto", None)
    configure_devices_for_images(eight, "auto", 1)
    assert seen == []
    configure_devices_for_images(eight, "auto", None)
    assert seen == [(DEVICES, 2)]
    monkeypatch.setattr("polyak.train.new_training.is_jax_started", lambda: True)
    make_envs("train.run", "ppo", eight, None)
    assert seen == [(DEVICES, 2)] * 2
    setattr(config, DEVICES, 4)
    configure_devices_for_images(eight, "auto", None)
    assert len(seen) == 2


@pytest.mark.slow
def test_an_environment_of_ones_own_resumes_on_the_devices_of_the_run(tmp_path, monkeypatch):
    def env():
        return AutoReset(ENV.dynamics, 8)

    polyak.train.run(AGENT, env(), env_steps=64, run_dir=tmp_path / "run", devices=4, eval_episodes=1, progress=False)
    configured = []
    for module in ("new_training", "resumption"):
        monkeypatch.setattr(f"polyak.train.{module}.is_jax_started", lambda: False)
        monkeypatch.setattr(f"polyak.train.{module}.configure_devices", lambda *wanted: configured.append(wanted))
    polyak.resume(tmp_path / "run", env=env(), env_steps=128, progress=False)
    assert {wanted for wanted, *_ in configured} == {4}


@pytest.mark.slow
def test_an_environment_of_ones_own_resumes_with_the_action_scaling_of_the_run(tmp_path):
    def make():
        return gymnasium.make("Pendulum-v1", max_episode_steps=20)

    tiny = {"actor": polyak.Actor((4,)), "critics": polyak.Critics((4,)), "batch_size": 4, "learning_starts": 8}
    options = {"settings": tiny | {"replay": polyak.UniformReplay(64)}, "num_envs": 2, "eval_episodes": 0, "progress": False}
    polyak.train.run("sac", make, env_steps=16, run_dir=tmp_path / "run", **options)
    result = polyak.resume(tmp_path / "run", env=make, env_steps=24, progress=False)
    assert result.agent.spec.action_scaling == "rescale"


@pytest.mark.parametrize(("loop", "devices"), [("compiled", 1), ("host", None)])
def test_seeds_that_train_one_after_another_take_the_default_number_of_devices(loop, devices, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "polyak.train.seeds.prepare", lambda agent, env, settings, **options: asked.append(settings.devices) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        polyak.train.run_seeds(AGENT, AutoReset(ENV.dynamics, 8), seeds=2, env_steps=64, loop=loop)
    assert asked == [devices]


def host_env(num_envs):
    """Environments of images on the host."""
    env = polyak.envs.make("CartPole-v1", num_envs=num_envs)
    env.spec = IMAGES
    return env
