"""What a person sees while training: a progress bar in a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from polyak.cli.signals import silence
from polyak.core.types import Callback, Progress, PyTree

PLAIN_LINES = 10


class Screen(Console):
    """A console whose reader may go away, as of `| head`: nothing more is shown then, and training goes on."""

    def on_broken_pipe(self) -> None:
        """Instead of ending the process, as Rich does."""
        self.quiet = True
        silence(sys.stdout.fileno())

    def say(self, line: str) -> None:
        """As it is, in one line however long."""
        self.print(line, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def showing(console: Screen, title: str, env_steps: int, done: int = 0) -> Iterator[Callback]:
    """A callback that shows how far training is, how fast, how well, and how long it will take.

    Args:
        title: what is trained.
        env_steps: how many there shall be.
        done: how many there are already.
    """
    if not console.is_terminal:
        yield _lines(console, title, env_steps, done)
        return
    console.say(title)
    # The bar takes what the numbers leave, so that eighty columns hold both.
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True)),
    )
    with Bar(*columns, console=console, expand=True) as bar:
        task = bar.add_task(title, total=env_steps, completed=done, status="compiling …")
        said = False

        def update(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
            nonlocal said
            if not said:
                said = True
                console.say(f"compiled in {progress.compile_seconds:.1f} s")
            completed = min(progress.env_steps, env_steps)
            bar.update(task, completed=completed, status=_status(progress, metrics, env_steps))

        yield update


def once_a_round(shown: Callback) -> Callback:
    """For several seeds that report together: shows whichever comes first, since one may have ended before the others."""
    iteration = 0

    def show(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        nonlocal iteration
        if progress.iteration > iteration:
            iteration = progress.iteration
            shown(progress, metrics, state)

    return show


def _lines(console: Screen, title: str, env_steps: int, done: int) -> Callback:
    console.say(f"{title}: compiling …")
    due: int | None = None

    def line(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        nonlocal due
        if due is None:
            due = done
            console.say(f"{title}: compiled in {progress.compile_seconds:.1f} s")
        if progress.env_steps < min(due, env_steps):
            return
        due = progress.env_steps + env_steps // PLAIN_LINES
        console.say(f"{title}: {_status(progress, metrics, env_steps)}")

    return line


def _status(progress: Progress, metrics: Mapping[str, float], env_steps: int) -> str:
    mean = metrics.get("rollout/ep_rew_mean")
    skipped = metrics.get("train/skipped_steps", 0)
    left = max(env_steps - progress.env_steps, 0) / progress.fps if progress.fps > 0 else 0.0
    parts = [
        f"{progress.env_steps:,} of {env_steps:,} env_steps",
        f"{progress.fps:,.0f}/s",
        f"mean return {mean:.1f}" if mean is not None else "no episode ended yet",
        *([f"{skipped:,.0f} gradient steps skipped"] if skipped else []),
        f"{_duration(left)} left",
    ]
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    """`42 s`, `3:07 min`, `2:03 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"
