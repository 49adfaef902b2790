"""Callbacks that write: metrics to JSON lines and to TensorBoard, and the whole state to checkpoints."""

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from polyak.core.checks import check_integer
from polyak.core.types import Callback, Progress, PyTree
from polyak.core.warn import warn
from polyak.storage.checkpoint import steps
from polyak.storage.files import append
from polyak.storage.progress import save_state, snapshot_of
from polyak.storage.run_directory import Run, package_version
from polyak.storage.run_files import make_directory


def with_time(progress: Progress, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the `time/*` tags of Stable-Baselines3.

    `time/fps` (env steps per second), `time/total_timesteps` (env steps), `time/iterations`, `time/time_elapsed` (seconds
    of training in this process). Existing tags are kept.
    """
    times = {
        "time/fps": progress.fps,
        "time/iterations": progress.iteration,
        "time/time_elapsed": progress.seconds,
        "time/total_timesteps": progress.env_steps,
    }
    return times | dict(metrics)


def jsonl_logger(run: Run) -> Callback:
    """A callback that appends one row to `metrics.jsonl`: `env_steps`, then every tag; flushed, NaN as null.

    A full disk costs the row and one warning; training goes on.

    Raises:
        RunError: the run was opened for reading.
    """
    run.require_writer()

    def write(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        run.append_metrics({"env_steps": progress.env_steps, **with_time(progress, metrics)})

    return _warn_once(write, run.metrics)


def tensorboard_logger(run: Run, *, resumed_at: int | None = None) -> Callback:
    """A callback that appends every tag, and the agent's histograms, to an event file in `tb/`, on the axis of env steps.

    A full disk costs the row and one warning; training goes on.

    Args:
        resumed_at: env steps of the checkpoint from which training resumes; TensorBoard discards later values.

    Raises:
        RunError: the run was opened for reading, or `tb` is not a directory.
        ImportError: the package `tensorboard` is not installed.
    """
    run.require_writer()
    if package_version("tensorboard") is None:
        raise ImportError("tensorboard_logger needs the package tensorboard: pip install 'polyak[tensorboard]'")
    make_directory(run.tensorboard)
    # TensorBoard reads the files of a directory in the order of their names; a counter, as clocks may go backwards.
    earlier = len(list(run.tensorboard.glob("*tfevents*")))
    path = run.tensorboard / f"events.out.tfevents.{earlier:06d}.{socket.gethostname()}.{secrets.token_hex(4)}"

    def write(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        from polyak.storage import tensorboard  # After the first update: importing protobuf takes 0.2 s.

        now = time.time()
        start = b""
        if not path.exists() or path.stat().st_size == 0:
            start = tensorboard.start_record(now)
            start += b"" if resumed_at is None else tensorboard.restart_record(now, resumed_at + 1)
        row = tensorboard.values_record(now, progress.env_steps, with_time(progress, metrics), progress.histograms)
        append(path, start + row)

    return _warn_once(write, path)


def _warn_once(write: Callable[[Progress, Mapping[str, float], PyTree], None], path: Path) -> Callback:
    """Wrap `write` so that I/O errors give one warning: a failed log does not end the training."""
    warned = False

    def callback(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        nonlocal warned
        try:
            write(progress, metrics, state)
        except OSError as error:
            if not warned:
                warned = True
                warn(f"{path}: {error}; rows are lost while this lasts, training goes on")

    return callback


def checkpointer(
    run: Run,
    every: int,
    *,
    keep: int = 3,
    replay: str | None = None,
    save_replay: bool = True,
) -> Callback:
    """A callback that saves the loop's whole state whenever `every` env steps have passed since the last save.

    The interval counts from the last save, so counters that jump never miss a save; the last report of a training run is saved
    too. An error ends training, which would be lost without checkpoints.

    Args:
        run: the run.
        every: environment steps between checkpoints.
        keep: number of checkpoints to keep.
        replay: the path of the replay in the state, from `polyak.storage.progress.replay_path`; parts that have not changed
            since the last checkpoint are not written again.
        save_replay: False leaves the replay out.

    Raises:
        RunError: the run was opened for reading.
        TypeError: `every` or `keep` is no integer.
        ValueError: `every` or `keep` is below 1.
    """
    run.require_writer()
    check_integer("checkpointer", "every", every)
    check_integer("checkpointer", "keep", keep)
    last: int | None = None

    def callback(progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        nonlocal last
        now = progress.env_steps
        if last is None:
            last = max((step for step in steps(run.checkpoints) if step <= now), default=0)
        if now - last >= every or (now >= progress.target_env_steps and now > last):
            save_state(run, progress, state, snapshot_of(progress), keep=keep, replay=replay, save_replay=save_replay)
            last = now

    return callback
