"""Reads a metrics file as columns: one array for each tag, of all rows or of evenly spaced ones."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.storage.files import open_regular, reject_constant
from polyak.storage.run_files import RunError, read_complete_lines, read_row

ENV_STEPS = "env_steps"

EVALUATION = "eval/"
"""Prefix of the tags of evaluations."""

MAX_TAGS = 10_000
"""Maximum number of tags of a metrics file."""

Columns = dict[str, npt.NDArray[np.float64]]
"""An array for each tag, all of one length; NaN where a row has no value of a tag."""

Lines = dict[int, bytes]
"""Lines by the number of the byte at which they begin."""

_BLOCK = 64 * 2**10

# Unlike the decoder of `parse_json`, it calls no Python function for each object and number, and so is twice as fast.
_DECODER = json.JSONDecoder(parse_constant=reject_constant)


def read_columns(
    path: Path, *, tags: Sequence[str] | None = None, max_rows: int | None = None, every: int | None = None
) -> Columns:
    """Read the rows of a metrics file as columns, of which `env_steps` is the first; an incomplete last line is skipped.

    Args:
        path: the file; a missing one has no rows.
        tags: the columns to return beside `env_steps`, as far as the file has them; None returns all.
        max_rows: read about so many rows, evenly spaced in the file, the first and the last among them, or up to twice as many
            if these are all; None reads all rows.
        every: with `max_rows`: read the first row after each multiple of this number of env_steps too, which has an
            evaluation; of more than `max_rows` multiples, evenly spaced ones.

    Raises:
        RunError: a line is damaged, or the file cannot be read.
    """
    lines = None if max_rows is None else _sample_lines(path, max_rows, every)
    if lines is None:
        all_lines = read_complete_lines(path).split(b"\n")[:-1]
        return to_columns(_parse_lines(all_lines, [f"line {n}" for n in range(1, len(all_lines) + 1)], path), tags, path)
    return to_columns(_parse_lines(list(lines.values()), [f"line at byte {n}" for n in lines], path), tags, path)


def read_last_row(path: Path) -> dict[str, Any] | None:
    """Read the last complete row of a metrics file, without the rows before; None if there is none.

    Raises:
        RunError: the row is damaged, or the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            last = _read_last_line(file.fileno())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from error
    return read_row(last[1], f"{path}, last line") if last else None


def has_evaluation(columns: Columns) -> npt.NDArray[np.bool_]:
    """Return True for each row with an evaluation."""
    has_values = [~np.isnan(values) for tag, values in columns.items() if tag.startswith(EVALUATION)]
    return np.any(has_values, axis=0) if has_values else np.zeros(len(columns[ENV_STEPS]), bool)


class GrowingColumns:
    """The columns of a metrics file that another process writes: `read` parses the rows that were added since the last call.

    Of a long file evenly spaced rows are kept, `max_rows` to twice as many, and those with an evaluation, as far as they are
    fewer than the others. A file that was replaced or has become shorter, as at a resumption, is read anew.
    """

    def __init__(self, path: Path, *, max_rows: int) -> None:
        self._path, self._max_rows = path, max_rows
        self._columns: Columns = {ENV_STEPS: np.zeros(0)}
        self._inode, self._end = 0, 0

    def read(self, every: int | None = None) -> Columns:
        """Return the columns of the complete lines.

        Args:
            every: env_steps between evaluations; see `read_columns`.

        Raises:
            RunError: a line is damaged, or the file cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if (status.st_ino, status.st_size) == (self._inode, self._end):
                    return self._columns
                is_new = status.st_ino != self._inode or status.st_size < self._end
                self._read_from(file.fileno(), 0 if is_new else self._end, status.st_size, every)
                self._inode = status.st_ino
        except FileNotFoundError:
            self._columns, self._inode, self._end = {ENV_STEPS: np.zeros(0)}, 0, 0
        except (OSError, ValueError) as error:
            raise RunError(f"{self._path}: {error}") from error
        return self._columns

    def _read_from(self, descriptor: int, start: int, size: int, every: int | None) -> None:
        last = _read_last_line(descriptor) if size > start else None
        end = start if last is None else last[0] + len(last[1]) + 1
        if start == 0:
            self._columns = read_columns(self._path, max_rows=self._max_rows, every=every)
        elif end > start:
            lines = os.pread(descriptor, end - start, start).split(b"\n")[:-1]
            rows = _parse_lines(lines, ["a new line"] * len(lines), self._path)
            # Rows that were added while the file was read first are known already.
            known = self._columns[ENV_STEPS].max(initial=-1)
            rows = [row for row in rows if row[ENV_STEPS] > known]
            self._columns = _append(self._columns, to_columns(rows, None, self._path))
        self._end = end
        if len(self._columns[ENV_STEPS]) > 2 * self._max_rows:
            self._columns = _thin(self._columns)


def _thin(columns: Columns) -> Columns:
    """Leave out every second row but the last; of those with an evaluation only if they are more than the others."""
    is_evaluated = has_evaluation(columns)
    evaluated, others = np.flatnonzero(is_evaluated), np.flatnonzero(~is_evaluated)
    evaluated = evaluated[::2] if len(evaluated) > len(others) else evaluated
    left = np.unique([*evaluated, *others[::2], len(is_evaluated) - 1])
    return {tag: values[left] for tag, values in columns.items()}


def _append(columns: Columns, more: Columns) -> Columns:
    counts = len(columns[ENV_STEPS]), len(more[ENV_STEPS])
    sides = zip((columns, more), counts, strict=True)
    filled = [{tag: side.get(tag, np.full(n, np.nan)) for tag in columns | more} for side, n in sides]
    return {tag: np.concatenate([part[tag] for part in filled]) for tag in filled[0]}


def _read_last_line(descriptor: int) -> tuple[int, bytes] | None:
    """Return the last complete line, and the byte at which it begins."""
    size = length = os.fstat(descriptor).st_size
    length = min(size, _BLOCK)
    while True:
        data = os.pread(descriptor, length, size - length)
        end = data.rfind(b"\n")
        start = data.rfind(b"\n", 0, max(end, 0)) + 1
        if start or length == size:
            return (size - length + start, data[start:end]) if end > 0 else None
        length = min(2 * length, size)


def _sample_lines(path: Path, count: int, every: int | None) -> Lines | None:
    """Read evenly spaced lines of a file, and those after each multiple of `every` env_steps; None for a short file.

    Seeking to them takes a hundredth of the time of reading and parsing all lines.
    """
    try:
        with open_regular(path) as file:
            descriptor = file.fileno()
            # Without reading ahead, of which little would be used.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            block = os.pread(descriptor, _BLOCK, 0)
            last = _read_last_line(descriptor)
            width = len(block) // max(block.count(b"\n"), 1)
            if last is None or last[0] <= 2 * count * width:
                return None
            starts = np.linspace(0, last[0], max(count, 2)).astype(int).tolist()[:-1]
            lines = dict(filter(None, (_read_line_after(descriptor, start, width) for start in starts)))
            lines[last[0]] = last[1]
            if every is not None:
                lines |= _read_lines_of_steps(descriptor, dict(sorted(lines.items())), every, count, width)
            return dict(sorted(lines.items()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {error}") from error


def _read_line_after(descriptor: int, start: int, width: int) -> tuple[int, bytes] | None:
    """Return the first complete line that begins at this byte or later, and the byte at which it begins."""
    length = 3 * width
    while True:
        # The line before ends at `start - 1` if a line begins at `start`.
        data = os.pread(descriptor, length, max(start - 1, 0))
        begin = data.find(b"\n") + 1 if start else 0
        end = data.find(b"\n", begin)
        if end >= 0 and (begin or not start):
            return max(start - 1, 0) + begin, data[begin:end]
        if len(data) < length:
            return None
        length *= 2


def _read_lines_of_steps(descriptor: int, known: Lines, every: int, count: int, width: int) -> Lines:
    """Read the first row after each multiple of `every` env_steps: it is looked for where it should be by interpolation.

    Args:
        known: lines in order, among them the first and the last; each multiple is between two of them.
    """
    starts = np.array(list(known))
    steps = np.array([_steps_of(line) for line in known.values()], np.float64)
    if not np.isfinite(steps).all():
        return {}  # parsing the lines names the damaged one
    last = int(steps[-1]) // every
    wanted = np.linspace(1, last, min(last, count)).astype(np.int64) * every
    after = np.searchsorted(steps, wanted)
    is_between = (after > 0) & (after < len(steps))
    wanted, after = wanted[is_between], after[is_between]
    first, end = starts[after - 1], starts[after]
    part = (wanted - steps[after - 1]) / np.maximum(steps[after] - steps[after - 1], 1)
    guess = (first + part * (end - first)).astype(np.int64)
    begin, stop = np.clip(guess - 3 * width, first, end), np.clip(guess + 2 * width, first, end)
    found: Lines = {}
    for goal, near, far, low, high in zip(*(array.tolist() for array in (wanted, begin, stop, first, end)), strict=True):
        line = _find_row(descriptor, near, far, goal) or _find_row(descriptor, low, high, goal)
        if line is not None:
            found[line[0]] = line[1]
    return found


def _find_row(descriptor: int, start: int, end: int, wanted: float) -> tuple[int, bytes] | None:
    """Return the first row between two bytes with at least so many env_steps after a row with fewer; None if there is none."""
    before = max(start - 1, 0)
    data = os.pread(descriptor, end - before, before)
    # Without the part of a line at the start.
    begin = data.find(b"\n") + 1 if start else 0
    has_fewer = False
    while (stop := data.find(b"\n", begin)) >= 0:
        line = data[begin:stop]
        if _steps_of(line) >= wanted:
            return (before + begin, line) if has_fewer else None
        has_fewer = True
        begin = stop + 1
    return None


_STEPS = b'"env_steps":'


def _steps_of(line: bytes) -> float:
    """Return the env_steps of a row without parsing all of it; NaN for a damaged row."""
    begin = line.find(_STEPS) + len(_STEPS)
    try:
        return int(line[begin : line.find(b",", begin)]) if begin >= len(_STEPS) else math.nan
    except ValueError:
        return math.nan


def _parse_lines(lines: Sequence[bytes], names: Sequence[str], path: Path) -> list[dict[str, Any]]:
    """Parse the lines at once, which is faster; line by line if that fails, for the name of the damaged line."""
    try:
        rows: list[Any] = _DECODER.decode(f"[{b','.join(lines).decode()}]")
        if len(rows) == len(lines) and all(type(row) is dict and type(row.get(ENV_STEPS)) is int for row in rows):
            return rows
    except (ValueError, RecursionError):
        pass
    return [read_row(line, f"{path}, {name}") for line, name in zip(lines, names, strict=True)]


def to_columns(rows: Sequence[Mapping[str, Any]], tags: Sequence[str] | None, path: Path | str) -> Columns:
    """Return rows of metrics as columns.

    Args:
        rows: the rows, each with its `env_steps`.
        tags: see `read_columns`.
        path: the file, for errors.

    Raises:
        RunError: a value is no finite number and not None.
    """
    found = list({ENV_STEPS: None} | {tag: None for row in rows for tag in row})
    if len(found) > MAX_TAGS:
        raise RunError(f"{path}: has {len(found):,} tags; at most {MAX_TAGS:,} are read")
    wanted = [tag for tag in found if tags is None or tag in (ENV_STEPS, *tags)]
    return {tag: _to_column([row.get(tag) for row in rows], tag, path) for tag in wanted}


def _to_column(values: Sequence[Any], tag: str, path: Path | str) -> npt.NDArray[np.float64]:
    try:
        # NumPy would read the text "1.5" as a number.
        if set(map(type, values)) <= {float, int, NoneType}:
            column = np.array(values, np.float64)
            if not np.isinf(column).any():
                return column
    except OverflowError:
        pass
    raise RunError(f"{path}: {tag[:80]!r} must be a finite number or null in every row")
