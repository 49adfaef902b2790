"""Which cores a training computes on."""

import os
import subprocess
import sys

import numpy as np
import pytest

import polyak
from polyak.commands.cores import THREADS, has_small_products, start_devices
from polyak.core.spaces import Box, Discrete, EnvSpec
from tests.commands.processes import environment

SPEC = EnvSpec(Box(np.full(3, -1.0), np.full(3, 1.0)), Discrete(2))
IMAGES = EnvSpec(Box(np.zeros((36, 36, 1)), np.full((36, 36, 1), 255.0), dtype=np.uint8), Discrete(2))


@pytest.mark.parametrize(
    ("devices", "num_minibatches", "spec", "network", "small"),
    [
        (1, 8, SPEC, None, True),
        (1, 7, SPEC, None, False),
        (2, 1, SPEC, None, True),
        (1, 8, SPEC, polyak.mlp((256, 256)), True),
        (1, 8, SPEC, polyak.mlp((257,)), False),
        (1, 8, SPEC, polyak.mlp((4,), value_hidden=(257,)), False),
        (1, 8, SPEC, polyak.mlp(()), True),
        (1, 8, SPEC, polyak.lstm(), True),
        (1, 8, IMAGES, None, False),
    ],
)
def test_products_are_small_with_few_rows_narrow_layers_and_no_images(devices, num_minibatches, spec, network, small):
    # 7 * 256 rows and more.
    agent = polyak.PPO(spec, network=network, num_steps=256, num_minibatches=num_minibatches)
    assert has_small_products(agent, devices, num_envs=8) is small


def test_a_thread_for_each_device_where_products_are_small_unless_the_user_says_otherwise(monkeypatch):
    small, large = (polyak.PPO(SPEC, num_minibatches=n) for n in (32, 1))
    monkeypatch.delenv(THREADS, raising=False)
    start_devices(1, 1, large, 8)
    assert THREADS not in os.environ
    monkeypatch.setenv(THREADS, "3")
    start_devices(1, 1, small, 8)
    assert os.environ[THREADS] == "3"
    monkeypatch.delenv(THREADS)
    start_devices(2, 2, small, 8)
    assert os.environ[THREADS] == "2"


def test_jax_has_not_started_when_the_threads_are_settled():
    # Afterwards it would be too late, without a word.
    program = """
import sys
from jax._src.xla_bridge import backends_are_initialized
import polyak.commands.train as command

def started(*_):
    raise SystemExit(backends_are_initialized())

command.start_devices = started
command.train(["ppo", sys.argv[1]])
"""
    for env in ("CartPole-v1", "jax/CartPole-v1"):
        done = subprocess.run([sys.executable, "-c", program, env], env=environment(), capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, b""), env
