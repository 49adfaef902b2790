"""Shows the progress of training: a progress bar in a terminal or a notebook, plain lines elsewhere."""

import errno
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from polyak.core.output import discard_output
from polyak.core.printing import format_number
from polyak.core.suggestions import escape_control
from polyak.core.tags import RETURN
from polyak.core.types import Callback, Progress, PyTree
from polyak.train.notebook import is_notebook, notebook_bar

PLAIN_LINES = 10
REPORTS_OF_PACE = 10
"""Number of last reports whose pace gives the time left, as the pace changes when learning begins."""

MAX_TITLE = 48
"""Maximum number of characters of a title, which every plain line repeats."""

STATUS_MARGIN = 8
"""Number of terminal columns of the spinner, a short bar and the gaps."""

ENV_STEPS = "env_steps"
SKIPPED, UPDATES = "train/skipped_steps", "train/n_updates"


class Screen(Console):
    """A console that prints no more lines after its pipe breaks (`| head`) or an environment closes it: training continues.

    In a notebook it prints text, of which Jupyter makes one output; Rich would make one of each line.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        file: IO[str] | None = None,
        force_terminal: bool | None = None,
        width: int | None = None,
        legacy_windows: bool | None = None,
    ) -> None:
        super().__init__(
            quiet=quiet,
            file=file,
            force_terminal=force_terminal,
            width=width,
            legacy_windows=legacy_windows,
            force_jupyter=False,
        )

    def on_broken_pipe(self) -> None:
        """Replace Rich's handler, which would exit the process."""
        self.quiet = True
        discard_output(sys.stdout.fileno())

    def print_line(self, line: str) -> None:
        """Print one line without markup, emoji such as `:snake:`, or wrapping, so that paths and commands stay in one piece."""
        self._print(line, soft_wrap=True)

    def print_text(self, text: str) -> None:
        """Print text without markup and emoji; a terminal wraps it between words."""
        self._print(text, soft_wrap=not self.is_terminal)

    def _print(self, text: str, *, soft_wrap: bool) -> None:
        try:
            self.print(escape_control(text), highlight=False, soft_wrap=soft_wrap, markup=False, emoji=False)
        except (OSError, ValueError) as error:
            if sys.stdout.closed:
                self.quiet = True
            elif isinstance(error, OSError) and error.errno == errno.EBADF:
                self.on_broken_pipe()
            else:
                raise


class Display:
    """A callback that shows env_steps, speed, mean return and the remaining time of a training run.

    Args:
        console: the console.
        title: algorithm and environment.
        env_steps: length of training.
        done: env_steps before the resume.
        seeds: number of seeds that train together.
        update_bar: sets `completed` and `status` of a progress bar; None prints plain lines.
        unit: what is counted, `"env_steps"` or `"gradient steps"`.
    """

    def __init__(
        self,
        console: Screen,
        title: str,
        env_steps: int,
        done: int = 0,
        seeds: int = 1,
        update_bar: Callable[[int | None, str], None] | None = None,
        unit: str = ENV_STEPS,
    ) -> None:
        self._console, self._env_steps, self._update_bar = console, env_steps, update_bar
        self._print_at, self._is_compiled, self._status = done, False, _Status(env_steps, seeds, unit)
        self._prefix = f"{shorten_title(title)}: " if update_bar is None else ""

    def __call__(self, progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        """Show a report."""
        self._show_compilation(progress)
        texts = self._status.describe(progress, metrics)
        if self._update_bar is not None:
            self._update_bar(min(progress.env_steps, self._env_steps), self._fit(texts))
        elif progress.env_steps >= min(self._print_at, self._env_steps):
            self._print_at = progress.env_steps + self._env_steps // PLAIN_LINES
            self._console.print_line(self._prefix + texts[0])

    def show_activity(self, progress: Progress, texts: Sequence[str]) -> None:
        """Show, until the next report, that something else is running, by the first of the texts that fits."""
        self._show_compilation(progress)
        if self._update_bar is not None:
            self._update_bar(None, self._fit(texts))

    def print_text(self, text: str) -> None:
        """Print a line with the title."""
        self._console.print_text(self._prefix + text)

    def _show_compilation(self, progress: Progress) -> None:
        if not self._is_compiled:
            self._is_compiled = True
            self.print_text(f"compiled in {progress.compile_seconds:.1f} s")

    def _fit(self, texts: Sequence[str]) -> str:
        """Return the first text that fits next to a bar, else the last text, which is the shortest."""
        room = self._console.width - STATUS_MARGIN
        return next((text for text in texts if len(text) <= room), texts[-1])


@contextmanager
def show_progress(
    console: Screen, title: str, env_steps: int, done: int = 0, seeds: int = 1, unit: str = ENV_STEPS
) -> Iterator[Display]:
    """Show a progress bar in a terminal or a notebook while the block runs, else plain lines; yields the display.

    Args:
        title: algorithm and environment.
        env_steps: length of training.
        done: env_steps before the resume.
        seeds: number of seeds that train together.
        unit: what is counted, `"env_steps"` or `"gradient steps"`.
    """
    if is_notebook() and not console.quiet:
        yield Display(console, title, env_steps, done, seeds, notebook_bar(title, env_steps, done), unit)
        return
    if not console.is_terminal:
        console.print_line(f"{title}: compiling …")
        yield Display(console, title, env_steps, done, seeds, unit=unit)
        return
    console.print_line(title)
    # The bar fills the rest of the line.
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True), markup=False),
    )
    with Bar(*columns, console=console, expand=True) as bar:
        task = bar.add_task(title, total=env_steps, completed=done, status="compiling …")

        def update_bar(completed: int | None, status: str) -> None:
            # Without `completed` a slow step follows, so refresh at once.
            bar.update(task, completed=completed, status=status, refresh=completed is None)

        yield Display(console, title, env_steps, done, seeds, update_bar, unit)


def shorten_title(title: str) -> str:
    """Shorten a title to at most `MAX_TITLE` characters by cutting out its middle."""
    half = MAX_TITLE // 2
    return title if len(title) <= MAX_TITLE else f"{title[:half]}…{title[1 - half :]}"


class SeedReports:
    """Merges the reports of seeds that train together into one report per round, with mean env_steps, speed and return.

    Args:
        callback: called with the merged report once all seeds that still train have reported.
        count: number of seeds.
    """

    def __init__(self, callback: Callback, count: int) -> None:
        self._callback, self._count, self._training = callback, count, set(range(count))
        self._round: dict[int, tuple[Progress, Mapping[str, float]]] = {}

    def callback_of(self, i: int) -> Callback:
        """Return the callback of seed `i`."""

        def report(progress: Progress, metrics: dict[str, float], state: PyTree) -> None:
            if i in self._round:
                # A new round has begun: seeds without a report in the last round have diverged.
                self._training = set(self._round)
                self.flush()
            self._round[i] = (progress, dict(metrics))
            if self._training <= set(self._round):
                self.flush()

        return report

    def flush(self) -> None:
        """Report the current round, if any seed has reported in it."""
        if not self._round:
            return
        reports, metrics = zip(*self._round.values(), strict=True)
        self._round = {}
        returns = [one[RETURN] for one in metrics if RETURN in one]
        joint = {name: value for one in metrics for name, value in one.items()}
        joint |= {name: sum(one.get(name, 0.0) for one in metrics) for name in (SKIPPED, UPDATES) if name in joint}
        joint |= {RETURN: sum(returns) / len(returns)} if returns else {}
        progress = Progress(
            sum(one.env_steps for one in reports) // len(reports),
            reports[0].target_env_steps,
            max(one.iteration for one in reports),
            max(one.seconds for one in reports),
            reports[0].compile_seconds,
            sum(one.fps for one in reports) / self._count,
        )
        self._callback(progress, joint, None)


class _Status:
    """Formats the progress line: env_steps, speed, mean return, and the time left at the pace of the last reports.

    For several seeds, the line has the env_steps of each seed and the total speed.
    """

    def __init__(self, env_steps: int, seeds: int, unit: str) -> None:
        self._env_steps, self._seeds, self._unit = env_steps, seeds, unit
        self._reports: deque[Progress] = deque(maxlen=REPORTS_OF_PACE + 1)
        self._first: tuple[Progress, float] | None = None
        self._has_waited = False

    def describe(self, progress: Progress, metrics: Mapping[str, float]) -> list[str]:
        """Return the line in versions of decreasing length; must be called at every report."""
        mean = metrics.get(RETURN)
        skipped = metrics.get(SKIPPED, 0)
        # Off-policy agents collect before they learn; a run shorter than `learning_starts` takes no gradient step.
        is_waiting = metrics.get(UPDATES) == 0 and not skipped
        has_replay = any(name.startswith("replay/") for name in metrics)
        seconds = self._seconds_left(progress, is_waiting=is_waiting, has_replay=has_replay)
        left = [] if seconds is None else [f"{_duration(seconds)} left"]
        returns = f"mean return {format_number(mean)}" if mean is not None else "no episode ended yet"
        # Replaces the return, which is the return of random actions.
        state = "not learning yet" if is_waiting else returns
        if self._unit != ENV_STEPS:  # no episode is played while learning from data
            state = f"skipped {skipped:,.0f}" if skipped else "learning from data"
        short_state = state.removeprefix("mean ")
        each, in_all = (" each", " in all") if self._seeds > 1 else ("", "")
        fps = progress.fps * self._seeds
        steps = f"{progress.env_steps:,} of {self._env_steps:,} {self._unit}{each}"
        short_steps = f"{_short_count(progress.env_steps)} of {_short_count(self._env_steps)}"
        speed, short_speed = f"{fps:,.0f}/s{in_all}", f"{_short_count(fps)}/s"
        long_skips = [f"{skipped:,.0f} gradient steps skipped"] if skipped else []
        skips = [f"{_short_count(skipped)} skipped"] if skipped else []
        lines = [
            [steps, speed, state, *long_skips, *left],
            [steps, speed, state, *skips, *left],
            [short_steps, short_speed, state, *skips, *left],
            [short_steps, short_state, *skips, *left],
            [short_state, *skips, *left],
            [short_state, *left],
            left or [short_state],
        ]
        return [", ".join(parts) for parts in lines]

    def _seconds_left(self, progress: Progress, *, is_waiting: bool, has_replay: bool) -> float | None:
        """Return the seconds left, or None if the pace of learning is unknown (not learning, or first report with a replay)."""
        if self._reports:
            first = self._reports[0]
            env_steps, seconds = progress.env_steps - first.env_steps, progress.seconds - first.seconds
            pace = env_steps / seconds if seconds > 0 else progress.fps
        else:
            pace = 0.0 if has_replay else progress.fps
        if self._has_waited or is_waiting:
            # Learning has begun since the last report, or has not begun.
            self._reports.clear()
        self._has_waited = is_waiting
        self._reports.append(progress)
        overhead = self._overhead_per_step(progress)
        remaining = max(self._env_steps - progress.env_steps, 0)
        if is_waiting or (remaining and pace <= 0):
            return None
        return remaining / pace + remaining * overhead if remaining else 0.0

    def _overhead_per_step(self, progress: Progress) -> float:
        """Return the seconds per env_step of evaluations, checkpoints and other callbacks, since the first report.

        The mean is over all reports, as evaluations are rarer than reports.
        """
        now = time.monotonic()
        first, started_at = self._first = self._first or (progress, now)
        env_steps = progress.env_steps - first.env_steps
        overhead = now - started_at - (progress.seconds - first.seconds)
        return max(overhead, 0.0) / env_steps if env_steps > 0 else 0.0


def _short_count(count: float) -> str:
    """`999`, `2.2k`, `20k`, `1.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.{1 if count < 9.95 * size else 0}f}{letter}"
    return f"{count:.0f}"


def _duration(seconds: float) -> str:
    """`42 s`, `3:07 min`, `2:03 h`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    return f"{rounded // 60}:{rounded % 60:02} min" if rounded < 3600 else f"{rounded // 3600}:{rounded % 3600 // 60:02} h"
