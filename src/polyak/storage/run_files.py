"""Reads and writes the JSON files of a run; errors are `RunError`s that name the file."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyak.core.warn import warn
from polyak.storage.files import append, dump_json, parse_json, read_bytes, write_file
from polyak.storage.json import finite_or_none

MAX_JSON_BYTES = 16 * 2**20
"""Maximum bytes of a config, summary or system file."""

MAX_METRICS_BYTES = 2**31


class RunError(Exception):
    """A run directory cannot be created, opened, read or written; the message names the path and the reason."""


def make_directory(path: Path) -> None:
    """Create a directory for the owner only (0700) if it is missing.

    Raises:
        RunError: the path is a file, or the directory cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be created: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        RunError: the file is missing or damaged.
    """
    return _parse(_read(path, MAX_JSON_BYTES), str(path))


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file atomically by a JSON object.

    Raises:
        RunError: the file cannot be written, or the value is not JSON data.
    """
    try:
        data = dump_json(dict(value), path.name)
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: {error}") from None
    _write(path, data)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics file, each with its `env_steps`; an incomplete last line is skipped.

    Raises:
        RunError: a line is damaged.
    """
    return [read_row(line, f"{path}, line {n}") for n, line in enumerate(read_complete_lines(path).split(b"\n")[:-1], start=1)]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file of events; an incomplete last line is skipped.

    Raises:
        RunError: a line is damaged.
    """
    return [_parse(line, f"{path}, line {n}") for n, line in enumerate(read_complete_lines(path).split(b"\n")[:-1], start=1)]


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row; NaN and infinities become null.

    Raises:
        OSError: for example, the disk is full; the file is unchanged.
    """
    append(path, dump_json(finite_or_none(row), path.name, indent=None))


def drop_rows_after(path: Path, env_steps: int) -> None:
    """Drop the rows after a step, and rows that a power cut has damaged, with a warning.

    Raises:
        RunError: the file cannot be read or written.
    """
    data = read_complete_lines(path)
    rows, readable = [], []
    for number, line in _lines_with(b'"env_steps"', data):
        with contextlib.suppress(RunError):
            if read_row(line, "")["env_steps"] <= env_steps:
                rows.append(line + b"\n")
            readable.append(number)
    if damaged := data.count(b"\n") - len(readable):
        first = next((n for n, number in enumerate(readable, start=1) if n != number), len(readable) + 1)
        warn(f"{path}: {damaged:,} damaged lines were dropped, the first of which was line {first:,}")
    if os.path.lexists(path):
        _write(path, b"".join(rows))


def drop_incomplete_line(path: Path) -> None:
    """Remove an incomplete last row, which a killed writer leaves, so that the next row starts a line."""
    if os.path.lexists(path):
        os.truncate(path, _read(path, MAX_METRICS_BYTES).rfind(b"\n") + 1)


def read_complete_lines(path: Path) -> bytes:
    """Return the file's complete lines, of which each ends with a newline; none if there is no file.

    Raises:
        RunError: the file cannot be read.
    """
    data = _read(path, MAX_METRICS_BYTES) if os.path.lexists(path) else b""
    return data[: data.rfind(b"\n") + 1]


def _lines_with(word: bytes, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and text of each line with the word; a damaged file may have millions of other lines."""
    number, start = 1, 0
    while (found := data.find(word, start)) >= 0:
        begin = data.rfind(b"\n", start, found) + 1 or start
        end = data.index(b"\n", found)
        number += data.count(b"\n", start, begin)
        yield number, data[begin:end]
        number, start = number + 1, end + 1


def _read(path: Path, limit: int) -> bytes:
    try:
        return read_bytes(path, limit=limit)
    except FileNotFoundError:
        raise RunError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from error


def _write(path: Path, data: bytes) -> None:
    try:
        write_file(path, data)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = parse_json(data, what)
    except ValueError as error:
        raise RunError(str(error)) from None
    if not isinstance(value, dict):
        raise RunError(f"{what}: must be a JSON object, got {json.dumps(value)[:40]}")
    return value


def read_row(line: bytes, what: str) -> dict[str, Any]:
    """Read a row of a metrics file, with its `env_steps`.

    Raises:
        RunError: the line is damaged; the message begins with `what`.
    """
    row = _parse(line, what)
    if type(row.get("env_steps")) is not int:
        raise RunError(f"{what}: env_steps={json.dumps(row.get('env_steps'))[:40]} must be an integer")
    return row
