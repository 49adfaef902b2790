"""polyak report RUN...: an HTML file about runs; --live DIR: the same as a page of this machine that follows trainings."""

import dataclasses
import errno
import os
import webbrowser
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

from polyak.cli.flags import UsageError, default_hint, fail, parse, parse_for_runs
from polyak.reports.live import HOST, serve_reports
from polyak.reports.report import report as write_report
from polyak.storage.run_directory import RunError

PORT = 8765

OUTPUT_DEFAULT = "(default: report.html in the first RUN)"
OutputFlag: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"], help_behavior_hint=OUTPUT_DEFAULT)]


@tyro.conf.configure(tyro.conf.DisallowNone)
@dataclasses.dataclass(frozen=True)
class ReportFlags:
    """File, groups and live page."""

    output: OutputFlag = None
    """HTML file to write, replaced if it exists"""
    group_by: Annotated[
        tuple[str, ...] | None, default_hint("the algorithm and all settings that differ", "SETTING [SETTING ...]")
    ] = None
    """settings in which groups differ, such as learning_rate; runs with equal values are one group"""
    live: Annotated[Path | None, default_hint("none", "DIR")] = None
    """instead of RUN: serve a page of the runs in this directory on this machine, until Ctrl-C, which follows trainings"""
    port: Annotated[int | None, default_hint(f"{PORT}", "INT")] = None
    """port of the live page; 0 is any free one"""
    open: bool = False
    """open the report in the browser"""


def report(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    description = "Write one HTML file about RUN, a run directory, or that compares several runs or directories of runs."
    try:
        if any(word.split("=")[0] == "--live" for word in arguments):
            if not arguments[0].startswith("-"):
                raise UsageError(f"--live takes no RUN beside its directory; got {arguments[0]}")
            flags = parse(ReportFlags, arguments, prog="polyak report", description=description)
            return _serve(flags)
        directories, flags = parse_for_runs(ReportFlags, arguments, command="report", description=description)
        if flags.port is not None:
            raise UsageError(f"--port {flags.port} needs --live DIR")
        path = write_report(*directories, output=flags.output, group_by=flags.group_by)
    except (UsageError, ValueError, ImportError, RunError) as error:
        return fail(error)
    print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    if flags.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _serve(flags: ReportFlags) -> int:
    others = {"--output": flags.output, "--group-by": flags.group_by}
    for name, value in others.items():
        if value is not None:
            raise UsageError(f"{name} has no effect with --live; choose groups on the page")
    port = PORT if flags.port is None else flags.port
    if not 0 <= port < 2**16:
        raise UsageError(f"--port must be between 0 and 65535, got {port}")
    assert flags.live is not None

    def announce(address: str) -> None:
        # Trainings on this machine come first.
        os.nice(10)
        print(f"{address} shows the runs in {flags.live}; Ctrl-C ends it", flush=True)
        if flags.open:
            webbrowser.open(address)

    try:
        serve_reports(flags.live, port, announce)
    except OSError as error:
        reasons = {errno.EADDRINUSE: "is in use", errno.EACCES: "needs a privilege"}
        if error.errno not in reasons:
            raise
        return fail(f"port {port} of {HOST} {reasons[error.errno]}; choose another one with --port", 1)
    return 0
