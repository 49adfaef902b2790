"""A run directory as data: settings, metrics, evaluations and checkpoints, read without changing anything."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from polyak.core.suggestions import unknown_name
from polyak.core.tags import RETURN
from polyak.storage.checkpoint import steps
from polyak.storage.columns import ENV_STEPS, EVALUATION, Columns, has_evaluation, read_columns, read_last_row
from polyak.storage.lock import is_locked
from polyak.storage.run_directory import CONFIG, KILLED, LOCK, SUMMARY, SYSTEM, Run, RunError, directory_path, open_run
from polyak.storage.run_files import read_object

if TYPE_CHECKING:
    import pandas

    from polyak.core.types import Agent, PredictingPolicy

Status = Literal["training", "done", "stopped", "diverged", "failed", "killed"]
"""
`"training"`: a process holds the run's lock. `"done"`: the run has all its `env_steps`. `"stopped"`: by Ctrl-C, SIGTERM or a
callback. `"diverged"`, `"failed"`: by an error, which the summary names. `"killed"`: the process ended without a summary.
"""

Settings = Mapping[str, Any]
"""Settings by name, each a number, a bool, a text, None or a list of these."""


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run directory, read by `polyak.load_run`; nothing is written, also while the run trains.

    Config, system, summary and status are read by `load_run`. Metrics, checkpoints and events are read when they
    are used; `metrics`, `evaluations` and `settings` are then kept.

    Attributes:
        directory: absolute path of the run directory.
        name: name of the directory, or its path relative to the directory of several runs.
        config: content of `config.json`.
        system: content of `system.json`: versions, machine and command line.
        summary: content of `summary.json`; None if the run has none yet, or none since it was resumed.
        status: see `polyak.reports.records.Status`.
        memory: the metrics of a training without a run directory, which are not read from a file.
    """

    directory: Path
    name: str
    config: Mapping[str, Any]
    system: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    status: Status
    memory: Columns | None = None

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(self.config["algorithm"])

    @property
    def env(self) -> str:
        """Name of the environment."""
        return str(self.config["env"])

    @property
    def seed(self) -> int | None:
        """Seed of the run; None if it was trained with a key."""
        seed: int | None = self.config.get("seed")
        return seed

    @property
    def unit(self) -> str:
        """The unit of `env_steps`."""
        # JAX takes most of a second, which most uses of a record do without.
        from polyak.runs import OFFLINE

        return "gradient steps" if self.config.get("loop") == OFFLINE else ENV_STEPS

    @property
    def failure(self) -> str | None:
        """Why the training ended early, in the words of the summary; None for a run that is done or has no summary."""
        return None if self.summary is None or self.summary.get("stopped") is None else str(self.summary["stopped"])

    @cached_property
    def settings(self) -> Settings:
        """All settings by name, settings of the agent without a prefix: `learning_rate`, `network.hidden`, `num_envs`."""
        from polyak.reports.flat_settings import flatten_settings

        return flatten_settings(self.config)

    @cached_property
    def metrics(self) -> Columns:
        """All rows of `metrics.jsonl`: an array for each tag, and their axis `env_steps`; NaN where a row lacks a tag.

        Raises:
            RunError: a line is damaged, or the run was removed meanwhile.
        """
        return self.read_metrics()

    def read_metrics(self, tags: Sequence[str] | None = None, *, max_rows: int | None = None) -> Columns:
        """Read the metrics anew, as for a run that trains, or a part of them.

        Args:
            tags: the columns to return beside `env_steps`, as far as the run has them; None returns all.
            max_rows: read about so many evenly spaced rows, and as many rows with an evaluation; None reads all.

        Raises:
            RunError: a line is damaged, or the run was removed meanwhile.
        """
        if self.memory is not None:
            return {tag: column for tag, column in self.memory.items() if tags is None or tag in (ENV_STEPS, *tags)}
        has_evaluations = tags is None or any(tag.startswith(EVALUATION) for tag in tags)
        every = self.eval_every if has_evaluations else None
        columns = read_columns(self._run.metrics, tags=tags, max_rows=max_rows, every=every)
        self._check_exists()
        return columns

    def read_last_metrics(self) -> dict[str, Any] | None:
        """Read the newest row of the metrics, by tag; None before the first report.

        Raises:
            RunError: the line is damaged, or the run was removed meanwhile.
        """
        row = read_last_row(self._run.metrics)
        self._check_exists()
        return row

    def curve(self, tag: str = RETURN) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return `env_steps` and values of a tag, without the rows that lack it.

        Raises:
            ValueError: the run has no such tag; the message suggests the nearest.
            RunError: see `metrics`.
        """
        check_tag(self.name, tag, self.metrics)
        has_value = ~np.isnan(self.metrics[tag])
        return self.metrics[ENV_STEPS][has_value], self.metrics[tag][has_value]

    @cached_property
    def evaluations(self) -> Columns:
        """The evaluations during training (`eval_every`): `env_steps` and every tag `eval/...`; empty arrays without any."""
        rows = has_evaluation(self.metrics)
        return {tag: x[rows] for tag, x in self.metrics.items() if tag == ENV_STEPS or tag.startswith(EVALUATION)}

    @property
    def checkpoints(self) -> list[int]:
        """The env_steps of the complete checkpoints, in order."""
        return steps(self._run.checkpoints)

    @property
    def best_checkpoint(self) -> int | None:
        """The env_steps of the checkpoint with the best evaluation; None without one."""
        return max(steps(self._run.best), default=None)

    @property
    def worker_events(self) -> list[dict[str, Any]]:
        """Starts, failures and restarts of workers, in order; [] for a run without workers.

        Raises:
            RunError: a line is damaged.
        """
        return self._run.read_worker_events()

    def load_policy(self, *, best: bool = False, agent: "Agent | None" = None) -> "PredictingPolicy":
        """Load the greedy policy of the newest valid checkpoint; see `polyak.load_policy`.

        Args:
            best: load the policy with the best evaluation.
            agent: an agent with the run's settings, if its network is user-defined.
        """
        from polyak.load import load_policy

        return load_policy(self._run.best if best else self.directory, agent=agent)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the metrics as a frame, with a column for each tag.

        Raises:
            ImportError: pandas is not installed.
        """
        return require_pandas().DataFrame(self.metrics)

    def rename(self, name: str) -> "RunRecord":
        """Return the record with another name."""
        return dataclasses.replace(self, name=name)

    def __repr__(self) -> str:
        return f"RunRecord({self.name!r}, {self.algorithm} {self.env}, seed {self.seed}, {self.status})"

    @property
    def eval_every(self) -> int | None:
        """The env_steps between evaluations during training; None without any."""
        every = self.config.get("eval_every")
        return every if type(every) is int and every > 0 else None

    @property
    def _run(self) -> Run:
        return Run(self.directory)

    def _check_exists(self) -> None:
        if not os.path.lexists(self.directory / CONFIG):
            raise RunError(f"{self.directory}: was moved or removed meanwhile")


def load_run(path: str | os.PathLike[str]) -> RunRecord:
    """Read a run directory as data: settings, metrics as arrays, evaluations, checkpoints and the policy.

    Nothing is written, and the run may train meanwhile.

    Args:
        path: the run directory.

    Raises:
        RunError: the path holds no run, or a file of it is damaged.
    """
    return read_record(directory_path(path), name=None)


def read_record(path: Path, name: str | None) -> RunRecord:
    """Read a run directory; see `load_run`.

    Args:
        name: name of the record; None is the name of the directory.
    """
    if not os.path.lexists(path / CONFIG):
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            raise RunError(f"{path}: cannot be read: permission denied")
        open_run(path)  # Raises with the reason.
    run = Run(path.resolve())
    config = run.read_config()
    kinds = {"algorithm": (str,), "env": (str,), "env_steps": (int,)}
    wrong = [field for field, types in kinds.items() if type(config.get(field)) not in types]
    if wrong:
        raise RunError(f"{path / CONFIG}: has no {wrong[0]}; it is not from polyak train")
    system, summary = (
        read_object(run.directory / file) if os.path.lexists(run.directory / file) else None for file in (SYSTEM, SUMMARY)
    )
    status = _read_status(run, config, summary)
    if status in ("training", "killed"):
        summary = None  # of before the run was resumed
    return RunRecord(run.directory, run.directory.name if name is None else name, config, system or {}, summary, status)


def record_training(config: Mapping[str, Any], metrics: Columns) -> RunRecord:
    """Return the record of a training without a run directory.

    Args:
        config: JSON data as in `config.json`.
        metrics: its metrics.
    """
    return RunRecord(Path(), "this training", config, {}, None, "done", metrics)


def _read_status(run: Run, config: Mapping[str, Any], summary: Mapping[str, Any] | None) -> Status:
    lock, path = run.directory / LOCK, run.directory / SUMMARY
    # A run that has ended is not tested: the test could keep a process from resuming it at the same moment.
    stopped = KILLED if summary is None else summary.get("stopped")
    has_ended = stopped != KILLED and _modified(lock) <= _modified(path)
    if not has_ended and is_locked(lock):
        return "training"
    if summary is None or stopped == KILLED:
        return "killed"
    if stopped is None:
        # Less than it was given: a resumption with more steps was killed.
        done = summary.get("env_steps")
        return "done" if type(done) is int and done >= config[ENV_STEPS] else "killed"
    if str(stopped).startswith("TrainingDiverged") or stopped == "diverged":
        return "diverged"
    return "failed" if ":" in str(stopped) else "stopped"


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def unit_of(records: Iterable[RunRecord]) -> str:
    """The unit of the steps of runs; `"env_steps or gradient steps"` where they differ."""
    return " or ".join(sorted({record.unit for record in records})) or ENV_STEPS


def check_tag(owner: str, tag: str, tags: Mapping[str, Any] | list[str]) -> None:
    """Check that metrics have a tag.

    Raises:
        ValueError: they do not; the message has the nearest tag and all tags.
    """
    if tag not in tags:
        raise ValueError(f"{owner}: {unknown_name(tag, [name for name in tags if name != ENV_STEPS], 'tag')}")


def require_pandas() -> Any:
    """Import pandas.

    Raises:
        ImportError: it is not installed; the message has the command that installs it.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas needs pandas: pip install 'polyak[pandas]'") from None
    return pandas
