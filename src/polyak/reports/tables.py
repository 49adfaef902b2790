"""Several runs, read together, and tables of them: one row for each run, or for each report of each run."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from polyak.core.printing import MAX_LINES, text_of
from polyak.core.suggestions import escape_control, unknown_name
from polyak.core.tags import RETURN
from polyak.core.text_table import NOTHING, align_table
from polyak.core.warn import warn
from polyak.reports.flat_settings import find_differences
from polyak.reports.records import RunRecord, check_tag, read_record, require_pandas
from polyak.storage.columns import ENV_STEPS
from polyak.storage.run_directory import CONFIG, RunError, directory_path, runs_in

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")

Table = dict[str, npt.NDArray[Any]]
"""Columns of equal length by name."""

RESULTS = ("eval_mean_return", "eval_std_return", "eval_episodes", "train_seconds", "fps")
"""Entries of the summary that are columns of a table of runs."""


@dataclass(frozen=True, eq=False, repr=False)
class Runs(Sequence[RunRecord]):
    """Several runs, read by `polyak.load_runs`; a sequence of `RunRecord`, also by name: `runs["ppo/seed-0"]`.

    Attributes:
        records: the runs that could be read, sorted by name and number.
        unreadable: reasons why the other runs cannot be read, by name.
    """

    records: tuple[RunRecord, ...]
    unreadable: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self.records)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self.records[key]
        found = {record.name: record for record in self.records}
        if key not in found:
            reason = self.unreadable.get(key) or unknown_name(key, found, "run")
            raise KeyError(f"load_runs: {reason}")
        return found[key]

    @property
    def tags(self) -> list[str]:
        """All tags of the metrics of all runs, in the order of the first run that has them."""
        rows = [columns for record in self.records if (columns := _read_or_warn(record, lambda r: r.read_metrics(max_rows=8)))]
        return list({tag: None for columns in rows for tag in columns if tag != ENV_STEPS})

    @property
    def differences(self) -> list[str]:
        """The names of the settings in which the runs differ, apart from the seed and others that change no learning."""
        return find_differences(record.settings for record in self.records)

    def columns(self, *tags: str, max_rows: int | None = None) -> Table:
        """Return a tidy table: without tags one row for each run, with tags one row for each report of each run.

        The first columns are `run`, `algorithm`, `env`, `seed` and the settings in which the runs differ. A row of a run then
        has `status`, `env_steps`, `return` (the last `rollout/ep_rew_mean`) and the results of the summary, such as
        `eval_mean_return`; a row of a report has `env_steps` and the tags.

        A run whose metrics are damaged is left out of a table of reports, with a warning.

        Args:
            tags: tags of the metrics.
            max_rows: about so many evenly spaced reports of each run; None is all.

        Raises:
            ValueError: no run has such a tag; the message suggests the nearest.
        """
        differences = self.differences
        if not tags:
            return _join([_describe(record, differences) | _result(record) for record in self.records], [1] * len(self))
        read = [(record, _read_or_warn(record, lambda r: r.read_metrics(tags, max_rows=max_rows))) for record in self.records]
        found = [(record, columns) for record, columns in read if columns is not None]
        for tag in tags:
            if not any(tag in columns for _, columns in found):
                check_tag("load_runs", tag, self.tags)
        counts = [len(columns[ENV_STEPS]) for _, columns in found]
        table = _join([_describe(record, differences) for record, _ in found], counts)
        for tag in (ENV_STEPS, *tags):
            parts = [columns.get(tag, np.full(n, np.nan)) for (_, columns), n in zip(found, counts, strict=True)]
            table[tag] = np.concatenate(parts) if parts else np.zeros(0)
        return table

    def to_pandas(self, *tags: str, max_rows: int | None = None) -> "pandas.DataFrame":
        """Return the table of `columns` as a frame.

        Raises:
            ImportError: pandas is not installed.
        """
        return require_pandas().DataFrame(self.columns(*tags, max_rows=max_rows))

    def __repr__(self) -> str:
        table = {name: column for name, column in self.columns().items() if name not in ("eval_std_return", "eval_episodes")}
        rows = [[_cell(column[n]) for column in table.values()] for n in range(min(len(self), MAX_LINES - 2))]
        lines = align_table([list(table), *rows], texts=3)
        more = len(self) - len(rows)
        bad = len(self.unreadable)
        lines += [f"... {more:,} more runs"] * (more > 0) + [f"{bad:,} cannot be read, see .unreadable"] * (bad > 0)
        return "\n".join(lines)


def load_runs(*paths: str | os.PathLike[str]) -> Runs:
    """Read all runs in directories, up to four levels deep, such as the runs of `--seeds`; nothing is written.

    A run that cannot be read is listed in `Runs.unreadable`, and hides no other.

    Args:
        paths: directories of runs, or run directories.

    Raises:
        RunError: a path holds no run, or no run can be read.
        TypeError: there is no path.
    """
    if not paths:
        raise TypeError("load_runs: needs a directory of runs; pass load_runs('runs')")
    # One path of a run that is found by several, such as links.
    paths_of_runs = {
        os.path.realpath(run): run for path in reversed(paths) for run in reversed(find_runs(directory_path(path)))
    }
    found = [Path(os.path.abspath(run)) for run in reversed(paths_of_runs.values())]
    root = _find_root([Path(os.path.abspath(path)) for path in paths], found)
    records, unreadable = [], {}
    for run in found:
        name = str(run.relative_to(root))
        try:
            records.append(read_record(run, name))
        except RunError as error:
            unreadable[name] = str(error)
    if not records:
        raise RunError(next(iter(unreadable.values())))
    return Runs(tuple(records), unreadable)


def find_runs(path: Path) -> list[Path]:
    """Return the run directories in a directory, or the directory itself if it is a run.

    Raises:
        RunError: there is no run, or the directory cannot be read.
    """
    if os.path.lexists(path / CONFIG):
        return [path]
    found = runs_in(path)
    if not found:
        read_record(path, name=None)  # Raises with the reason.
    return found


def _find_root(paths: Sequence[Path], runs: Sequence[Path]) -> Path:
    """Return the directory to which names are relative: the given one, else the common parent."""
    return Path(os.path.commonpath([path.parent if path in runs else path for path in paths]))


def _describe(record: RunRecord, differences: Sequence[str]) -> dict[str, Any]:
    own = {"run": record.name, "algorithm": record.algorithm, "env": record.env, "seed": record.seed}
    return own | {name: record.settings.get(name) for name in differences if name not in own}


def _result(record: RunRecord) -> dict[str, Any]:
    summary, last = record.summary or {}, _read_or_warn(record, RunRecord.read_last_metrics) or {}
    # A summary is older than the metrics after a resumed run was killed.
    is_newest = not _is_less(summary.get(ENV_STEPS), last.get(ENV_STEPS))
    env_steps = summary.get(ENV_STEPS) if record.summary is not None and is_newest else last.get(ENV_STEPS)
    own = {"status": record.status, ENV_STEPS: env_steps, "return": last.get(RETURN)}
    return own | {name: summary.get(name) if is_newest else None for name in RESULTS}


def _is_less(a: Any, b: Any) -> bool:
    """Return True if both are integers and the first is less."""
    return type(a) is int and type(b) is int and a < b


def _read_or_warn(record: RunRecord, read: Callable[[RunRecord], T | None]) -> T | None:
    """Return what the function reads; None with a warning if the run is damaged or was removed."""
    try:
        return read(record)
    except RunError as error:
        warn(str(error))
        return None


def _join(rows: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> Table:
    """Return rows as columns; each row is repeated so many times."""
    names = list({name: None for row in rows for name in row})
    return {name: np.repeat(_to_array([row.get(name) for row in rows]), counts) for name in names}


def _to_array(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return integers, floats (None as NaN), or objects."""
    kinds = set(map(type, values))
    if kinds == {int} and all(abs(value) < 2**63 for value in values):
        return np.array(values, np.int64)
    if kinds and kinds <= {int, float, type(None)} and kinds != {type(None)}:
        return np.array(values, np.float64)
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return NOTHING
    return escape_control(value if isinstance(value, str) else text_of(value))
