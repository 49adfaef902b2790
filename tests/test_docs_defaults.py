"""Migration pages: the defaults of polyak that their tables name are those of the fields."""

import dataclasses
import functools

import pytest
from benchmarks.migration import agrees, clauses, read_page

import polyak
from polyak.agents.a2c import A2C
from polyak.agents.c51 import C51
from polyak.agents.ddpg import DDPG
from polyak.agents.dqn import DQN
from polyak.agents.ppo import PPO
from polyak.agents.ppo_kl import PPOKL
from polyak.agents.qrdqn import QRDQN
from polyak.agents.reinforce import REINFORCE
from polyak.agents.sac import SAC
from polyak.agents.td3 import TD3
from polyak.agents.tqc import TQC
from polyak.core.spaces import Box, Discrete

OBS = Box(-1.0, 1.0, (3,))
AGENTS = {
    **{agent.__name__: agent(polyak.EnvSpec(OBS, Discrete(2))) for agent in (PPO, A2C, REINFORCE, DQN, C51, QRDQN)},
    **{agent.__name__: agent(polyak.EnvSpec(OBS, Box(-1.0, 1.0, (2,)))) for agent in (SAC, TQC, TD3, DDPG)},
}
# The fewest values of polyak that the tables of a page have now.
LEAST = {"stable-baselines3": 90, "tf-agents": 65, "rl-coach": 85}


@functools.cache
def fields_of(name):
    """The values of an agent's fields, and as `Actor.hidden` those of its networks and replay; of PPO, also those of PPOKL."""
    agent = AGENTS[name]
    owners = {"": [PPOKL(agent.spec), agent] if name == "PPO" else [agent]}
    parts = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
    for part in (*(parts.get(field) for field in ("actor", "critics", "replay")), polyak.PrioritizedReplay()):
        owners[f"{type(part).__name__}."] = [part] if dataclasses.is_dataclass(part) else []
    return {
        f"{prefix}{field.name}": getattr(owner, field.name)
        for prefix, of_prefix in owners.items()
        for owner in of_prefix
        for field in dataclasses.fields(owner)
    }


@pytest.mark.parametrize("library", LEAST)
def test_defaults_in_the_tables_are_those_of_the_fields(library):
    compared = 0
    for row, defaults in read_page(library):
        for side, agent, name, value, is_agent_named in defaults:
            if side == "here" and (is_agent_named or name in fields_of(agent)):
                field = fields_of(agent)[name]
                assert agrees(value, field), f"{agent}.{name} is {field!r}, not {value!r}: {row}"
                compared += 1
    assert compared >= LEAST[library], compared


def test_clauses_of_a_row_are_read():
    agents = ("DQN", "QRDQN", "SAC")
    assert list(clauses("2,048 there, off here", agents)) == [("there", [], [2048.0]), ("here", [], [None])]
    assert list(clauses('DQN 4 and `"a"`, the others 1e-3 (0.001) here', agents)) == [
        ("here", ["DQN"], [4.0, "a"]),
        ("here", ["QRDQN", "SAC"], [1e-3]),
    ]
    # The agents of one side are those of the next, in a clause; those of earlier clauses are not "the others".
    assert list(clauses("DQN and SAC 1 there, 2 here; the others 3 here", agents)) == [
        ("there", ["DQN", "SAC"], [1.0]),
        ("here", ["DQN", "SAC"], [2.0]),
        ("here", ["QRDQN"], [3.0]),
    ]
    assert [values for _, _, values in clauses("a size of 3 there, `f(4)` here", agents)] == []
