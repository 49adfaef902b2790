"""The guard: what is not finite is seen, counted, and named."""

import jax.numpy as jnp
import numpy as np
import pytest

from polyak.ops.guard import Guard, all_finite, finite_rows


def after(guard, skipped, steps, bad):
    return guard.after_update(jnp.uint32(skipped), steps, jnp.array(bad))


def counts(guard):
    return int(guard.skipped), int(guard.in_a_row), int(guard.first_bad)


def test_an_update_that_took_no_step_because_of_bad_numbers_counts_in_a_row():
    guard = Guard.fresh()
    assert counts(guard) == (0, 0, 0)
    guard = after(guard, 4, 4, [False, True, True])
    assert counts(guard) == (4, 1, 2)
    guard = after(guard, 4, 4, [True, False, False])
    assert counts(guard) == (8, 2, 1)


def test_one_good_step_ends_the_row_and_what_was_bad_is_remembered():
    guard = after(Guard.fresh(), 4, 4, [False, False, True])
    guard = after(guard, 3, 4, [False, True, False])
    assert counts(guard) == (7, 0, 2)
    guard = after(guard, 0, 4, [False, False, False])
    assert counts(guard) == (7, 0, 2)


def test_steps_skipped_without_a_bad_number_are_no_row():
    guard = after(Guard.fresh(), 4, 4, [False, False])
    assert counts(guard) == (4, 0, 0)
    # All steps were over, or had no weight, before a bad number could matter.
    guard = after(guard, 0, 0, [False, True])
    assert counts(guard) == (4, 0, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_floats_decide_and_each_row_for_itself(bad):
    tree = {"x": jnp.array([[1.0, 2.0], [bad, 4.0]]), "n": jnp.arange(2), "none": None}
    assert not bool(all_finite(tree))
    np.testing.assert_array_equal(finite_rows(tree, 1), [True, False])
    np.testing.assert_array_equal(finite_rows(tree, 2)[1], [False, True])
    assert bool(all_finite({"n": jnp.arange(3)})) and bool(all_finite(()))
