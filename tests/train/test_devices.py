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


def host_env(num_envs):
    """Environments of images on the host."""
    env = polyak.envs.make("CartPole-v1", num_envs=num_envs)
    env.spec = IMAGES
    return env
