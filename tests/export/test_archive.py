"""The file of an exported policy: whole or not there, read without running or allocating anything on its word."""

import io
import json
import struct
import zipfile
import zlib

import jax
import numpy as np
import pytest

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.export.archive import (
    FORMAT,
    HEADER,
    ONNX_HASH,
    Export,
    ExportError,
    from_members,
    read_export,
    seal_onnx,
    to_members,
    write_export,
)
from polyak.export.numpy_format import describe_spaces
from polyak.policies import numpy_reader
from tests.storage.test_security import payloads

SPEC = EnvSpec(Box([-np.inf], [np.inf]), Discrete(3, start=1), "Toy-v0")
ROW = {"obs": jax.ShapeDtypeStruct((1,), np.float32)}
EXPORT = Export("numpy", SPEC, ROW, {"action": jax.ShapeDtypeStruct((), np.int32)}, {"env": "Toy-v0"}, {"a.npy": b"bytes"})


@pytest.fixture
def path(tmp_path):
    write_export(tmp_path / "policy", EXPORT)
    return tmp_path / "policy"


def rewritten(path, change=lambda header: header, members=None, compression=zipfile.ZIP_STORED):
    """The file with another header or other members."""
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    found = {**found, **(members or {}), HEADER: json.dumps(change(json.loads(found[HEADER]))).encode()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in found.items():
            archive.writestr(name, data)


def test_what_is_written_is_read_again_and_always_the_same_bytes(path, tmp_path):
    assert read_export(path) == EXPORT
    write_export(tmp_path / "again", EXPORT)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"policy", "again"}


def test_arrays_come_back_and_objects_never():
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([True])}
    back = from_members(to_members(arrays), "x")
    assert all(np.array_equal(back[name], arrays[name]) and back[name].dtype == arrays[name].dtype for name in arrays)
    with pytest.raises(ExportError, match="x: is damaged: its arrays cannot be read"):
        from_members({"a.npy": payloads("marker")["npy"]}, "x")


def test_a_newer_format_is_rejected_by_name(path):
    rewritten(path, lambda header: header | {"polyak_export": FORMAT + 1})
    with pytest.raises(ExportError, match="policy: has format 2, this version reads 1; upgrade polyak"):
        read_export(path)


def array(name="obs", shape=(1,), dtype="float32"):
    return {"name": name, "shape": shape, "dtype": dtype}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda header: {"a": 1}, "header.json has no field polyak_export"),
        (lambda header: [], "header.json has no field polyak_export"),
        (lambda header: header | {"kind": "pickle"}, "header cannot be read: kind 'pickle'"),
        (lambda header: header | {"spec": {"$class": "Popen", "args": "ls"}}, "header cannot be read"),
        (lambda header: header | {"spec": {"$class": "Discrete", "n": 2}}, "spec a Discrete"),
        (lambda header: header | {"inputs": [{"name": "x", "shape": ["a"], "dtype": "f4"}]}, "header cannot be read"),
        (lambda header: header | {"inputs": 7}, "header cannot be read"),
        (lambda header: header | {"inputs": [array(name=5)]}, "an array has the name '5'"),
        (lambda header: header | {"inputs": [array(), array()]}, "an array has the name 'obs'"),
        (lambda header: header | {"inputs": [array(dtype="S1000000000")]}, "'obs' has the shape .* and the dtype .S1000000000"),
        (lambda header: header | {"inputs": [array(shape=[-1])]}, r"'obs' has the shape \(-1,\)"),
        (lambda header: header | {"inputs": [array(shape=[2**26 + 1])]}, "a row of 'obs' has more than 268435456 bytes"),
        (lambda header: header | {"inputs": [array(shape=[2])]}, r"inputs \[\('obs', \(2,\), 'f'\)\].*do not fit its spaces"),
        (lambda header: header | {"inputs": [array(name="x")]}, "do not fit its spaces"),
        (lambda header: header | {"inputs": [array(), array(name="carry")]}, "do not fit its spaces"),
        (lambda header: header | {"outputs": [array(name="action", shape=[])]}, "do not fit its spaces"),
        (lambda header: header | {"outputs": [*header["outputs"], array(name="carry")]}, "do not fit its spaces"),
        (lambda header: {k: v for k, v in header.items() if k != "about"}, "header cannot be read"),
        (lambda header: header | {"files": {}}, "its header names others"),
        (
            lambda header: header | {"files": {"a.npy": {"size": 5, "sha256": "0"}}},
            r"size or SHA-256 of a\.npy differ",
        ),
    ],
)
def test_a_header_that_does_not_hold_is_rejected(path, change, said):
    rewritten(path, change)
    with pytest.raises(ExportError, match=said):
        read_export(path)


def test_a_file_more_or_other_bytes_are_rejected(path):
    whole = path.read_bytes()
    rewritten(path, members={"b.npy": b"x"})
    with pytest.raises(ExportError, match=r"holds the files \['a.npy', 'b.npy'\], its header names others"):
        read_export(path)
    path.write_bytes(whole)
    rewritten(path, members={"a.npy": b"bytez"})
    with pytest.raises(ExportError, match=r"size or SHA-256 of a\.npy differ"):
        read_export(path)


def test_a_bomb_is_rejected_by_what_it_declares(path):
    rewritten(path, members={"a.npy": bytes(10**7)}, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**5
    with pytest.raises(ExportError, match="its members are compressed, or together larger than the file"):
        read_export(path)


def nested(path, count, size):
    """A zip archive of `count` stored members, each of which holds all the later ones and so many bytes."""
    data, entries = bytes(size), []
    for i in range(count):
        name = b"m%d.npy" % i
        sizes = (zlib.crc32(data), len(data), len(data), len(name))
        data = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 33, *sizes, 0) + name + data
        entries.append((sizes, name, len(data)))
    directory = b"".join(
        struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 33, *sizes, 0, 0, 0, 0, 0, len(data) - end) + name
        for sizes, name, end in entries
    )
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(data), 0)
    path.write_bytes(data + directory + end)


@pytest.mark.parametrize("load", [read_export, numpy_reader.load])
def test_members_that_overlap_are_rejected_by_what_they_declare(load, tmp_path):
    nested(tmp_path / "bomb", 3, 1000)
    with pytest.raises((ExportError, ValueError), match="its members are compressed, or together larger than the file"):
        load(tmp_path / "bomb")


@pytest.mark.parametrize("descr", ["'<f4'", "'S1000000000'", "'O'"])
def test_an_array_is_as_large_as_its_bytes(descr):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (10000000000,), }}".encode().ljust(117) + b"\n"
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(8)
    with pytest.raises(ValueError, match=r"reshape|buffer size|OBJECT"):
        numpy_reader.array_of(npy)


def test_the_reader_makes_no_actions_but_numbers(path):
    rewritten(path, lambda header: header | {"about": {"action": "box", "dtype": "S1000000000"}})
    with pytest.raises(ValueError, match="policy: its actions are S1000000000, which are no numbers"):
        numpy_reader.load(path)


@pytest.mark.parametrize("kind", payloads("x"))
def test_a_foreign_file_is_rejected_and_never_run(path, tmp_path, kind):
    marker = tmp_path / "marker"
    whole, payload = path.read_bytes(), payloads(marker)[kind]
    path.write_bytes(payload)
    with pytest.raises(ExportError, match="policy: is not a policy exported by polyak, or is damaged"):
        read_export(path)
    rewritten_bytes = io.BytesIO(whole)
    with zipfile.ZipFile(rewritten_bytes, "w") as archive:
        archive.writestr(HEADER, payload)
    path.write_bytes(rewritten_bytes.getvalue())
    with pytest.raises(ExportError, match="is not a policy exported by polyak"):
        read_export(path)
    assert not marker.exists()


def test_what_is_not_there_or_a_link_is_rejected(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    for name in ("link", "nothing"):
        with pytest.raises(ExportError, match=name):
            read_export(tmp_path / name)


def test_an_onnx_file_is_reported_as_one_and_its_hash_is_checked(path):
    whole = seal_onnx(b"\x08\x09\x12\x06polyak" + ONNX_HASH[0].encode() + b"\x12\x40" + ONNX_HASH[1].encode() + b"end")
    path.write_bytes(whole)
    with pytest.raises(ExportError, match="policy: is an ONNX file; open it with an ONNX runtime"):
        read_export(path)
    for damaged in (whole[:-1] + b"D", whole[:-1], whole.replace(b"sha256", b"sha255"), b"\x08\x09\x12\x06polyak"):
        path.write_bytes(damaged)
        with pytest.raises(ExportError, match="policy: is an ONNX file, but damaged or not from polyak"):
            read_export(path)


@pytest.mark.slow
def test_every_bit_flip_of_a_file_for_the_numpy_reader_is_noticed_or_changes_nothing(tmp_path):
    spec = EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0], dtype=np.float32))
    weights = {"head_kernel": np.full((1, 1), 0.5, np.float32), "head_bias": np.ones(1, np.float32)}
    weights |= {"mean": np.ones((1, 1), np.float32), "mean_rest": np.zeros((1, 1), np.float32)}
    weights |= {"deviation": np.full((1, 1), 2.0, np.float32), "clip": np.full(1, 9.0, np.float32)}
    about, bounds = describe_spaces(spec, squash_mean=False)
    about |= {"layers": 0, "activation": "tanh", "tanh": False}
    path = tmp_path / "policy.npz"
    write_export(path, Export("numpy", spec, ROW, ROW, about, to_members(weights | bounds)))
    whole, expected = path.read_bytes(), numpy_reader.load(path)(np.ones((1, 1)))
    unnoticed = 0
    for position in range(0, len(whole) * 8, 3):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            policy = numpy_reader.load(path)
        except Exception:  # of zipfile, mostly
            continue
        unnoticed += 1
        np.testing.assert_array_equal(policy(np.ones((1, 1))), expected)
    assert unnoticed < len(whole) * 8 / 3 * 0.2


def test_on_a_full_disk_the_file_of_before_stays(path, full_disk):
    before = path.read_bytes()
    large = Export("numpy", SPEC, ROW, ROW, {}, {"a.npy": bytes(100_000)})
    with full_disk(50_000), pytest.raises(ExportError, match="policy: cannot be written"):
        write_export(path, large)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["policy"]
