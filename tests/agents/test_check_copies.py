"""Copies that another optimizer created are rejected, each network by itself."""

import dataclasses

import jax
import optax
import pytest

import polyak
from polyak.core.spaces import Box, EnvSpec

SPEC = EnvSpec(Box([-1.0] * 2, [1.0] * 2), Box([-1.0], [1.0]))


@pytest.mark.parametrize(("name", "cls"), [("value", polyak.IQL), ("flow", polyak.FQL), ("optimistic_actor", polyak.BRO)])
def test_one_network_of_another_optimizer_is_rejected(name, cls):
    agent, other = cls(SPEC), cls(SPEC, optimizer=optax.sgd(1e-3))
    copies, others = (made.create_copies(jax.random.key(0)) for made in (agent, other))
    agent.check_copies(copies)
    with pytest.raises(ValueError, match="this state was created with another optimizer"):
        agent.check_copies(dataclasses.replace(copies, **{name: getattr(others, name)}))
