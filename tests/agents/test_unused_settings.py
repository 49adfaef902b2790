"""Settings that have no effect because of another one: a warning with both, and stored runs load."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents import AGENTS, action_scaling_of, agent_class
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.runs import config_classes
from polyak.storage.config import from_json, to_json

UNUSED = {
    "priority_alpha": (0.5, "prioritized=False, only with prioritized=True"),
    "priority_beta": (polyak.Linear(0.4, 1.0, 100), "prioritized=False, only with prioritized=True"),
    "priority_eps": (np.array([1e-3, 1e-6]), "prioritized=False, only with prioritized=True"),
    "clip_obs": (5.0, "normalize_obs=False, only with normalize_obs=True"),
    "epsilon": (0.1, "temperature=1.0, only with temperature=None"),
    "frame_padding": ("first", "frame_stack=1, only with frame_stack=2 or more"),
    "clip_reward": (5.0, "normalize_reward=None, only if normalize_reward is set"),
    "kl_tolerance": (0.3, "kl_beta=None, only if kl_beta is set"),
}
USED = {"prioritized": True, "normalize_obs": True, "temperature": None, "frame_stack": 4, "normalize_reward": "return"}
USED |= {"kl_beta": 1.0, "kl_target": 0.01}
CASES = [
    (algorithm, name)
    for algorithm in AGENTS
    for name in UNUSED
    if name in agent_class(algorithm).__dataclass_fields__
    and (name != "epsilon" or "temperature" in agent_class(algorithm).__dataclass_fields__)
]


def make(algorithm, **settings):
    scaling = action_scaling_of(algorithm)
    action = Box([-1.0], [1.0]) if scaling == "rescale" else Discrete(2)
    return agent_class(algorithm)(EnvSpec(Box([-9.0], [9.0]), action, action_scaling=scaling), **settings)


@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_setting_without_effect_warns_once_and_used_or_default_is_silent(algorithm, name):
    value, said = UNUSED[name]
    other = {"temperature": 1.0} if name == "epsilon" else {}
    with pytest.warns(UserWarning, match=re.escape(f"{name}={value!r} has no effect with {said}")) as record:
        make(algorithm, **other, **{name: value})
    assert len(record) == 1
    fields = agent_class(algorithm).__dataclass_fields__
    make(algorithm, **{key: used for key, used in USED.items() if key in fields}, **{name: value})
    default = fields[name].default
    given = {"frame_padding": [default]} | {key: [None, default] for key in ("clip_obs", "priority_beta", "epsilon")}
    for value in given.get(name, [default, np.array([default] * 2)]):
        make(algorithm, **other, **{name: value})


def test_a_batch_of_settings_is_compared_by_any_of_them():
    for same, other in ((np.array([0.6, 0.6]), np.array([0.6, 0.5])), (jnp.array([0.6, 0.6]), jnp.array([0.6, 0.5]))):
        make("dqn", priority_alpha=same)
        with pytest.warns(UserWarning, match="DQN: priority_alpha=.* has no effect with prioritized=False"):
            make("dqn", priority_alpha=other)


def test_traced_settings_are_not_compared():
    agent = make("dqn")
    jax.eval_shape(lambda traced: dataclasses.replace(traced, gamma=0.9).priority_alpha, agent)


def test_a_stored_agent_with_a_setting_without_effect_loads():
    with pytest.warns(UserWarning, match="priority_alpha"):
        agent = make("td3", priority_alpha=0.5)
    with pytest.warns(UserWarning, match="TD3: priority_alpha=0.5 has no effect"):
        assert from_json(to_json(agent), config_classes()) == agent
