"""The file of an exported policy: an uncompressed zip archive of a JSON header and plain members, each with its hash."""

import hashlib
import io
import math
import os
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from numpy.lib.format import write_array

from polyak.core.spaces import EnvSpec, Space, leaf_spaces
from polyak.export.policy_function import mask_inputs
from polyak.policies.numpy_reader import array_of
from polyak.storage.config import SPEC_CLASSES, ConfigError, from_json, to_json
from polyak.storage.files import dump_json, parse_json, read_bytes, write_file

FORMAT = 1
HEADER = "header.json"
MAX_BYTES = 2**31 - 1
"""Maximum bytes of a file."""

MAX_HEADER_BYTES = 16 * 2**20

MAX_ROW_BYTES = 2**28
"""Maximum bytes of one row of an array (an observation, a part of a carry) that a file may declare."""

MAX_DIMENSIONS = 32

ONNX_HASH = ("polyak_sha256", "0" * 64)
"""Metadata entry of an ONNX file; `seal_onnx` fills in the hash."""

Kind = Literal["stablehlo", "onnx", "numpy"]

_DAMAGE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError, struct.error, OverflowError)

# Key and value as protobuf writes them: field 2, 64 bytes long.
_ONNX_HASH_ENTRY = re.compile(ONNX_HASH[0].encode() + rb"\x12\x40([0-9a-f]{64})")


class ExportError(Exception):
    """An exported policy cannot be written or read; the message names the file and the reason."""


@dataclass(frozen=True)
class Export:
    """The contents of an exported file.

    Attributes:
        kind: the format of the policy.
        spec: spec of the environment.
        inputs: shape and dtype, without the first axis, of each input array, by name.
        outputs: shape and dtype, without the first axis, of each output array, by name.
        about: information about the run, and settings for the reader.
        members: files in the archive, by name.
        jax_version: version of JAX that wrote the file.
    """

    kind: Kind
    spec: EnvSpec
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Mapping[str, jax.ShapeDtypeStruct]
    about: Mapping[str, Any]
    members: Mapping[str, bytes]
    jax_version: str = jax.__version__


def make_header(export: Export) -> dict[str, Any]:
    """Return the header of the file, as JSON data."""
    return {
        "polyak_export": FORMAT,
        "kind": export.kind,
        "polyak": metadata.version("polyak"),
        "jax": export.jax_version,
        "spec": to_json(export.spec),
        "inputs": _describe_arrays(export.inputs),
        "outputs": _describe_arrays(export.outputs),
        "about": dict(export.about),
        "files": {name: _describe_member(data) for name, data in export.members.items()},
    }


def write_export(path: Path, export: Export) -> None:
    """Write the file atomically, replacing an existing file.

    Raises:
        ExportError: the file cannot be written.
    """
    header = dump_json(make_header(export), str(path))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {HEADER: header, **export.members}.items():
            # A constant date: equal policies give equal bytes.
            archive.writestr(zipfile.ZipInfo(name), data)
    replace_file(path, buffer.getvalue())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically.

    Raises:
        ExportError: the data are too large, the disk is full, or the path is no plain file.
    """
    if len(data) > MAX_BYTES:
        raise ExportError(f"{path}: {len(data)} bytes; at most {MAX_BYTES} are written")
    try:
        if path.is_dir():
            raise IsADirectoryError("is a directory; expected a file")
        if path.exists() and not path.is_file():
            raise FileExistsError("exists and is not a plain file")
        write_file(path, data, shared=True)
    except OSError as error:
        # Only `strerror`, as the full error names the temporary file.
        raise ExportError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_export(path: str | os.PathLike[str]) -> Export:
    """Read an exported file without running anything; each member is compared with its SHA-256, the header with its CRC.

    Raises:
        ExportError: the file is missing, is no exported policy, is damaged, is from a newer version of polyak, or declares
            arrays that do not fit its spaces.
    """
    what = str(path)
    data = b""
    try:
        data = read_bytes(what, limit=MAX_BYTES)
        members = _read_members(data)
        header = parse_json(members.pop(HEADER, b""), f"{what}: {HEADER}")
    except _DAMAGE as error:
        # ONNX begins with its version, a small number in field 1, and its producer, in field 2.
        if (data[:1], data[2:3]) == (b"\x08", b"\x12"):
            raise ExportError(_describe_onnx(data, what)) from None
        raise ExportError(f"{what}: is not a policy exported by polyak, or is damaged: {error}") from None
    if not isinstance(header, dict) or "polyak_export" not in header:
        raise ExportError(f"{what}: is not a policy exported by polyak: {HEADER} has no field polyak_export")
    if header["polyak_export"] != FORMAT:
        newer = isinstance(header["polyak_export"], int) and header["polyak_export"] > FORMAT
        advice = "upgrade polyak" if newer else "export it again"
        raise ExportError(f"{what}: has format {header['polyak_export']!r}, this version reads {FORMAT}; {advice}")
    _check_hashes(header, members, what)
    return _parse_header(header, members, what)


def to_members(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, bytes]:
    """Convert each array to a `.npy` file, which `numpy.load` can open."""
    members = {}
    for name, array in arrays.items():
        buffer = io.BytesIO()
        write_array(buffer, np.ascontiguousarray(array))
        members[f"{name}.npy"] = buffer.getvalue()
    return members


def from_members(members: Mapping[str, bytes], what: str) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of `.npy` files, without pickled objects.

    Raises:
        ExportError: a member is not an array.
    """
    try:
        return {name.removesuffix(".npy"): array_of(data) for name, data in members.items()}
    except Exception as error:
        raise ExportError(f"{what}: is damaged: its arrays cannot be read: {error}") from None


def seal_onnx(model: bytes) -> bytes:
    """Fill in the metadata entry `ONNX_HASH` with the SHA-256 of the file in which this entry is zero."""
    return model.replace(ONNX_HASH[1].encode(), hashlib.sha256(model).hexdigest().encode(), 1)


def _describe_onnx(data: bytes, what: str) -> str:
    entry = _ONNX_HASH_ENTRY.search(data)
    zeroed = data[: entry.start(1)] + ONNX_HASH[1].encode() + data[entry.end(1) :] if entry else b""
    if entry and hashlib.sha256(zeroed).hexdigest().encode() == entry[1]:
        return f"{what}: is an ONNX file; open it with an ONNX runtime"
    return f"{what}: is an ONNX file, but damaged or not from polyak: its SHA-256 is missing or differs"


def _read_members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        if len(set(names)) != len(names):
            raise ValueError("two members have the same name")
        # Otherwise several members could share one part of the file.
        if sum(info.file_size for info in infos) > len(data):
            raise ValueError("its members are compressed, or together larger than the file")
        for info in infos:
            # A small compressed file could expand to a huge one.
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise ValueError(f"{info.filename!r} is compressed or encrypted")
            if info.filename == HEADER and info.file_size > MAX_HEADER_BYTES:
                raise ValueError(f"{HEADER} has {info.file_size} bytes; at most {MAX_HEADER_BYTES} are read")
        return {info.filename: archive.read(info) for info in infos}


def _check_hashes(header: dict[str, Any], members: Mapping[str, bytes], what: str) -> None:
    files = header.get("files")
    if not isinstance(files, dict) or set(files) != set(members):
        raise ExportError(f"{what}: is damaged: holds the files {sorted(members)}, its header names others")
    for name, data in members.items():
        if files[name] != _describe_member(data):
            raise ExportError(f"{what}: is damaged: size or SHA-256 of {name} differ from the header")


def _describe_member(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _parse_header(header: dict[str, Any], members: Mapping[str, bytes], what: str) -> Export:
    try:
        spec = from_json(header["spec"], SPEC_CLASSES, what=f"{what}: spec")
        inputs, outputs = (_parse_arrays(header[name]) for name in ("inputs", "outputs"))
        kind, about, jax_version = header["kind"], header["about"], str(header["jax"])[:40]
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{what}: its header cannot be read: {str(error)[:300]!r}") from None
    if kind not in ("stablehlo", "numpy") or not isinstance(spec, EnvSpec) or not isinstance(about, dict):
        raise ExportError(f"{what}: its header cannot be read: kind {kind!r}, spec a {type(spec).__name__}")
    _check_arrays(spec, _kinds(inputs), _kinds(outputs), what)
    return Export(kind, spec, inputs, outputs, about, members, jax_version)


def _describe_arrays(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[dict[str, Any]]:
    return [{"name": name, "shape": list(x.shape), "dtype": str(x.dtype)} for name, x in arrays.items()]


def _parse_arrays(described: Any) -> dict[str, jax.ShapeDtypeStruct]:
    arrays = {}
    for x in described:
        name, shape, text = x["name"], tuple(x["shape"]), x["dtype"]
        if not isinstance(name, str) or name in arrays or not isinstance(text, str):
            raise ValueError(f"an array has the name {str(name)[:80]!r} and the dtype {str(text)[:80]!r}")
        dtype = np.dtype(text)
        if dtype.kind not in "fiub" or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name[:80]!r} has the shape {str(shape)[:80]} and the dtype {str(dtype)[:80]}")
        if math.prod(shape) * dtype.itemsize > MAX_ROW_BYTES:
            raise ValueError(f"a row of {name[:80]!r} has more than {MAX_ROW_BYTES} bytes")
        arrays[name] = jax.ShapeDtypeStruct(shape, dtype)
    return arrays


_Kinds: TypeAlias = list[tuple[str, tuple[int, ...], str]]


def _kinds(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> _Kinds:
    return [(name, x.shape, x.dtype.kind) for name, x in arrays.items()]


def _space_kinds(name: str, space: Space) -> _Kinds:
    return [(f"{name}/{path}" if path else name, leaf.shape, leaf.dtype.kind) for path, leaf in leaf_spaces(space)]


def _check_arrays(spec: EnvSpec, inputs: _Kinds, outputs: _Kinds, what: str) -> None:
    """Check that inputs are observation and action masks (and `first` and carry if recurrent), and outputs action and carry."""
    action = _space_kinds("action", spec.action)
    carry = outputs[len(action) :]
    wanted = _space_kinds("obs", spec.obs) + _kinds(mask_inputs(spec)) + ([("first", (), "b"), *carry] if carry else [])
    if inputs != wanted or outputs[: len(action)] != action or not all(name.startswith("carry") for name, _, _ in carry):
        raise ExportError(f"{what}: inputs {str(inputs)[:300]} and outputs {str(outputs)[:300]} do not fit its spaces")
