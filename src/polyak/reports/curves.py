"""Curves of a tag: of single runs, and of groups of runs as interquartile mean with its interval on a common grid."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from polyak.core.suggestions import unknown_name
from polyak.reports.flat_settings import find_differences
from polyak.reports.records import RunRecord, check_tag
from polyak.reports.statistics import iqm_intervals
from polyak.storage.columns import ENV_STEPS, Columns
from polyak.storage.run_directory import RunError

Floats = npt.NDArray[np.float64]

XAxis = Literal["env_steps", "time"]
"""Axis of a curve: environment steps, or seconds of training."""

TIME, FPS = "time/time_elapsed", "time/fps"

POINTS = 200
"""Maximum number of points of a group."""

SLACK = 0.05
"""Fraction of a curve by which runs may begin later or end earlier, and still bound the curve."""

MIN_ROWS, MAX_ROWS_OF_ALL = 64, 64_000
"""Minimum number of rows that are read of a run, and number of rows that are read of all runs together."""


@dataclass(frozen=True)
class Group:
    """Runs whose settings are equal apart from the seed, or that have equal values of the settings of `group_by`.

    Attributes:
        label: algorithm and settings in which the groups differ.
        env: the environment.
        settings: those settings.
        records: the runs.
    """

    label: str
    env: str
    settings: Mapping[str, object]
    records: tuple[RunRecord, ...]


@dataclass(frozen=True)
class Curve:
    """The curve of a group.

    Attributes:
        group: the group.
        x: env_steps or seconds, ascending.
        y: interquartile mean over the runs; the values themselves if there is one run.
        low: lower end of the 95 % interval of `y`; None if there is one run.
        high: upper end.
        runs: number of runs at each point.
    """

    group: Group
    x: Floats
    y: Floats
    low: Floats | None
    high: Floats | None
    runs: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Samples:
    """The metrics of runs, read once for several curves.

    Attributes:
        columns: evenly spaced rows of each run, by name.
        unreadable: why the metrics of the other runs cannot be read, by name.
    """

    columns: Mapping[str, Columns]
    unreadable: Mapping[str, str]

    @property
    def tags(self) -> list[str]:
        """All tags, in the order of the first run that has them."""
        return list({tag: None for columns in self.columns.values() for tag in columns if tag != ENV_STEPS})


@dataclass(frozen=True)
class Curves:
    """The curves of one tag, one for each group with values of it.

    Attributes:
        tag: the tag.
        x: the axis.
        curves: the curves.
        missing: names of the runs without a value of the tag.
    """

    tag: str
    x: XAxis
    curves: Sequence[Curve]
    missing: Sequence[str] = field(default=())


def as_names(argument: str, value: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of tags or settings, of which an argument has one or several.

    Raises:
        ValueError: there is none, or the argument has something else.
    """
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{argument} must be one name or more, got {value!r:.80}")
    return names


def group_runs(records: Sequence[RunRecord], by: Sequence[str] | None = None) -> list[Group]:
    """Group runs by environment and settings, in the order of the runs; settings that are numbers are in their order.

    Args:
        records: the runs.
        by: names of settings; None groups by the algorithm and all settings in which runs of one algorithm and environment
            differ, so that only seeds are one group.

    Raises:
        ValueError: no run has such a setting; the message suggests the nearest.
    """
    known = {name: None for record in records for name in record.settings}
    for name in by or ():
        if name not in known:
            raise ValueError(f"group_by: {unknown_name(name, known, 'setting')}")
    tasks: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        tasks.setdefault((record.env, record.algorithm), []).append(record)
    names = {task: find_differences(record.settings for record in inside) for task, inside in tasks.items()}
    has_algorithms = len({record.algorithm for record in records}) > 1
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for record in records:
        chosen = _settings_of(record, names[record.env, record.algorithm] if by is None else by)
        algorithm = record.algorithm if by is None else ""
        groups.setdefault((record.env, algorithm, repr(list(map(_key, chosen.values())))), []).append(record)
    result, keys = [], []
    first: dict[str, int] = {}
    values_of: dict[tuple[str, str], set[str]] = {}
    for (env, algorithm, _), inside in groups.items():
        for name, value in _settings_of(inside[0], names[env, algorithm] if by is None else by).items():
            values_of.setdefault((name, _text(value)), set()).add(repr(_key(value)))

    def rank(*parts: object) -> int:
        return first.setdefault(repr(parts), len(first))

    for (env, algorithm, _), inside in groups.items():
        settings = _settings_of(inside[0], names[env, algorithm] if by is None else by)
        # Groups with equal labels would be one.
        texts = {name: _text(x) if len(values_of[name, _text(x)]) == 1 else repr(x) for name, x in settings.items()}
        parts = [text if name == "algorithm" else f"{name}={text}" for name, text in texts.items()]
        if by is None and (has_algorithms or not parts):
            parts.insert(0, algorithm)
        result.append(Group(", ".join(parts), env, settings, tuple(inside)))
        values = [(0, x) if _is_number(x) else (1, rank(env, algorithm, name, x)) for name, x in settings.items()]
        keys.append((rank(env), rank(env, algorithm), values))
    return [result[i] for i in sorted(range(len(result)), key=keys.__getitem__)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _key(value: object) -> object:
    # 1 of Python and 1.0 of the command line are one value.
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value


def _settings_of(record: RunRecord, names: Sequence[str]) -> dict[str, object]:
    return {name: record.settings.get(name) for name in names}


def read_samples(records: Sequence[RunRecord], tags: Sequence[str] | None = None, *, max_rows: int | None = None) -> Samples:
    """Read the metrics of runs, of which about `max_rows` rows each; a run that cannot be read hides no other.

    Args:
        records: the runs.
        tags: tags to read; None reads all.
        max_rows: number of evenly spaced rows of a run; None is all rows of few runs, and fewer of each of many.
    """
    rows = max(MIN_ROWS, MAX_ROWS_OF_ALL // max(len(records), 1)) if max_rows is None else max_rows
    wanted = None if tags is None else [*tags, TIME, FPS]
    columns, unreadable = {}, {}
    for record in records:
        try:
            columns[record.name] = record.read_metrics(wanted, max_rows=rows)
        except RunError as error:
            unreadable[record.name] = str(error)
    return Samples(columns, unreadable)


def make_curves(groups: Sequence[Group], samples: Samples, tag: str, *, x: XAxis = "env_steps", points: int = POINTS) -> Curves:
    """Compute the curves of a tag, one for each group.

    Seeds report at slightly different env_steps, so they are interpolated to a common grid, which goes from where half of the
    runs have a value to where half of them still have one, less the last few reports of runs of about equal length. A run that
    diverged keeps its last value until then: leaving it out would raise the curve.

    Args:
        groups: the groups.
        samples: the metrics of their runs.
        tag: the tag.
        x: `"env_steps"`, or `"time"` for seconds of training.
        points: maximum number of points of a group; a curve of one run has at most ten times as many, among them its extremes.

    Raises:
        ValueError: no run has the tag; the message suggests the nearest.
    """
    check_tag("curves", tag, samples.tags)
    curves, missing = [], []
    for group in groups:
        lines: dict[str, tuple[Floats, Floats]] = {}
        for record in group.records:
            if record.name in samples.columns:
                lines[record.name] = line_of(samples.columns[record.name], tag, x)
        empty = [name for name, line in lines.items() if not len(line[0])]
        missing += empty
        inside = [record for record in group.records if record.name in lines and record.name not in empty]
        if len(inside) == 1:
            a, b = thin(*lines[inside[0].name], 10 * points)
            curves.append(Curve(group, a, b, None, None, np.ones(len(a), np.int64)))
        elif inside:
            diverged = [record.status == "diverged" for record in inside]
            curves.append(_aggregate(group, [lines[record.name] for record in inside], diverged, points))
    return Curves(tag, x, curves, missing)


def elapsed_seconds(columns: Columns) -> Floats:
    """Return the seconds of training at each row; a resumed run counts them anew in `time/time_elapsed`."""
    seconds = columns.get(TIME, np.full(len(columns[ENV_STEPS]), np.nan))
    before = np.concatenate([[0.0], np.where(_is_resumed(columns, seconds), seconds[:-1], 0.0)]) if len(seconds) else seconds
    return np.asarray(seconds + np.cumsum(before), np.float64)


def _is_resumed(columns: Columns, seconds: Floats) -> npt.NDArray[np.bool_]:
    """Return True for each row but the first that was written after a resumption, where the row before was not.

    The seconds are fewer than before, or as many or more where the first report came late; `time/fps` counts from the
    env_steps at which the run was resumed.
    """
    steps = columns[ENV_STEPS]
    started_at = steps - seconds * columns.get(FPS, np.full(len(steps), np.nan))
    # Half of the steps before a resumption: far more than rounding errors.
    starts_later = np.diff(started_at) > (steps - started_at)[:-1] / 2
    return np.asarray((np.diff(seconds) < 0) | starts_later)


def thin(x: Floats, y: Floats, points: int) -> tuple[Floats, Floats]:
    """Return at most about `points` points of a curve: the ends, and the lowest and highest point of each of many parts."""
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), max(points // 2, 1) + 1).round().astype(int)
    parts = [(start, y[start:end]) for start, end in itertools.pairwise(edges)]
    extremes = {start + int(choose(part)) for start, part in parts for choose in (np.argmin, np.argmax)}
    rows = sorted({0, len(x) - 1} | extremes)
    return x[rows], y[rows]


def line_of(columns: Columns, tag: str, x: XAxis) -> tuple[Floats, Floats]:
    """Return the axis and the values of a tag, without rows that lack it."""
    y = columns.get(tag, np.full(len(columns[ENV_STEPS]), np.nan))
    axis = columns[ENV_STEPS] if x == "env_steps" else elapsed_seconds(columns)
    has_value = np.isfinite(axis) & np.isfinite(y)
    return axis[has_value], y[has_value]


def _aggregate(group: Group, lines: Sequence[tuple[Floats, Floats]], diverged: Sequence[bool], points: int) -> Curve:
    firsts, lasts = sorted(x[0] for x, _ in lines), sorted((x[-1] for x, _ in lines), reverse=True)
    half = math.ceil(len(lines) / 2) - 1
    # Without the last reports of the runs that report later than others: the mean would jump where the others end.
    slack = SLACK * (lasts[half] - firsts[half])
    first = max(x for x in firsts if x <= firsts[half] + slack)
    last = min(x for x in lasts if x >= lasts[half] - slack)
    grid = _make_grid([x for x, _ in lines], first, max(first, last), points)
    values = np.array(
        [
            np.interp(grid, x, y, left=np.nan, right=y[-1] if has_diverged else np.nan)
            for (x, y), has_diverged in zip(lines, diverged, strict=True)
        ]
    )
    low, y, high = np.full((3, len(grid)), np.nan)
    has_value = ~np.isnan(values)
    # Runs begin and end at few different points, between which the same runs have values.
    for pattern in np.unique(has_value, axis=1).T:
        columns = np.all(has_value == pattern[:, None], axis=0)
        if pattern.any():
            y[columns], low[columns], high[columns] = iqm_intervals(values[pattern][:, columns])
    runs = has_value.sum(axis=0)
    some = runs > 0
    return Curve(group, grid[some], y[some], low[some], high[some], runs[some])


def _make_grid(axes: Sequence[Floats], first: float, last: float, points: int) -> Floats:
    """Return all points of the runs, between which each curve is straight, or evenly spaced ones if they are too many."""
    if len(axes[0]) <= points and all(np.array_equal(axis, axes[0]) for axis in axes):
        return axes[0]
    union = np.unique(np.concatenate(axes))
    inside = union[(union >= first) & (union <= last)]
    return inside if len(inside) <= points else np.linspace(first, last, points)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
