"""Schedules of settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.copies.follow import Follow
from polyak.ops.schedules import (
    SCHEDULES,
    Constant,
    Exponential,
    Linear,
    Piecewise,
    StepCount,
    check_schedule,
    saturating_add,
    value_at,
)
from polyak.storage.config import from_json, to_json


@pytest.mark.parametrize(("steps", "value"), [(0, 1.0), (25, 0.875), (100, 0.5), (101, 0.5), (2**32 - 1, 0.5)])
def test_linear_goes_straight_to_its_end_and_stays(steps, value):
    schedule = Linear(1.0, 0.5, env_steps=100.0)
    assert float(schedule(jnp.asarray(steps, jnp.uint32))) == pytest.approx(value)
    assert float(value_at(schedule, jnp.asarray(steps, jnp.uint32))) == pytest.approx(value)


def test_linear_ends_at_its_end_to_the_bit():
    ends = np.random.default_rng(0).uniform(0, 1, (2, 200)).astype(np.float32)
    at = jax.jit(jax.vmap(lambda start, end, s: Linear(start, end, 10)(s), in_axes=(0, 0, None)))
    for steps in (10, 11, 2**32 - 1):
        assert np.array_equal(at(*ends, jnp.uint32(steps)), ends[1])
    assert float(Linear(1.0, 0.05, env_steps=10)(10)) == float(np.float32(0.05))


def test_saturating_add_stops_at_the_largest_uint32():
    most = 2**32 - 1
    for count, more, total in ((0, 0, 0), (7, 5, 12), (most - 5, 5, most), (most - 5, 6, most), (most, 100, most)):
        assert int(saturating_add(jnp.asarray(count, jnp.uint32), jnp.asarray(more, jnp.uint32))) == total


def test_a_step_count_adds_compares_and_subtracts_beyond_32_bits():
    numbers = [0, 1, 2**32 - 3, 2**32, 10**12, 10**12 + 5, 2**62 + 7]
    for start in numbers:
        for more in (0, 2, 3, 2**32 - 1):
            assert int(jax.jit(StepCount.__add__)(StepCount.of(start), jnp.uint32(more))) == start + more
        for other in numbers:
            a, b = StepCount.of(start), StepCount.of(other)
            assert bool(a >= b) == (start >= other) and bool(a == b) == bool(a == other) == (start == other)
            assert start < other or int(a.since(b)) == start - other
        assert float(StepCount.of(start).as_float()) == np.float32(start) == float(StepCount.of(np.float32(start)).as_float())
    assert int(StepCount.of(jnp.uint32(7))) == int(StepCount.of(StepCount.of(7))) == 7


LONG = [
    Linear(1.0, 0.0, 10**12),
    Exponential(1.0, 0.5, 10**11),
    Piecewise((Linear(1.0, 0.5, 4 * 10**11), Linear(0.5, 0.1, 10**11)), (5 * 10**11,)),
]


@pytest.mark.parametrize("schedule", LONG, ids=lambda schedule: type(schedule).__name__)
def test_schedules_of_1e12_steps_go_on_beyond_32_bits(schedule):
    for steps in (2**32 - 1, 2**32, 10**11, 5 * 10**11, 55 * 10**10, 10**12, 10**13):
        expected = by_hand(schedule, steps)
        assert float(schedule(steps)) == pytest.approx(expected, rel=1e-5)
        assert float(jax.jit(value_at)(schedule, StepCount.of(steps))) == pytest.approx(expected, rel=1e-5)


def test_a_number_is_constant():
    assert float(value_at(0.25, jnp.uint32(7))) == 0.25 and value_at(1, 7).dtype == jnp.float32


def test_other_numbers_do_not_recompile_and_may_be_mapped_over():
    value = jax.jit(lambda schedule: schedule(jnp.uint32(50)))
    assert float(value(Linear(1.0, env_steps=100.0))) == 0.5 and float(value(Linear(3.0, 1.0, 200.0))) == 2.5
    assert value._cache_size() == 1
    many = Linear(jnp.array([1.0, 2.0]), jnp.zeros(2), jnp.array([100.0, 100.0]))
    np.testing.assert_allclose(jax.vmap(lambda schedule: schedule(jnp.uint32(50)))(many), [0.5, 1.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": float("nan")}, "Linear: start must be a number"),
        ({"start": 1.0, "end": float("inf")}, "Linear: end must be a number"),
        ({"start": 1.0, "env_steps": 0}, r"Linear: env_steps must be a number in \(0, inf\), got 0"),
        ({"start": 1.0, "env_steps": -5.0}, "Linear: env_steps"),
        ({"start": "1"}, "Linear: start must be a number"),
    ],
)
def test_invalid_linear_raises(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Linear(**settings)


@pytest.mark.parametrize("schedule", [1e-3, 1, Linear(1e-3), Linear(1e-3, 1e-4)])
def test_a_positive_schedule_passes(schedule):
    check_schedule("PPO", "learning_rate", schedule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (0.0, r"PPO: learning_rate must be a number in \(0, inf\) or a schedule such as Linear, got 0.0"),
        (Linear(-1.0), r"PPO: learning_rate.start must be a number in \(0, inf\), got -1.0"),
        (Linear(1.0, -1.0), r"PPO: learning_rate.end must be a number in \[0, inf\), got -1.0"),
        (lambda steps: 1.0, "learning_rate must be a number .* or a schedule such as polyak.Linear.* stored.*got <function"),
    ],
)
def test_schedule_that_is_not_positive_raises(schedule, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_schedule("PPO", "learning_rate", schedule)


MIXED = Piecewise((0.5, Linear(1.0, 0.0, 100), Exponential(2.0, 0.5, 10, end=0.25), Constant(7.0)), (50, 200, 300))
EACH = [Constant(0.3), Linear(1.0, 0.25, 100), Exponential(2.0, 0.5, 100, end=0.3), MIXED]
each_schedule = pytest.mark.parametrize("schedule", EACH, ids=lambda schedule: type(schedule).__name__)


def by_hand(schedule, s):
    """Schedules as a person would write them down, in double precision."""
    match schedule:
        case Constant():
            return schedule.value
        case Linear():
            return schedule.start + (schedule.end - schedule.start) * min(s / schedule.env_steps, 1)
        case Exponential():
            return max(schedule.start * schedule.factor ** (s / schedule.env_steps), schedule.end)
        case Piecewise():
            past = [0, *(boundary for boundary in schedule.boundaries if s >= boundary)]
            return by_hand(schedule.schedules[len(past) - 1], s - past[-1])
    return schedule


@each_schedule
def test_every_schedule_is_its_formula_compiled_and_not(schedule):
    steps = [0, 1, 49, 50, 51, 100, 149, 199, 200, 215, 299, 300, 5000, 2**31 + 5, 2**32 - 1]
    expected = [by_hand(schedule, s) for s in steps]
    compiled = jax.jit(jax.vmap(value_at, in_axes=(None, 0)))(schedule, jnp.asarray(steps, jnp.uint32))
    assert compiled.dtype == jnp.float32
    np.testing.assert_allclose(compiled, expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose([float(schedule(s)) for s in steps[::4]], expected[::4], rtol=2e-6, atol=1e-7)


@each_schedule
def test_every_schedule_can_be_written_to_a_file(schedule):
    again = from_json(to_json(schedule), {cls.__name__: cls for cls in SCHEDULES})
    assert again == schedule and type(again) is type(schedule)


def test_lengths_beyond_what_int32_holds_compile():
    for schedule in (Linear(1.0, 0.0, 4_000_000_000), Piecewise((1.0, Linear(0.5, 0.0, 1_000_000_000)), (3_000_000_000,))):
        assert float(jax.jit(value_at)(schedule, jnp.uint32(2**32 - 1))) == 0.0
        assert float(jax.jit(value_at)(schedule, jnp.uint32(0))) == 1.0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constant(float("nan")), "Constant: value must be a number"),
        (lambda: Exponential(0.0), r"Exponential: start must be a number in \(0, inf\), got 0.0"),
        (lambda: Exponential(1.0, 1.5), r"Exponential: factor must be a number in \(0, 1\], got 1.5"),
        (lambda: Exponential(1.0, env_steps=0), "Exponential: env_steps"),
        (lambda: Exponential(1.0, end=2.0), "Exponential: end must be at most start=1.0, got 2.0"),
        (lambda: Piecewise([1.0]), r"Piecewise: schedules must be a tuple, got \[1.0\]"),
        (lambda: Piecewise(()), "Piecewise: schedules must be one more than boundaries, got 0 and 0"),
        (lambda: Piecewise((1.0, 2.0)), "Piecewise: schedules must be one more than boundaries, got 2 and 0"),
        (lambda: Piecewise((1.0, 2.0, 3.0), (20, 20)), r"Piecewise: boundaries must rise, got \(20, 20\)"),
        (lambda: Piecewise((1.0, 2.0), (0,)), r"Piecewise: boundaries\[0\] must be a number in \(0"),
        (lambda: Piecewise((1.0, lambda s: s), (3,)), r"Piecewise: schedules\[1\] must be a number .* or a schedule, got <fun"),
    ],
)
def test_other_invalid_schedules_raise(build, message, unchecked):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Constant(0.0), "PPO: clip_range.value must be a number"),
        (
            Piecewise((0.1, Linear(0.2, -0.1)), (5,)),
            r"PPO: clip_range.schedules\[1\].end must be a number in \[0, inf\), got -0.1",
        ),
    ],
)
def test_schedule_in_a_setting_is_checked_recursively(schedule, message):
    with pytest.raises(ValueError, match=message):
        check_schedule("PPO", "clip_range", schedule)
    check_schedule("PPO", "clip_range", Exponential(1.0))


def test_what_a_schedule_may_reach_a_later_part_may_begin_with():
    for later in (0.0, Constant(0.0), Linear(0.0, 1.0), Piecewise((0.0, 1.0), (5,))):
        check_schedule("PPO", "clip_range", Piecewise((Linear(1.0, 0.0), later), (100,)))
        with pytest.raises(ValueError, match=r"PPO: clip_range\.schedules\[0\].* must be a number in \(0, inf\)"):
            check_schedule("PPO", "clip_range", Piecewise((later, 1.0), (100,)))
    with pytest.raises(ValueError, match=r"PPO: clip_range.schedules\[1\] must be a number in \[0, inf\).*, got -0.5"):
        check_schedule("PPO", "clip_range", Piecewise((1.0, -0.5), (100,)))


def test_scheduled_tau_stays_within_its_bounds():
    share = Piecewise((1.0, Exponential(0.5, 0.5, 1)), (2,))
    follow = Follow(share)
    target, state = {"w": jnp.zeros(2)}, follow.init()
    expected = 0.0
    for step in range(1, 5):
        target, state = follow.step(state, {"w": jnp.full(2, float(step))}, target)
        expected += by_hand(share, step) * (step - expected)
        np.testing.assert_allclose(target["w"], expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"Follow: tau.start must be a number in \[0, 1\], got 2.0"):
        Follow(Exponential(2.0))


@pytest.mark.parametrize("wide", [np.int64(6_000_000_000), np.array(6_000_000_000), np.array([6_000_000_000])], ids=str)
def test_numpy_counts_and_boundaries_beyond_32_bits_keep_their_value(wide):
    assert int(np.asarray(StepCount.of(wide).as_float()).max()) == pytest.approx(6e9)
    if wide.ndim == 0:
        schedule = Piecewise((1.0, 2.0), (wide,))
        assert [float(schedule(steps)) for steps in (5_999_999_000, 6_000_000_000)] == [1.0, 2.0]
