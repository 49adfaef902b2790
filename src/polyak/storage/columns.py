"""Reads a metrics file as columns: one array for each tag, of all rows or of evenly spaced ones."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.storage.files import open_regular, reject_constant
from polyak.storage.run_files import RunError, read_complete_lines, read_row

ENV_STEPS = "env_steps"

MAX_TAGS = 10_000
"""Maximum number of tags of a metrics file."""

_TAIL = 16 * 2**10

Columns = dict[str, npt.NDArray[np.float64]]
"""An array for each tag, all of one length; NaN where a row has no value of a tag."""

# Unlike that of `parse_json` it calls no Python function for each object and number, and so is twice as fast.
_DECODER = json.JSONDecoder(parse_constant=reject_constant)


def read_columns(path: Path, *, tags: Sequence[str] | None = None, max_rows: int | None = None) -> Columns:
    """Read the rows of a metrics file as columns, of which `env_steps` is the first; an incomplete last line is skipped.

    Args:
        tags: the columns to return beside `env_steps`, as far as the file has them; None returns all.
        max_rows: read about so many rows, evenly spaced, the first and the last among them, and as many rows with an
            evaluation; None reads all rows.

    Raises:
        RunError: a line is damaged.
    """
    lines = read_complete_lines(path).split(b"\n")[:-1]
    numbers: Sequence[int] = range(len(lines))
    if max_rows is not None and len(lines) > max_rows:
        numbers = _select_rows(lines, max_rows)
    return _to_columns(_parse_lines([lines[n] for n in numbers], numbers, path), tags, path)


def read_last_row(path: Path) -> dict[str, Any] | None:
    """Read the last complete row of a metrics file, without the rows before; None if there is none.

    Raises:
        RunError: the row is damaged, or the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            length = min(size, _TAIL)
            while True:
                file.seek(size - length)
                data = file.read(length)
                data = data[: data.rfind(b"\n") + 1]
                start = data.rfind(b"\n", 0, -1) + 1
                if start or length == size:
                    break
                length = min(2 * length, size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from error
    return read_row(data[start:-1], f"{path}, last line") if data else None


def _select_rows(lines: Sequence[bytes], count: int) -> list[int]:
    """Return the numbers of evenly spaced lines, and of evenly spaced lines among those with an evaluation."""
    evaluated = [n for n, line in enumerate(lines) if b'"eval/' in line]
    spaced = np.linspace(0, len(lines) - 1, count).round().astype(int).tolist()
    if len(evaluated) > count:
        evaluated = [evaluated[n] for n in np.linspace(0, len(evaluated) - 1, count).round().astype(int)]
    return sorted({*spaced, *evaluated})


def _parse_lines(lines: Sequence[bytes], numbers: Sequence[int], path: Path) -> list[dict[str, Any]]:
    """Parse the lines at once, which is faster; line by line if that fails, for the number of the damaged line."""
    try:
        rows: list[Any] = _DECODER.decode(f"[{b','.join(lines).decode()}]")
        if len(rows) == len(lines) and all(type(row) is dict and type(row.get(ENV_STEPS)) is int for row in rows):
            return rows
    except (ValueError, RecursionError):
        pass
    return [read_row(line, f"{path}, line {number + 1}") for line, number in zip(lines, numbers, strict=True)]


def _to_columns(rows: Sequence[dict[str, Any]], tags: Sequence[str] | None, path: Path) -> Columns:
    found = list({ENV_STEPS: None} | {tag: None for row in rows for tag in row})
    if len(found) > MAX_TAGS:
        raise RunError(f"{path}: has {len(found):,} tags; at most {MAX_TAGS:,} are read")
    wanted = [tag for tag in found if tags is None or tag in (ENV_STEPS, *tags)]
    return {tag: _to_column([row.get(tag) for row in rows], tag, path) for tag in wanted}


def _to_column(values: Sequence[Any], tag: str, path: Path) -> npt.NDArray[np.float64]:
    try:
        # NumPy would read the text "1.5" as a number.
        if set(map(type, values)) <= {float, int, NoneType}:
            column = np.array(values, np.float64)
            if not np.isinf(column).any():
                return column
    except OverflowError:
        pass
    raise RunError(f"{path}: {tag[:80]!r} must be a finite number or null in every row")
