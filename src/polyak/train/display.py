"""Shows the progress of training: a progress bar in a terminal, plain lines elsewhere."""

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from polyak.core.output import discard_output
from polyak.core.printing import format_number
from polyak.core.suggestions import escape_control
from polyak.core.types import Callback, Progress, PyTree

PLAIN_LINES = 10
REPORTS_OF_PACE = 10
"""The time left follows from the pace of this many reports, as the pace changes when learning begins."""


class Screen(Console):
    """A console that falls silent when its pipe breaks, as under `| head`; training goes on."""

    def on_broken_pipe(self) -> None:
        """Called by Rich, which would exit the process."""
        self.quiet = True
        discard_output(sys.stdout.fileno())

    def print_line(self, line: str) -> None:
        """Print one line without markup or wrapping."""
        self.print(escape_control(line), highlight=False, soft_wrap=True, markup=False)


@contextmanager
def show_progress(console: Screen, title: str, env_steps: int, done: int = 0) -> Iterator[Callback]:
    """A callback that shows env_steps, speed, mean return and the remaining time.

    Args:
        title: algorithm and environment.
        env_steps: length of the training.
        done: env_steps of an earlier process that this training resumes.
    """
    if not console.is_terminal:
        yield _lines(console, title, env_steps, done)
        return
    console.print_line(title)
    # The bar takes the rest of the line, so that 80 columns hold both.
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True)),
    )
    with Bar(*columns, console=console, expand=True) as bar:
        task = bar.add_task(title, total=env_steps, completed=done, status="compiling …")
        is_first, status = True, _Status(env_steps)

        def update(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                console.print_line(f"compiled in {progress.compile_seconds:.1f} s")
            completed = min(progress.env_steps, env_steps)
            bar.update(task, completed=completed, status=status.describe(progress, metrics))

        yield update


def once_per_iteration(callback: Callback) -> Callback:
    """For seeds that train together: calls back for the first report of each iteration, as some seeds may have ended."""
    iteration = 0

    def show(progress: Progress, metrics: dict[str, float], state: PyTree) -> None:
        nonlocal iteration
        if progress.iteration > iteration:
            iteration = progress.iteration
            callback(progress, metrics, state)

    return show


def _lines(console: Screen, title: str, env_steps: int, done: int) -> Callback:
    console.print_line(f"{title}: compiling …")
    due: int | None = None
    status = _Status(env_steps)

    def line(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        nonlocal due
        if due is None:
            due = done
            console.print_line(f"{title}: compiled in {progress.compile_seconds:.1f} s")
        text = status.describe(progress, metrics)
        if progress.env_steps < min(due, env_steps):
            return
        due = progress.env_steps + env_steps // PLAIN_LINES
        console.print_line(f"{title}: {text}")

    return line


class _Status:
    """The line about a training: env_steps, speed, mean return, and the time left at the pace of the last reports."""

    def __init__(self, env_steps: int) -> None:
        self._env_steps = env_steps
        self._reports: deque[Progress] = deque(maxlen=REPORTS_OF_PACE + 1)
        self._has_waited = False

    def describe(self, progress: Progress, metrics: Mapping[str, float]) -> str:
        """The line, which must be asked for at every report."""
        mean = metrics.get("rollout/ep_rew_mean")
        skipped = metrics.get("train/skipped_steps", 0)
        # Off-policy agents collect before they learn; a training that is shorter than that learns nothing.
        is_waiting = metrics.get("train/n_updates") == 0 and not skipped
        has_replay = any(name.startswith("replay/") for name in metrics)
        left = self._seconds_left(progress, is_waiting=is_waiting, has_replay=has_replay)
        returns = f"mean return {format_number(mean)}" if mean is not None else "no episode ended yet"
        parts = [
            f"{progress.env_steps:,} of {self._env_steps:,} env_steps",
            f"{progress.fps:,.0f}/s",
            # In place of the return, which is that of random actions: 80 columns hold no more.
            "not learning yet" if is_waiting else returns,
            *([f"{skipped:,.0f} gradient steps skipped"] if skipped else []),
            *([] if left is None else [f"{_duration(left)} left"]),
        ]
        return ", ".join(parts)

    def _seconds_left(self, progress: Progress, *, is_waiting: bool, has_replay: bool) -> float | None:
        """None where the pace of learning is not known: before it begins, and at the first report of an agent with a replay."""
        if self._reports:
            first = self._reports[0]
            env_steps, seconds = progress.env_steps - first.env_steps, progress.seconds - first.seconds
            pace = env_steps / seconds if seconds > 0 else progress.fps
        else:
            pace = 0.0 if has_replay else progress.fps
        if self._has_waited or is_waiting:
            # Learning has begun between the last report and this one, or not yet.
            self._reports.clear()
        self._has_waited = is_waiting
        self._reports.append(progress)
        remaining = max(self._env_steps - progress.env_steps, 0)
        if is_waiting or (remaining and pace <= 0):
            return None
        return remaining / pace if remaining else 0.0


def _duration(seconds: float) -> str:
    """`42 s`, `3:07 min`, `2:03 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"
