"""The runs of a directory for a live page: what has changed since the last look is read, and nothing else."""

import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyak.reports.comparison_view import Choice, compare_runs
from polyak.reports.curves import Samples
from polyak.reports.page import View
from polyak.reports.records import RunRecord, read_record
from polyak.reports.run_view import describe_run, newest_video
from polyak.storage.columns import Columns, GrowingColumns
from polyak.storage.lock import is_locked
from polyak.storage.run_directory import CONFIG, LOCK, METRICS, SUMMARY, SYSTEM, RunError, runs_in

ROWS = 400
"""Number of rows that are kept of each run."""

Stamp = tuple[tuple[int, int, int], ...]


@dataclass
class LiveRun:
    """A run as it was read last.

    Attributes:
        stamp: inode, size and time of the files of the record.
        metrics_stamp: inode, size and time of the metrics file.
        growing: reads the metrics.
        record: the record; None if it cannot be read.
        columns: the metrics; None if they cannot be read.
        error: the reason why the run or its metrics cannot be read; "" if there is none.
    """

    stamp: Stamp
    metrics_stamp: Stamp
    growing: GrowingColumns
    record: RunRecord | None = None
    columns: Columns | None = None
    error: str = ""


class LiveRuns:
    """The runs below a directory, or the directory itself if it is a run; runs may appear, change and vanish at any time."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.abspath(directory))
        if not os.path.isdir(self.directory):
            reason = "is not a directory" if os.path.lexists(self.directory) else "there is no such directory"
            raise RunError(f"{directory}: {reason}; the live page needs a directory of runs")
        if not os.access(self.directory, os.R_OK | os.X_OK):
            raise RunError(f"{directory}: cannot be read: permission denied")
        self._runs: dict[str, LiveRun] = {}
        self._state = 0

    def refresh(self) -> int:
        """Read what has changed; returns a number that differs from the last one if anything has."""
        is_run = os.path.lexists(self.directory / CONFIG)
        paths = [self.directory] if is_run else runs_in(self.directory)
        found = {path.name if is_run else str(path.relative_to(self.directory)): path for path in paths}
        has_changed = found.keys() != self._runs.keys()
        runs = {}
        for name, path in found.items():
            runs[name], is_new = _read(name, path, self._runs.get(name))
            has_changed |= is_new
        self._runs = runs
        self._state += has_changed
        return self._state

    def view(self, show: str | None, picked: Sequence[str], group_by: Sequence[str]) -> View:
        """Return the page of the run `show`, or of all runs with a comparison of the picked ones."""
        shown = self._runs.get(show) if show is not None else None
        failures = {name: run.error for name, run in self._runs.items() if run.error}
        if shown is not None and shown.record is not None and not shown.error:
            try:
                source = f"/video?{urllib.parse.urlencode({'show': show})}"
                return describe_run(shown.record, video_source=source)
            except RunError as error:  # removed or damaged since
                failures[str(show)] = str(error)
        elif show is not None:
            failures.setdefault(show, "this run is not here any more")
        records = [run.record for run in self._runs.values() if run.record is not None]
        samples = {run.record.name: run.columns for run in self._runs.values() if run.record and run.columns is not None}
        links = {record.name: f"/?{urllib.parse.urlencode({'show': record.name})}" for record in records}
        known = {name for record in records for name in record.settings}
        choice = Choice(tuple(name for name in group_by if name in known), frozenset(picked), links)
        return compare_runs(records, Samples(samples, {}), failures, self.directory.name or "/", self.directory, choice)

    def find_video(self, name: str) -> Path | None:
        """Return the newest video of a run of this directory, None without one."""
        run = self._runs.get(name)
        return None if run is None or run.record is None else newest_video(run.record.directory)


def _read(name: str, path: Path, known: LiveRun | None) -> tuple[LiveRun, bool]:
    """Return a run as it is now, and whether it has changed."""
    stamp, metrics = _stamp(path, CONFIG, SYSTEM, SUMMARY, LOCK), _stamp(path, METRICS)
    run = known or LiveRun((), (), GrowingColumns(path / METRICS, max_rows=ROWS))
    # A killed process changes no file.
    is_killed = run.record is not None and run.record.status == "training" and not is_locked(path / LOCK)
    has_changed = stamp != run.stamp or is_killed
    if not has_changed and metrics == run.metrics_stamp:
        return run, False
    try:
        record = read_record(path, name) if has_changed or run.record is None else run.record
        columns = run.growing.read(record.eval_every)
        return replace(run, stamp=stamp, metrics_stamp=metrics, record=record, columns=columns, error=""), True
    except RunError as error:
        return replace(run, stamp=stamp, metrics_stamp=metrics, columns=None, error=str(error)), True


def _stamp(path: Path, *names: str) -> Stamp:
    stamps = []
    for name in names:
        try:
            status = os.lstat(path / name)
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
