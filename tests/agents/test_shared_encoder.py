"""Convolutions that an actor shares with its critics: only the loss of the critics trains them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak.core.spaces import Box, Dict, EnvSpec
from polyak.core.types import Rollout, TimeStep
from polyak.ops.gradient_step import ravel

KEY = jax.random.key(0)
PIXELS = Box(0, 255, (36, 36, 1), np.uint8)
SPEC = EnvSpec(Dict({"pixels": PIXELS, "speed": Box([-9.0], [9.0])}), Box([-1.0] * 2, [1.0] * 2))
AGENTS = {"ddpg": polyak.DDPG, "td3": polyak.TD3, "sac": polyak.SAC, "tqc": polyak.TQC}
every_agent = pytest.mark.parametrize("name", AGENTS)


def make(name, spec=SPEC, **settings):
    actor = polyak.Actor((8,), std="fixed" if name in ("ddpg", "td3") else "state")
    critics = polyak.Critics((8,), num_critics=1 if name == "ddpg" else 2)
    small = {
        "actor": actor,
        "critics": critics,
        "replay": polyak.UniformReplay(64),
        "batch_size": 4,
        "learning_starts": 0,
        "num_steps": 3,
    }
    return AGENTS[name](spec, **{**small, "updates_per_step": 2 / 3, "tau": 0.5, "shared_encoder": True, **settings})


def random_rollout(steps, num_envs=1):
    rng = np.random.default_rng(0)
    shape = steps + 1, num_envs
    obs = {"pixels": rng.integers(0, 256, (*shape, 36, 36, 1), np.uint8), "speed": rng.normal(size=(*shape, 1)).astype("f4")}
    zeros = jnp.zeros(shape, bool)
    time_steps = TimeStep(jax.tree.map(jnp.asarray, obs), jnp.asarray(rng.normal(size=shape), jnp.float32), *[zeros] * 3)
    return Rollout(time_steps, jnp.asarray(rng.uniform(-1, 1, (steps, num_envs, 2)), jnp.float32))


def encoders(state):
    """Those of the actors, then those of the critics: online, and target where there is one."""
    copies = state.copies
    of_actor = [x.params["actor"]["encoder"] for x in (copies.actor.online, copies.actor.target) if x is not None]
    return of_actor, [copies.critics.online.params["encoder"], copies.critics.target.params["encoder"]]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddpg", "td3", "sac"])  # TQC has SAC's train_step
def test_the_actor_has_the_encoder_of_the_critics_and_no_gradient_of_it(name):
    # Of three gradient steps the actor learns in the second, but DDPG's in each.
    agent = make(name, target_period=1, updates_per_step=1.0, **({} if name == "ddpg" else {"policy_delay": 2}))
    states = [jax.jit(agent.init)(KEY)]
    states += [jax.jit(agent.update)(states[0], random_rollout(3), KEY)[0]]
    for state in states:
        of_actor, of_critics = encoders(state)
        assert all(equal(a, b) for a, b in zip(of_actor, of_critics, strict=False))
    assert int(states[1].updates) == 3
    assert all(not np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(encoders(s)[1][0]) for s in states), strict=True))
    actor = states[1].copies.actor
    # Adam's mean gradient, which the optimizer has as one vector.
    moments = ravel(actor.online.params)[1](optax.tree.get(actor.optimizer_state, "mu"))
    assert not any(np.any(x) for x in jax.tree.leaves(moments["actor"]["encoder"]))
    assert all(np.any(x) for x in jax.tree.leaves(moments["actor"]["dense"]))


def test_the_evaluated_actor_has_the_average_encoder_of_the_critics():
    agent = make("td3", optimizer=optax.contrib.schedule_free_sgd(0.1))
    state = jax.jit(agent.init)(KEY)
    critics = state.copies.critics
    moved = dataclasses.replace(critics.online, params=jax.tree.map(lambda x: x + 1.0, critics.online.params))
    trained = optax.tree.set(critics.optimizer_state, z=jax.tree.map(lambda x: x - 1.0, moved.params))
    critics = dataclasses.replace(critics, online=moved, optimizer_state=trained)
    actor = dataclasses.replace(state.copies.actor, online=agent.share_encoder(state.copies.actor.online, moved))
    state = dataclasses.replace(state, copies=dataclasses.replace(state.copies, actor=actor, critics=critics))
    average = critics.evaluated().params["encoder"]
    assert not equal(average, moved.params["encoder"])
    assert equal(agent.policy(state).policy.variables.params["actor"]["encoder"], average)


def test_without_the_setting_the_actor_has_an_encoder_of_its_own():
    of_actor, of_critics = encoders(make("td3", shared_encoder=False).init(KEY))
    assert not equal(of_actor[0], of_critics[0])


@every_agent
def test_networks_without_a_common_encoder_are_rejected(name):
    vector = EnvSpec(Box([-1.0], [1.0]), SPEC.action)
    with pytest.raises(ValueError, match="shared_encoder must be False for observations without an image"):
        make(name, vector)
    with pytest.raises(ValueError, match="shared_encoder must be False unless the networks are Actor and Critics, got MLP"):
        make(name, actor=polyak.MLP((8,), head=polyak.PolicyAndValue()))
