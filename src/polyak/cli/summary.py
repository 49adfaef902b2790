"""The `summary.json` of a run, and its one line for the terminal."""

import contextlib
import time
from typing import Any

from polyak.core.types import Progress
from polyak.runs import RunConfig
from polyak.storage.checkpoint import CheckpointError, steps
from polyak.storage.run_directory import Run, RunError
from polyak.train.evaluate import Evaluation


def summary_line(config: RunConfig, progress: Progress, evaluation: Evaluation | None) -> str:
    """Speed and return in one line."""
    training = (
        f"{config.algorithm} {config.env}: {progress.env_steps:,} env_steps in {progress.seconds:.1f} s "
        f"({progress.fps:,.0f}/s, compiled in {progress.compile_seconds:.1f} s)"
    )
    if evaluation is None:
        return training
    return (
        f"{training}; greedy return {evaluation.mean_return:.1f} ± {evaluation.std_return:.1f} over "
        f"{len(evaluation.returns)} episodes"
    )


def write_summary(
    run: Run,
    config: RunConfig,
    started_at: float,
    progress: Progress | None,
    evaluation: Evaluation | None,
    *,
    stopped: str | None,
) -> None:
    """Write the summary of a training that began at `started_at` of the monotonic clock."""
    run.write_summary(
        {
            "algorithm": config.algorithm,
            "env": config.env,
            "seed": config.seed,
            **_progress(run, started_at, progress),
            "eval_mean_return": evaluation.mean_return if evaluation else None,
            "eval_std_return": evaluation.std_return if evaluation else None,
            "eval_mean_length": evaluation.mean_length if evaluation else None,
            "eval_episodes": len(evaluation.returns) if evaluation else 0,
            "stopped": stopped,
        }
    )


def _progress(run: Run, started_at: float, progress: Progress | None) -> dict[str, Any]:
    """env_steps and times of this process, or of the process that trained to the last checkpoint if this one did not train."""
    fields: dict[str, Any] = {
        "env_steps": progress.env_steps if progress else None,
        "wall_seconds": time.monotonic() - started_at,
        "train_seconds": None,
        "compile_seconds": None,
        "fps": None,
    }
    if progress is not None and progress.seconds > 0:
        times = {"train_seconds": progress.seconds, "compile_seconds": progress.compile_seconds, "fps": progress.fps}
        return fields | times
    with contextlib.suppress(RunError, CheckpointError):
        earlier = run.read_summary()
        if earlier.get("env_steps") == max(steps(run.checkpoints), default=0):
            return {name: earlier.get(name) for name in fields}
    return fields
