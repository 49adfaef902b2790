"""Settings that no array of JAX can hold are rejected when an agent is made, not while it trains."""

import dataclasses
import functools
import re

import pytest

from polyak.agents import AGENTS, action_scaling_of, agent_class
from polyak.core.checks import check_integer
from polyak.core.spaces import Box, Discrete, EnvSpec


def integers(agent):
    checked = [f for f in dataclasses.fields(agent) if isinstance(f.metadata.get("check"), functools.partial)]
    return [f.name for f in checked if f.metadata["check"].func is check_integer]


@pytest.mark.parametrize("name", AGENTS)
def test_an_integer_beyond_int32_is_rejected_by_its_name(name):
    agent, scaling = agent_class(name), action_scaling_of(name)
    spec = EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0]) if scaling == "rescale" else Discrete(2), action_scaling=scaling)
    names = integers(agent)
    assert {"num_steps", "max_skipped_updates"} <= set(names)
    for setting in names:
        for value in (2**31, 10**21):
            with pytest.raises(ValueError, match=re.escape(f"{agent.__name__}: {setting} must be an integer in [")):
                agent(spec, **{setting: value})
