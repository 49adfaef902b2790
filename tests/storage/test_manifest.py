import contextlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.storage.leaves import CheckpointError, Leaf
from polyak.storage.manifest import (
    MAX_BYTES,
    MAX_LEAVES,
    Damage,
    Manifest,
    arrays_header,
    encode_meta,
    read_manifest_json,
    write_manifest,
)
from tests.mutated import mutated

LEAVES = (
    Leaf(".a", "array", dtype="float32", shape=(2, 3)),
    Leaf("['b']", "array", dtype="bfloat16", shape=()),
    Leaf(".none", "array", dtype="int8", shape=(0, 4)),
    Leaf(".keys", "key", shape=(3,), impl="threefry2x32"),
    Leaf(".odd", "array", dtype="int4", shape=(5,)),
    Leaf(".count", "int", value=2**70),
    Leaf(".rate", "float", value=0.1),
    Leaf(".flag", "bool", value=False),
)
SIZE = len(arrays_header(LEAVES)) + 24 + 2 + 24 + 5
MANIFEST = Manifest(1, "0.1.0", 12, LEAVES, SIZE, "0" * 64, {"platform": "cpu"}, {"a": (1, float("inf"))})
TEXT = write_manifest(MANIFEST)


def read(document):
    return read_manifest_json(json.dumps(document).encode(), "here", "0.1.0")


def test_a_manifest_is_read_back_as_it_was_written():
    assert read_manifest_json(TEXT, "here", "0.1.0") == MANIFEST


def test_arrays_file_is_valid_safetensors(tmp_path):
    from safetensors.flax import load_file

    data = np.arange(6, dtype=np.float32).tobytes() + np.array(2, jnp.bfloat16).tobytes() + bytes(24) + bytes(5)
    (tmp_path / "x").write_bytes(arrays_header(LEAVES) + data)
    arrays = load_file(tmp_path / "x")
    assert np.array_equal(arrays[".a"], np.arange(6).reshape(2, 3))
    assert arrays["['b']"] == 2
    assert {name: (str(a.dtype), a.shape) for name, a in arrays.items()} == {
        ".a": ("float32", (2, 3)),
        "['b']": ("bfloat16", ()),
        ".none": ("int8", (0, 4)),
        ".keys": ("uint32", (3, 2)),
        ".odd": ("uint8", (5,)),
    }


def test_a_newer_format_is_rejected_by_name():
    document = json.loads(TEXT) | {"format": 7, "library": "9.1"}
    with pytest.raises(
        CheckpointError, match=r"here: written by polyak 9\.1 \(format 7\), this is 0\.1\.0 \(format 2\); upgrade"
    ):
        read(document)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"format": "1"},
        {"format": True},
        {"library": "\x1b[2J"},
        {"step": -1},
        {"step": 1.0},
        {"leaves": {}},
        {"leaves": [3]},
        {"files": {}},
        {"files": {"arrays.safetensors": {"size": SIZE, "sha256": "0" * 63}}},
        {"files": {"arrays.safetensors": {"size": SIZE + 1, "sha256": "0" * 64}}},
        {"meta": []},
        {"meta": {"$int": "0x1"}},
        {"meta": {"a": {"$class": "os.system"}}},
        {"machine": None},
    ],
)
def test_a_malformed_manifest_is_damage(change):
    with pytest.raises(Damage, match="here"):
        read(json.loads(TEXT) | change)


@pytest.mark.parametrize(
    "change",
    [
        {"path": "a\0b"},
        {"path": "a\x1b[2J"},
        {"path": 3},
        {"path": "x" * 5000},
        {"kind": "object"},
        {"kind": "int"},
        {"dtype": "object"},
        {"dtype": "O8"},
        {"shape": [2, -3]},
        {"shape": [2**60, 2]},
        {"shape": [10**10]},
        {"shape": "23"},
        {"shape": None},
        {"path": "['b']"},
    ],
)
def test_a_malformed_leaf_is_damage(change):
    document = json.loads(TEXT)
    document["leaves"][0] |= change
    with pytest.raises(Damage, match="here"):
        read(document)


def test_a_million_leaves_are_rejected():
    document = json.loads(TEXT)
    document["leaves"] = [{"path": f".{i}", "kind": "int", "value": 1} for i in range(MAX_LEAVES + 1)]
    with pytest.raises(Damage, match=f"{MAX_LEAVES + 1} leaves"):
        read(document)


JUNK = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.just([])


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_mutated_manifest_raises_only_checkpoint_errors(data):
    with contextlib.suppress(CheckpointError):
        read(mutated(json.loads(TEXT), JUNK, data))


@given(st.integers(0, 8 * len(TEXT) - 1))
@settings(deadline=None, max_examples=100)
def test_flipped_bits_raise_only_checkpoint_errors(bit):
    text = bytearray(TEXT)
    text[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(CheckpointError):
        read_manifest_json(bytes(text), "here", "0.1.0")


def test_meta_that_is_not_plain_data_is_rejected():
    with pytest.raises(CheckpointError, match=r"meta\.env\[0\]: must be dicts, lists, .*, got a builtin_function"):
        encode_meta({"env": [print]})


def test_a_manifest_that_could_not_be_read_back_is_not_written():
    large = Manifest(1, "0.1.0", 1, (), 10, "0" * 64, {}, {"state": np.random.default_rng(0).bytes(MAX_BYTES)})
    with pytest.raises(CheckpointError, match="put large arrays in the tree"):
        write_manifest(large)
    deep = {}
    for _ in range(70):
        deep = {"a": deep}
    with pytest.raises(CheckpointError, match="nested more than 64 deep"):
        write_manifest(Manifest(1, "0.1.0", 1, (), 10, "0" * 64, {}, deep))
