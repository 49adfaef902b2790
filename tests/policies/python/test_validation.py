"""What is accepted of Python's answers, what is cast, and how everything else is refused."""

import jax
import numpy as np
import pytest

from polyak.core.space_check import action_specs
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple, unflatten
from polyak.core.types import PolicyStep
from polyak.policies.python.validation import OutputChecker, describe_masked_actions, initial_carry_values, specs_like

OBS = Box([-1.0], [1.0])
TORQUE = Box([-2.0, -1.0], [2.0, 1.0])
TREE = Dict({"gear": Discrete(3), "pair": Tuple((Box([-1.0], [1.0]), MultiDiscrete((2, 4))))})


def answers(action, clip=False, check=True, **spec):
    specs = unflatten(action, action_specs(EnvSpec(OBS, action, **spec)))
    return OutputChecker("rule", "action", specs, clip=clip, check=check)


@pytest.mark.parametrize(
    ("space", "value", "wanted"),
    [
        (Discrete(3), np.array([0, 2], np.int64), np.array([0, 2], np.int32)),
        (Discrete(3), np.array([0, 2], np.uint8), np.array([0, 2], np.int32)),
        (Discrete(3), np.array([True, False]), np.array([1, 0], np.int32)),
        (Discrete(3), [0, 2], np.array([0, 2], np.int32)),
        (Discrete(3, start=5), [0, 2], np.array([0, 2], np.int32)),
        # As classifiers label.
        (Discrete(3), np.array([0.0, 2.0]), np.array([0, 2], np.int32)),
        (Discrete(3), [0.0, 2.0], np.array([0, 2], np.int32)),
        (MultiBinary((2,)), np.ones((2, 2), bool), np.ones((2, 2), np.int8)),
        (TORQUE, np.full((2, 2), 0.5), np.full((2, 2), 0.5, np.float32)),
        (TORQUE, np.full((2, 2), 0.5, np.float16), np.full((2, 2), 0.5, np.float32)),
        (TORQUE, [[1, 0], [0, 1]], np.array([[1, 0], [0, 1]], np.float32)),
        # The nearest float32 is the bound itself.
        (TORQUE, np.full((2, 2), 1.00000001), np.ones((2, 2), np.float32)),
    ],
)
def test_documented_casts_are_made(space, value, wanted):
    got = answers(space).batch(value, 2)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", [1, 8, 9, 64])
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", ">i4", "f4", "f8"])
def test_bounds_hold_for_every_width_and_number_of_numbers(size, dtype):
    good, many = np.arange(size) % 100, answers(Discrete(300)) if dtype[0] != "f" else answers(Box(0.0, 299.0))
    np.testing.assert_array_equal(many.batch(good.astype(dtype), size), good)
    for wrong in (-1, 300) if np.dtype(dtype).itemsize > 1 else (-1,):
        bad = good.copy()
        bad[size // 2] = wrong
        with pytest.raises(ValueError, match=r"must be in \[0, 299\]"):
            many.batch(bad.astype(dtype), size)


@pytest.mark.parametrize(
    ("space", "value", "error", "says"),
    [
        (Discrete(3), np.array([0.5, 1.0]), TypeError, "rule: action must have dtype int32 (integers or bools), got float64"),
        (TORQUE, np.ones((2, 2), bool), TypeError, "rule: action must have dtype float32 (floats or integers), got bool"),
        (TORQUE, np.ones((2, 2), complex), TypeError, "got complex128"),
        (Discrete(3), None, TypeError, "rule: action must be an array of int32, got None"),
        (Discrete(3), (0, 1), TypeError, "rule: action must be an array of int32, got (0, 1)"),
        (Discrete(3), (np.array([0, 1]),), TypeError, "must be an array of int32, got (array([0, 1]),)"),
        (Discrete(3), "01", TypeError, "rule: action must be an array of int32, got '01'"),
        (Discrete(3), [[0], [1, 2]], TypeError, "rule: action is not an array"),
        (
            Discrete(3),
            [object(), object()],
            TypeError,
            "rule: action must have dtype int32 (integers or bools), got list [<object",
        ),
        (Discrete(3), np.int32(1), ValueError, "rule: action must have shape (2,), got ()"),
        (TORQUE, np.zeros((2, 1)), ValueError, "rule: action must have shape (2, 2), got (2, 1)"),
        (TORQUE, np.zeros(2), ValueError, "rule: action must have shape (2, 2), got (2,)"),
        (TORQUE, 0.5, ValueError, "rule: action must have shape (2, 2), got ()"),
        (TREE, np.zeros(2), ValueError, "rule: action has the wrong structure: got array([0., 0.])"),
        (TREE, {"gear": [0, 1]}, ValueError, "wanted {'gear': 'int32[]', 'pair': ('float32[1]', 'int32[2]')}"),
        (
            TREE,
            {"gear": [0, 1], "pair": (np.zeros((2, 1)), np.zeros((2, 3), int))},
            ValueError,
            "rule: action 'pair/1' must have shape (2, 2), got (2, 3)",
        ),
    ],
)
def test_outputs_of_wrong_shape_kind_or_structure_are_rejected(space, value, error, says):
    with pytest.raises(error) as caught:
        answers(space).batch(value, 2)
    assert says in str(caught.value)


BEYOND = [
    (Discrete(3), [0, 3], [0, 2], 1),
    (Discrete(3), [-1, 10**12], [0, 2], 2),
    (MultiDiscrete((2, 4)), [[1, 3], [2, 4]], [[1, 3], [1, 3]], 2),
    (MultiBinary((1,)), [[1], [7]], [[1], [1]], 1),
    (TORQUE, [[0.0, 1e6], [-3.0, 0.0]], [[0.0, 1.0], [-2.0, 0.0]], 2),
    (TORQUE, [[0.0, np.inf], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]], 1),
    (Box([-1.0], [1.0]), [[1e300], [0.5]], [[1.0], [0.5]], 1),
    (Box([0.0], [255.0], dtype=np.uint8), [[256], [3]], [[255.0], [3.0]], 1),
]


@pytest.mark.parametrize(("space", "value", "clipped", "count"), BEYOND)
def test_actions_out_of_bounds_raise_or_are_clipped_and_counted(space, value, clipped, count):
    with pytest.raises(ValueError, match=r"rule: action must be (in \[.*\]|finite), got .* in environment [01]"):
        answers(space).batch(value, 2)
    clipping = answers(space, clip=True)
    np.testing.assert_array_equal(clipping.batch(value, 2), np.array(clipped, np.float32))
    assert clipping.clipped == count


@pytest.mark.parametrize("clip", [False, True])
def test_nan_action_raises_with_and_without_clipping(clip):
    value = np.zeros((9, 2))
    value[4, 1] = np.nan
    with pytest.raises(ValueError, match=r"rule: action must be in \[.*\], got nan in environment 4"):
        answers(TORQUE, clip=clip).batch(value, 9)


def test_infinite_actions_of_an_unbounded_box_are_rejected():
    with pytest.raises(ValueError, match="must be"):
        answers(Box([-np.inf], [np.inf])).batch([[np.inf]], 1)


def test_actions_of_a_rescaled_box_must_lie_in_minus_one_to_one():
    rescaled = answers(TORQUE, action_scaling="rescale")
    assert rescaled.batch([[1.0, -1.0]], 1).tolist() == [[1.0, -1.0]]
    with pytest.raises(ValueError, match="must be"):
        rescaled.batch([[1.5, 0.0]], 1)


def test_without_checks_values_pass_but_shapes_do_not():
    loose = answers(TORQUE, check=False)
    assert np.isnan(loose.batch([[np.nan, 9.0]], 1)[0, 0])
    with pytest.raises(ValueError, match="shape"):
        loose.batch([[0.0]], 1)


def test_unbatched_outputs_are_stacked_and_errors_name_the_environment():
    one = answers(TREE)
    row = {"gear": 2, "pair": (np.array([0.5]), [1, 3])}
    stack = one.stack([one.row(row, i) for i in range(3)])
    assert jax.tree.map(np.shape, stack) == {"gear": (3,), "pair": ((3, 1), (3, 2))}
    with pytest.raises(ValueError, match=r"rule: action 'gear' of environment 1 must have shape \(\), got \(2,\)"):
        one.row(row | {"gear": [0, 1]}, 1)
    with pytest.raises(ValueError, match=r"must be in .* in environment 2"):
        one.stack([one.row(row | {"gear": 3 if i == 2 else 0}, i) for i in range(3)])


def test_declared_carry_defines_specs_and_initial_values():
    spec = {"h": Box([-1.0] * 2, [1.0] * 2), "n": jax.ShapeDtypeStruct((), np.int32), "x": np.array([3, 4], np.int8)}
    carry = initial_carry_values(spec, 2)
    assert carry["h"].shape == (2, 2) and carry["n"].dtype == np.int32
    assert carry["x"].tolist() == [[3, 4], [3, 4]]
    held = OutputChecker("rule", "carry", specs_like(spec))
    assert jax.tree.map(np.shape, held.batch(carry, 2)) == jax.tree.map(np.shape, carry)
    with pytest.raises(ValueError, match=r"rule: carry 'h' must have shape \(2, 2\), got \(2, 3\)"):
        held.batch(carry | {"h": np.zeros((2, 3))}, 2)
    with pytest.raises(TypeError, match=r"rule: carry 'n' must have dtype int32 \(integers or bools\), got float64"):
        held.batch(carry | {"n": np.zeros(2)}, 2)
    with pytest.raises(ValueError, match="must be"):
        held.batch(carry | {"x": np.full((2, 2), 300)}, 2)


def test_outputs_are_copied():
    one = answers(Discrete(3))
    mine = np.zeros(2, np.int32)
    whole, rows = one.batch(mine, 2), [one.row(mine[0:1].reshape(()), 0)]
    mine[:] = 2
    assert whole.tolist() == [0, 0] and one.stack(rows).tolist() == [0]


def test_64_bit_declarations_become_32_bit_and_non_arrays_are_rejected():
    held = OutputChecker("rule", "carry", specs_like({"x": np.zeros(3), "n": np.array(7)}))
    carry = initial_carry_values({"x": np.zeros(3), "n": np.array(7)}, 2)
    assert carry["x"].dtype == np.float32 and carry["n"].dtype == np.int32 and carry["n"].tolist() == [7, 7]
    assert jax.tree.map(lambda x: x.dtype, held.batch(carry, 2)) == {"x": np.float32, "n": np.int32}
    with pytest.raises(TypeError, match=r"arrays of numbers at 'n', e.g. np.int32\(0\), got 0"):
        specs_like({"n": 0})


def test_carry_that_overflows_float32_is_rejected():
    held = OutputChecker("rule", "carry", specs_like(np.float32(0)))
    assert held.batch(np.array([1.0, -np.inf]), 2).tolist() == [1.0, -np.inf]
    with pytest.raises(ValueError, match="rule: carry holds numbers beyond float32 in environment 1"):
        held.batch(np.array([1.0, -1e300]), 2)


def test_masked_actions_are_described_except_in_rows_that_allow_none():
    spec = EnvSpec(OBS, TREE, has_action_mask=True)
    action = {"gear": np.array([2, 0, 2]), "pair": (np.zeros((3, 1)), np.array([[1, 0], [0, 3], [1, 3]]))}
    gear, lever = np.ones((3, 3), bool), np.ones((3, 6), bool)

    def said():
        return describe_masked_actions(spec, action, {"gear": gear, "pair": (None, lever)})

    assert said() == ""
    gear[2], lever[:, 0], lever[1, 5] = False, False, False
    assert said() == "'pair/1': array([0, 3]) in environment 1"
    gear[0, 2] = False
    assert said() == "'gear': np.int64(2) in environment 0; 'pair/1': array([0, 3]) in environment 1"


def _generate():
    yield 0


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda: np.ma.masked_array([0, 1], [True, False]), r"got masked_array\("),
        (_generate, "got <generator object _generate "),
        (lambda: PolicyStep(np.array([0, 1])), r"got PolicyStep\("),
    ],
)
def test_outputs_that_are_not_arrays_are_rejected(returned, says):
    with pytest.raises(TypeError, match="rule: action must be an array of int32, " + says):
        answers(Discrete(3)).batch(returned(), 2)


def test_fractional_or_nan_discrete_actions_are_rejected():
    for value in (np.array([0.0, np.nan]), np.array([0.0, 1e30]), [0.0, 1.5]):
        with pytest.raises(TypeError, match="rule: action must have dtype int32"):
            answers(Discrete(3)).batch(value, 2)
