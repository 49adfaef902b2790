"""Prioritized replay: who is drawn, how often, with which weight, and what priorities may be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from polyak.core.types import Rollout, TimeStep
from polyak.ops.schedules import Linear
from polyak.replay import PrioritizedReplay
from tests.kernels.test_sum_tree import chi_square, recomputed
from tests.replay.streams import add, filled_with, rollouts_of, slow_lines, stream

KEY = jax.random.key(0)
# |δ| of five transitions with ε = 1e-6 and α = 0.6.
ERRORS = (0.0, 0.5, 1.0, 2.0, 4.0)
PROBABILITIES = (0.000046, 0.120545, 0.182711, 0.276938, 0.419760)


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def sample(replay, state, key, batch, envs=1, beta=0.4):
    return dataclasses.replace(replay, beta=beta).sample(state, key, batch, num_envs=envs, gamma=0.9)


@functools.partial(jax.jit, static_argnums=0)
def set_priorities(replay, state, index, td_error):
    return replay.set_priorities(state, index, td_error)


def five_transitions():
    replay = PrioritizedReplay(64)
    state = filled_with(replay, stream(np.ones(6)))
    return replay, set_priorities(replay, state, jnp.arange(5, dtype=jnp.int32), jnp.array(ERRORS))


def test_probabilities_and_weights_are_those_of_the_paper():
    replay, state = five_transitions()
    priority = np.asarray(state.priorities.tree.priority[:5])
    np.testing.assert_allclose(priority / priority.sum(), PROBABILITIES, atol=1e-6)
    batch = sample(replay, state, KEY, 512)
    weights = dict(zip(np.asarray(batch.index).tolist(), np.asarray(batch.weight).tolist(), strict=True))
    np.testing.assert_allclose([weights[i] for i in (1, 2, 3, 4)], (1, 0.846746, 0.716978, 0.607098), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_rows_are_drawn_in_proportion_to_their_priority(batch_size):
    replay, state = five_transitions()
    keys = jax.random.split(KEY, 60_000 // batch_size)
    index = jax.jit(jax.vmap(lambda key: replay.sample(state, key, batch_size, num_envs=1, gamma=0.9).index))(keys)
    counts = np.bincount(np.asarray(index).ravel(), minlength=5)
    statistic, degrees = chi_square(counts, np.array(PROBABILITIES) / sum(PROBABILITIES) * counts.sum())
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def test_new_transitions_get_the_largest_priority_so_far():
    replay, state = five_transitions()
    largest = (4 + 1e-6) ** 0.6
    state = set_priorities(replay, state, jnp.array([4], jnp.int32), jnp.array([0.1]))
    state = filled_with(replay, stream(np.ones(3), start=5), state)
    priority = np.asarray(state.priorities.tree.priority)
    np.testing.assert_allclose(priority[5:7], largest, rtol=1e-6)
    assert priority[7:].sum() == 0 and float(state.priorities.largest) == priority[5]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0])
def test_bad_priorities_are_rejected_and_counted(bad):
    replay, state = five_transitions()
    before = np.asarray(state.priorities.tree.nodes)
    state = set_priorities(replay, state, jnp.array([1, 2], jnp.int32), jnp.array([bad, 3.0]))
    assert int(state.priorities.rejected) == 1
    after = np.asarray(state.priorities.tree.priority)
    assert after[1] == before[1]
    np.testing.assert_allclose(after[2], 3.0**0.6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 1), (1,), ()])
def test_errors_of_another_shape_are_rejected(shape, unchecked):
    """`[N, 1]`, as of a network with one output, would give every row the largest priority."""
    replay, state = five_transitions()
    with pytest.raises(ValueError, match=r"PrioritizedReplay: td_error must have the shape \(2,\) of index, got \("):
        replay.set_priorities(state, jnp.array([1, 2]), jnp.ones(shape))


def test_rows_without_priority_and_rows_that_only_reset_are_never_drawn():
    replay = PrioritizedReplay(64, eps=0.0)
    state = filled_with(replay, stream(np.ones(20), terminated=[5], truncated=[11]))
    index = jnp.array([0, 5, 11, 19, 40], jnp.int32)
    state = set_priorities(replay, state, index, jnp.array([0.0, 100.0, 100.0, 100.0, 100.0]))
    batch = sample(replay, state, KEY, 4_096)
    assert set(np.asarray(batch.index).tolist()) == set(range(19)) - {0, 5, 11}
    assert (np.asarray(batch.weight) > 0).all()


def test_nothing_is_learned_where_all_priorities_are_0():
    replay = PrioritizedReplay(16, eps=0.0)
    state = filled_with(replay, stream(np.ones(4)))
    state = set_priorities(replay, state, jnp.arange(3, dtype=jnp.int32), jnp.zeros(3))
    assert not np.asarray(sample(replay, state, KEY, 8).weight).any()


def test_huge_and_tiny_errors_neither_overflow_nor_lose_their_weight():
    replay = PrioritizedReplay(16, alpha=1.0)
    state = filled_with(replay, stream(np.ones(4)))
    state = set_priorities(replay, state, jnp.arange(3, dtype=jnp.int32), jnp.array([3e38, 3e38, 0.0]))
    batch = sample(replay, state, KEY, 8)
    assert bool(jnp.isfinite(state.priorities.tree.nodes).all()) and (np.asarray(batch.weight) == 1).all()


def test_beta_0_weighs_all_alike_and_alpha_0_draws_uniformly():
    replay, state = five_transitions()
    assert (np.asarray(sample(replay, state, KEY, 64, beta=0.0).weight) == 1).all()
    replay = PrioritizedReplay(64, alpha=0.0)
    state = set_priorities(replay, state, jnp.arange(5, dtype=jnp.int32), jnp.array(ERRORS))
    batch = sample(replay, state, KEY, 1_000)
    assert (np.asarray(batch.weight) == 1).all()
    np.testing.assert_array_equal(np.bincount(np.asarray(batch.index)), [200] * 5)


def test_a_row_that_was_drawn_twice_gets_its_larger_priority():
    replay, state = five_transitions()
    for order in ([1.0, 3.0], [3.0, 1.0]):
        changed = set_priorities(replay, state, jnp.array([2, 2], jnp.int32), jnp.array(order))
        np.testing.assert_allclose(changed.priorities.tree.priority[2], 3.0**0.6, rtol=1e-5)


def test_an_episode_that_begins_after_a_gap_takes_the_priority_of_the_row_before():
    replay = PrioritizedReplay(16)
    state = filled_with(replay, stream(np.ones(5)))
    state = filled_with(replay, stream(np.ones(3)), state)
    np.testing.assert_array_equal(np.asarray(state.priorities.tree.priority) > 0, np.isin(np.arange(16), [0, 1, 2, 4, 5]))


@pytest.mark.parametrize("envs", [1, 3])
def test_another_number_of_environments_forgets_all_priorities(envs):
    replay = PrioritizedReplay(61)
    state = filled_with(replay, stream(np.ones(61), envs=2), num_steps=2)
    state = set_priorities(replay, state, jnp.arange(60, dtype=jnp.int32), jnp.full(60, 1e6))
    state = filled_with(replay, stream(np.full(5, 2.0), envs=envs, start=200), state, num_steps=2)
    batch = sample(replay, state, KEY, 4_096, envs)
    obs = {200.0 + t + 1000 * env for t in range(4) for env in range(envs)}
    assert set(np.asarray(batch.obs[:, 0]).tolist()) == obs and (np.asarray(batch.weight) == 1).all()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_stream_of_adds_and_priorities_leaves_the_tree_of_a_slow_reference(data):
    num_steps, envs, slots = data.draw(st.sampled_from([(1, 1, 12), (2, 3, 8), (3, 2, 9)]))
    replay = PrioritizedReplay(slots * envs + data.draw(st.sampled_from([0, num_steps * envs - 1])))
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    state = replay.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=num_steps)
    expected = np.zeros(replay.capacity)
    largest, position, rejected = 1.0, 0, 0
    last = np.zeros(envs, bool)
    for _ in range(data.draw(st.integers(1, 20))):
        rollout, last = random_rollout(rng, num_steps, envs, last)
        state = add(replay, state, rollout)
        valid, first = np.asarray(rollout.valid), np.asarray(rollout.time_steps.first[0])
        before = (position - 1) % slots * envs + np.arange(envs)
        expected[before] = np.where(first, 0.0, expected[before])
        for t in range(num_steps):
            expected[(position + t) * envs + np.arange(envs)] = np.where(valid[t], largest, 0.0)
        position = (position + num_steps) % slots
        expected[position * envs + np.arange(envs)] = 0.0
        index = rng.integers(0, replay.capacity, 7)
        error = rng.choice([0.0, 0.3, 2.0, 5.0, np.nan, -1.0], 7)
        state = set_priorities(replay, state, jnp.asarray(index, jnp.int32), jnp.asarray(error, jnp.float32))
        rejected += int(np.sum(~(error >= 0)))
        is_set = (error >= 0) & (expected[index] > 0)
        value = np.float32(np.maximum(error, 0) + 1e-6) ** np.float32(0.6)
        for row in set(index[is_set].tolist()):
            expected[row] = value[is_set & (index == row)].max()
        largest = max([largest, *value[is_set]])
    nodes = np.asarray(state.priorities.tree.nodes)
    np.testing.assert_allclose(nodes[: replay.capacity], expected, rtol=1e-5)
    sums, total = recomputed(nodes, replay.capacity)
    np.testing.assert_allclose(nodes[replay.capacity : replay.capacity + len(sums)], sums, rtol=1e-6)
    assert int(state.priorities.rejected) == rejected
    batch = sample(replay, state, KEY, 256, envs)
    assert total == 0 or (expected[np.asarray(batch.index)] > 0).all()
    assert total == 0 or (np.asarray(batch.weight) > 0).all()


def random_rollout(rng, num_steps, envs, last):
    """A rollout whose first steps follow time steps that were `last`, and which of its own were, at its end."""
    terminated = np.concatenate([last[None], rng.random((num_steps, envs)) < 0.2])
    first = np.concatenate([[rng.random(envs) < 0.1], terminated[:-1]])
    terminated &= ~first
    steps = TimeStep(
        jnp.asarray(rng.random((num_steps + 1, envs, 1)), jnp.float32),
        jnp.ones((num_steps + 1, envs)),
        *[jnp.asarray(x) for x in (terminated, np.zeros_like(terminated), first)],
    )
    return Rollout(steps, jnp.zeros((num_steps, envs), jnp.int32)), terminated[-1]


@pytest.mark.slow
def test_seeds_under_vmap_are_those_one_by_one():
    replay = PrioritizedReplay(64, beta=0.5)
    rollouts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rollouts_of(stream(np.ones(9), terminated=[4]), 1))

    def run(key):
        def once(now, rollout):
            state, key = now
            state = replay.add(state, rollout)
            key, sample_key = jax.random.split(key)
            batch = replay.sample(state, sample_key, 4, num_envs=1, gamma=0.9)
            return (replay.set_priorities(state, batch.index, jax.random.uniform(key, (4,))), key), batch

        state = replay.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=1)
        (state, _), batches = jax.lax.scan(once, (state, key), rollouts)
        return state.priorities, batches

    keys = jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(run))(keys)
    for number in range(3):
        alone = jax.jit(run)(keys[number])
        jax.tree.map(lambda a, b, n=number: np.testing.assert_allclose(a[n], b, rtol=1e-6), together, alone)


@pytest.mark.slow
def test_two_devices_have_a_tree_each_and_weights_of_one_batch():
    replay = PrioritizedReplay(60, beta=0.5)
    rollouts = list(rollouts_of(stream(np.ones(9), envs=4), 2))
    rows, whole = PartitionSpec("envs"), PartitionSpec()
    mesh = jax.make_mesh((2,), ("envs",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    specs = replay.partition("envs", 2)

    def run(state, rollout):
        state = replay.add(state, rollout)
        key = jax.random.fold_in(KEY, jax.lax.axis_index("envs"))
        batch = replay.sample(state, key, 16, num_envs=2, gamma=0.9, axis_name="envs")
        return replay.set_priorities(state, batch.index, batch.obs[:, 0] - 2, axis_name="envs"), batch

    steps = PartitionSpec(None, "envs")
    both = Rollout(steps, steps, steps, rows)
    split = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(specs, both), out_specs=(specs, rows), check_vma=False), donate_argnums=0
    )
    state = replay.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=2)
    for rollout in rollouts:
        state, batch = split(state, rollout)
    # Environments 0 and 1 on the first device, 2 and 3 on the second, whose priorities are much larger.
    assert (np.asarray(batch.obs[:16, 0]) < 1500).all() and (np.asarray(batch.obs[16:, 0]) >= 2000).all()
    weight = np.asarray(batch.weight)
    assert weight.max() == 1 and (weight > 0).all()
    largest = [float(x.data) for x in state.priorities.largest.addressable_shards]
    np.testing.assert_allclose(largest, (3007 - 2 + 1e-6) ** 0.6, rtol=0.01)
    assert len(set(largest)) == 1
    assert len({int(x.data) for x in state.priorities.rejected.addressable_shards}) == 1 and int(state.priorities.rejected) > 0
    assert whole == specs.position


@pytest.mark.slow
def test_adding_sampling_and_setting_priorities_neither_copies_nor_sorts_the_storage():
    replay = PrioritizedReplay(50_000, beta=0.5)
    state = replay.init(jnp.zeros(17), jnp.zeros((), jnp.int32), num_steps=4)
    steps = TimeStep(jnp.zeros((5, 8, 17)), *[jnp.zeros((5, 8), dtype) for dtype in (jnp.float32, bool, bool, bool)])
    rollout = Rollout(steps, jnp.zeros((4, 8), jnp.int32))

    def step(state, key):
        state = replay.add(state, rollout)
        batch = replay.sample(state, key, 32, num_envs=8, n_step=3, gamma=0.9)
        return replay.set_priorities(state, batch.index, batch.weight * batch.reward), batch.weight.sum()

    def several(state, keys):
        return jax.lax.scan(step, state, keys)

    for function, key in ((step, KEY), (several, jax.random.split(KEY, 3))):
        text = jax.jit(function, donate_argnums=0).lower(state, key).compile().as_text()
        assert "[100000" in text and not slow_lines(text, 50_000, 100_000)


def test_settings_and_states_are_checked():
    with pytest.raises(ValueError, match="alpha"):
        PrioritizedReplay(64, alpha=-0.1)
    with pytest.raises(ValueError, match="eps"):
        PrioritizedReplay(64, eps=-1e-6)
    for beta in (-0.1, 1.1, Linear(0.4, 2.0, 10)):
        with pytest.raises(ValueError, match="beta"):
            PrioritizedReplay(64, beta=beta)
    with pytest.raises(ValueError, match=r"PrioritizedReplay: capacity=8 must be at least 12 for num_envs=3, num_steps=2"):
        PrioritizedReplay(8).check(3, 2)
