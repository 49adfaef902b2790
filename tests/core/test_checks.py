"""Checks of settings: owner and field, got, wanted."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.checks import check_choice, check_integer, check_number, check_unset

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), jnp.float32(0.5), np.array([0.0, 1.0]), jnp.array([0.1])])
def test_numbers_and_arrays_of_them_within_the_bounds_pass(value):
    check_number("X", "tau", value, at_least=0, at_most=1)


@pytest.mark.parametrize("value", [-1e-9, 1.5, NAN, INF, -INF, np.array([0.5, 2.0]), np.array([NAN])])
def test_numbers_out_of_bounds_are_rejected(value):
    with pytest.raises(ValueError, match=re.escape("X: tau must be a number in [0, 1], got ")):
        check_number("X", "tau", value, at_least=0, at_most=1)


@pytest.mark.parametrize("value", ["0.5", None, True, False, [0.5, "a"], 1j, np.array([True]), object()])
def test_what_is_no_number_is_rejected(value):
    with pytest.raises(TypeError, match=re.escape(f"X: tau must be a number in [0, 1], got {value!r}")):
        check_number("X", "tau", value, at_least=0, at_most=1)


@pytest.mark.parametrize("value", [[], (0.5,), [0.5], range(2), np.ma.masked, np.ma.array([0.5]), np.zeros(0), {0.5}])
def test_sequences_and_masked_arrays_are_no_numbers(value):
    with pytest.raises(TypeError, match=re.escape(f"X: tau must be a number in [0, 1], got {value!r}")):
        check_number("X", "tau", value, at_least=0, at_most=1)


def test_narrow_floats_and_large_integers_are_numbers():
    check_number("X", "tau", jnp.bfloat16(0.5), at_least=0, at_most=1)
    check_number("X", "tau", 10**30, above=0)
    with pytest.raises(ValueError, match=re.escape("X: tau must be a number in (0, inf), got 1000")):
        check_number("X", "tau", 10**400, above=0)


@pytest.mark.parametrize("value", [1e39, -1e39, 10**40, np.array([1.0, 1e39])])
def test_numbers_that_float32_cannot_hold_are_rejected(value):
    check_number("X", "v_max", float(np.finfo(np.float32).max))
    said = f"X: v_max must be a number that float32 can hold, at most 3.4e38, got {value!r}"
    with pytest.raises(ValueError, match=re.escape(said)):
        check_number("X", "v_max", value)


def test_the_interval_is_written_as_it_is_meant():
    for bounds, interval in (
        ({"above": 0}, "(0, inf)"),
        ({"at_least": 0}, "[0, inf)"),
        ({"at_most": 2}, "(-inf, 2]"),
        ({}, "(-inf, inf)"),
        ({"above": 0, "at_most": 1}, "(0, 1]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"in {interval}, got nan")):
            check_number("X", "y", NAN, **bounds)
    with pytest.raises(ValueError, match=re.escape("(0, inf) or None, got 0")):
        check_number("X", "y", 0, above=0, optional=True)


def test_none_is_for_optional_settings_and_tracers_pass():
    check_number("X", "y", None, optional=True)
    jax.jit(lambda y: check_number("X", "y", y, above=5))(1.0)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)])
def test_integers(value, error):
    check_integer("X", "n", 1)
    check_integer("X", "n", 0, at_least=0)
    with pytest.raises(error, match=re.escape(f"X: n must be an integer >= 1, got {value}")):
        check_integer("X", "n", value)


@pytest.mark.parametrize("value", ["c", 1, 1.0, None, np.array([1, 2])])
def test_choices_are_compared_with_their_type(value):
    check_choice("X", "mode", "a", ("a", True))
    check_choice("X", "mode", True, ("a", True))
    with pytest.raises(ValueError, match="X: mode must be one of 'a', True, got "):
        check_choice("X", "mode", value, ("a", True))


def test_a_default_given_as_an_equal_string_counts_as_unset():
    @dataclasses.dataclass
    class Settings:
        loss: str = "log_alpha"

    check_unset(Settings("".join(["log", "_alpha"])), ("loss",), "has no effect")
    with pytest.raises(ValueError, match="Settings: loss has no effect"):
        check_unset(Settings("alpha"), ("loss",), "has no effect")
