"""JSON from a stranger is read or rejected in linear time, and damage gives the documented errors only."""

import random
import time
import warnings
import zipfile

import jax
import numpy as np
import pytest

from polyak.export.archive import HEADER, ExportError, make_header, read_export
from polyak.storage.checkpoint import CheckpointError, save
from polyak.storage.config import SPEC_CLASSES, ConfigError, from_json, to_json
from polyak.storage.directory import MANIFEST, directory_name
from polyak.storage.files import dump_json
from polyak.storage.manifest import read_manifest_json
from polyak.storage.run_files import RunError, append_row, drop_rows_after, read_object, read_rows
from tests.export.test_archive import EXPORT

HASH = 2**61 - 1
"""The modulus of Python's hash of an integer: its multiples all have the hash 0."""

KINDS = {
    "escaped quotes": lambda n: b'{"a": "' + b'\\"' * (n // 2),
    "open strings": lambda n: b'{"a": ' + b'"\\' * (n // 2),
    "backslashes": lambda n: b'"' + b"\\" * n,
    "brackets": lambda n: b"[" * n,
    "newlines": lambda n: b"\n" * n,
    "zeros": lambda n: b"\0" * n,
    "digits": lambda n: b"9" * n,
    "a long tag": lambda n: b'{"$' + b"x" * n + b'": 0}',
    "keys": lambda n: b'{"$int": 0' + b"".join(b',"%d":0' % i for i in range(n // 11)) + b"}",
    "the last key twice": lambda n: b"{" + b"".join(b'"%d":0,' % i for i in range(n // 11)) + b'"%d":0}' % (n // 11 - 1),
    "a long key over a list": lambda n: b'{"' + b"k" * (n // 2) + b'":[' + b"0," * (n // 4) + b"0]}",
    "keys of one hash": lambda n: b'{"$dict":[' + b",".join(b"[%d,0]" % (i * HASH) for i in range(n // 24)) + b"]}",
}
MIB = 2**20


def config(data, folder):
    (folder / "config.json").write_bytes(data)
    return from_json(read_object(folder / "config.json"), SPEC_CLASSES)


def manifest(data, folder):
    return read_manifest_json(data, "here", "0")


def value_in_manifest(data, folder):
    return read_manifest_json(MANIFEST_OF_A_VALUE % data, "here", "0")


MANIFEST_OF_A_VALUE = (
    b'{"format": 1, "library": "0", "step": 1, "machine": {}, "files": {"arrays.safetensors": {"size": 1000, "sha256": "'
    + b"0" * 64
    + b'"}}, "leaves": [{"path": "a", "kind": "int", "value": %s}], "meta": {}}'
)


def header(data, folder):
    with zipfile.ZipFile(folder / "policy", "w") as archive:
        for name, member in {HEADER: data, **EXPORT.members}.items():
            archive.writestr(name, member)
    return read_export(folder / "policy")


def metrics(data, folder):
    (folder / "metrics.jsonl").write_bytes(data + b"\n")
    return read_rows(folder / "metrics.jsonl")


def resumed_metrics(data, folder):
    (folder / "metrics.jsonl").write_bytes(data + b"\n")
    drop_rows_after(folder / "metrics.jsonl", 1)


READERS = [config, manifest, value_in_manifest, header, metrics, resumed_metrics]


def read(reader, data, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            reader(data, folder)
        except (ConfigError, CheckpointError, ExportError, RunError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_json_takes_linear_time(kind, tmp_path):
    for reader in READERS:
        start = time.process_time()
        message = read(reader, KINDS[kind](MIB // 4), tmp_path)
        assert time.process_time() - start < 2, reader.__name__
        assert len(message) < 1000, reader.__name__


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["escaped quotes", "open strings", "backslashes", "newlines", "zeros", "digits"])
@pytest.mark.parametrize("reader", [config, resumed_metrics])
def test_hostile_json_of_8_MiB_takes_two_seconds_at_most(kind, reader, tmp_path):
    data, start = KINDS[kind](8 * MIB), time.process_time()
    read(reader, data, tmp_path)
    assert time.process_time() - start < 2


@pytest.mark.slow
@pytest.mark.parametrize("reader", [config, manifest, header, metrics, resumed_metrics])
def test_flipped_bits_give_documented_errors_only(reader, tmp_path):
    data = bytearray(document(reader, tmp_path))
    generator, errors = random.Random(0), 0
    for _ in range(500):
        position, bit = generator.randrange(len(data)), 1 << generator.randrange(8)
        data[position] ^= bit
        errors += read(reader, bytes(data), tmp_path) != ""
        data[position] ^= bit
    assert errors > 100 or reader is resumed_metrics


def document(reader, folder):
    """A file as polyak writes it."""
    if reader is config:
        return dump_json(to_json(EXPORT.spec), "config.json")
    if reader is manifest:
        save(folder, {"a": np.zeros(3, np.float32), "key": jax.random.key(0)}, step=1, meta={"b": (1, {2: np.ones(3)})})
        return (folder / directory_name(1) / MANIFEST).read_bytes()
    if reader is header:
        return dump_json(make_header(EXPORT), HEADER)
    for step in range(3):
        append_row(folder / "metrics.jsonl", {"env_steps": step, "loss": 0.5})
    return (folder / "metrics.jsonl").read_bytes()
