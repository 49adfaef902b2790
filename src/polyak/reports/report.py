"""`polyak.report`: one HTML file about one run or several runs, which opens from the disk without a network."""

import os
from collections.abc import Sequence
from pathlib import Path

from polyak.reports.comparison_view import Choice, compare_runs, tags_to_read
from polyak.reports.curves import as_names, read_samples
from polyak.reports.page import View, render_page, require_bokeh
from polyak.reports.run_view import describe_run
from polyak.reports.tables import Runs, load_runs
from polyak.storage.files import write_file
from polyak.storage.run_directory import RunError, is_run_file

REPORT = "report.html"
"""Name of a report whose file is not given."""


def report(
    *runs: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    group_by: str | Sequence[str] | None = None,
) -> Path:
    """Write a report of one run, or a comparison of several runs, as one HTML file; returns its path.

    The file needs no other file and no network. A report of one run has its summary, warnings, curves, times, evaluations,
    newest video, settings and versions. Several runs are compared by the interquartile mean of their returns, with 95 %
    intervals of a stratified bootstrap.

    Args:
        runs: run directories, or directories of runs, which are found up to four levels deep.
        output: the file, replaced if it exists; its suffix is .html. None is `report.html` in the first directory.
        group_by: the setting or settings by which runs form a group, such as `"learning_rate"`; None groups the runs that
            differ in their seed alone.

    Raises:
        RunError: a path holds no run, no run can be read, or the file cannot be written.
        ValueError: no run has the setting `group_by`, or `output` has another suffix, or is a file of a run.
        TypeError: there is no path.
        ImportError: the extra `report` is missing.

    Source of the statistics: Agarwal et al. 2021, arXiv:2108.13264.
    """
    if not runs:
        raise TypeError('report: needs a run; pass report("runs/pole")')
    require_bokeh()
    path = Path(runs[0]) / REPORT if output is None else Path(output)
    if is_run_file(path) or path.is_dir():
        raise ValueError(f"report: output must be a separate file, not a directory or a file of the run, got {path}")
    if path.suffix.lower() != ".html":
        raise ValueError(f"report: output must end in .html, got {path}")
    found, groups = load_runs(*runs), () if group_by is None else as_names("report: group_by", group_by)
    if not path.parent.is_dir():
        raise RunError(f"{path}: cannot be written: there is no directory {path.parent}")
    page = render_page(_make_view(found, runs, path, groups))
    try:
        write_file(path, page, shared=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def _make_view(runs: Runs, paths: Sequence[str | os.PathLike[str]], output: Path, group_by: tuple[str, ...]) -> View:
    if len(runs) == 1 and not runs.unreadable and not group_by:
        return describe_run(runs[0], output=output)
    samples = read_samples(runs.records, tags_to_read(len(runs)))
    title = ", ".join(os.fspath(path) for path in paths)
    return compare_runs(runs.records, samples, runs.unreadable, title, Path(paths[0]).resolve(), Choice(group_by))
