"""`polyak.plot`: curves of runs as a picture for a paper, one panel for each tag and environment."""

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from polyak.core.checks import check_choice
from polyak.core.tags import RETURN
from polyak.core.warn import warn
from polyak.reports.curves import Curves, Group, Samples, XAxis, as_names, group_runs, make_curves, read_samples
from polyak.reports.records import RunRecord, check_tag
from polyak.reports.tables import Runs, load_runs
from polyak.storage.files import write_file
from polyak.storage.run_directory import RunError, is_run_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".pdf", ".png")

WIDTHS = {"column": 83.0, "text": 140.0, "page": 171.0}
"""
Widths in mm by name: a column of a page with two columns, the text of a page with one column (NeurIPS, ICLR, JMLR), and both
columns (ICML).
"""

MIN_SIZE, MAX_SIZE = 30.0, 1000.0
"""Range of widths and heights in mm."""

MAX_GROUPS = 24
"""Maximum number of curves in a picture: more could not be told apart."""


def plot(
    *runs: str | os.PathLike[str] | RunRecord | Runs,
    y: str | Sequence[str] = RETURN,
    x: XAxis = "env_steps",
    group_by: str | Sequence[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    width: str | float = "text",
    height: str | float | None = None,
) -> "Figure":
    """Draw curves of runs; equals `polyak plot`.

    Runs that differ in their seed alone are one curve: the interquartile mean over them, with its 95 % interval by a bootstrap
    over the runs as a band. A single run is drawn as it is. Each environment, and each tag, has a panel of its own. Curves
    differ in color, dashes and markers, so that they can be told apart without colors. Equal runs give equal files.

    Args:
        runs: run directories, directories of runs, or what `polyak.load_run` and `polyak.load_runs` return.
        y: tag of the metrics, or several.
        x: `"env_steps"`, gradient steps of trainings on data, or `"time"` for the time of training.
        group_by: names of the settings in which curves differ, such as `"learning_rate"`; None is the algorithm and all
            settings that differ.
        output: file to write, replaced if it exists; its suffix is .svg, .pdf or .png. None writes none.
        width: width of the picture: `"column"`, `"text"`, `"page"` (83, 140 and 171 mm), mm as a number, `"90mm"` or `"3.5in"`.
        height: height of the picture; None follows from the panels.

    Returns:
        The figure of matplotlib, to change or to save.

    Raises:
        RunError: there is no run, or none can be read.
        ValueError: no run has such a tag or setting; a size or the output's suffix is invalid.
        OSError: the output cannot be written.
        ImportError: the extra `plots` is missing.
    """
    check_output(output)
    check_choice("plot", "x", x, get_args(XAxis))
    size = (parse_length("width", width), None if height is None else parse_length("height", height))
    tags, groups_by = as_names("plot: y", y), None if group_by is None else as_names("plot: group_by", group_by)
    require_matplotlib()
    records = _collect_records(runs)
    groups = group_runs(records, groups_by)
    samples = read_samples(records, tags)
    for name, reason in samples.unreadable.items():
        warn(f"plot: {name} is left out: {reason}")
    _check_tags(records, samples, tags)
    return draw(groups, samples, tags, x, size, output)


def draw(
    groups: Sequence[Group],
    samples: Samples,
    tags: Sequence[str],
    x: XAxis,
    size: tuple[float, float | None],
    output: str | os.PathLike[str] | None,
) -> "Figure":
    """Draw the curves of groups, and write the picture.

    Args:
        size: width and height in mm.
    """
    labels = list({group.label: None for group in groups})
    if len(labels) > MAX_GROUPS:
        raise ValueError(
            f"plot: {len(labels)} curves cannot be told apart, at most {MAX_GROUPS} are drawn; pass fewer runs, or group them "
            "by one setting with group_by (--group-by)"
        )
    panels = [make_curves(groups, samples, tag, x=x) for tag in tags]
    for panel in panels:
        if not panel.curves:
            raise ValueError(f"plot: no run has a finite value of {panel.tag}")
        _warn_of_missing(panel)
    from polyak.reports.figures import draw_figure, save_figure

    figure = draw_figure(panels, labels, size)
    if output is not None:
        buffer = io.BytesIO()
        save_figure(figure, buffer, Path(output).suffix.lower()[1:])
        try:
            write_file(Path(output), buffer.getvalue(), shared=True, mode=0o666)
        except OSError as error:
            raise OSError(f"plot: {output} cannot be written: {error.strerror}") from error
    return figure


def _check_tags(records: Sequence[RunRecord], samples: Samples, tags: Sequence[str]) -> None:
    if not samples.columns:
        raise RunError(f"plot: {next(iter(samples.unreadable.values()))}")
    if all(tag in samples.tags for tag in tags):
        return
    known = read_samples(records, max_rows=8).tags
    if not known:
        raise ValueError("plot: there are no metrics yet; wait for the first report of a run")
    for tag in tags:
        check_tag("plot", tag, known)


def _collect_records(runs: Sequence[Any]) -> list[RunRecord]:
    paths = [run for run in runs if isinstance(run, str | os.PathLike)]
    found = load_runs(*paths) if paths or not runs else None
    for name, reason in found.unreadable.items() if found else ():
        warn(f"plot: {name} is left out: {reason}")
    records = list(found or ())
    for run in runs:
        if isinstance(run, RunRecord):
            records.append(run)
        elif isinstance(run, Runs):
            records += run
        elif not isinstance(run, str | os.PathLike):
            raise TypeError(f"plot: runs must be directories or what polyak.load_runs returns, got {run!r:.80}")
    # A run that is passed twice is one; records of several calls may have equal names, and those in memory no directory.
    records = list({record.directory if record.memory is None else id(record): record for record in records}.values())
    names = [record.name for record in records]
    return records if len(set(names)) == len(names) else [record.rename(str(record.directory)) for record in records]


def check_output(output: str | os.PathLike[str] | None) -> None:
    """Check the file of a picture before anything is read.

    Raises:
        ValueError: the suffix is no format, the directory does not exist, or the file belongs to a run.
    """
    if output is None:
        return
    path = Path(output)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"plot: output must end with {', '.join(SUFFIXES)}, got {output}")
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ValueError(f"plot: output must be a file, got {output}; {reason}")
    if is_run_file(path):
        raise ValueError(f"plot: output must not be a file that belongs to a run, got {output}")


def parse_length(name: str, length: str | float) -> float:
    """Return a length in mm, of a name of `WIDTHS`, a number of mm, or a text such as `90mm` or `3.5in`.

    Raises:
        ValueError: it is no length, or out of range.

    >>> parse_length("width", "3.5in")
    88.9
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(mm|cm|in|)\s*", str(length))
    scale = {"mm": 1.0, "cm": 10.0, "in": 25.4, "": 1.0}
    value = WIDTHS.get(str(length) if name == "width" else "") or (float(found[1]) * scale[found[2]] if found else 0.0)
    if not MIN_SIZE <= value <= MAX_SIZE:
        names = f"{', '.join(WIDTHS)}, or " if name == "width" else ""
        raise ValueError(
            f"plot: {name} must be {names}from {MIN_SIZE:g} to {MAX_SIZE:g} mm, such as 90mm or 3.5in, got {length}"
        )
    return value


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        ImportError: it is not; the message has the command that installs it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("plot needs matplotlib: pip install 'polyak[plots]'") from None


def _warn_of_missing(panel: Curves) -> None:
    if panel.missing:
        names = ", ".join(panel.missing[:3]) + (f" and {len(panel.missing) - 3} more" if len(panel.missing) > 3 else "")
        has, is_left = ("has", "is left") if len(panel.missing) == 1 else ("have", "are left")
        warn(f"plot: {names} {has} no value of {panel.tag} and {is_left} out")
