"""Mixed replay: the parts of a batch, their rows, and their priorities."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import DQN, MLP
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Rollout
from polyak.replay import HindsightReplay, MixedReplay, PrioritizedReplay, SequenceReplay, UniformReplay
from tests.replay.streams import filled_with, stream

KEY = jax.random.key(0)
DATA, STEPS = 2.0, 1.0


def mixed(inner, share=0.25, data_count=6):
    """A replay of five steps with reward 1, beside data with reward 2."""
    recorded = filled_with(inner.with_capacity(32), stream(np.full(data_count, DATA)))
    replay = MixedReplay(inner, 32, share)
    state = replay.with_data(filled_with(replay, stream(np.full(2, STEPS))), jax.device_get(recorded))
    return replay, filled_with(replay, stream(np.full(6, STEPS)), state)


@functools.partial(jax.jit, static_argnums=(3, 4))
def sample(replay, state, key, batch, n_step=1):
    return replay.sample(state, key, batch, num_envs=1, gamma=0.5, n_step=n_step)


@pytest.mark.parametrize("inner", [UniformReplay(64), PrioritizedReplay(64)])
def test_a_fixed_share_of_each_batch_comes_from_the_data(inner):
    replay, state = mixed(inner)
    for seed in range(5):
        batch = sample(replay, state, jax.random.key(seed), 16)
        np.testing.assert_array_equal(batch.reward, [STEPS] * 12 + [DATA] * 4)
        assert (batch.weight > 0).all()
    two_steps = sample(replay, state, KEY, 16, 2).reward
    assert set(np.asarray(two_steps[:12])) <= {STEPS, 1.5 * STEPS} and set(np.asarray(two_steps[12:])) <= {DATA, 1.5 * DATA}


def test_steps_of_the_environment_overwrite_no_data():
    replay, state = mixed(UniformReplay(8))
    before = jax.device_get(state.data)
    for _ in range(5):
        state = filled_with(replay, stream(np.full(6, 3.0)), state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.data), before)
    assert set(np.asarray(sample(replay, state, KEY, 16).reward)) == {3.0, DATA}


def test_each_part_has_priorities_of_its_own():
    replay, state = mixed(PrioritizedReplay(64, eps=0.0), share=0.5)
    batch = sample(replay, state, KEY, 64)
    # All errors are 0, so nothing is drawn again, but those of one row of each part.
    errors = jnp.where((batch.index == 1) & (jnp.arange(64) < 32), 1.0, 0.0)
    errors = jnp.where((batch.index == 3) & (jnp.arange(64) >= 32), 1.0, errors)
    state = replay.set_priorities(state, batch.index, errors)
    drawn = sample(replay, state, jax.random.key(1), 64).index
    assert set(np.asarray(drawn[:32])) == {1} and set(np.asarray(drawn[32:])) == {3}
    unchanged = replay.set_priorities(state, batch.index, jnp.ones(64), enabled=False)
    jax.tree.map(np.testing.assert_array_equal, unchanged, state)


def test_the_share_of_the_loss_is_the_share_of_the_batch():
    """Also where the importance weights of one part have a wider range."""
    replay, state = mixed(PrioritizedReplay(64, alpha=1.0, beta=1.0, eps=0.0), share=0.5)
    batch = sample(replay, state, KEY, 64)
    errors = jnp.where(jnp.arange(64) < 32, 1.0, 10.0 ** -(batch.index % 3).astype(jnp.float32))
    state = replay.set_priorities(state, batch.index, errors)
    weight = sample(replay, state, jax.random.key(1), 64).weight
    np.testing.assert_allclose(weight[32:].sum(), weight[:32].sum(), rtol=1e-5)


def test_a_stream_that_ends_changes_no_data():
    agent = DQN(EnvSpec(Box([-9.0], [9.0]), Discrete(3)), MLP((4,)), replay=MixedReplay(PrioritizedReplay(20), 32))
    state, steps = agent.init(KEY), stream(np.ones(13))
    for _ in range(3):
        state = agent.add(state, Rollout(steps, jnp.zeros((12, 1), jnp.int32)))
    priorities, data = state.replay.priorities[0], state.replay.data
    assert not (np.asarray(priorities.tree.priority[:20]) > 0)[~np.asarray(state.replay.rows.valid)].any()
    assert int(data.size) == 0


def test_without_data_the_other_part_is_learned_from():
    replay = MixedReplay(UniformReplay(64), 32, 0.25)
    batch = sample(replay, filled_with(replay, stream(np.full(6, STEPS))), KEY, 16)
    assert (batch.weight[:12] > 0).all() and (batch.weight[12:] == 0).all()


def test_what_cannot_be_mixed_is_an_error():
    with pytest.raises(TypeError, match="replay must be a UniformReplay, a PrioritizedReplay or a HindsightReplay, got Seq"):
        MixedReplay(SequenceReplay(64))
    replay, state = mixed(UniformReplay(64))
    for share, size in ((0.25, 1), (1.0, 16)):
        with pytest.raises(ValueError, match=rf"share={share} of batch_size={size} must leave transitions in both parts"):
            dataclasses.replace(replay, share=share).sample(state, KEY, size, num_envs=1, gamma=0.9)
    with pytest.raises(ValueError, match="a PrioritizedReplay needs devices=1, got devices=2"):
        MixedReplay(PrioritizedReplay(64)).check(1, 1, devices=2)


def test_a_capacity_is_the_inner_replay_s():
    assert MixedReplay(HindsightReplay(UniformReplay(64))).with_capacity(128).replay.replay.capacity == 128
