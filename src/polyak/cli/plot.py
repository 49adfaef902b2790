"""polyak plot RUN... -o FILE: curves of runs as a picture for a paper."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from polyak.cli.flags import UsageError, default_hint, fail, parse_for_runs
from polyak.core.tags import RETURN
from polyak.reports.plots import plot as draw_runs
from polyak.storage.run_directory import RunError


@tyro.conf.configure(tyro.conf.DisallowNone)
@dataclasses.dataclass(frozen=True)
class PlotFlags:
    """Curves and picture."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE", aliases=["-o"])]
    """picture to write, replaced if it exists: .svg, .pdf or .png"""
    y: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TAG [TAG ...]")] = (RETURN,)
    """tags of the metrics, each in its own panel"""
    x: Literal["env_steps", "time"] = "env_steps"
    """env_steps: environment steps, or gradient steps of trainings on data; time: time of training"""
    group_by: Annotated[
        tuple[str, ...] | None, default_hint("the algorithm and all settings that differ", "SETTING [SETTING ...]")
    ] = None
    """settings in which curves differ, such as learning_rate; runs with equal values are one curve with its interval"""
    width: Annotated[str, tyro.conf.arg(metavar="WIDTH")] = "text"
    """width of the picture: column, text or page (83, 140 and 171 mm), or a length such as 90mm or 3.5in"""
    height: Annotated[str | None, default_hint("from the panels", "LENGTH")] = None
    """height of the picture, such as 60mm"""


def plot(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    description = (
        "Draw curves of each RUN, a run directory or a directory of runs: interquartile means over seeds with 95 % intervals."
    )
    try:
        directories, flags = parse_for_runs(PlotFlags, arguments, command="plot", description=description)
        draw_runs(
            *directories,
            y=flags.y,
            x=flags.x,
            group_by=flags.group_by,
            output=flags.output,
            width=flags.width,
            height=flags.height,
        )
    except (UsageError, ValueError, ImportError, RunError, OSError) as error:
        return fail(error)
    print(f"wrote {flags.output} ({flags.output.stat().st_size:,} bytes)")
    return 0
