"""When a copy follows: elapsed counts, jumps, wraps, schedules, refusals, and no work when it is not due."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.copies.follow import Follow
from polyak.ops.schedules import Linear
from tests.ops.bits import sharded

NAN = float("nan")
ONLINE, TARGET = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}


@jax.jit
def values_after(follow, counts):
    """The target's value and whether it fired, after each call."""

    def body(carry, count):
        target, state = follow.step(carry[1], ONLINE, carry[0], count)
        return (target, state), (target["w"][0], state.fired)

    return jax.lax.scan(body, (TARGET, follow.init()), jnp.asarray(counts))[1]


def test_target_is_updated_once_per_period_and_unchanged_between():
    values, fired = values_after(Follow(tau=0.05, period=40), np.ones(80, np.int32))
    assert not np.any(values[:39]) and np.all(values[39:79] == values[39])
    np.testing.assert_allclose((values[39], values[79]), (0.05, 0.0975), rtol=1e-6)
    assert fired[38] == 0 and fired[39] == 1 and fired[79] == 2


def test_counts_that_jump_by_16_do_not_miss_a_period_of_1000():
    fired = values_after(Follow(period=1000, unit="env_steps"), np.full(300, 16, np.int32))[1]
    assert [int(np.argmax(fired >= n) + 1) * 16 for n in (1, 2, 3)] == [1008, 2016, 3024]


def test_count_0_never_updates_and_a_large_count_updates_once():
    assert values_after(Follow(period=1), np.zeros(3, np.int32))[1].tolist() == [0, 0, 0]
    assert values_after(Follow(period=2), np.array([100, 0, 1, 1], np.int32))[1].tolist() == [1, 1, 1, 2]
    assert values_after(Follow(period=1), np.array([-5, 1], np.int32))[1].tolist() == [0, 1]


@pytest.mark.parametrize("compile", [False, True])
def test_counts_beyond_2_to_the_31_and_the_32_neither_wrap_nor_miss(compile):
    follow = Follow(period=2**32 - 1, unit="env_steps")
    step = follow.step
    step = jax.jit(step) if compile else step
    state = follow.init()
    for count, fired in (
        (jnp.int32(2**31 - 1), 0),
        (jnp.int32(2**31 - 1), 0),
        (jnp.int32(1), 1),
        (jnp.uint32(2**32 - 1), 2),
        (jnp.int32(7), 2),
    ):
        _, state = step(state, ONLINE, TARGET, count)
        assert int(state.fired) == fired
    assert int(state.total) == 2**32 - 1 and int(state.elapsed) == 7
    assert int(follow.step(state, ONLINE, TARGET, 2**40)[1].fired) == 3


@pytest.mark.parametrize("count", [1, jnp.int32(3)])
def test_eager_compiled_and_scanned_steps_give_the_same_numbers(count):
    follow = Follow(tau=0.3, period=3)
    eager, compiled = (TARGET, follow.init()), (TARGET, follow.init())
    step = jax.jit(lambda state, target: follow.step(state, ONLINE, target, count))
    for _ in range(7):
        eager = follow.step(eager[1], ONLINE, eager[0], count)
        compiled = step(compiled[1], compiled[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), eager, compiled)
    scanned = values_after(follow, np.full(7, int(count), np.int32))
    np.testing.assert_allclose(scanned[0][-1], eager[0]["w"][0], rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("period", value) for value in (0, -1, 2.5, NAN, "2", True, None, 2**32)]
    + [("tau", value) for value in (2, -0.1, NAN, "0.5", None, True, Linear(2.0, 0.0))]
    + [("stats_tau", value) for value in (2, -0.1, NAN, "0.5", Linear(1.0, -1.0))],
)
def test_invalid_setting_raises_with_its_name(field, value):
    with pytest.raises((TypeError, ValueError), match=rf"^Follow: {field}"):
        Follow(**{field: value})


@pytest.mark.parametrize("count", [-1, 1.5, "1", True, None, np.ones(2, np.int32)])
def test_invalid_count_raises(count):
    with pytest.raises((TypeError, ValueError), match=r"^Follow: count must be"):
        Follow().step(Follow().init(), ONLINE, TARGET, count)


def test_different_trees_raise_even_when_no_update_is_due():
    with pytest.raises(ValueError, match=r"^Follow: leaf 'w': online is"):
        Follow(period=100).step(Follow().init(), {"w": jnp.ones(3)}, TARGET)


def test_a_step_that_is_not_due_copies_nothing_when_the_target_is_donated():
    follow = Follow(tau=0.005, period=1000)
    online, target = {"w": jnp.ones(4096), "v": jnp.ones((64, 64))}, {"w": jnp.zeros(4096), "v": jnp.zeros((64, 64))}
    compiled = jax.jit(follow.step, donate_argnums=(0, 2)).lower(follow.init(), online, target).compile()
    text = compiled.as_text()
    assert " conditional(" in text and re.search(r"input_output_alias=\{.*\{1\}: \(\d+", text)
    assert not re.search(r"= f32\[(4096|64,64)\]\S* copy\(", text)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("partition", [(), ("d",)])
def test_replicated_and_sharded_targets_are_updated_equally_and_preserve_their_sharding(compile, partition):
    follow = Follow(tau=0.3, period=2)
    online, target = ({"w": jnp.arange(16.0) * scale} for scale in (1.0, -2.0))
    step = jax.jit(follow.step) if compile else follow.step
    alone, apart = (target, follow.init()), (sharded(target, partition), follow.init())
    home = apart[0]["w"].sharding
    for _ in range(4):
        alone = step(alone[1], online, alone[0])
        apart = step(apart[1], sharded(online, partition), apart[0])
        assert apart[0]["w"].sharding.is_equivalent_to(home, 1)
        np.testing.assert_array_equal(apart[0]["w"], alone[0]["w"])
    np.testing.assert_allclose(alone[0]["w"], np.arange(16.0) * (1.0 - 3.0 * 0.7**2), rtol=1e-5)


def test_settings_are_leaves_so_another_tau_compiles_nothing_and_vmap_runs_over_them():
    step = jax.jit(lambda follow, state: follow.step(state, ONLINE, TARGET))
    for tau in (0.25, 0.5):
        assert step(Follow(tau), Follow().init())[0]["w"].tolist() == [tau, tau]
    assert step._cache_size() == 1
    stepped = jax.jit(jax.vmap(lambda follow: follow.step(follow.init(), ONLINE, TARGET)[0]))
    many = stepped(Follow(jnp.array([0.0, 0.5, 1.0])))
    assert many["w"][:, 0].tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("count", [-(2**40), 2**32 - 1, 2**32, 2**40])
def test_a_traced_count_of_64_bits_saturates(count):
    with jax.enable_x64(True):
        step = jax.jit(lambda count: Follow().step(Follow().init(), jnp.ones(2), jnp.zeros(2), count)[1].total)
        assert int(step(jnp.int64(count))) == max(0, min(count, 2**32 - 1))


@pytest.mark.parametrize("schedule", [Linear(1.0, 0.0, 4.0), optax.linear_schedule(1.0, 0.0, 4), lambda n: 1.0 - n / 4])
def test_a_schedule_is_called_with_the_total_count(schedule):
    follow = Follow(tau=schedule, stats_tau=schedule)
    step = jax.jit(lambda follow, state: follow.step(state, ONLINE, TARGET, 2))
    target, state = step(follow, follow.init())
    assert target["w"].tolist() == [0.5, 0.5]
    assert step(follow, state)[0]["w"].tolist() == [0.0, 0.0]
    assert follow.is_soft and follow.is_soft_on_stats


def test_traced_tau_outside_the_interval_skips_the_update_and_is_diagnosed():
    follow = Follow(tau=lambda n: 2.0 * n)
    target, state = jax.jit(follow.step)(follow.init(), ONLINE, TARGET)
    assert target["w"].tolist() == [0.0, 0.0] and int(state.skipped) == 1 and int(state.fired) == 0
    assert "1 updates were skipped because tau was outside [0, 1]" in follow.diagnose(state)
    assert follow.diagnose(follow.init()) is None
    bad_stats = Follow(tau=0.5, stats_tau=lambda n: -1.0 * n)
    assert int(jax.jit(bad_stats.step)(bad_stats.init(), ONLINE, TARGET)[1].skipped) == 1


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("compiled", [True, False])
def test_an_online_tree_that_is_not_finite_is_not_followed_and_is_diagnosed(bad, tau, compiled):
    follow = Follow(tau, period=2)
    online = {"w": ONLINE["w"].at[1].set(bad), "key": jax.random.key(1), "count": jnp.array(7)}
    target = {"w": TARGET["w"], "key": jax.random.key(0), "count": jnp.array(3)}
    step = jax.jit(follow.step) if compiled else follow.step
    kept, state = step(follow.init(), online, target)
    assert int(state.skipped) == 0, "not due yet"
    kept, state = step(state, online, target)
    assert kept["w"].tolist() == TARGET["w"].tolist() and kept["key"] == target["key"] and int(kept["count"]) == 3
    assert int(state.skipped) == 1 and int(state.fired) == 0 and int(state.elapsed) == 0
    assert "1 updates were skipped" in follow.diagnose(state)
    healed = online | {"w": ONLINE["w"]}
    for _ in range(2):
        kept, state = step(state, healed, kept)
    assert int(state.fired) == 1 and kept["w"].tolist() == (TARGET["w"] + tau * (ONLINE["w"] - TARGET["w"])).tolist()


def test_the_check_of_the_online_tree_can_be_left_to_the_caller():
    follow = Follow(0.5, check_finite=False)
    target, state = jax.jit(follow.step)(follow.init(), {"w": jnp.array([jnp.nan, 2.0])}, {"w": jnp.zeros(2)})
    assert np.isnan(target["w"][0]) and target["w"][1] == 1.0 and int(state.skipped) == 0
    wrong_tau = Follow(lambda n: 2.0 * n, check_finite=False)
    assert int(jax.jit(wrong_tau.step)(wrong_tau.init(), ONLINE, TARGET)[1].skipped) == 1


@pytest.mark.parametrize("tau", [1.0, 0.75, 0.25])
@pytest.mark.parametrize("compiled", [True, False])
def test_an_infinite_constant_of_both_and_huge_numbers_are_followed(compiled, tau):
    online = {"mask": jnp.array([0.0, -jnp.inf]), "w": jnp.array([3e38, 3e38])}
    target = {"mask": jnp.array([0.0, -jnp.inf]), "w": jnp.array([3e38, 1e38])}
    follow = Follow(tau)
    step = jax.jit(follow.step) if compiled else follow.step
    followed, state = step(follow.init(), online, target)
    assert int(state.fired) == 1 and int(state.skipped) == 0
    np.testing.assert_allclose(followed["w"], [3e38, 1e38 + tau * 2e38], rtol=1e-6)
    assert followed["mask"].tolist() == [0.0, -np.inf]


@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_the_target_may_be_on_another_device(bad):
    here, there = jax.devices()[:2]
    online = jax.device_put({"w": jnp.array([1.0, bad])}, here)
    target = jax.device_put({"w": jnp.zeros(2)}, there)
    followed, state = Follow(0.5).step(Follow(0.5).init(), online, target)
    assert followed["w"].devices() == {there} and int(state.skipped) == int(np.isnan(bad))
    np.testing.assert_array_equal(followed["w"], [0.0, 0.0] if np.isnan(bad) else [0.5, 0.0])


@pytest.mark.parametrize(
    ("follow", "soft", "soft_on_stats"),
    [
        (Follow(), False, False),
        (Follow(0.5), True, True),
        (Follow(0.5, stats_tau=1.0), True, False),
        (Follow(1, stats_tau=0.5), False, True),
    ],
)
def test_is_soft_depends_on_tau(follow, soft, soft_on_stats):
    assert follow.is_soft is soft and follow.is_soft_on_stats is soft_on_stats


def test_str_is_readable():
    assert str(Follow(0.05, 40)) == "tau 0.05, every 40 updates"
    assert str(Follow(unit="env_steps", stats_tau=1.0)) == "tau 1, statistics 1, every env step"
