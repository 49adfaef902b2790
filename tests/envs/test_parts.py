import functools

import gymnasium
import jax
import numpy as np
import pytest

from polyak.envs.constructors import make
from polyak.envs.parts import split
from polyak.envs.source import EnvSource


def test_parts_together_step_the_environments_of_the_whole_batch():
    whole = make("Pendulum-v1", num_envs=6)
    parts = [part() for part in split(whole.source, 6, 3)]
    actions = np.random.default_rng(0).uniform(-2, 2, (20, 6, 1)).astype(np.float32)
    time_steps = [whole.reset(7), *(whole.step(action) for action in actions)]
    for i, part in enumerate(parts):
        rows = slice(2 * i, 2 * i + 2)
        for wanted, got in zip(time_steps, [part.reset(7), *(part.step(action[rows]) for action in actions)], strict=True):
            jax.tree.map(lambda a, b, rows=rows: np.testing.assert_array_equal(a[rows], b), wanted, got)


def test_errors_of_a_part_name_the_environment_of_the_whole_batch():
    part = split(EnvSource(lambda: NaN(), {}), 6, 3)[2]()
    part.reset(0)
    with pytest.raises(ValueError, match="env 4, step 1"):
        part.step(np.zeros(2, np.int32))


def test_parts_must_be_equal():
    with pytest.raises(ValueError, match="num_envs=5 cannot be split over workers=2"):
        split(EnvSource("Pendulum-v1", {}), 5, 2)


@pytest.mark.parametrize("env_id, message", [("CartPole-v1", "a vector environment cannot be split")])
def test_a_vectorized_form_has_no_parts(env_id, message):
    with pytest.raises(ValueError, match=message):
        split(EnvSource(env_id, {"vectorization": "own"}), 4, 2)[0]()


def test_an_environment_in_jax_has_no_parts():
    source = EnvSource("jax/CartPole-v1", {})
    part = split(EnvSource("CartPole-v1", {}), 4, 2)[0]
    with pytest.raises(ValueError, match="steps on the host"):
        type(part)(source, 0, 2, 4)()


class NaN(gymnasium.Env):
    """Observations are NaN after a step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.full(1, np.nan, np.float32), 0.0, False, False, {}


class Faulty(gymnasium.Env):
    """Raises, or returns a wrong observation."""

    observation_space = gymnasium.spaces.Box(-10, 10, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        if self.fault == "raises":
            raise ArithmeticError("of a test")
        return np.full(3 + (self.fault == "shape"), np.nan, np.float32), 0.0, False, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("fault", ["raises", "shape", "nan"])
def test_errors_of_a_part_name_the_environment_by_its_place_in_the_whole_batch(fault, vectorization):
    part = split(EnvSource(functools.partial(Faulty, fault), {"vectorization": vectorization}), 4, 2)[1]()
    try:
        part.reset(0)
        with pytest.raises((ArithmeticError, ValueError)) as caught:
            part.step(np.zeros(2, np.int32))
    finally:
        part.close()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert ": env 2, step 1" in text and ": env 0, step" not in text
