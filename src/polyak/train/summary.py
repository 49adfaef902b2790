"""The `summary.json` of a run, and its lines for the terminal."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from polyak.core.printing import format_number
from polyak.core.text_table import NOTHING, align_table
from polyak.core.types import Progress
from polyak.loops.evaluate import Evaluation
from polyak.runs import RunConfig
from polyak.storage.checkpoint import CheckpointError, steps
from polyak.storage.run_directory import Run, RunError
from polyak.train.statistics import seed_statistics

RETURN_FIELDS = ("eval_mean_return", "eval_std_return", "eval_mean_length")

MAX_REASON = 60
"""Maximum number of characters of a stop reason in a row of the table."""


def summary_line(
    title: str, progress: Progress, evaluation: Evaluation | None, wall_seconds: float | None = None, unit: str = "env_steps"
) -> str:
    """Return one line with the speed, and a second line with the return: one line would be wider than a terminal.

    Args:
        title: algorithm and environment.
        wall_seconds: total seconds with evaluations, which the speed leaves out; None if there were none during training.
        unit: what is counted.
    """
    wall = "" if wall_seconds is None else f"; {wall_seconds:.1f} s in all, with evaluations"
    training = (
        f"{title}: {progress.env_steps:,} of {progress.target_env_steps:,} {unit} in "
        f"{progress.seconds:.1f} s ({progress.fps:,.0f}/s, compiled in {progress.compile_seconds:.1f} s{wall})"
    )
    return training if evaluation is None else f"{training}\ngreedy return {format_return(evaluation)}"


def format_return(evaluation: Evaluation) -> str:
    """`500.0 ± 0.0 over 20 episodes`."""
    mean, std = format_number(evaluation.mean_return), format_number(evaluation.std_return)
    return f"{mean} ± {std} over {len(evaluation.returns)} episodes"


def seed_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one row per seed, and a last line with the statistics over seeds.

    Args:
        summaries: content of `summary.json` of each seed.
    """
    rows: list[tuple[str, ...]] = [("seed", "env_steps", "return", "±", "mean length")]
    for one in summaries:
        steps_done = NOTHING if one["env_steps"] is None else f"{one['env_steps']:,}"
        returns = [NOTHING if one[name] is None else format_number(one[name]) for name in RETURN_FIELDS]
        rows.append((str(one["seed"]), steps_done, *returns))
    reasons = ["" if one["stopped"] is None else f"  stopped by {one['stopped']}"[:MAX_REASON] for one in summaries]
    lines = [line + reason for line, reason in zip(align_table(rows, texts=1), ["", *reasons], strict=True)]
    means = [one["eval_mean_return"] for one in summaries if one["eval_mean_return"] is not None]
    together = [str(seed_statistics(means))] if len(means) > 1 else []
    return "\n".join([*lines, *together])


def write_summary(
    run: Run,
    config: RunConfig,
    started_at: float,
    progress: Progress | None,
    evaluation: Evaluation | None,
    *,
    stopped: str | None,
) -> None:
    """Write the summary of a training run that began at the time `started_at` of the monotonic clock.

    If this process did not train, the times are from the process that trained to the last checkpoint, and so is the evaluation
    if there is no new one; without a report, env_steps are from the last checkpoint.
    """
    fields = make_summary(config, progress, evaluation, wall_seconds=time.monotonic() - started_at, stopped=stopped)
    if progress is None or progress.seconds == 0:
        with contextlib.suppress(RunError, CheckpointError):
            saved = max(steps(run.checkpoints), default=None)
            fields |= {"env_steps": saved} if progress is None else {}
            earlier = run.read_summary()
            if earlier.get("env_steps") == (saved or 0):
                fields |= {name: earlier.get(name) for name in (*TIMES, *(EVALUATION if evaluation is None else ()))}
    run.write_summary(fields)


TIMES = ("env_steps", "wall_seconds", "train_seconds", "compile_seconds", "fps")
EVALUATION = ("eval_mean_return", "eval_std_return", "eval_mean_length", "eval_episodes")


def make_summary(
    config: RunConfig,
    progress: Progress | None,
    evaluation: Evaluation | None,
    *,
    wall_seconds: float | None = None,
    stopped: str | None,
) -> dict[str, Any]:
    """Return the content of `summary.json`: requested and completed env_steps, times, and the return of the greedy policy."""
    has_trained = progress is not None and progress.seconds > 0
    return {
        "algorithm": config.algorithm,
        "env": config.env,
        "seed": config.seed,
        "target_env_steps": config.env_steps,
        "env_steps": progress.env_steps if progress else None,
        "wall_seconds": wall_seconds,
        "train_seconds": progress.seconds if progress and has_trained else None,
        "compile_seconds": progress.compile_seconds if progress and has_trained else None,
        "fps": progress.fps if progress and has_trained else None,
        "eval_mean_return": evaluation.mean_return if evaluation else None,
        "eval_std_return": evaluation.std_return if evaluation else None,
        "eval_mean_length": evaluation.mean_length if evaluation else None,
        "eval_episodes": len(evaluation.returns) if evaluation else 0,
        "stopped": stopped,
    }
