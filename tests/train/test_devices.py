"""How many devices a training takes where nobody says: those of images, and those of many environments in JAX."""

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.train.devices import DEVICES, configure_devices_for_images, default_devices, splits_images
from tests.loops.setting import AGENT, ENV, KEY

IMAGES = EnvSpec(Box(np.zeros((36, 36, 1)), np.full((36, 36, 1), 255.0), dtype=np.uint8), Discrete(2))


@pytest.mark.parametrize(("num_envs", "num_minibatches", "devices"), [(32, 1, 1), (64, 1, 2), (65, 1, 1), (64, 64 * 8, 1)])
def test_default_is_two_devices_where_they_pay(num_envs, num_minibatches, devices):
    agent = dataclasses.replace(AGENT, num_minibatches=num_minibatches)
    assert default_devices(agent, AutoReset(ENV.dynamics, num_envs)) == devices
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
    configure_devices_for_images(seven, None)
    configure_devices_for_images(eight, 1)
    assert seen == []
    configure_devices_for_images(eight, None)
    assert seen == [(DEVICES, 2)]
    setattr(config, DEVICES, 4)
    configure_devices_for_images(eight, None)
    assert len(seen) == 1


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


def host_env(num_envs):
    """Environments of images on the host."""
    env = polyak.envs.make("CartPole-v1", num_envs=num_envs)
    env.spec = IMAGES
    return env
