"""The manifest of a checkpoint: leaves, hash and size of the files, library version and machine."""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from polyak.storage.directory import ARRAYS, MANIFEST
from polyak.storage.files import dump_json, parse_json
from polyak.storage.json import DTYPES, decode, encode, parse_shape
from polyak.storage.leaves import KEY_WORDS, KINDS, CheckpointError, Leaf

FORMAT = 2
"""The newest version of the layout, in which leaves may be in segments; newer versions are rejected."""

WHOLE = 1
"""The version of a checkpoint without segments, which older versions of polyak can read."""

MAX_BYTES = 32 * 2**20
"""Maximum bytes of a manifest; large data belong in the tree."""

MAX_LEAVES = 50_000

_HEADER = "polyak checkpoint"
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class Damage(CheckpointError):
    """This checkpoint cannot be read; an older one may be readable."""


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
        format: version of the layout.
        library: version of polyak that wrote the manifest.
        step: environment steps, or another count of the caller.
        leaves: every leaf of the tree, in the order of the file.
        size: bytes of `arrays.safetensors`.
        sha256: hash of `arrays.safetensors`.
        machine: platform and number of devices; results are reproducible bit for bit only if both are equal.
        meta: plain data of the caller.
        segment_bytes: bytes of a segment; 0 if no leaf has segments.
    """

    format: int
    library: str
    step: int
    leaves: tuple[Leaf, ...]
    size: int
    sha256: str
    machine: dict[str, Any]
    meta: dict[str, Any]
    segment_bytes: int = 0


def arrays_header(leaves: tuple[Leaf, ...]) -> bytes:
    """Return the header of the safetensors file, which depends only on the leaves: readers compare and never parse the header.

    A dtype that safetensors lacks is stored as bytes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": _HEADER}}
    end = 0
    for leaf in leaves:
        if not leaf.in_file:
            continue
        start, end = end, end + leaf.nbytes
        name = _SAFETENSORS.get(leaf.data_dtype.name)
        shape = list(leaf.data_shape) if name else [leaf.nbytes]
        entries[leaf.path] = {"dtype": name or "U8", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_manifest(manifest: Manifest) -> bytes:
    """Serialize a manifest as JSON.

    Raises:
        CheckpointError: the manifest is too large to be read back, or `meta` is nested too deeply.
    """
    if len(manifest.leaves) > MAX_LEAVES:
        raise CheckpointError(f"{len(manifest.leaves)} leaves; a checkpoint holds at most {MAX_LEAVES}")
    document = {
        "format": manifest.format,
        "library": manifest.library,
        "step": manifest.step,
        "machine": manifest.machine,
        "files": {ARRAYS: {"size": manifest.size, "sha256": manifest.sha256}},
        "leaves": [_leaf_to_json(leaf) for leaf in manifest.leaves],
        "meta": encode_meta(manifest.meta),
    }
    if manifest.format > WHOLE:
        document["segment_bytes"] = manifest.segment_bytes
    try:
        data = dump_json(document, MANIFEST, indent=1)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{MANIFEST} has {len(data)} bytes, at most {MAX_BYTES} are read; put large arrays in the tree")
    return data


def encode_meta(meta: dict[str, Any]) -> Any:
    """Convert the caller's data to JSON data.

    Raises:
        CheckpointError: the data are not plain.
    """
    try:
        return encode(meta, "meta")
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from None


def read_manifest_json(data: bytes, where: str, this_version: str) -> Manifest:
    """Parse a manifest and validate every field, without a comparison with the files.

    Raises:
        CheckpointError: the manifest has a newer format.
        Damage: the data are not a polyak manifest.
    """
    try:
        document = parse_json(data, MANIFEST)
        number = _member(document, "format", int)
        library = _printable(_member(document, "library", str), "library")
        if number > FORMAT:
            raise CheckpointError(
                f"{where}: written by polyak {library} (format {number}), this is {this_version} (format {FORMAT}); upgrade"
            )
        return _validate(document, library)
    except ValueError as error:
        raise Damage(f"{where}: {error}") from None


def _validate(document: dict[str, Any], library: str) -> Manifest:
    file = _member(_member(document, "files", dict), ARRAYS, dict)
    sha256, size, step = _member(file, "sha256", str), _member(file, "size", int), _member(document, "step", int)
    version, segment_bytes = document["format"], 0
    if version > WHOLE:
        segment_bytes = _member(document, "segment_bytes", int)
    if not _SHA256.match(sha256) or step < 0 or not WHOLE <= version <= FORMAT or (version > WHOLE and segment_bytes < 1):
        raise ValueError(f"{MANIFEST}: malformed format, step, sha256 or segment_bytes")
    items = _member(document, "leaves", list)
    if len(items) > MAX_LEAVES:
        raise ValueError(f"{MANIFEST}: {len(items)} leaves; at most {MAX_LEAVES} are read")
    leaves = tuple(_leaf_from_json(item, segment_bytes) for item in items)
    if len({leaf.path for leaf in leaves}) < len(leaves):
        raise ValueError(f"{MANIFEST}: two leaves have the same path")
    declared = sum(leaf.nbytes for leaf in leaves)
    if len(arrays_header(leaves)) + declared != size:
        raise ValueError(f"{MANIFEST}: the leaves take {declared} bytes, which does not fit a file of {size}")
    meta = decode(_member(document, "meta", dict), "meta")
    if not isinstance(meta, dict):
        raise ValueError(f"{MANIFEST}: meta is not a dict")
    return Manifest(version, library, step, leaves, size, sha256, _member(document, "machine", dict), meta, segment_bytes)


def _member(document: Any, name: str, kind: type) -> Any:
    if not isinstance(document, dict) or type(document.get(name)) is not kind:
        raise ValueError(f"{MANIFEST}: has no {kind.__name__} {name!r}; not written by polyak")
    return document[name]


def _printable(text: str, what: str) -> str:
    if not text.isprintable() or len(text) > 4096:
        raise ValueError(f"{MANIFEST}: {what} is not printable: {text[:80]!r}")
    return text


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    document: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind}
    if leaf.segments:
        document["segments"] = list(leaf.segments)
    if leaf.kind == "array":
        return document | {"dtype": leaf.dtype, "shape": list(leaf.shape)}
    if leaf.kind == "key":
        return document | {"impl": leaf.impl, "shape": list(leaf.shape)}
    return document | {"value": encode(leaf.value, leaf.path)}


def _leaf_from_json(document: Any, segment_bytes: int) -> Leaf:
    path = _printable(_member(document, "path", str), "a leaf's path")
    kind = _member(document, "kind", str)
    if kind not in KINDS:
        raise ValueError(f"{MANIFEST}: leaf {path}: unknown kind {kind[:40]!r}")
    if kind in ("array", "key"):
        shape = parse_shape(document.get("shape"), path)
        if kind == "array":
            leaf = Leaf(path, kind, dtype=_check_known(_member(document, "dtype", str), DTYPES, path), shape=shape)
        else:
            leaf = Leaf(path, kind, shape=shape, impl=_check_known(_member(document, "impl", str), KEY_WORDS, path))
        return dataclasses.replace(leaf, segments=_segments_from_json(document, leaf, segment_bytes))
    value = decode(document.get("value"), path)
    if type(value).__name__ != kind:
        raise ValueError(f"{MANIFEST}: leaf {path}: {kind} expected, got {str(value)[:40]!r}")
    return Leaf(path, kind, value=value)


def _segments_from_json(document: dict[str, Any], leaf: Leaf, segment_bytes: int) -> tuple[str, ...]:
    """Return the names of the leaf's segments, checked to be as many as its bytes need."""
    if "segments" not in document:
        return ()
    names = _member(document, "segments", list)
    is_complete = segment_bytes > 0 and len(names) == -(-leaf.data_nbytes // segment_bytes)
    if not is_complete or not all(isinstance(name, str) and _SHA256.match(name) for name in names):
        raise ValueError(f"{MANIFEST}: leaf {leaf.path}: malformed segments")
    return tuple(names)


def _check_known(name: str, known: dict[str, Any], path: str) -> str:
    if name not in known:
        raise ValueError(f"{MANIFEST}: leaf {path}: unknown type {name[:40]!r}")
    return name
