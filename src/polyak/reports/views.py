"""Content of the templates of a report: plain texts, and the charts that the script of the page draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyak.core.text_table import NOTHING
from polyak.reports.charts import Chart
from polyak.reports.findings import Finding


@dataclass(frozen=True)
class Tile:
    """A figure of the summary, with its name and a detail."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Status:
    """The state of a run: a word, and `"good"`, `"bad"` or `"busy"` for its color."""

    text: str
    kind: str


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    is_number: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and the value by which the page sorts."""

    text: str
    value: float | None = None
    is_number: bool = False


def number_cell(value: float | None, text: str | None = None) -> Cell:
    """Return the cell of a number; "—" for None and NaN, which the page sorts last."""
    if value is None or not math.isfinite(value):
        return Cell(NOTHING, math.nan, is_number=True)
    shown = f"{value:,.4g}" if abs(value) < 1e4 and value % 1 else f"{value:,.0f}"
    return Cell(shown if text is None else text, value, is_number=True)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        cells: the cells, of which the first is the row's heading.
        key: name of the run in the address of a live page.
        link: address behind the first cell.
        is_picked: the run is compared.
    """

    cells: Sequence[Cell]
    key: str = ""
    link: str = ""
    is_picked: bool = False


@dataclass(frozen=True)
class Table:
    """A table, with a title for screen readers.

    Attributes:
        sorts: the page sorts it by its columns.
        picks: each row has a box that picks its run.
    """

    title: str
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    sorts: bool = False
    picks: bool = False


@dataclass(frozen=True)
class ChartGroup:
    """Charts under one heading."""

    name: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class TimePart:
    """A part of the run's time; `start` and `share` in percent of the whole."""

    name: str
    text: str
    start: float
    share: float


@dataclass(frozen=True)
class Video:
    """A video: its name, and the address of the file or its data."""

    name: str
    source: str


@dataclass(frozen=True)
class RunView:
    """The page of one run; see `templates/run.html`."""

    title: str
    path: str
    status: Status
    tiles: Sequence[Tile]
    warnings: Sequence[Finding]
    chart_groups: Sequence[ChartGroup]
    no_curves: str
    spent: Sequence[TimePart]
    evaluations: Table
    evaluations_note: str
    video: Video | None
    settings_note: str
    preset_name: str
    changed_settings: Sequence[tuple[str, str, str]]
    settings: Sequence[tuple[str, str]]
    command: str
    command_note: str
    machine: Sequence[tuple[str, str]]
    resumptions: Table
    template: str = field(default="run.html", init=False)

    @property
    def has_speed_charts(self) -> bool:
        """True if a group of charts has the heading under which the times stand."""
        return any(group.name == "Speed" for group in self.chart_groups)

    def charts(self) -> list[Chart]:
        """Return all charts of the page."""
        return [chart for group in self.chart_groups for chart in group.charts]


@dataclass(frozen=True)
class EnvView:
    """The comparison of the runs of one environment."""

    name: str
    note: str
    mains: Sequence[Chart]
    groups: Table
    statistics: Sequence[Chart]
    improvement: Table
    improvement_note: str
    chart_groups: Sequence[ChartGroup]


@dataclass(frozen=True)
class ComparisonView:
    """The page of several runs; see `templates/comparison.html`."""

    title: str
    path: str
    runs: Table
    failures: Sequence[str]
    no_runs: str
    environments: Sequence[EnvView]
    group_by: str
    group_choices: Sequence[str]
    status: Status | None = None
    template: str = field(default="comparison.html", init=False)

    def charts(self) -> list[Chart]:
        """Return all charts of the page."""
        found: list[Chart] = []
        for env in self.environments:
            found += [*env.mains, *env.statistics, *(chart for group in env.chart_groups for chart in group.charts)]
        return found


@dataclass(frozen=True)
class StudyView:
    """The page of a study; see `templates/study.html`."""

    title: str
    path: str
    tiles: Sequence[Tile]
    notes: Sequence[str]
    history: Chart
    importances: Table
    best: Sequence[tuple[str, str]]
    command: str
    trials: Table
    errors: Sequence[str]
    status: Status | None = None
    template: str = field(default="study.html", init=False)

    def charts(self) -> list[Chart]:
        """Return all charts of the page."""
        return [self.history]
