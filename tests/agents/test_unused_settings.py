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
from polyak.networks.feedforward import MLP
from polyak.networks.heads import QValues
from polyak.runs import config_classes
from polyak.storage.config import from_json, to_json

UNUSED = {
    "clip_obs": (5.0, "normalize_obs=False, only with normalize_obs=True"),
    "epsilon": (0.1, "temperature=1.0, only with temperature=None"),
    "clip_reward": (5.0, "normalize_reward=None, only if normalize_reward is set"),
    "kl_tolerance": (0.3, "kl_beta=None, only if kl_beta is set"),
    "munchausen_temperature": (0.1, "munchausen=None, only if munchausen is set"),
    "kl_cutoff_factor": (3.0, "kl_cutoff_coef=None, only if kl_cutoff_coef is set"),
    "reset_keeps": ("dense", "reset_period=None, only if reset_period is set"),
}
USED = {"normalize_obs": True, "temperature": None, "normalize_reward": "return"}
USED |= {"kl_beta": 1.0, "kl_cutoff_coef": 1.0, "munchausen": 0.9, "reset_period": 8}
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
    others = {"epsilon": {"temperature": 1.0}, "kl_tolerance": {"kl_beta": None}, "clip_obs": {"normalize_obs": False}}
    other = others.get(name, {})
    with pytest.warns(UserWarning, match=re.escape(f"{name}={value!r} has no effect with {said}")) as record:
        make(algorithm, **other, **{name: value})
    assert len(record) == 1
    fields = agent_class(algorithm).__dataclass_fields__
    make(algorithm, **{key: used for key, used in USED.items() if key in fields}, **{name: value})
    default = fields[name].default
    given = {key: [None, default] for key in ("clip_obs", "epsilon", "reset_keeps")}
    for value in given.get(name, [default, np.array([default] * 2)]):
        make(algorithm, **other, **{name: value})


def test_a_batch_of_settings_is_compared_by_any_of_them():
    for same, other in ((np.array([0.5, 0.5]), np.array([0.5, 0.4])), (jnp.array([0.5, 0.5]), jnp.array([0.5, 0.4]))):
        make("ppo_kl", kl_beta=None, kl_tolerance=same)
        with pytest.warns(UserWarning, match="PPOKL: kl_tolerance=.* has no effect with kl_beta=None"):
            make("ppo_kl", kl_beta=None, kl_tolerance=other)


def test_traced_settings_are_not_compared():
    agent = make("ppo_kl", kl_beta=None)
    jax.eval_shape(lambda traced: dataclasses.replace(traced, gamma=0.9).kl_tolerance, agent)


def test_a_stored_agent_with_a_setting_without_effect_loads():
    with pytest.warns(UserWarning, match="clip_obs"):
        agent = make("td3", clip_obs=5.0)
    with pytest.warns(UserWarning, match="TD3: clip_obs=5.0 has no effect"):
        assert from_json(to_json(agent), config_classes()) == agent


@pytest.mark.parametrize("algorithm", ["ppo", "ppo_kl"])
def test_gae_lambda_warns_where_no_part_of_the_update_uses_it(algorithm):
    returns = {"advantages": "monte_carlo", "value_targets": "monte_carlo"}
    said = "gae_lambda=0.5 has no effect with advantages='monte_carlo' and value_targets='monte_carlo'"
    with pytest.warns(UserWarning, match=re.escape(said)):
        make(algorithm, gae_lambda=0.5, **returns)
    make(algorithm, gae_lambda=0.95, **returns)
    for name, value in returns.items():
        make(algorithm, gae_lambda=0.5, **{name: value})


def test_outputs_of_a_head_warn_in_agents_of_single_values():
    network = MLP(head=QValues(outputs=7))
    for algorithm in ("dqn", "pqn"):
        with pytest.warns(UserWarning, match="outputs=7 of the network's head has no effect, only with C51 and QRDQN"):
            agent = make(algorithm, network=network)
        assert agent.network.head.outputs is None
        dataclasses.replace(agent, gamma=0.5)
    c51 = make("c51", network=MLP(head=QValues()))
    assert dataclasses.replace(c51, num_atoms=11).network.head.outputs == 11


def test_a_text_that_was_read_from_a_file_is_compared_by_its_letters():
    read = "".join(["batch", "_renorm"])
    assert read is not "batch_renorm"  # noqa: F632
    network = polyak.Critics((8,), norm=read, renorm_warmup=5)
    with pytest.warns(UserWarning, match="renorm_warmup=5 has no effect with norm='batch', only with norm=batch_renorm"):
        dataclasses.replace(network, norm="batch")
