"""Compiled programs are kept for equal environments and agents, and for nothing that may change."""

import dataclasses

import jax.numpy as jnp

from polyak.core.types import Env
from polyak.envs.autoreset import AutoReset
from polyak.loops.program_cache import cached_per_env, shape_of
from polyak.networks.adapters import FlaxNNX
from tests.loops.setting import AGENT, ENV


class Ordinary:
    """Equal to itself, whatever is written to it."""

    spec, num_envs = ENV.spec, 2
    init = step = reset = observe = print


def test_programs_are_cached_per_environment_unless_it_is_mutable():
    made = cached_per_env(lambda env: [])
    assert isinstance(Ordinary(), Env)
    for env, keeps in ((ENV, True), (Ordinary(), False), (AutoReset(Ordinary()), False)):
        assert (made(env) is made(env)) == keeps


def test_programs_are_cached_per_agent_unless_a_setting_is_mutable():
    class Network:
        init = apply = print

    made, state = cached_per_env(lambda shape: []), jnp.zeros(2)
    for network, keeps in ((AGENT.network, True), (FlaxNNX(print), True), (Network(), False)):
        agent = dataclasses.replace(AGENT, network=network)
        assert (made(shape_of(agent, state)) is made(shape_of(agent, state))) == keeps
        assert made(shape_of(agent, state)) is not made(shape_of(agent, state[:1]))
