"""The data of a report's charts: short lines, and arrays of float32 in base64 that lines share."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.storage.columns import ENV_STEPS

Floats = npt.NDArray[np.floating[Any]]

MAX_POINTS = 600
"""Maximum number of points of a line: more than a chart has pixels."""

STEPS, TIME = "steps", "time"
"""The two horizontal axes of a chart."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: text of the legend.
        x: steps or seconds.
        y: values.
        color: position in the palette; None is gray, behind the other lines.
        low: lower end of the interval around `y`.
        high: upper end of the interval around `y`.
    """

    name: str
    x: Floats
    y: Floats
    color: int | None = 0
    low: Floats | None = None
    high: Floats | None = None


@dataclass(frozen=True)
class Chart:
    """A chart, of which the page shows the lines of one axis.

    Attributes:
        name: identifies the chart on the page.
        title: heading.
        note: a sentence below it.
        lines: the lines by axis; `{"": lines}` for a chart that has an axis of its own.
        x_label: label of an own axis.
        y_range: limits of the vertical axis; None follows the data.
        unit: label of the axis of steps.
    """

    name: str
    title: str
    note: str
    lines: Mapping[str, Sequence[Line]]
    x_label: str = ""
    y_range: tuple[float, float] | None = None
    unit: str = ENV_STEPS


@dataclass
class ChartData:
    """The charts of a page as JSON data; equal arrays are stored once.

    Attributes:
        charts: JSON data of each chart.
        arrays: base64 of each array.
    """

    charts: list[dict[str, Any]] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)
    positions: dict[bytes, int] = field(default_factory=dict, repr=False)

    def add(self, chart: Chart) -> None:
        """Add a chart."""
        self.charts.append(
            {
                "name": chart.name,
                "title": chart.title,
                "xLabel": chart.x_label,
                "yRange": chart.y_range,
                "unit": chart.unit,
                "lines": {axis: [self._line(line) for line in lines] for axis, lines in chart.lines.items()},
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return the data for the page's script."""
        return {"charts": self.charts, "arrays": self.arrays}

    def _line(self, line: Line) -> dict[str, Any]:
        data: dict[str, Any] = {"name": line.name, "color": line.color, "x": self._array(line.x), "y": self._array(line.y)}
        if line.low is not None and line.high is not None:
            data |= {"low": self._array(line.low), "high": self._array(line.high)}
        return data

    def _array(self, values: Floats) -> int:
        # Values beyond float32 would be infinite, which a chart leaves out.
        data = np.clip(values, -3e38, 3e38).astype("<f4").tobytes()
        if data not in self.positions:
            self.positions[data] = len(self.arrays)
            self.arrays.append(base64.b64encode(data).decode())
        return self.positions[data]
