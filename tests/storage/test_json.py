import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polyak.storage.files import dump_json, parse_json
from polyak.storage.json import DTYPES, MAX_FILL_BYTES, decode, encode

NATIVE = [dtype for dtype in DTYPES.values() if dtype.kind in "biufc" and dtype.isnative and "8_" not in str(dtype)]
ARRAYS = st.sampled_from(NATIVE).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=5)))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | ARRAYS,
    lambda part: (
        st.lists(part, max_size=3)
        | st.lists(part, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(["$int", "$class", "a"]), part, max_size=3)
    ),
    max_leaves=10,
)


def through_json(value):
    return decode(parse_json(dump_json(encode(value, "x"), "x"), "x"), "x")


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(VALUES)
@settings(deadline=None, max_examples=200)
def test_values_survive_a_round_trip_with_type_and_bits(value):
    assert same(through_json(value), value)


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_of_every_dtype_come_back(name):
    array = np.array([0, 1, 1, 0, 1, 1] * 20).astype(DTYPES[name]).reshape(4, 30)
    assert same(through_json(array), array)
    assert same(through_json(array[::2, ::-1]), np.ascontiguousarray(array[::2, ::-1]))
    assert same(through_json(array[0, 1]), array[0, 1])


def test_large_arrays_take_the_shortest_form():
    image = np.zeros((84, 84), np.uint8)
    assert encode(image, "x") == {"$array": {"dtype": "uint8", "shape": [84, 84], "fill": 0}}
    assert "base64" in encode(np.arange(1000.0), "x")["$array"]
    assert encode(np.float32([0.5, -np.inf]), "x")["$array"]["values"] == [0.5, {"$float": "-inf"}]
    signs = np.zeros(100, np.float32)
    signs[3] = -0.0
    assert same(through_json(signs), signs)


def test_a_generator_s_state_comes_back():
    generator = np.random.Generator(np.random.PCG64(3))
    other = np.random.Generator(np.random.PCG64(4))
    other.bit_generator.state = through_json(generator.bit_generator.state)
    assert generator.integers(1 << 60) == other.integers(1 << 60)
    twister = np.random.RandomState(3).get_state()
    assert same(through_json(twister), twister)


def test_integers_of_any_size_come_back():
    assert through_json([2**53, -(2**64), 10**5000]) == [2**53, -(2**64), 10**5000]


def test_scalar_jax_arrays_become_numbers():
    assert encode({"a": jnp.float32(0.5), "b": jnp.int32(3), "c": jnp.array(True)}, "x") == {"a": 0.5, "b": 3, "c": True}
    assert same(through_json(jnp.arange(3)), np.arange(3, dtype=np.int32))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (print, "builtin_function"),
        (object(), "object"),
        ({1, 2}, "set"),
        (np.array(["a"]), "ndarray"),
        (np.array([None]), "ndarray"),
        (np.zeros(2, ">f4"), "ndarray"),
        (np.zeros(2, "M8[s]"), "ndarray"),
        (1j, "complex"),
        (jax.random.key(0), "PRNGKeyArray"),
        (int, "type"),
    ],
)
def test_unsupported_value_raises_with_its_path(value, name):
    with pytest.raises(TypeError, match=rf"meta\.env\[1\]: must be dicts, lists, .*, got a {name}"):
        encode({"env": [0, value]}, "meta")


def test_recursive_list_raises():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="meta: nested too deeply, or contains itself"):
        encode(loop, "meta")


@pytest.mark.parametrize(
    "data",
    [
        {"$int": "12"},
        {"$int": 12},
        {"$int": "0x1__1"},
        {"$float": "1.0"},
        {"$float": ["nan"]},
        {"$tuple": 3},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$bytes": "?"},
        {"$bytes": 3},
        {"$dtype": "object"},
        {"$dtype": "O"},
        {"$array": {"dtype": "object", "shape": [1], "base64": ""}},
        {"$array": {"dtype": "float32", "shape": [2], "base64": "AAAA"}},
        {"$array": {"dtype": "float32", "shape": [-1], "base64": ""}},
        {"$array": {"dtype": "float32", "shape": [1.0], "values": [0]}},
        {"$array": {"dtype": "float32", "shape": [True], "values": [0]}},
        {"$array": {"dtype": "float32", "shape": [2], "values": [0]}},
        {"$array": {"dtype": "float32", "shape": [1], "values": ["1.0"]}},
        {"$array": {"dtype": "float32", "shape": [1], "values": [1e300]}},
        {"$array": {"dtype": "uint8", "shape": [1], "values": [256]}},
        {"$array": {"dtype": "uint8", "shape": [1], "values": [0.5]}},
        {"$array": {"dtype": "bool", "shape": [1], "values": [2]}},
        {"$array": {"dtype": "uint8", "shape": [1]}},
        {"$array": {"dtype": "uint8", "shape": [1], "values": [1], "fill": 1}},
        {"$array": {"shape": [1], "values": [1]}},
        {"$array": []},
        {"$int": "0x1", "more": 1},
        {"$call": "os.system"},
        {"$class": "PPO"},
        {"$unsupported": "<function>"},
    ],
)
def test_malformed_tags_raise_with_their_path(data):
    with pytest.raises(ValueError, match=r"meta\.a"):
        decode({"a": data}, "meta")


@pytest.mark.parametrize("shape", [[2**60], [2**40], [2**47, 2**47], [MAX_FILL_BYTES + 1], [2**16, 2**16]])
def test_a_declared_shape_is_rejected_before_it_is_allocated(shape):
    for form in ({"fill": 0}, {"base64": ""}, {"values": []}):
        with pytest.raises(ValueError, match="meta"):
            decode({"$array": {"dtype": "uint8", "shape": shape, **form}}, "meta")


def test_many_fills_together_are_rejected():
    one = {"$array": {"dtype": "uint8", "shape": [MAX_FILL_BYTES // 16], "fill": 0}}
    with pytest.raises(ValueError, match="too large to be filled"):
        decode([one] * 17, "meta")
