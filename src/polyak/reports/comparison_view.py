"""The page of several runs: a table of them, and for each environment the curves and statistics of groups of runs."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyak.core.printing import format_number
from polyak.core.tags import RETURN
from polyak.core.text_table import NOTHING
from polyak.reports.charts import STEPS, TIME, Chart, Line
from polyak.reports.curves import POINTS, Curves, Group, Samples, XAxis, elapsed_seconds, group_runs, line_of, make_curves
from polyak.reports.flat_settings import find_differences
from polyak.reports.preset_settings import setting_text
from polyak.reports.records import RunRecord, unit_of
from polyak.reports.run_view import format_seconds
from polyak.reports.statistics import Floats, bootstrap_interval, iqm, performance_profile, probability_of_improvement
from polyak.reports.tags import EVAL_RETURN, group_tags, healthy_curve
from polyak.reports.views import Cell, ChartGroup, Column, ComparisonView, EnvView, Row, Table, number_cell
from polyak.storage.columns import ENV_STEPS

COLORS = 8
"""Number of groups that have a color; further groups are gray."""

MANY = 20
"""Number of groups above which curves have half as many points."""

MAX_SETTINGS = 8
"""Number of columns of settings in the table of runs."""

MAX_RUNS_WITH_ALL_TAGS = 100
"""Number of compared runs above which only returns are compared."""

FAILED = ("diverged", "failed", "killed")
"""Status of runs that may have ended before the others."""

AXES: Mapping[str, XAxis] = {STEPS: "env_steps", TIME: "time"}


@dataclass(frozen=True)
class Choice:
    """The choice of runs that a page compares.

    Attributes:
        group_by: the settings by which runs are grouped; () groups runs that differ in their seed alone.
        picked: names of the compared runs; None compares all, and has no boxes to pick.
        links: address of the page of a run by its name.
    """

    group_by: tuple[str, ...] = ()
    picked: Collection[str] | None = None
    links: Mapping[str, str] | None = None


def tags_to_read(count: int) -> list[str] | None:
    """Return the tags that a comparison of so many runs needs; None for all."""
    return None if count <= MAX_RUNS_WITH_ALL_TAGS else [RETURN, EVAL_RETURN, "time/fps"]


def compare_runs(
    records: Sequence[RunRecord], samples: Samples, failures: Mapping[str, str], title: str, path: Path, choice: Choice
) -> ComparisonView:
    """Return the page of several runs.

    Args:
        records: the runs.
        samples: their metrics.
        failures: reasons why other runs cannot be read, by name.
        title: heading of the page.
        path: the directory of the runs.
        choice: what is compared.

    Raises:
        ValueError: no run has a setting of `choice.group_by`.
    """
    compared = [record for record in records if choice.picked is None or record.name in choice.picked]
    compared = [record for record in compared if record.name in samples.columns]
    groups = group_runs(compared, choice.group_by or None) if compared else []
    names = list(dict.fromkeys(record.env for record in compared))
    unreadable = {**failures, **samples.unreadable}
    return ComparisonView(
        title=title,
        path=str(path),
        runs=_run_table(records, samples, choice),
        failures=[f"{name}: {reason}" if not reason.startswith(name) else reason for name, reason in unreadable.items()],
        no_runs="There are no runs here yet.",
        environments=[
            _compare_in_env(number, env, [group for group in groups if group.env == env], samples)
            for number, env in enumerate(names, start=1)
        ],
        group_by=", ".join(choice.group_by),
        group_choices=["", *find_differences(record.settings for record in records)] if records else [""],
    )


def _run_table(records: Sequence[RunRecord], samples: Samples, choice: Choice) -> Table:
    settings = find_differences([record.settings for record in records])
    settings = [name for name in settings if name not in ("algorithm", "env")][:MAX_SETTINGS]
    texts = ["run", "algorithm", "environment", "status"]
    numbers = ["seed", unit_of(records), "return", "greedy return", "steps/s", "training time"]
    columns = [*map(Column, texts), *(Column(name, is_number=True) for name in numbers), *map(Column, settings)]
    rows = [
        Row(
            _run_cells(record, _last_row(samples, record.name), settings),
            key=record.name,
            link=(choice.links or {}).get(record.name, ""),
            is_picked=choice.picked is not None and record.name in choice.picked,
        )
        for record in records
    ]
    return Table("All runs", columns, rows, sorts=True, picks=choice.picked is not None)


def _last_row(samples: Samples, name: str) -> dict[str, float]:
    """Return the last finite value of each tag, with the seconds of training."""
    columns = samples.columns.get(name)
    if columns is None or not len(columns[ENV_STEPS]):
        return {}
    finite = {tag: values[np.isfinite(values)] for tag, values in columns.items()}
    last = {tag: float(values[-1]) for tag, values in finite.items() if len(values)}
    return last | {"seconds": float(elapsed_seconds(columns)[-1])}


def _run_cells(record: RunRecord, last: Mapping[str, float], settings: Sequence[str]) -> list[Cell]:
    seconds = last.get("seconds", math.nan)
    greedy = (record.summary or {}).get("eval_mean_return")
    numbers = [
        number_cell(record.seed),
        number_cell(last.get(ENV_STEPS)),
        number_cell(last.get(RETURN)),
        number_cell(greedy if isinstance(greedy, int | float) else last.get(EVAL_RETURN)),
        number_cell(last.get("time/fps")),
        number_cell(seconds, format_seconds(seconds)),
    ]
    own = [Cell(setting_text(record.settings.get(name, NOTHING))) for name in settings]
    return [Cell(record.name), Cell(record.algorithm), Cell(record.env), Cell(record.status), *numbers, *own]


def _compare_in_env(number: int, env: str, groups: Sequence[Group], samples: Samples) -> EnvView:
    """Compare the groups of one environment."""
    tags = [tag for tag in (RETURN, EVAL_RETURN) if any(_has_tag(samples, group, tag) for group in groups)]
    prefix, points = f"{number}:", POINTS if len(groups) <= MANY else POINTS // 2
    if not tags:
        return EnvView(env, "None of these runs has a return yet.", [], Table("Groups"), [], Table("Pairs"), "", [])
    curves = {tag: {axis: make_curves(groups, samples, tag, x=x, points=points) for axis, x in AXES.items()} for tag in tags}
    scores = {axis: _final_scores(groups, samples, tags[0], x) for axis, x in AXES.items()}
    colors = _choose_colors(scores[STEPS][0])
    mains = [_curve_chart(f"{prefix}{tag}", tag, by_axis, colors, _NOTES[tag]) for tag, by_axis in curves.items()]
    runs, unit = sum(len(group.records) for group in groups), unit_of(record for group in groups for record in group.records)
    noun = "runs" if runs > 1 else "run"
    count = f"{runs} {noun} in {len(groups)} groups" if len(groups) > 1 else f"{runs} {noun} of one group"
    ends = ", ".join(text for axis in AXES if (text := _end_text(axis, scores[axis][1], unit)))
    return EnvView(
        env,
        f"{count}. Statistics are of {tags[0]} at {ends}, which all runs but failed ones have reached.",
        mains,
        _group_table(groups, scores),
        [_profile_chart(f"{prefix}profile", scores, colors)],
        _improvement_table(scores),
        "Probability that a run of the first group has a higher return than a run of the second one, with 95 % intervals.",
        _other_charts(prefix, groups, samples, colors, tags),
    )


_NOTES = {
    RETURN: "Return of the training's episodes: interquartile mean over the runs of a group, with its 95 % interval.",
    EVAL_RETURN: "Return of the greedy policy: interquartile mean over the runs of a group, with its 95 % interval.",
}


def _has_tag(samples: Samples, group: Group, tag: str) -> bool:
    columns = [samples.columns[record.name] for record in group.records]
    return any(tag in values and np.isfinite(values[tag]).any() for values in columns)


def _final_scores(groups: Sequence[Group], samples: Samples, tag: str, x: XAxis) -> tuple[dict[str, Floats], float]:
    """Return the scores of each group's runs at the largest step or time that all of them have reached, and that point.

    A run that failed before keeps its last value: leaving it out would raise the score of its group.
    """
    lines: dict[str, list[tuple[Floats, Floats]]] = {}
    ends: dict[bool, list[float]] = {True: [], False: []}
    for group in groups:
        for record in group.records:
            axis, values = line_of(samples.columns[record.name], tag, x)
            if len(axis):
                lines.setdefault(group.label, []).append((axis, values))
                ends[record.status in FAILED].append(float(axis[-1]))
    end = min(ends[False] or ends[True], default=0.0)
    return {label: np.array([np.interp(end, *line) for line in inside]) for label, inside in lines.items()}, end


def _end_text(axis: str, end: float, unit: str) -> str:
    if not end:
        return ""
    return f"{end:,.0f} {unit}" if axis == STEPS else f"{end:,.1f} s of training"


def _choose_colors(scores: Mapping[str, Floats]) -> dict[str, int]:
    """Give a color to the groups with the best scores, in the order of the groups."""
    best = sorted(scores, key=lambda label: -float(iqm(scores[label][:, None])))[:COLORS]
    return {label: color for color, label in enumerate(label for label in scores if label in best)}


def _curve_chart(name: str, tag: str, by_axis: Mapping[str, Curves], colors: Mapping[str, int], note: str) -> Chart:
    lines = {
        axis: [
            Line(
                curve.group.label,
                curve.x,
                curve.y,
                colors.get(curve.group.label),
                *((curve.low, curve.high) if curve.group.label in colors else (None, None)),
            )
            for curve in curves.curves
        ]
        for axis, curves in by_axis.items()
    }
    unit = unit_of(record for curve in by_axis[STEPS].curves for record in curve.group.records)
    return Chart(name, tag, note, {axis: inside for axis, inside in lines.items() if inside or axis == STEPS}, unit=unit)


def _group_table(groups: Sequence[Group], scores: Mapping[str, tuple[dict[str, Floats], float]]) -> Table:
    columns = [Column("group"), Column("runs", is_number=True)]
    for name in ("at equal steps", "at equal wall time"):
        columns += [Column(f"IQM {name}", is_number=True), Column("95 % interval", is_number=True)]
    rows = []
    for group in groups:
        cells = [Cell(group.label), number_cell(len(group.records))]
        for axis in AXES:
            values = scores[axis][0].get(group.label)
            if values is None:
                cells += [number_cell(None), Cell(NOTHING, is_number=True)]
                continue
            text = NOTHING
            if len(values) > 1:
                text = "[{}, {}]".format(*(format_number(float(end)) for end in bootstrap_interval(iqm, values[:, None])))
            middle = float(iqm(values[:, None]))
            cells += [number_cell(middle, format_number(middle)), Cell(text, is_number=True)]
        rows.append(Row(cells))
    return Table("Groups", columns, rows, sorts=True)


def _profile_chart(name: str, scores: Mapping[str, tuple[dict[str, Floats], float]], colors: Mapping[str, int]) -> Chart:
    lines: dict[str, list[Line]] = {}
    for axis, (by_group, _) in scores.items():
        if not by_group:
            continue
        together = np.concatenate(list(by_group.values()))
        margin = 0.02 * float(np.ptp(together)) or 1.0
        limits = np.linspace(together.min() - margin, together.max(), 101)
        lines[axis] = [_profile(label, values[:, None], limits, colors.get(label)) for label, values in by_group.items()]
    note = "Share of a group's runs with a return above each threshold, with 95 % intervals; higher is better."
    return Chart(name, "Performance profile", note, lines, x_label="return", y_range=(0.0, 1.02))


def _profile(label: str, values: Floats, limits: Floats, color: int | None) -> Line:
    shares = performance_profile(values, limits)
    if color is None or len(values) < 2:
        return Line(label, limits, shares, color)
    low, high = bootstrap_interval(lambda resampled: performance_profile(resampled, limits), values)
    return Line(label, limits, shares, color, np.asarray(low), np.asarray(high))


def _improvement_table(scores: Mapping[str, tuple[dict[str, Floats], float]]) -> Table:
    """Compare all pairs of few groups, or the best of many with the next ones."""
    by_group = scores[STEPS][0]
    ranked = sorted(by_group, key=lambda label: -float(iqm(by_group[label][:, None])))[: COLORS + 1]
    pairs = [(a, b) for i, a in enumerate(ranked[: 3 if len(ranked) <= 4 else 1]) for b in ranked[i + 1 :]]
    rows = []
    for a, b in pairs:
        cells = [Cell(a), Cell(b)]
        for axis in AXES:
            first, second = (scores[axis][0].get(label) for label in (a, b))
            cells.append(number_cell(None) if first is None or second is None else _probability(first, second))
        rows.append(Row(cells))
    titles = [Column(f"P(first > second) {name}", is_number=True) for name in ("at equal steps", "at equal wall time")]
    return Table("Probability of improvement", [Column("first group"), Column("second group"), *titles], rows, sorts=True)


def _probability(first: Floats, second: Floats) -> Cell:
    arrays = first[:, None], second[:, None]
    value = float(probability_of_improvement(*arrays))
    if min(map(len, arrays)) < 2:
        return number_cell(value, f"{value:.2f}")
    low, high = bootstrap_interval(probability_of_improvement, *arrays)
    return number_cell(value, f"{value:.2f} [{float(low):.2f}, {float(high):.2f}]")


def _other_charts(
    prefix: str, groups: Sequence[Group], samples: Samples, colors: Mapping[str, int], without: Collection[str]
) -> list[ChartGroup]:
    """Curves of the other metrics, of the groups that have a color."""
    shown = [group for group in groups if group.label in colors]
    records = [record for group in shown for record in group.records]
    found = {tag for record in records for tag, x in samples.columns[record.name].items() if np.isfinite(x).any()}
    charts = []
    for group, tags in group_tags(found - set(without)):
        inside = []
        for tag in tags:
            by_axis: dict[str, Any] = {axis: make_curves(shown, samples, tag, x=x, points=100) for axis, x in AXES.items()}
            inside.append(_curve_chart(f"{prefix}{tag}", tag, by_axis, colors, healthy_curve(tag)))
        charts.append(ChartGroup(group.name, inside))
    return charts
