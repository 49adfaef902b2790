"""Spaces: what they refuse, how they come from Gymnasium, and how an agent's action becomes the environment's."""

import copy

import gymnasium.spaces as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.core.gymnasium_spaces import from_gymnasium, to_gymnasium
from polyak.core.spaces import (
    Box,
    Dict,
    Discrete,
    EnvSpec,
    MultiBinary,
    MultiDiscrete,
    Tuple,
    leaf_spaces,
    map_space,
    zeros,
)
from polyak.core.spec_difference import difference

OBS = Box([0.0], [1.0])


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Box([0.0], [1.0, 2.0]), ValueError, r"low has shape \(1,\), high \(2,\)"),
        (lambda: Box([2.0], [1.0]), ValueError, "low must not be above high"),
        (lambda: Box([np.nan], [1.0]), ValueError, "nor either NaN"),
        (lambda: Box(np.zeros(0), np.zeros(0)), ValueError, "has no element"),
        (lambda: Box([0.0], [1.0], dtype="U1"), TypeError, "must be a number type"),
        (lambda: Discrete(0), ValueError, "n must be a positive int32, got 0"),
        (lambda: Discrete(2**31), ValueError, "n must be a positive int32, got 2147483648"),
        (lambda: MultiDiscrete((2, 2**40)), ValueError, "nvec must be a flat, non-empty vector of positive int32"),
        (lambda: Box("a", 1.0), TypeError, "Box: low must be numbers, got 'a'"),
        (lambda: Box(0.5, 1, (2,), np.int32), ValueError, "Box: low must be integers in .* with dtype=int32, got 0.5"),
        (lambda: Box(-1, 255, (2,), np.uint8), ValueError, r"low must be integers in \[0, 255\] with dtype=uint8, got -1"),
        (lambda: Box(0, np.inf, (2,), np.int32), ValueError, "high must be integers in .* got inf"),
        (lambda: Box(0, 2.0**63, (2,), np.int64), ValueError, "high must be integers in .* got 9.2"),
        (lambda: Box(0, np.float32([2**31]), dtype=np.int32), ValueError, "high must be integers in .* got array"),
        (lambda: Discrete(2.5), ValueError, "n must be a positive int32, got 2.5"),
        (lambda: Discrete(3, 1.5), ValueError, "Discrete: start must be an integer, got 1.5"),
        (lambda: MultiDiscrete((2, 3), (0.5, 1)), ValueError, "MultiDiscrete: start must be integers"),
        (lambda: MultiDiscrete(()), ValueError, "non-empty"),
        (lambda: MultiDiscrete((2, 0)), ValueError, "positive"),
        (lambda: MultiDiscrete((2, 3), (1,)), ValueError, "start has 1 entries, nvec 2"),
        (lambda: MultiBinary((0,)), ValueError, "must be positive"),
        (lambda: Dict({}), ValueError, "at least one key"),
        (lambda: Dict({"a/b": OBS, "a": Dict({"b": OBS})}), ValueError, "paths must be unique, got 'a/b' twice"),
        (lambda: Tuple(()), ValueError, "at least one entry"),
        (lambda: EnvSpec(OBS, Discrete(2), action_scaling="squash"), ValueError, "'clip' or 'rescale', got 'squash'"),
        (
            lambda: EnvSpec(OBS, Dict({"x": Box([0.0], [np.inf])}), action_scaling="rescale"),
            ValueError,
            "needs finite bounds.*at action 'x'",
        ),
    ],
)
def test_a_bad_space_is_rejected(make, error, says, unchecked):
    with pytest.raises(error, match=says):
        make()


def test_a_box_with_equal_bounds_is_a_space():
    assert Box([1.0], [1.0]).bounded


def test_bounds_may_be_integers_beyond_64_bits_where_floats_hold_them():
    assert Box(-(2**70), 2**70, (2,)).high[0] == np.float32(2**70)
    assert Box(-(2**31), 2**31 - 1, (2,), np.int32).high[0] == 2**31 - 1


def test_a_bound_of_minus_zero_is_zero():
    assert Box(-0.0, 1.0, (2,)) == Box(0.0, 1.0, (2,))


def test_bounds_of_integers_are_printed_in_full():
    assert str(Box(0, 2**31 - 1, (2,), np.int32)) == "Box(0, 2147483647, shape=(2,), dtype=int32)"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Box([0, 0, 0, 0], [1, 1, 1, 1]), Box([0, 0, 0, 0], [1, 1, 1, 2]), ("obs.high[3]", 1.0, 2.0)),
        (Box([[0, 0]], [[9, 9]], dtype=np.uint8), Box([[0, 5]], [[9, 9]], dtype=np.uint8), ("obs.low[0, 1]", 0, 5)),
        (Box(0, 1), Box(0, 3), ("obs.high", 1.0, 3.0)),
        (Dict({"a": OBS, "b": Discrete(2)}), Dict({"a": OBS, "b": Discrete(3)}), ("obs['b']", Discrete(2), Discrete(3))),
        (Box([0], [1]), Box([0, 0], [1, 1]), ("obs", Box([0], [1]), Box([0, 0], [1, 1]))),
        (Dict({"0": OBS}), Tuple((OBS,)), ("obs", Dict({"0": OBS}), Tuple((OBS,)))),
    ],
)
def test_the_first_difference_of_two_spaces_is_named(one, other, expected):
    assert difference(EnvSpec(one, Discrete(2)), EnvSpec(other, Discrete(2))) == expected
    assert difference(EnvSpec(one, Discrete(2)), EnvSpec(one, Discrete(2))) is None


def test_spaces_are_equal_and_hash_by_value():
    a = Dict({"x": Box([0.0], [1.0]), "y": Discrete(2)})
    b = Dict({"y": Discrete(2), "x": Box([0.0], [1.0])})
    assert a == b and hash(a) == hash(b)
    assert a != Dict({"x": Box([0.0], [2.0]), "y": Discrete(2)})
    assert Box([0.0], [1.0]) != Box([0.0], [1.0], dtype=np.float16)
    assert Discrete(2) != Discrete(2, 1)
    spec = EnvSpec(a, Discrete(2))
    assert spec == EnvSpec(b, Discrete(2)) and hash(spec) == hash(EnvSpec(b, Discrete(2)))


def test_a_copy_takes_no_hash_along_since_another_process_hashes_otherwise():
    space = Dict({"x": Box([0.0], [1.0])})
    kept = hash(space)
    copied = copy.deepcopy(space)
    assert "_hash" not in vars(copied) and copied == space and hash(copied) == kept


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (gym.Box(-1.0, 1.0, (2,), np.float32), Box([-1.0, -1.0], [1.0, 1.0])),
        (gym.Box(-1.0, np.inf, (2,), np.float64), Box([-1.0, -1.0], [np.inf, np.inf])),
        (gym.Box(0, 255, (2,), np.uint8), Box([0, 0], [255, 255], dtype=np.uint8)),
        (gym.Box(-5, 2**40, (1,), np.int64), Box([-5], [2**31 - 1], dtype=np.int32)),
        (gym.Box(0, 2**63, (1,), np.uint64), Box([0], [2**32 - 1], dtype=np.uint32)),
        (gym.Discrete(3, start=-1), Discrete(3, -1)),
        (gym.MultiDiscrete([2, 3], start=[1, 0]), MultiDiscrete((2, 3), (1, 0))),
        (gym.MultiBinary((2, 2)), MultiBinary((2, 2))),
        (
            gym.Dict({"b": gym.Discrete(2), "a": gym.Tuple((gym.Discrete(3), gym.MultiBinary(2)))}),
            Dict({"a": Tuple((Discrete(3), MultiBinary((2,)))), "b": Discrete(2)}),
        ),
    ],
)
def test_a_supported_gymnasium_space_becomes_ours(space, expected):
    assert from_gymnasium(space) == expected


def test_keys_of_a_gymnasium_dict_must_be_strings():
    space = gym.Dict({"a": gym.Dict({1: gym.Discrete(2)})})
    with pytest.raises(ValueError, match=r"obs\['a'\]: the keys of a Dict must be strings, got 1; rename it in"):
        from_gymnasium(space, "obs")


@pytest.mark.parametrize("space", [gym.Text(5), gym.Graph(gym.Box(0, 1), None), gym.Sequence(gym.Discrete(2))])
def test_an_unsupported_space_is_rejected_by_name_and_place(space):
    nested = gym.Dict({"words": gym.Tuple((gym.Discrete(2), space))})
    with pytest.raises(TypeError, match=rf"obs\['words'\]\[1\]: {type(space).__name__} is not supported; supported are Box"):
        from_gymnasium(nested, "obs")


@pytest.mark.parametrize("space", [gym.MultiDiscrete(np.array([[2, 3], [4, 5]])), gym.Box(0, 1, (0,))])
def test_a_space_without_a_flat_shape_or_an_element_is_rejected_with_its_place(space):
    with pytest.raises(ValueError, match=r"action space: (MultiDiscrete|Box): "):
        from_gymnasium(space, "action space")


@pytest.mark.parametrize(
    "space",
    [
        Box([-1.0, 0.0], [1.0, np.inf]),
        Discrete(4, 2),
        MultiDiscrete((2, 3), (5, 6)),
        MultiBinary((2, 3)),
        Dict({"x": Tuple((Discrete(2), Box([0], [9], dtype=np.int16)))}),
    ],
)
def test_a_space_survives_the_way_to_gymnasium_and_back(space):
    assert from_gymnasium(to_gymnasium(space)) == space
    assert to_gymnasium(space).contains(jax.tree.map(np.asarray, from_start(space)))


def from_start(space):
    """A value of the space in the environment's terms."""
    smallest = {Box: lambda s: s.low, Discrete: lambda s: np.int64(s.start), MultiDiscrete: lambda s: np.array(s.start)}
    return map_space(lambda s: smallest.get(type(s), lambda s: np.zeros(s.shape, s.dtype))(s), space)


def test_zeros_and_leaves_follow_the_tree():
    space = Dict({"b": Tuple((Discrete(2), MultiBinary((3,)))), "a": Box([0.0, 0.0], [1.0, 1.0])})
    value = zeros(space, (5,))
    assert value["a"].shape == (5, 2) and value["a"].dtype == np.float32
    assert value["b"][0].shape == (5,) and value["b"][0].dtype == np.int32
    assert value["b"][1].shape == (5, 3) and value["b"][1].dtype == np.int8
    assert [path for path, _ in leaf_spaces(space)] == ["a", "b/0", "b/1"]
    assert list(leaf_spaces(Discrete(2))) == [("", Discrete(2))]


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_native_action_counts_from_the_start(xp, batch):
    spec = EnvSpec(OBS, Tuple((Discrete(3, 7), MultiDiscrete((2, 2), (0, -4)), MultiBinary((2,)))))
    action = (xp.zeros(batch, xp.int32), xp.ones((*batch, 2), xp.int32), xp.ones((*batch, 2), xp.int8))
    one, several, bits = spec.native_action(action)
    np.testing.assert_array_equal(one, np.full(batch, 7))
    np.testing.assert_array_equal(several, np.broadcast_to([1, -3], (*batch, 2)))
    np.testing.assert_array_equal(bits, np.ones((*batch, 2)))
    assert one.dtype == np.int32 and several.dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(
    low=st.floats(-100, 99, width=32),
    width=st.floats(0.125, 50, width=32),
    # XLA takes subnormal numbers for 0.
    action=st.lists(st.floats(-300, 300, width=32, allow_subnormal=False), min_size=2, max_size=2),
    scaling=st.sampled_from(["clip", "rescale"]),
    on_jax=st.booleans(),
)
def test_native_action_lies_in_the_box_and_matches_the_formula(low, width, action, scaling, on_jax):
    box = Box([low, low], [low + width] * 2)
    array = np.array([action], np.float32)
    native = np.asarray(EnvSpec(OBS, box, action_scaling=scaling).native_action(jnp.asarray(array) if on_jax else array))
    assert native.dtype == np.float32 and native.shape == (1, 2)
    assert np.all(native >= box.low) and np.all(native <= box.high)
    if scaling == "clip":
        np.testing.assert_array_equal(native, np.clip(array, box.low, box.high))
    else:
        unit = (np.clip(array.astype(np.float64), -1, 1) + 1) / 2
        np.testing.assert_allclose(native, box.low + unit * (np.float64(box.high) - box.low), rtol=1e-5, atol=1e-4)


def test_rescaling_reaches_both_bounds_exactly_and_the_middle():
    spec = EnvSpec(OBS, Box([-3.0, 0.1], [5.0, 0.7]), action_scaling="rescale")
    ends = spec.native_action(np.array([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]], np.float32))
    np.testing.assert_array_equal(ends[:2], np.array([[-3.0, 0.1], [5.0, 0.7]], np.float32))
    np.testing.assert_allclose(ends[2], [1.0, 0.4], rtol=1e-6)


def test_rescaling_to_the_widest_box_does_not_overflow():
    most = float(np.finfo(np.float32).max)
    spec = EnvSpec(OBS, Box([-most], [most]), action_scaling="rescale")
    native = spec.native_action(np.array([[-1.0], [0.0], [1.0]], np.float32))
    np.testing.assert_array_equal(native, np.array([[-most], [0.0], [most]], np.float32))


def test_a_box_of_integers_takes_the_nearest():
    native = EnvSpec(OBS, Box([0], [10], dtype=np.int32)).native_action(jnp.array([[2.6], [99.0]]))
    assert native.dtype == np.int32
    np.testing.assert_array_equal(native, [[3], [10]])


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("scaling", ["clip", "rescale"])
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (np.int32, -(2**31), 2**31 - 1),
        (np.int32, 0, 2**25 - 1),
        (np.int32, 2**25 + 1, 2**25 + 3),
        (np.uint32, 0, 2**32 - 1),
        (np.uint8, 0, 255),
        (np.int8, -128, 127),
    ],
)
def test_the_ends_of_a_wide_box_of_integers_are_reached_and_not_passed(xp, scaling, dtype, low, high):
    box = Box(low, high, (3,), dtype)
    spec = EnvSpec(OBS, box, action_scaling=scaling)
    ends = (-1.0, 1.0) if scaling == "rescale" else (low, high)
    native = np.asarray(spec.native_action(xp.asarray([[ends[0], (ends[0] + ends[1]) / 2, ends[1]]], xp.float32)))
    assert native.dtype == dtype and native[0, 0] == low and native[0, 2] == high
    assert low <= native[0, 1] <= high and abs(int(native[0, 1]) - (low + high) / 2) <= max(1, (high - low) * 2**-23)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Box(-1, 1, (6,)), gym.Box(-1, 1, (6,))),
        (Box(0, 255, (8, 8, 3), np.uint8), gym.Box(0, 255, (8, 8, 3), np.uint8)),
        (Box(-np.ones(2, np.float32), np.ones(2, np.float32)), gym.Box(-np.ones(2, np.float32), np.ones(2, np.float32))),
        (Box(-np.inf, np.inf, shape=[2], dtype=np.float32), gym.Box(-np.inf, np.inf, (2,))),
    ],
)
def test_a_box_is_made_as_in_gymnasium(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert (ours.low == theirs.low).all() and (ours.high == theirs.high).all()


def test_a_wrong_shape_of_a_box_is_rejected(unchecked):
    with pytest.raises(TypeError, match="'type' object is not iterable"):
        Box(0, 255, np.uint8)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        Box(0, 1, (3.0,))
    assert Box(0, 1, np.array([3])).shape == (3,)
    with pytest.raises(ValueError, match=r"could not be broadcast .*\(2,\) *and requested shape \(3,\)"):
        Box([0, 0], [1, 1], (3,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnvSpec(OBS, gym.Discrete(2)), r"action must be a space of .* \(see gymnasium_spaces\), got Discrete\(2\)$"),
        (lambda: EnvSpec(gym.Box(0, 1, (3,)), Discrete(2)), r"EnvSpec: obs must be a space of polyak.core.spaces .* got Box\("),
        (lambda: EnvSpec(Dict({"a": Tuple((Discrete(2), 3))}), Discrete(2)), r"obs must be a space .* got 3 at 'a/1'$"),
        (lambda: EnvSpec(OBS, "Discrete"), r"EnvSpec: action must be a space .* got 'Discrete'$"),
    ],
)
def test_a_spec_is_made_of_polyaks_spaces(make, message, unchecked):
    with pytest.raises(TypeError, match=message):
        make()
