"""Minibatches: every row once, the same ones on any number of devices, and gradients in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from polyak.learning.batch import map_steps
from polyak.learning.epochs import epoch_seeds, shuffled_minibatches
from polyak.loops.loop import ENVS, mesh_over
from polyak.ops import gradient_step
from polyak.ops.gradient_step import accumulate, count_microbatches

KEY = jax.random.key(0)


def one_epoch(key, *sizes, axis_name=None):
    (words,) = epoch_seeds(key, 1, *sizes, axis_name)
    return shuffled_minibatches(words, *sizes)


def batches(key, *sizes):
    return np.asarray(jax.jit(one_epoch, static_argnums=(1, 2, 3))(key, *sizes))


@pytest.mark.parametrize(
    ("num_steps", "num_envs", "num_minibatches"),
    [(16, 4, 4), (5, 2, 10), (3, 7, 3), (1, 1, 1), (128, 8, 4), (6, 12, 9)],
)
def test_every_row_is_in_one_minibatch(num_steps, num_envs, num_minibatches):
    index = batches(KEY, num_steps, num_envs, num_minibatches)
    assert index.shape == (num_minibatches, num_steps * num_envs // num_minibatches)
    assert sorted(index.ravel()) == list(range(num_steps * num_envs))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_any_sizes_either_split_or_raise(num_steps, num_envs, num_minibatches):
    rows = num_steps * num_envs
    sizes = (num_steps, num_envs, num_minibatches)
    if rows % num_minibatches:
        with pytest.raises(ValueError, match=f"num_minibatches={num_minibatches} .*{num_steps} .* {num_envs} = {rows}"):
            jax.eval_shape(lambda key: one_epoch(key, *sizes), KEY)
    else:
        shape = jax.eval_shape(lambda key: one_epoch(key, *sizes), KEY).shape
        assert shape == (num_minibatches, rows // num_minibatches)


def test_a_minibatch_draws_equally_from_eight_groups_of_environments():
    index = batches(KEY, 4, 16, 2)
    env = index % 16
    for one in env:
        assert np.array_equal(np.bincount(one // 2, minlength=8), np.full(8, 4))


def test_the_key_decides_the_order():
    a, b, c = (batches(jax.random.key(seed), 16, 8, 4) for seed in (0, 0, 1))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert not np.array_equal(a.ravel(), np.arange(128))


def test_every_epoch_has_an_order_of_its_own():
    words = epoch_seeds(KEY, 3, 16, 8, 4)
    orders = {tuple(np.asarray(shuffled_minibatches(its, 16, 8, 4)).ravel()) for its in words}
    assert len(orders) == 3


def test_steps_are_mixed_within_every_environment():
    """A shuffle that kept the time order, or gave every group one order, would put the same steps together."""
    step = batches(KEY, 64, 8, 8) // 8
    assert all(np.ptp(one) > 32 for one in step)
    rows = batches(KEY, 64, 8, 2).ravel()
    orders = [rows[rows % 8 == env] // 8 for env in range(8)]
    assert len({tuple(order) for order in orders}) == 8


def test_single_minibatch_is_not_shuffled():
    assert np.array_equal(batches(KEY, 4, 6, 1), [np.arange(24)])


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_minibatches_do_not_depend_on_the_number_of_devices(devices):
    num_steps, num_envs, num_minibatches = 4, 16, 4
    here = num_envs // devices
    split = jax.shard_map(
        lambda key: one_epoch(key, num_steps, here, num_minibatches, axis_name=ENVS)[None],
        mesh=mesh_over(devices, num_envs),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(ENVS),
        check_vma=False,
    )
    local = np.asarray(jax.jit(split)(KEY))
    device = np.arange(devices)[:, None, None]
    rows = local // here * num_envs + device * here + local % here
    whole = batches(KEY, num_steps, num_envs, num_minibatches)
    for i in range(num_minibatches):
        assert sorted(rows[:, i].ravel()) == sorted(whole[i])


def test_devices_without_whole_groups_still_cover_their_samples():
    split = jax.shard_map(
        lambda key: one_epoch(key, 4, 2, 2, axis_name=ENVS)[None],
        mesh=mesh_over(3, 6),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(ENVS),
        check_vma=False,
    )
    for one in np.asarray(jax.jit(split)(KEY)):
        assert sorted(one.ravel()) == list(range(8))


def quadratic(params, index):
    x = jnp.stack([jnp.sin(index.astype(jnp.float32)), jnp.cos(index.astype(jnp.float32))], -1)
    loss = jnp.sum(jnp.square(x @ params - 1.0)) / 24
    return loss, {"loss": loss, "sum": jnp.sum(x)}


slope = jax.jit(jax.grad(quadratic, has_aux=True))


@pytest.mark.parametrize("parts", [1, 2, 4, 6, 24])
def test_a_gradient_in_parts_is_the_gradient(parts):
    params, index = jnp.array([0.3, -0.7]), jnp.arange(24, dtype=jnp.int32)[::-1]
    gradient, terms = slope(params, index)
    sizes = []

    def counted(params, part):
        sizes.append(part.shape[0])
        return quadratic(params, part)

    def gradient_of(part):
        return jax.grad(counted, has_aux=True)(params, part), 2 * part

    (got, got_terms), doubled = jax.jit(lambda index: accumulate(gradient_of, index, parts))(index)
    assert set(sizes) == {24 // parts}
    np.testing.assert_array_equal(doubled, 2 * index)
    np.testing.assert_allclose(got, gradient, rtol=1e-6)
    np.testing.assert_allclose(got_terms["loss"], terms["loss"], rtol=1e-6)
    np.testing.assert_allclose(got_terms["sum"], terms["sum"], atol=1e-5)


def test_parts_of_several_devices_add_up():
    params, index = jnp.array([0.3, -0.7]), np.arange(24, dtype=np.int32)
    split = jax.shard_map(
        lambda index: accumulate(lambda part: (jax.grad(lambda p: quadratic(p, part)[0])(params), part), index, 3, ENVS),
        mesh=mesh_over(2, 2),
        in_specs=PartitionSpec(ENVS),
        out_specs=(PartitionSpec(), PartitionSpec(ENVS)),
        check_vma=False,
    )
    gradient, samples = jax.jit(split)(index)
    np.testing.assert_allclose(gradient, slope(params, index)[0], rtol=1e-5)
    np.testing.assert_array_equal(samples, index)


@pytest.mark.parametrize(("limit", "parts"), [(24, 1), (12, 2), (7, 4), (5, 6), (1, 24)])
def test_microbatches_are_the_fewest_that_fit_the_cache(monkeypatch, limit, parts):
    monkeypatch.setattr(gradient_step, "SAMPLES_IN_CACHE", limit)
    assert count_microbatches(24, None) == parts
    monkeypatch.setattr(gradient_step, "SAMPLES_IN_CORE_CACHE", 2 * limit)
    assert count_microbatches(48, None, ENVS) == parts


def test_microbatches_of_sequences_are_counted_in_samples(monkeypatch):
    monkeypatch.setattr(gradient_step, "SAMPLES_IN_CACHE", 64)
    assert count_microbatches(8, None, samples_each=8) == 1
    assert count_microbatches(8, None, samples_each=16) == 2
    assert count_microbatches(8, None, samples_each=1000) == 8, "a sequence is not split"
    assert count_microbatches(8, 4, samples_each=16) == 2


def test_size_without_a_fitting_divisor_is_one_microbatch(monkeypatch):
    monkeypatch.setattr(gradient_step, "SAMPLES_IN_CACHE", 12)
    assert count_microbatches(23, None) == 1


def test_microbatches_of_images_are_smaller_on_a_cpu(monkeypatch):
    assert count_microbatches(256, None, has_images=True) == count_microbatches(256, None, ENVS, has_images=True) == 8
    assert count_microbatches(256, 128, has_images=True) == 2
    seen = []
    images = np.zeros((9, 8, 2), np.float32)
    jax.eval_shape(lambda x: map_steps(lambda part: (seen.append(len(part)), part)[1], x, has_images=True), images)
    assert max(seen) == 32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count_microbatches(256, None, has_images=True) == 1


def test_a_given_microbatch_size_decides_whatever_fits_the_cache(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count_microbatches(24, 3) == 8 and count_microbatches(10**6, None) == 1


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("rows_in_cache", [1, 6, 9, 12, 1000])
def test_mapped_rows_are_those_of_one_call(monkeypatch, rows_in_cache, asked):
    if not asked:
        monkeypatch.setattr(gradient_step, "SAMPLES_IN_CACHE", rows_in_cache)
    tree = {"a": np.arange(7 * 3 * 2, dtype=np.float32).reshape(7, 3, 2), "b": np.arange(21, dtype=np.int32).reshape(7, 3)}
    seen = []

    def function(part):
        seen.append(part["b"].shape[0])
        assert part["a"].shape == (part["b"].shape[0], 2)
        return part["a"].sum(-1) * 2.0, part["b"] + 1

    microbatch_size = rows_in_cache if asked else None
    doubled, plus_one = jax.jit(lambda tree: map_steps(function, tree, microbatch_size))(tree)
    assert np.array_equal(doubled, tree["a"].sum(-1) * 2) and np.array_equal(plus_one, tree["b"] + 1)
    # Up to twice as many pass in one call.
    assert max(seen) < 2 * max(3, rows_in_cache)
