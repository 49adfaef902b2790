"""Draws curves with matplotlib: colors, dashes and markers that can be told apart without colors."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from polyak.core.tags import RETURN
from polyak.reports.curves import Curve, Curves, XAxis
from polyak.reports.records import unit_of
from polyak.reports.tags import EVAL_RETURN

MM = 1 / 25.4
"""Inches of a millimetre."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
"""The palette of Okabe and Ito 2008 without yellow, which is too light for lines: distinct to color-blind readers."""

DASHES = ((), (5, 1.5), (1.2, 1.2), (5, 1.5, 1.2, 1.5), (8, 2))
"""Lengths of lines and gaps, in line widths; () is a solid line."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")

NUM_MARKERS = 6
"""Number of markers on a curve."""

ASPECT = 0.72
"""Height of a panel over its width."""

MIN_PANEL = 45.0
"""Minimum width of a panel in mm, from which the number of panels in a row follows."""


NAMES = {RETURN: "episode return", "rollout/ep_len_mean": "episode length", EVAL_RETURN: "evaluation return"}
"""Labels of tags; others are labelled with the tag."""

ENTRY, CHARACTER = 16.0, 1.65
"""Width in mm of an entry of the legend without its text, and of a character."""

UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))

STYLE: Any = {
    "svg.hashsalt": "polyak",  # equal ids in equal files
    "pdf.fonttype": 42,  # TrueType, as publishers demand
    "text.parse_math": False,  # a setting may contain dollar signs
    "font.size": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 8,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "legend.handlelength": 3.4,
    "savefig.dpi": 300,
}


class CurveFigure(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        from io import BytesIO

        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()


def draw_figure(panels: Sequence[Curves], labels: Sequence[str], size: tuple[float, float | None]) -> Figure:
    """Draw a panel for each tag and environment.

    Args:
        panels: the curves of each tag.
        labels: labels of all groups, of which each has a style.
        size: width and height in mm; without a height, panels have `ASPECT`.
    """
    envs = list({curve.group.env: None for panel in panels for curve in panel.curves})
    cells = [(panel, env) for panel in panels for env in envs]
    width, height = size
    columns = _count_columns(len(panels), len(envs), width)
    rows = math.ceil(len(cells) / columns)
    styles = {label: number for number, label in enumerate(labels)}
    with _style():
        panel_height = min(width / columns, 110.0) * ASPECT
        legend_rows = _legend_rows(labels, width)
        total = height or rows * panel_height + 4.0 * legend_rows
        figure = CurveFigure(figsize=(width * MM, total * MM), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for number, (axes, (panel, env)) in enumerate(zip(grid.flat, cells, strict=False)):
            _draw_panel(axes, panel, env, styles, title=env if len(envs) > 1 else "")
            # Without labels that a neighbor has.
            if number % columns and cells[number - 1][0] is panel:
                axes.set_ylabel("")
        for axes, below in zip(grid.flat, grid.flat[columns : len(cells)], strict=False):
            if axes.get_xlabel() == below.get_xlabel():
                axes.set_xlabel("")
        for axes in grid.flat[len(cells) :]:
            axes.remove()
        _draw_legend(figure, labels, legend_rows)
    return figure


def _count_columns(tags: int, envs: int, width: float) -> int:
    """Return the number of panels in a row: the environments of a tag, as far as they fit, else rows of about equal length."""
    most = max(1, int(width // MIN_PANEL))
    if tags > 1 and 1 < envs <= most:
        return envs
    panels = tags * envs
    return math.ceil(panels / math.ceil(panels / most))


def save_figure(figure: Figure, file: BinaryIO, suffix: str) -> None:
    """Write a figure as svg, pdf or png, without dates, so that equal figures are equal files."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[suffix]
    with _style():
        figure.savefig(file, format=suffix, metadata=metadata)


@contextmanager
def _style() -> Iterator[None]:
    """Use the style, whatever the user's settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _draw_panel(axes: Axes, panel: Curves, env: str, styles: dict[str, int], title: str) -> None:
    curves = [curve for curve in panel.curves if curve.group.env == env]
    longest = max((curve.x[-1] for curve in curves), default=1.0)
    unit, seconds = next(((unit, size) for unit, size in UNITS if longest >= 2 * size), UNITS[-1])
    for curve in curves:
        _draw_curve(axes, curve, styles[curve.group.label], seconds if panel.x == "time" else 1.0, has_others=len(styles) > 1)
    axes.set_title(title)
    axes.set_ylabel(NAMES.get(panel.tag, panel.tag))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    _label_x(axes, panel.x, unit, unit_of(record for curve in curves for record in curve.group.records))
    axes.margins(x=0.03)  # not to cut the first and last marker of narrow panels


def _label_x(axes: Axes, x: XAxis, unit: str, steps: str) -> None:
    if x == "time":
        axes.set_xlabel(f"training time ({unit})")
    else:
        axes.set_xlabel(steps.replace("env_steps", "environment steps"))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_curve(axes: Axes, curve: Curve, number: int, scale: float, *, has_others: bool) -> None:
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    x = curve.x / scale
    # The markers of curves with equal points do not cover each other.
    every = max(len(x) // NUM_MARKERS, 1)
    (line,) = axes.plot(
        x,
        curve.y,
        color=color,
        linewidth=1.2,
        marker=marker if has_others or len(x) == 1 else None,
        markersize=3.5,
        markerfacecolor="white",
        markeredgewidth=0.9,
        markevery=(number * every // 3 % every, every),
        label=curve.group.label,
    )
    if dashes := DASHES[number % len(DASHES)]:
        line.set_dashes(dashes)
    if curve.low is not None and curve.high is not None:
        axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)


def _legend_rows(labels: Sequence[str], width: float) -> int:
    """Return the number of lines of the legend; a single curve has none."""
    if len(labels) < 2:
        return 0
    lines = math.ceil(max(map(len, labels)) * CHARACTER / max(width - ENTRY, CHARACTER))
    return lines * math.ceil(len(labels) / _legend_columns(labels, width))


def _legend_columns(labels: Sequence[str], width: float) -> int:
    longest = max(map(len, labels))
    return max(1, min(len(labels), int(width // (ENTRY + CHARACTER * longest))))


def _draw_legend(figure: Figure, labels: Sequence[str], rows: int) -> None:
    if rows == 0:
        return
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    shown = [label for label in labels if label in found]
    width = figure.get_figwidth() / MM
    most = max(int((width - ENTRY) / CHARACTER), 10)
    texts = ["\n".join(textwrap.wrap(label, most)) for label in shown]
    columns = _legend_columns(labels, width)
    figure.legend([found[label] for label in shown], texts, loc="outside lower center", ncols=columns)
