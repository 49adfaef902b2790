"""Schedules of settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.ops.schedules import Linear, check_schedule, counted_on, value_at


@pytest.mark.parametrize(("steps", "value"), [(0, 1.0), (25, 0.875), (100, 0.5), (101, 0.5), (2**32 - 1, 0.5)])
def test_linear_goes_straight_to_its_end_and_stays(steps, value):
    schedule = Linear(1.0, 0.5, env_steps=100.0)
    assert float(schedule(jnp.asarray(steps, jnp.uint32))) == pytest.approx(value)
    assert float(value_at(schedule, jnp.asarray(steps, jnp.uint32))) == pytest.approx(value)


def test_a_count_stays_at_its_end():
    most = 2**32 - 1
    for count, more, total in ((0, 0, 0), (7, 5, 12), (most - 5, 5, most), (most - 5, 6, most), (most, 100, most)):
        assert int(counted_on(jnp.asarray(count, jnp.uint32), jnp.asarray(more, jnp.uint32))) == total


def test_a_number_is_constant():
    assert float(value_at(0.25, jnp.uint32(7))) == 0.25 and value_at(1, 7).dtype == jnp.float32


def test_other_numbers_do_not_recompile_and_may_be_mapped_over():
    value = jax.jit(lambda schedule: schedule(jnp.uint32(50)))
    assert float(value(Linear(1.0, env_steps=100.0))) == 0.5 and float(value(Linear(3.0, 1.0, 200.0))) == 2.5
    assert value._cache_size() == 1
    many = Linear(jnp.array([1.0, 2.0]), jnp.zeros(2), jnp.array([100.0, 100.0]))
    np.testing.assert_allclose(jax.vmap(lambda schedule: schedule(jnp.uint32(50)))(many), [0.5, 1.0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"start": float("nan")}, "Linear: start must be a number"),
        ({"start": 1.0, "end": float("inf")}, "Linear: end must be a number"),
        ({"start": 1.0, "env_steps": 0}, r"Linear: env_steps must be a number in \(0, inf\), got 0"),
        ({"start": 1.0, "env_steps": -5.0}, "Linear: env_steps"),
        ({"start": "1"}, "Linear: start must be a number"),
    ],
)
def test_F2_a_wrong_linear_is_refused(settings, said):
    with pytest.raises((TypeError, ValueError), match=said):
        Linear(**settings)


@pytest.mark.parametrize("schedule", [1e-3, 1, Linear(1e-3), Linear(1e-3, 1e-4)])
def test_a_positive_schedule_passes(schedule):
    check_schedule("PPO", "learning_rate", schedule)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (0.0, r"PPO: learning_rate must be a number in \(0, inf\) or a Linear, got 0.0"),
        (Linear(-1.0), r"PPO: learning_rate.start must be a number in \(0, inf\), got -1.0"),
        (Linear(1.0, -1.0), r"PPO: learning_rate.end must be a number in \[0, inf\), got -1.0"),
        (lambda steps: 1.0, "PPO: learning_rate must be a number .* or a Linear, got <function"),
    ],
)
def test_F2_a_schedule_that_is_not_positive_is_refused(schedule, said):
    with pytest.raises((TypeError, ValueError), match=said):
        check_schedule("PPO", "learning_rate", schedule)
