"""One check of arrays against a space: each error names the leaf, what is expected and what was received."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.space_check import (
    action_specs,
    check_dtype,
    check_range,
    check_shape,
    obs_specs,
    read_leaves,
    to_array,
)
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple, unflatten

OBS = Box([-1.0], [1.0])
TREE = Dict({"gear": Discrete(3, start=1), "pair": Tuple((Box([-np.inf] * 2, [np.inf] * 2), MultiDiscrete((2, 4))))})
F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


def test_a_leaf_is_named_by_its_path_and_a_single_array_by_the_values_name():
    assert [spec.name("obs") for spec in obs_specs(TREE)] == ["obs 'gear'", "obs 'pair/0'", "obs 'pair/1'"]
    assert [spec.name("obs") for spec in obs_specs(OBS)] == ["obs"]


def test_leaves_are_read_in_the_order_of_the_space_and_other_entries_left_out():
    value = {"pair": [np.zeros(2), np.array([1, 3])], "gear": 2, "text": "unused"}
    leaves = read_leaves("obs", obs_specs(TREE), value)
    assert leaves[0] == 2 and leaves[2].tolist() == [1, 3]
    assert unflatten(TREE, leaves) == {"gear": 2, "pair": (leaves[1], leaves[2])}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"gear": 1}, "'pair' is missing, got a dict with keys ['gear']"),
        ({"gear": 1, "pair": (0,)}, "'pair/1' is missing, got tuple (0,)"),
        (np.zeros(3), "'gear' is missing, got an array of float64 and shape (3,)"),
        (None, "'gear' is missing, got NoneType None"),
    ],
)
def test_a_missing_leaf_is_named(value, says):
    with pytest.raises(ValueError, match="obs must be a tree of 'gear', 'pair/0', 'pair/1'; ") as caught:
        read_leaves("obs", obs_specs(TREE), value)
    assert str(caught.value).endswith(says)


def test_observations_count_from_their_start_and_actions_from_zero():
    observed, chosen = obs_specs(TREE), action_specs(EnvSpec(OBS, TREE))
    assert (observed[0].low, observed[0].high) == (1, 3) and (chosen[0].low, chosen[0].high) == (0, 2)
    assert observed[2].high.tolist() == chosen[2].high.tolist() == [1, 3]
    assert action_specs(EnvSpec(OBS, MultiBinary((2,))))[0].high == 1


def test_actions_of_a_box_are_finite_floats_within_its_bounds_or_within_one_where_they_are_rescaled():
    integers = Box([0, 0], [9, 5], dtype=np.uint8)
    (clipped,), (rescaled,) = (action_specs(EnvSpec(OBS, integers, "", scaling)) for scaling in ("clip", "rescale"))
    assert clipped.dtype == rescaled.dtype == np.float32
    assert clipped.high.tolist() == [9, 5] and (rescaled.low, rescaled.high) == (-1.0, 1.0)
    unbounded = action_specs(EnvSpec(OBS, Box([-np.inf], [np.inf])))[0]
    with pytest.raises(ValueError, match="action must be finite, got inf"):
        check_range("action", np.array([np.inf]), unbounded.low, unbounded.high)


@pytest.mark.parametrize(
    ("dtype", "exact", "accepted", "rejected"),
    [
        (F32, False, [np.float64, np.int8, np.uint8, jnp.bfloat16], [bool, complex, object, "U1"]),
        (F32, True, [np.float64, np.float16, jnp.bfloat16], [np.int32, bool]),
        (I32, False, [np.int64, np.uint8, bool], [np.float32, jnp.bfloat16, object]),
        (I32, True, [np.int64, np.uint8, bool], [np.float32]),
        (np.dtype(bool), False, [bool], [np.int32, np.float32]),
    ],
)
def test_dtypes_that_are_cast_and_those_that_are_not(dtype, exact, accepted, rejected):
    for got in accepted:
        check_dtype("x", np.zeros(1, got), dtype, exact=exact)
    for got in rejected:
        with pytest.raises(TypeError, match=rf"x must have dtype {dtype} \(.*\), got {np.dtype(got)}"):
            check_dtype("x", np.zeros(1, got), dtype, exact=exact)


def test_traced_arrays_are_checked_while_tracing():
    def function(x):
        check_shape("x", x, (2, 3))
        check_dtype("x", x, I32)
        return x

    jax.jit(function)(jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"x must have shape \(2, 3\), got \(3,\)"):
        jax.jit(function)(jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="x must have dtype int32"):
        jax.jit(function)(jnp.zeros((2, 3)))


def test_what_is_no_array_is_rejected():
    with pytest.raises(TypeError, match=r"x is not an array: .*; got list \[\[1\], \[1, 2\]\]"):
        to_array("x", [[1], [1, 2]], (2, 1), I32)
    with pytest.raises(TypeError, match=r"x must have dtype int32 .*, got str 'up'"):
        to_array("x", "up", (), I32)


@pytest.mark.parametrize(
    ("array", "batched", "says"),
    [
        (np.array(4), False, "x must be in [0, 3], got 4"),
        (np.array([0, -1]), False, "x must be in [0, 3], got -1 at [1]"),
        (np.array([0, 9]), True, "x must be in [0, 3], got 9 in environment 1"),
        (np.array([[0, 1], [1, np.nan]]), True, "x must be in [0, 3], got nan in environment 1 at [1]"),
    ],
)
def test_the_first_value_out_of_range_is_named(array, batched, says):
    with pytest.raises(ValueError) as caught:
        check_range("x", array, 0, 3, batched=batched)
    assert str(caught.value) == says


def test_workers_check_observations_without_importing_jax():
    program = "import sys, polyak.envs.single_env, polyak.core.space_check; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_half_precision_is_compared_with_bounds_that_it_cannot_hold():
    specs = obs_specs(Box([-np.inf], [np.inf]))
    check_range("obs", np.float16([65_504.0, -3.0]), specs[0].low, specs[0].high)
    with pytest.raises(ValueError, match=r"obs must be finite, got inf at \[1\]"):
        check_range("obs", np.float16([1.0, np.inf]), specs[0].low, specs[0].high)
