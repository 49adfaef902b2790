"""The file of an exported policy: a zip archive without compression of a JSON header and plain members, each with its hash."""

import hashlib
import io
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax

from polyak.core import spaces
from polyak.core.spaces import EnvSpec
from polyak.io.config import ConfigError, from_json, to_json
from polyak.io.files import dump_json, parse_json, read_bytes, write_file

FORMAT = 1
HEADER = "header.json"
MAX_BYTES = 2**31 - 1
"""The largest file that is written or read."""

MAX_HEADER_BYTES = 16 * 2**20

Kind = Literal["stablehlo", "onnx", "numpy"]

SPEC_CLASSES: tuple[type, ...] = (
    *(spaces.EnvSpec, spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple),
)
"""What the spaces in a file may be made of."""

_NOT_A_ZIP = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError, struct.error, OverflowError)


class ExportError(Exception):
    """An exported policy cannot be written, or a file is none or is damaged: which, and why."""


@dataclass(frozen=True)
class Export:
    """What is in a file.

    Attributes:
        kind: how the policy is written.
        spec: the spaces it acts in.
        inputs: name, and shape and dtype without the first axis, of each array that it takes.
        outputs: likewise of those that it answers.
        about: what else is known: of the run it came from, and what its reader needs.
        members: the files in it, by name.
    """

    kind: Kind
    spec: EnvSpec
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Mapping[str, jax.ShapeDtypeStruct]
    about: Mapping[str, Any]
    members: Mapping[str, bytes]


def header_of(export: Export) -> dict[str, Any]:
    """What the file says of itself, as JSON data."""
    return {
        "polyak_export": FORMAT,
        "kind": export.kind,
        "polyak": metadata.version("polyak"),
        "jax": jax.__version__,
        "spec": to_json(export.spec),
        "inputs": _described(export.inputs),
        "outputs": _described(export.outputs),
        "about": dict(export.about),
        "files": {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in export.members.items()
        },
    }


def write_export(path: Path, export: Export) -> None:
    """Write the file aside and put it in its place; what was there before is replaced as a whole.

    Raises:
        ExportError: it cannot be written there.
    """
    header = dump_json(header_of(export), str(path))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {HEADER: header, **export.members}.items():
            # Always the same date: the same policy is the same bytes.
            archive.writestr(zipfile.ZipInfo(name), data)
    write_whole(path, buffer.getvalue())


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file as a whole.

    Raises:
        ExportError: it is too large, or the disk or a directory is in the way.
    """
    if len(data) > MAX_BYTES:
        raise ExportError(f"{path}: {len(data)} bytes; at most {MAX_BYTES} are written")
    try:
        if path.is_dir():
            raise IsADirectoryError("is a directory; a file was wanted")
        write_file(path, data)
    except OSError as error:
        raise ExportError(f"{path}: cannot be written: {error}") from error


def read_export(path: str | os.PathLike[str]) -> Export:
    """The exported policy in a file. Nothing in it is run, and every byte is compared with its hash.

    Raises:
        ExportError: it is not there, is none, is damaged, or is of a newer version of polyak.
    """
    what = str(path)
    try:
        members = _members(read_bytes(what, limit=MAX_BYTES), what)
    except _NOT_A_ZIP as error:
        raise ExportError(f"{what}: is no policy that polyak exported, or is damaged: {error}") from None
    try:
        header = parse_json(members.pop(HEADER, b""), f"{what}: {HEADER}")
    except ValueError as error:
        raise ExportError(f"{what}: is no policy that polyak exported, or is damaged: {error}") from None
    if not isinstance(header, dict) or "polyak_export" not in header:
        raise ExportError(f"{what}: is no policy that polyak exported: {HEADER} does not say that it is one")
    if header["polyak_export"] != FORMAT:
        raise ExportError(f"{what}: has format {header['polyak_export']!r}, this version reads {FORMAT}; upgrade polyak")
    _check_hashes(header, members, what)
    return _export(header, members, what)


def _members(data: bytes, what: str) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = archive.infolist()
        names = [info.filename for info in found]
        if len(set(names)) != len(names):
            raise ValueError("a name stands twice in it")
        for info in found:
            # Compressed, a small file could become a huge one.
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size > len(data):
                raise ValueError(f"{info.filename!r} is compressed, encrypted or larger than the file")
            if info.filename == HEADER and info.file_size > MAX_HEADER_BYTES:
                raise ValueError(f"{HEADER} has {info.file_size} bytes; at most {MAX_HEADER_BYTES} are read")
        return {info.filename: archive.read(info) for info in found}


def _check_hashes(header: dict[str, Any], members: Mapping[str, bytes], what: str) -> None:
    files = header.get("files")
    if not isinstance(files, dict) or set(files) != set(members):
        raise ExportError(f"{what}: is damaged: holds the files {sorted(members)}, its header names others")
    for name, data in members.items():
        if files[name] != {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}:
            raise ExportError(f"{what}: is damaged: {name} does not have the size and the SHA-256 that the header gives")


def _export(header: dict[str, Any], members: Mapping[str, bytes], what: str) -> Export:
    classes = {cls.__name__: cls for cls in SPEC_CLASSES}
    try:
        spec = from_json(header["spec"], classes, what=f"{what}: spec")
        inputs, outputs = (_arrays(header[name]) for name in ("inputs", "outputs"))
        kind, about = header["kind"], header["about"]
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{what}: its header cannot be read: {error!r}") from None
    if kind not in ("stablehlo", "numpy") or not isinstance(spec, EnvSpec) or not isinstance(about, dict):
        raise ExportError(f"{what}: its header cannot be read: kind {kind!r}, spec a {type(spec).__name__}")
    return Export(kind, spec, inputs, outputs, about, members)


def _described(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[dict[str, Any]]:
    return [{"name": name, "shape": list(x.shape), "dtype": str(x.dtype)} for name, x in arrays.items()]


def _arrays(described: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {x["name"]: jax.ShapeDtypeStruct(tuple(map(int, x["shape"])), x["dtype"]) for x in described}
