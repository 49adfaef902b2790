"""Safe reading and atomic writing of files: survives kills, full disks and planted links."""

import errno
import json
import math
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAX_DEPTH = 64
"""Maximum nesting of a JSON document: more than polyak writes, less than Python's stack allows."""

# A string without an end matches too: where a match fails, the next quotation mark would read all of it again.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def open_regular(path: str | Path, *, dir_fd: int | None = None) -> BufferedReader:
    """Open a regular file for reading: not a symbolic link, a pipe or a device.

    Raises:
        ValueError: the path is no regular file.
        OSError: as from `open`.
    """
    try:
        # O_NONBLOCK: opening a planted pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link; must be a plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a plain file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, *, limit: int, dir_fd: int | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        ValueError: the file is larger, or no regular file.
        OSError: as from `open`.
    """
    with open_regular(path, dir_fd=dir_fd) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise ValueError(f"{path} has {size} bytes; at most {limit} are read")
    return data


def parse_json(data: bytes, what: str) -> Any:
    """Parse strict JSON: UTF-8, no NaN or Infinity, no number that overflows, no duplicate key, no deep nesting.

    Args:
        what: name of the document in errors, usually the file name.

    Raises:
        ValueError: the data are not strict JSON.
    """
    if _is_too_deep(data):
        raise ValueError(f"{what}: JSON nested more than {MAX_DEPTH} deep")
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: not valid JSON: {error}") from None


def dump_json(value: Any, what: str, *, indent: int | None = 2) -> bytes:
    """Serialize a value as JSON that `parse_json` can read back, with a newline at the end.

    Raises:
        ValueError: the value contains NaN or infinity, or is nested too deeply.
        TypeError: the value is not JSON data.
    """
    try:
        data = json.dumps(value, allow_nan=False, indent=indent).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what}: cannot be written as JSON: {error}") from None
    if _is_too_deep(data):
        raise ValueError(f"{what}: nested more than {MAX_DEPTH} deep; it could not be read back")
    return data


def _is_too_deep(data: bytes) -> bool:
    """Return True if brackets outside strings are nested too deeply; exact up to the first error in the JSON."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    text = np.frombuffer(_STRING.sub(b"", data), np.uint8)
    opens, closes = np.isin(text, list(b"[{")), np.isin(text, list(b"]}"))
    return bool(np.max(np.cumsum(opens.astype(np.int32) - closes), initial=0) > MAX_DEPTH)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {key[:80]!r} occurs twice in one object")
    return result


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:40]} is too large")
    return value


def reject_constant(name: str) -> Any:
    """Raise a ValueError for NaN and Infinity in JSON."""
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite_float, parse_constant=reject_constant)


@contextmanager
def new_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Create a file, by default readable by its owner only, and sync it to the disk at the end of the block."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes, *, shared: bool = False, mode: int = 0o600) -> None:
    """Replace a file atomically: a reader, or a kill at any moment, finds the old bytes or the new bytes.

    Args:
        shared: other processes may write the same file at the same time, so the temporary file gets a random name; such a file
            is left behind after a kill, whereas the next write reuses a fixed name.
        mode: permissions, less the umask.

    Raises:
        OSError: for example, the disk is full; the old file is unchanged.
    """
    own = f".{secrets.token_hex(8)}" if shared else ""
    aside = path.with_name(f".{path.name}{own}.aside")
    aside.unlink(missing_ok=True)
    try:
        with new_file(aside, mode) as file:
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def append(path: Path, data: bytes) -> None:
    """Append all of `data` to the file, or nothing.

    Raises:
        OSError: for example, the disk is full; the file is unchanged.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        end = os.fstat(descriptor).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Sync a directory's entries (after a rename, for example) to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
