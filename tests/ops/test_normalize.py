import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from polyak.ops.normalize import RunningStats

# Compiled, as they are used; and one compilation is quicker than one for each operation.
update = jax.jit(RunningStats.update, static_argnames="axis_name")
merge, normalize = jax.jit(RunningStats.merge), jax.jit(RunningStats.normalize)
stddev = jax.jit(RunningStats.stddev)

init = functools.cache(RunningStats.init)


def stats_of(x):
    return update(init(x.shape[1:]), x, np.ones(len(x), np.float32))


def assert_same(a, b, **tolerance):
    for name in ("count", "mean", "variance"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), **tolerance)


def test_fresh_statistics_leave_numbers_as_they_are():
    x = jnp.array([[-3.0, 0.0, 2.5]])
    np.testing.assert_allclose(normalize(init((3,)), x), x, rtol=1e-7)
    np.testing.assert_array_equal(stddev(init(()), epsilon=0.0), 1.0)


def test_count_mean_and_variance_equal_numbers_by_hand():
    stats = stats_of(jnp.array([[1.0, 10.0], [3.0, 10.0]]))
    assert int(stats.count) == 2
    np.testing.assert_array_equal(stats.mean, [2, 10])
    np.testing.assert_array_equal(stats.variance, [1, 0])
    stats = update(stats, jnp.array([[8.0, 10.0]]), jnp.ones(1))
    np.testing.assert_allclose(stats.mean, [4, 10], rtol=1e-6)
    np.testing.assert_allclose(stats.variance, [26 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(normalize(stats, jnp.array([4 + np.sqrt(26 / 3), 10.0], jnp.float32)), [1, 0], rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([0.0, 100.0]))
def test_batches_of_any_size_give_the_statistics_of_all_entries(seed, sizes, centre):
    rng = np.random.default_rng(seed)
    x = (centre + rng.normal(size=(6, 5, 2))).astype(np.float32)
    weight = np.arange(5)[None] < np.resize(sizes, 6)[:, None]
    stats = RunningStats.init((2,))
    for batch, counts in zip(x, weight, strict=True):
        stats = update(stats, jnp.asarray(batch), jnp.asarray(counts))
    seen = x[weight].astype(np.float64)
    assert int(stats.count) == len(seen)
    if len(seen):
        np.testing.assert_allclose(stats.mean, seen.mean(0), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(stats.variance, seen.var(0), rtol=1e-5, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0, 1, 6]), st.sampled_from([0, 1, 6]))
def test_merged_statistics_equal_those_of_all_entries(seed, first, second):
    x = np.random.default_rng(seed).normal(5, 2, size=(first + second, 2)).astype(np.float32)
    merged = merge(stats_of(x[:first]), stats_of(x[first:]))
    assert_same(merged, stats_of(x), rtol=1e-5, atol=1e-6)


def test_merging_with_nothing_changes_no_bit():
    stats, nothing = stats_of(jnp.array([0.1, 0.2, 0.7])), RunningStats.init(())
    for merged in (merge(stats, nothing), merge(nothing, stats)):
        np.testing.assert_array_equal(merged.mean, stats.mean)
        np.testing.assert_array_equal(merged.variance, stats.variance)
        assert int(merged.count) == 3


def test_ten_million_samples_far_from_zero_keep_their_digits():
    x = np.float32(1e4) + np.random.default_rng(0).standard_normal((1000, 10_000), np.float32)  # 1,000 updates of 10,000
    stats = jax.jit(lambda x: jax.lax.scan(lambda s, b: (s.update(b, jnp.ones(b.shape)), None), RunningStats.init(()), x)[0])(x)
    exact = np.asarray(x, np.float64)
    assert int(stats.count) == 10**7
    assert abs(float(stats.mean) + float(stats.mean_rest) - exact.mean()) < 1e-5
    np.testing.assert_allclose(stats.variance, exact.var(), rtol=1e-4)


def test_many_small_updates_are_as_good_as_few_large_ones():
    x = np.float32(1e4) + np.random.default_rng(0).standard_normal((200_000, 8), np.float32)
    stats = jax.jit(lambda x: jax.lax.scan(lambda s, b: (s.update(b, jnp.ones(8)), None), RunningStats.init(()), x)[0])(x)
    exact = np.asarray(x, np.float64)
    assert int(stats.count) == 1_600_000
    assert abs(float(stats.mean) + float(stats.mean_rest) - exact.mean()) < 1e-4
    np.testing.assert_allclose(stats.variance, exact.var(), rtol=1e-3)


def seen(count, mean=0.0, variance=1.0):
    return RunningStats(jnp.uint32(count), jnp.float32(mean), jnp.float32(0), jnp.float32(variance))


@pytest.mark.parametrize("count", [2**24, 10**8, 10**9])
def test_the_count_goes_on_where_float32_would_stand_still(count):
    stats = seen(count)
    for _ in range(3):
        stats = update(stats, jnp.array([1.0]), jnp.ones(1))
    assert int(stats.count) == count + 3
    np.testing.assert_allclose(stats.variance, 1.0, rtol=1e-6)


def test_after_a_billion_samples_a_shift_of_the_data_still_arrives():
    stats = seen(10**9)
    batch = jnp.full(4096, 5.0)
    stats = jax.jit(lambda s: jax.lax.fori_loop(0, 20_000, lambda _, s: s.update(batch, jnp.ones(4096)), s))(stats)
    share = 4096 * 20_000 / (10**9 + 4096 * 20_000)
    np.testing.assert_allclose(float(stats.mean) + float(stats.mean_rest), 5 * share, rtol=1e-4)
    np.testing.assert_allclose(stats.variance, (1 - share) + 25 * share * (1 - share), rtol=1e-3)


def test_a_count_saturates_at_the_largest_uint32():
    stats = update(seen(2**32 - 2), jnp.zeros(5), jnp.ones(5))
    assert int(stats.count) == 2**32 - 1
    stats = update(stats, jnp.full(5, 3.0), jnp.ones(5))
    assert int(stats.count) == 2**32 - 1 and jnp.isfinite(stats.mean) and float(stats.mean) >= 0


@pytest.mark.parametrize("junk", [1e9, np.nan, np.inf, 1e38])
def test_samples_of_weight_zero_change_no_bit(junk):
    x, hidden = np.arange(12, dtype=np.float32).reshape(2, 3, 2) / 7, np.array([[False, True, False], [True, False, False]])
    dirty = np.where(hidden[..., None], np.float32(junk), x)
    stats = stats_of(np.full((4, 2), 3, np.float32))
    clean, same = (update(stats, v, ~hidden) for v in (x, dirty))
    jax.tree.map(np.testing.assert_array_equal, clean, same)
    nothing = update(stats, dirty, np.zeros((2, 3), np.float32))
    jax.tree.map(np.testing.assert_array_equal, nothing, stats)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_non_finite_entry_leaves_all_statistics_unchanged(junk):
    stats = stats_of(jnp.array([[1.0, 2.0], [3.0, 5.0]]))
    after = update(stats, jnp.array([[1.0, 1.0], [junk, 1.0]], jnp.float32), jnp.ones(2))
    jax.tree.map(np.testing.assert_array_equal, after, stats)
    after = update(after, jnp.array([[2.0, 2.0]]), jnp.ones(1))
    assert int(after.count) == 3 and bool(jnp.all(jnp.isfinite(after.mean)))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e4 / 3, -7e5])
def test_constant_observation_becomes_zero_and_a_later_change_is_not_amplified(constant):
    stats = stats_of(np.full(1000, constant, np.float32))
    for _ in range(20):
        stats = update(stats, np.full(7, constant, np.float32), np.ones(7, np.float32))
    x = np.full(2, constant, np.float32)
    np.testing.assert_allclose(normalize(stats, x), [0, 0], atol=1e-3)
    np.testing.assert_array_equal(stddev(stats), 1.0)
    np.testing.assert_allclose(normalize(stats, x + 3), [3, 3], atol=0.1)
    np.testing.assert_array_equal(normalize(stats, x - 1 - abs(x), clip=0.5), [-0.5, -0.5])


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_what_varies_by_a_millionth_of_its_size_is_normalised_by_that(size):
    x = size * (1 + 1e-6 * np.random.default_rng(0).standard_normal(1000))
    stats = stats_of(x.astype(np.float32))
    np.testing.assert_allclose(stddev(stats, epsilon=0.0), 1e-6 * size, rtol=0.1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, bool])
def test_integers_have_statistics_in_float32(dtype):
    x = np.array([[0, 1], [1, 1], [1, 0]], dtype)
    stats = stats_of(x)
    assert stats.mean.dtype == stats.variance.dtype == jnp.float32
    assert_same(stats, stats_of(x.astype(np.float32)))
    assert normalize(stats, jnp.asarray(x)).dtype == jnp.float32


def test_normalized_data_has_mean_zero_and_deviation_one():
    x = np.random.default_rng(0).normal([3, -50], [0.1, 20], size=(500, 2)).astype(np.float32)
    y = np.asarray(normalize(stats_of(x), x), np.float64)
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(y.std(0), 1, rtol=1e-5)


@functools.cache
def updated_over(devices):
    mesh, spec = Mesh(np.array(jax.devices()[:devices]), ("data",)), P(None, "data")
    return jax.jit(
        jax.shard_map(
            lambda s, x, w: s.update(x, w, "data"), mesh=mesh, in_specs=(P(), spec, spec), out_specs=P(), check_vma=False
        )
    )


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("centre", [0.0, 1e4])
def test_statistics_of_a_batch_split_over_devices_are_those_of_the_whole(devices, centre):
    rng = np.random.default_rng(1)
    x = rng.normal(centre, 1, size=(16, 32, 3)).astype(np.float32)
    weight = (rng.random((16, 32)) < 0.7) & (np.arange(32) < 20)  # nothing counts on the last devices
    split = updated_over(devices)
    one = many = stats_of(x[0] + 1)

    for _ in range(3):
        one, many = update(one, x, weight), split(many, x, weight)
    assert_same(many, one, rtol=1e-6, atol=1e-6)
    x[0, 0, 0] = np.nan
    broken = split(many, x, weight | True)
    jax.tree.map(np.testing.assert_array_equal, broken, many)


def test_nested_observations_are_a_tree_of_statistics():
    obs = {"camera": jnp.ones((4, 2, 2)), "pair": (jnp.arange(4.0), jnp.arange(8.0).reshape(4, 2))}

    @jax.jit
    def normalized(obs):
        stats = jax.tree.map(lambda x: RunningStats.init(x.shape[1:]), obs)
        is_stats = lambda s: isinstance(s, RunningStats)  # noqa: E731
        stats = jax.tree.map(lambda s, x: s.update(x, jnp.ones(4)), stats, obs, is_leaf=is_stats)
        return jax.tree.map(lambda s, x: s.normalize(x), stats, obs, is_leaf=is_stats)

    normal = normalized(obs)
    np.testing.assert_allclose(np.std(normal["pair"][0]), 1, rtol=1e-6)
    assert jax.tree.structure(normal) == jax.tree.structure(obs)


def test_statistics_are_a_pytree_for_jit_vmap_and_scan():
    x = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    many = jax.jit(jax.vmap(lambda x: RunningStats.init((2,)).update(x, jnp.ones(4))))(x)
    for i in range(3):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], many), stats_of(x[i]), rtol=1e-6)


@pytest.mark.parametrize(("x", "weight"), [((4, 3), (4,)), ((4, 2), (4, 2)), ((4, 2), ()), ((2,), (2,))])
def test_wrong_shape_raises_with_both_shapes(x, weight):
    plain = inspect.unwrap(RunningStats.update)
    with pytest.raises(ValueError, match=r"RunningStats: x must have shape .*, got \("):
        plain(RunningStats.init((2,)), jnp.ones(x), jnp.ones(weight))
