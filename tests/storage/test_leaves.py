import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.struct import struct
from polyak.storage.json import DTYPES
from polyak.storage.leaves import KEY_WORDS, CheckpointError, Leaf, differences, flatten, from_host, is_finite, to_host


@struct
class State:
    params: dict
    count: int


def described(tree, prefix=""):
    return [leaf for leaf, _ in flatten(tree, prefix)[0]]


def test_leaves_are_named_as_jax_names_them():
    state = State({"kernel": (jnp.zeros((2, 3)), np.uint8(3))}, 7)
    assert [(leaf.path, str(leaf)) for leaf in described(state, ".agent")] == [
        (".agent.params['kernel'][0]", "float32[2,3]"),
        (".agent.params['kernel'][1]", "uint8[]"),
        (".agent.count", "Python int"),
    ]


@pytest.mark.parametrize("impl", KEY_WORDS)
def test_keys_are_described_alike_as_arrays_and_as_shapes(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 5)
    shape = jax.eval_shape(lambda: keys)
    (leaf,), (abstract,) = described(keys), described(shape)
    assert leaf == abstract
    assert str(leaf) == f"key<{impl}>[5]"
    assert leaf.nbytes == to_host(keys).nbytes
    back = from_host(leaf, to_host(keys), shape)
    assert back.dtype == keys.dtype
    assert np.array_equal(jax.random.key_data(back), jax.random.key_data(keys))


@pytest.mark.parametrize("leaf", ["text", b"bytes", print, 1j, object(), np.array(["a"]), np.zeros(2, ">f4")])
def test_other_leaves_are_rejected_by_path(leaf):
    with pytest.raises(CheckpointError, match=r"\['a'\]\[0\] must be "):
        flatten({"a": [leaf]})


def test_shape_struct_is_rejected_on_save():
    tree = {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}
    assert [str(leaf) for leaf in described(tree)] == ["float32[3]"]
    with pytest.raises(CheckpointError, match=r"\['a'\] must be .*, got a ShapeDtypeStruct"):
        flatten(tree, concrete=True)


def test_a_path_that_cannot_be_printed_is_rejected():
    @jax.tree_util.register_pytree_with_keys_class
    class Odd:
        def tree_flatten_with_keys(self):
            return ((jax.tree_util.GetAttrKey("a\0b"), 1),), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls()

    with pytest.raises(CheckpointError, match="printable"):
        flatten(Odd())
    assert described({"a\0b": 1})[0].path == r"['a\x00b']"


def test_every_difference_has_a_line_with_both_sides():
    saved = described({"a": jnp.zeros((2, 3)), "b": jnp.zeros(3), "c": 1, "d": jax.random.key(0), "e": jnp.zeros(2)})
    wanted, _ = flatten({"a": jnp.zeros((3, 2)), "b": jnp.zeros(3, jnp.bfloat16), "c": 1.0, "d": jnp.zeros(()), "f": True})
    assert set(differences(saved, wanted)) == {
        "['a']: float32[2,3] in the checkpoint, expected float32[3,2]",
        "['b']: float32[3] in the checkpoint, expected bfloat16[3]",
        "['c']: Python int in the checkpoint, expected Python float",
        "['d']: key<threefry2x32>[] in the checkpoint, expected float32[]",
        "['e']: float32[2] in the checkpoint, not expected",
        "['f']: expected Python bool, missing in the checkpoint",
    }
    assert differences(saved, [(leaf, None) for leaf in saved]) == []


def test_long_list_of_differences_is_truncated():
    lines = differences([Leaf(f".{i}", "int", value=1) for i in range(1000)], [])
    assert len(lines) == 201
    assert lines[-1] == "and 800 more"


def test_a_dtype_that_jax_would_narrow_is_rejected():
    wide, _ = flatten({"a": jax.ShapeDtypeStruct((2,), np.dtype(np.float64))})
    (line,) = differences([leaf for leaf, _ in wide], wide)
    assert "['a']: float64[2] needs 64 bits in JAX" in line
    host, _ = flatten({"a": np.zeros(2)})
    assert differences([leaf for leaf, _ in host], host) == []


@pytest.mark.parametrize("name", DTYPES)
def test_only_floats_can_be_non_finite(name):
    assert is_finite(np.array([1, 1]).astype(DTYPES[name]))
    if name in ("bfloat16", "float16", "float32", "float64", "complex64", "float8_e5m2"):
        assert not is_finite(np.array([0, np.nan]).astype(DTYPES[name]))
        assert not is_finite(np.array([0, -np.inf]).astype(DTYPES[name]))


def test_a_leaf_from_a_file_has_a_buffer_of_its_own():
    raw = np.zeros(80, np.float32)
    # Aligned to 64 bytes, so that JAX would alias it.
    data = raw[-raw.ctypes.data // 4 % 16 :][:64]
    leaf = from_host(Leaf("", "array", dtype="float32", shape=(64,)), data, jnp.zeros(64))
    assert leaf.unsafe_buffer_pointer() != data.ctypes.data
