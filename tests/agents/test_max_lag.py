"""How old a rollout each agent bears."""

import dataclasses

import numpy as np
import pytest

from polyak.agents import AGENTS, agent_class
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import SupportsLag
from tests.reinforce import Reinforce

OBS = Box([-1.0], [1.0])
UNIT_ACTIONS = EnvSpec(OBS, Box(-np.ones(1), np.ones(1)))
REPLAY = (
    *(
        "bc",
        "bootstrapped_dqn",
        "bro",
        "c51",
        "cql",
        "crossq",
        "ddpg",
        "discrete_cql",
        "dqn",
        "droq",
        "fast_td3",
        "flash_sac",
        "fql",
        "iql",
        "iqn",
        "naf",
        "qrdqn",
        "qt_opt",
        "rainbow",
        "redq",
        "rnd_dqn",
        "sac",
        "simbav2",
        "sr_sac",
        "td3",
        "td3_bc",
        "tqc",
        "xqc",
    ),
)
MAX_LAG = {**dict.fromkeys(("a2c", "a3c", "ppo", "ppo_kl", "pqn", "reinforce"), 0), **dict.fromkeys(("impala", *REPLAY))}


def make(name):
    rescales = getattr(agent_class(name), "action_scaling", "clip") == "rescale"
    return agent_class(name)(UNIT_ACTIONS if rescales else EnvSpec(OBS, Discrete(2)))


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_states_how_old_a_rollout_it_bears(name):
    agent = make(name)
    assert isinstance(agent, SupportsLag)
    assert agent.max_lag == MAX_LAG[name]
    assert "max_lag" not in {field.name for field in dataclasses.fields(agent)}


def test_ppo_bears_one_update_if_it_keeps_the_behaviour_policys_parameters():
    assert agent_class("ppo")(EnvSpec(OBS, Discrete(2)), values_when="collect").max_lag == 1


def test_an_agent_may_leave_it_out():
    assert not isinstance(Reinforce(EnvSpec(OBS, Discrete(2))), SupportsLag)
