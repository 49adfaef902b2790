"""What a person sees while training: a progress bar in a terminal, plain lines elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from polyak.core.types import Callback, Progress, PyTree

PLAIN_LINES = 10


@contextmanager
def showing(console: Console, title: str, env_steps: int) -> Iterator[Callback]:
    """A callback that shows how far training is, how fast, how well, and how long it will take."""
    if not console.is_terminal:
        yield _lines(console, title, env_steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(title, total=env_steps, status="compiling …")

        def update(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
            bar.update(task, completed=min(progress.env_steps, env_steps), status=_status(progress, metrics))

        yield update


def _lines(console: Console, title: str, env_steps: int) -> Callback:
    console.print(f"{title}: compiling …", highlight=False)
    due = 0

    def line(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        nonlocal due
        if progress.env_steps < min(due, env_steps):
            return
        due = progress.env_steps + env_steps // PLAIN_LINES
        left = (env_steps - progress.env_steps) / progress.fps if progress.fps > 0 else 0.0
        share = 100 * min(progress.env_steps / env_steps, 1)
        console.print(
            f"{title}: {progress.env_steps:,} of {env_steps:,} env_steps ({share:.0f} %), {_status(progress, metrics)}, "
            f"{max(left, 0):.0f} s left",
            highlight=False,
            soft_wrap=True,
        )

    return line


def _status(progress: Progress, metrics: Mapping[str, float]) -> str:
    mean = metrics.get("rollout/ep_rew_mean")
    parts = [
        f"{progress.fps:,.0f} env_steps/s",
        f"mean return {mean:.1f}" if mean is not None else "no episode ended yet",
        f"compiled in {progress.compile_seconds:.1f} s",
    ]
    skipped = metrics.get("train/skipped_steps", 0)
    return ", ".join([*parts, f"{skipped:.0f} gradient steps skipped"] if skipped else parts)
