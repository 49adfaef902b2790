"""Resets of networks: what is drawn anew, what is kept, when, and that a training with them resumes to the bit."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak.agents import AGENTS, agent_class
from polyak.agents.resets import reset_if_due
from polyak.core.spaces import Box, EnvSpec
from tests import probe_envs
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_actor_critics import KEY, SPEC, equal, make, random_rollout, update
from tests.agents.test_unused_settings import make as make_small
from tests.selection import quick

IMAGES = EnvSpec(Box(0, 255, (1, 36, 36), np.uint8), SPEC.action)
CLASSES = {agent_class(name): name for name in reversed(AGENTS)}
WITH_REPLAY = [name for kind, name in CLASSES.items() if "reset_period" in kind.__dataclass_fields__]


def drawn(agent, state):
    """The copies of the next reset."""
    return agent.create_copies(jax.random.fold_in(state.resets.key, state.resets.count))


def moved(copies):
    """Copies in which every float is another one."""
    return jax.tree.map(lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.floating) else x, copies)


@pytest.fixture(scope="module")
def trained():
    """An agent with four gradient steps an update and a reset after eight, and its states after each of four updates."""
    agent = make("sac", reset_period=8, ema_tau=0.1, normalize_obs=True)
    states = [agent.init(KEY)]
    for number in range(4):
        states.append(update(agent, states[-1], random_rollout(agent, seed=number), jax.random.fold_in(KEY, number))[0])
    return agent, states


def test_the_update_after_a_period_begins_with_new_networks(trained):
    """The same bits as an agent without resets whose networks, averages, optimizers and temperature are replaced."""
    agent, states = trained
    assert [int(state.resets.count) for state in states] == [0, 0, 0, 1, 1]
    assert [int(state.updates) for state in states] == [0, 4, 8, 12, 16]
    plain = dataclasses.replace(agent, reset_period=None)
    for number in range(4):
        before = dataclasses.replace(states[number], resets=None)
        if number == 2:
            before = dataclasses.replace(before, copies=drawn(agent, states[2]))
        wanted, _ = update(plain, before, random_rollout(agent, seed=number), jax.random.fold_in(KEY, number))
        assert equal(dataclasses.replace(states[number + 1], resets=None), wanted)
    assert not equal(drawn(agent, states[2]), drawn(agent, states[3])), "each reset has its own parameters"


def test_without_a_period_nothing_is_stored():
    with_resets, without = (jax.eval_shape(make("sac", reset_period=period).init, KEY) for period in (8, None))
    assert without.resets is None
    assert len(jax.tree.leaves(with_resets)) == len(jax.tree.leaves(without)) + 3


def test_nothing_is_reset_while_no_gradient_step_follows(trained):
    agent, states = trained
    state = states[2]
    copies, resets = jax.jit(partial(reset_if_due, agent))(state.copies, state.resets, state.updates, jnp.array(False))
    assert equal(copies, state.copies) and int(resets.count) == 0


def test_each_seed_resets_for_itself_and_networks_are_drawn_only_if_one_does(trained):
    agent, states = trained
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), states[1], states[2])
    reset = jax.vmap(lambda state: reset_if_due(agent, state.copies, state.resets, state.updates, jnp.array(True))[0])
    waiting, new = (jax.tree.map(lambda x, i=i: x[i], jax.jit(reset)(both)) for i in range(2))
    assert equal(waiting, states[1].copies) and equal(new, jax.jit(partial(drawn, agent))(states[2]))
    in_every_update = {equation.primitive.name for equation in jax.make_jaxpr(reset)(both).eqns}
    assert "cond" in in_every_update and not any(name.startswith("random_") for name in in_every_update)


@pytest.mark.parametrize("name", quick("dqn", "td3", of=WITH_REPLAY))
def test_every_agent_with_a_replay_gets_networks_like_those_it_has(name):
    agent = make_small(name, reset_period=1)
    state = jax.eval_shape(agent.init, KEY)
    copies, _ = jax.eval_shape(
        lambda state: reset_if_due(agent, state.copies, state.resets, state.updates, jnp.array(True)), state
    )
    assert copies == state.copies


@pytest.mark.parametrize("optimizer", quick("one vector", of={"one vector": None, "a tree": optax.adam(1e-3)}))
def test_kept_layers_stay_in_all_copies_with_their_averages(optimizer):
    """The convolutions, which actor and critics share, of the network, its target and the average."""
    agent = make(
        "sac", IMAGES, actor=polyak.Actor((8,)), critics=polyak.Critics((8,)), shared_encoder=True, ema_tau=0.1,
        optimizer=optimizer, reset_period=1, reset_keeps="encoder",
    )  # fmt: skip

    @jax.jit
    def reset():
        state = agent.init(KEY)
        old = moved(state.copies)
        return old, drawn(agent, state), reset_if_due(agent, old, state.resets, jnp.uint32(1), jnp.array(True))[0]

    old, new, got = reset()
    for was, fresh, now in zip(*(jax.tree_util.tree_leaves_with_path(x) for x in (old, new, got)), strict=True):
        path = jax.tree_util.keystr(was[0])
        if optimizer is None and path.endswith((".mu", ".nu")):
            continue
        assert np.array_equal(now[1], was[1] if "['encoder']" in path else fresh[1]), path
    if optimizer is None:
        mu = got.critics.optimizer_state[1].mu
        size = sum(x.size for x in jax.tree.leaves(got.critics.online.params["encoder"]))
        assert 0 < size == int(mu.sum()) < mu.size


def test_bad_settings_are_errors_that_name_them():
    with pytest.raises(ValueError, match=r"SAC: reset_keeps: unknown layer 'encoder'.*layers: actor, dense, layers, policy, "):
        make("sac", reset_period=8, reset_keeps="encoder").init(KEY)
    agent, other = make("sac", reset_period=8), make("sac")
    agent.check(2)
    with pytest.raises(ValueError, match="SAC: reset_period=8 must exceed an update's 8 steps"):
        agent.check(4)
    for one, state, message in (
        (agent, other, "created with reset_period=None but the agent sets reset_period"),
        (other, agent, "created with reset_period but the agent has reset_period=None"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(one.update, state.init(KEY), random_rollout(one), KEY)


@pytest.mark.slow
def test_gradient_steps_on_data_reset_too():
    """After a period, an agent learns as one without resets and with new networks does, and the data stays."""
    agent = make("td3", reset_period=2, num_steps=8)
    state = agent.add_data(agent.init(KEY), random_rollout(agent, num_envs=1))
    learn = jax.jit(lambda agent, state: agent.learn(state, KEY)[0])
    states = [state]
    for _ in range(3):
        states.append(learn(agent, states[-1]))
    assert [int(state.resets.count) for state in states] == [0, 0, 0, 1]
    before = dataclasses.replace(states[2], copies=drawn(agent, states[2]), resets=None)
    assert equal(learn(dataclasses.replace(agent, reset_period=None), before).copies, states[3].copies)
    assert equal(states[3].replay, state.replay)


@pytest.mark.slow
@in_both_loops
def test_a_run_resumes_to_the_bit(loop, devices, tmp_path):
    """Over two resets, one of them before the checkpoint, and with noise on parameters, which is in the policy's carry."""
    agent_for = partial(make, "ddpg", learning_starts=32, reset_period=40, normalize_obs=True, parameter_noise=0.2)
    check_resuming(agent_for, "Pendulum-v1", loop, devices, tmp_path, action_scaling="rescale")


@pytest.mark.slow
def test_values_are_learned_again_after_each_reset():
    """Of an action that pays where it agrees with a sign."""
    env = probe_envs.settings(sees="sign", pays="agreement")
    agent = polyak.DQN(
        env.spec, polyak.MLP((16,)), learning_rate=1e-2, num_steps=4, updates_per_step=1.0, target_period=10, batch_size=32,
        learning_starts=64, replay=polyak.UniformReplay(4_096), reset_period=800,
    )  # fmt: skip
    (state,) = probe_envs.train_in(agent, [env], 4, 250)
    assert int(state.resets.count) == 4
    values, _ = agent.network.apply(state.copies.online, jnp.array([[-1.0], [1.0]]))[0]
    np.testing.assert_allclose(values, [[1.0, -1.0], [-1.0, 1.0]], atol=0.15)
