"""Recurrent DQN: values along sequences, runs that resume to the bit, and a task that needs memory."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops, train
from polyak.agents.dqn import DQN
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.envs.autoreset import AutoReset
from polyak.networks.feedforward import MLP
from polyak.networks.heads import QValues
from polyak.networks.recurrent import GRU, LSTM
from polyak.replay import SequenceReplay
from polyak.storage.checkpoint import restore, save

KEY = jax.random.key(0)
SMALL = {"num_steps": 4, "replay": SequenceReplay(256, 8, burn_in=2), "learning_starts": 32, "batch_size": 4}


@struct
class Recall:
    """A sign is shown in the first of five steps; in the last, the action that agrees with it is worth 1, the other -1."""

    @property
    def spec(self):
        return EnvSpec(Box(np.full(2, -1.0, np.float32), np.ones(2, np.float32)), Discrete(2), "recall")

    def reset(self, key, num_envs):
        sign = jnp.where(jax.random.bernoulli(key, 0.5, (num_envs,)), 1.0, -1.0)
        return sign, jnp.zeros(num_envs, jnp.int32)

    def step(self, state, action, key):
        sign, steps = state
        over = steps == 4
        reward = jnp.where(over, sign * jnp.where(action == 1, 1.0, -1.0), 0.0)
        return (sign, steps + 1), reward, over, jnp.zeros_like(over)

    def observe(self, state):
        sign, steps = state
        return jnp.stack([jnp.where(steps == 0, sign, 0.0), steps.astype(jnp.float32) / 4.0 - 0.5], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("network", [LSTM(8, hidden=(), head=QValues()), GRU(8, hidden=(4,), head=QValues(dueling=True))])
def test_values_along_a_sequence_are_those_of_acting_step_by_step(network):
    env = AutoReset(Recall(), 3)
    agent = DQN(env.spec, network=network, **{**SMALL, "replay": SequenceReplay(256, 8)})
    state = agent.init(KEY)
    rollout = train.collect(agent.collect_policy(state), env, 16, key=KEY)
    state = jax.jit(agent.add)(state, rollout)
    batch = jax.jit(partial(agent.replay.sample, batch_size=32, num_envs=3, n_step=2, gamma=0.9))(state.replay, KEY)
    values, _ = jax.jit(agent.action_values)(state.copies.online, batch.obs, None)
    # From the first rollout on the recurrent state is known: zeros.
    carry, expected = network.initial_carry(3), []
    act = jax.jit(agent.network_policy(state, state.copies.online).distribution)
    for t in range(17):
        step = jax.tree.map(lambda x, t=t: x[t], rollout.time_steps)
        distribution, carry = act(step, carry)
        expected.append(distribution.logits)
    expected = np.asarray(jnp.stack(expected))
    start = np.asarray(batch.index) // 3
    env_number = np.asarray(batch.index) % 3
    sequence_start = np.repeat(start[:32][None], 8, axis=0).ravel()
    from_zero = (sequence_start == 0) & (np.asarray(batch.weight) > 0)
    assert from_zero.any()
    shifted = np.asarray(values) - np.asarray(values).max(1, keepdims=True)
    wanted = expected - expected.max(2, keepdims=True)
    np.testing.assert_allclose(shifted[from_zero], wanted[start[from_zero], env_number[from_zero]], atol=1e-5)


@pytest.mark.slow
def test_no_gradient_flows_into_the_burn_in():
    env = AutoReset(Recall(), 2)
    agent = DQN(env.spec, network=LSTM(8, hidden=()), **SMALL)
    state = agent.init(KEY)
    state = jax.jit(agent.add)(state, train.collect(agent.collect_policy(state), env, 32, key=KEY))
    batch = jax.jit(partial(agent.replay.sample, batch_size=4, num_envs=2, gamma=0.9))(state.replay, KEY)

    def total(obs):
        rows = dataclasses.replace(batch.obs, obs=obs, first=batch.obs.first & False)
        return agent.action_values(state.copies.online, rows, None)[0].sum()

    gradient = np.asarray(jax.jit(jax.grad(total))(batch.obs.obs))
    assert not gradient[:2].any() and gradient[2:8].any(axis=(1, 2)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "devices"), [("compiled", 2), ("host", 1)])
def test_a_recurrent_run_resumes_to_the_bit(loop, devices, tmp_path):
    name = "CartPole-v1" if loop == "host" else "jax/CartPole-v1"
    env, again = (polyak.envs.make(name, num_envs=4) for _ in range(2))
    agent = DQN(env.spec, network=GRU(8, hidden=(8,)), **SMALL)
    options = {"key": KEY} | ({"devices": devices} if loop == "compiled" else {})
    run = getattr(loops, loop)
    whole = run(agent, env, env_steps=256, **options)
    assert int(whole.state.updates) > 0
    half = run(agent, again, env_steps=128, **options)
    save(tmp_path / "checkpoints", half.loop_state, step=128, meta={}, segmented=".agent.replay")
    restored = restore(tmp_path / "checkpoints", half.loop_state).tree
    if loop == "host":
        snapshot = again.snapshot()
        again.reset(0)
        again.restore(snapshot)
    resumed = run(agent, again, env_steps=256, **options, resume_from=restored, env_steps_done=half.progress.env_steps)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["compiled", "host", "seeds"])
def test_no_copy_of_the_replay_in_the_compiled_update(loop):
    env = AutoReset(Recall(), 4)
    agent = DQN(env.spec, network=GRU(8, hidden=()), **{**SMALL, "replay": SequenceReplay(65_536, 8, burn_in=2)})
    state = agent.init(KEY)
    rollout = train.collect(agent.collect_policy(state), env, 4, key=KEY)

    def several(state, key):
        return jax.lax.scan(lambda state, key: (agent.update(state, rollout, key)[0], None), state, jax.random.split(key, 3))[0]

    update, key = (lambda state, key: agent.update(state, rollout, key), KEY) if loop == "host" else (several, KEY)
    if loop == "seeds":
        update, key = jax.vmap(several), jax.random.split(KEY, 2)
        state = jax.vmap(agent.init)(key)
    text = jax.jit(update, donate_argnums=0).lower(state, key).compile().as_text()
    copies = [line for line in text.splitlines() if " copy(" in line and any(size in line for size in ("65536", "16384"))]
    assert "65536" in text and "16384" in text and not copies


@pytest.mark.slow
def test_only_the_recurrent_network_solves_a_task_that_needs_memory():
    env = AutoReset(Recall(), 16)
    settings = {
        "num_steps": 5,
        "updates_per_step": 0.1,
        "learning_starts": 500,
        "epsilon": 0.1,
        "target_period": 50,
    }
    settings |= {"learning_rate": 2e-3}
    recurrent = DQN(env.spec, network=GRU(16, hidden=(16,)), replay=SequenceReplay(8_000, 10), batch_size=32, **settings)
    plain = DQN(env.spec, network=MLP((32,)), replay=polyak.UniformReplay(8_000), batch_size=64, **settings)
    returns = {}
    for name, agent in (("recurrent", recurrent), ("plain", plain)):
        result = loops.compiled(agent, env, env_steps=16_000, key=KEY)
        returns[name] = np.mean(polyak.evaluate(agent.policy(result.state), env, episodes=200, key=KEY).returns)
    assert returns["recurrent"] > 0.95 and abs(returns["plain"]) < 0.4, returns


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": LSTM(8)}, "replay must be a SequenceReplay with a recurrent network"),
        ({"replay": SequenceReplay(256)}, "and only with one"),
        ({"network": LSTM(8), "replay": polyak.PrioritizedReplay(256)}, "replay must be a SequenceReplay"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        DQN(Recall().spec, **settings)
    with pytest.raises(ValueError, match="C51: replay must draw transitions; sequences are for recurrent networks of DQN"):
        polyak.C51(Recall().spec, replay=SequenceReplay(256))


def test_the_replay_must_have_room_for_sequences():
    agent = DQN(Recall().spec, network=LSTM(8), **SMALL)
    with pytest.raises(ValueError, match=r"capacity=256 must be at least .* for num_envs=32"):
        agent.check(32)
    with pytest.raises(ValueError, match=r"capacity=258 must be divisible by num_steps \* devices = 4 \* 1"):
        dataclasses.replace(agent, replay=SequenceReplay(258, 8)).check(4)
    with pytest.raises(ValueError, match=r"sequence_length - burn_in must be at least num_steps=4, .* got 8 - 6"):
        dataclasses.replace(agent, replay=SequenceReplay(256, 8, burn_in=6))
