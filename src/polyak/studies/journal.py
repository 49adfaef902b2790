"""The directory of a study: its options, which never change, and a line for each trial that ended."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyak.storage.files import append, dump_json
from polyak.storage.lock import LockedError, acquire
from polyak.storage.run_files import RunError, drop_incomplete_line, make_directory, read_events, read_object, write_object
from polyak.studies.space import Space

OPTIONS, TRIALS, LOCK, SUMMARY, BEST, PAGE = (
    "options.json", "trials.jsonl", "study.lock", "study.json", "best.toml", "study.html",
)  # fmt: skip

STATES = ("complete", "pruned", "failed")


@dataclass(frozen=True)
class Trial:
    """A trial of a study.

    Attributes:
        number: its number; 0 is the baseline, with the preset's settings.
        state: `"complete"`; `"pruned"`, stopped early as others were better; `"failed"`, by invalid settings, NaN or infinity.
        settings: the settings that differ from the preset.
        score: mean reward over the seeds: of the evaluation at the end, or of the last one before a trial was pruned.
        scores: mean reward of each seed at the end.
        error: why a trial failed, or None.
        evaluations: mean reward over the seeds by number of the evaluation.
        rungs: values of the trial that Hyperband compares.
        fresh_scores: mean reward of seeds that the search has not used, for the baseline and the best trial.
        fresh_error: why a training with one of these seeds failed, or None.
    """

    number: int
    state: str
    settings: Mapping[str, Any]
    score: float | None
    scores: tuple[float, ...] = ()
    error: str | None = None
    evaluations: Mapping[int, float] = field(default_factory=dict)
    rungs: Mapping[str, float] = field(default_factory=dict)
    fresh_scores: tuple[float, ...] = ()
    fresh_error: str | None = None


@dataclass(frozen=True)
class Journal:
    """The file of trials.

    Attributes:
        path: the file.
        trials: the trials that ended, by number.
    """

    path: Path
    trials: dict[int, Trial] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Append a trial, or its newer version with scores of fresh seeds.

        Raises:
            OSError: for example, the disk is full; the file is unchanged.
        """
        append(self.path, dump_json(dataclasses.asdict(trial), self.path.name, indent=None))
        self.trials[trial.number] = trial


@contextlib.contextmanager
def open_study(path: Path, options: Mapping[str, Any], space: Space) -> Iterator[Journal]:
    """Create the directory of a study, or check that it is of the same study; it is locked while the block runs.

    Raises:
        RunError: the directory has other files or another study, is in use, cannot be written, or is damaged.
    """
    is_used = os.path.lexists(path) and (not path.is_dir() or any(inside.name != LOCK for inside in path.iterdir()))
    if is_used and not (path / OPTIONS).is_file():
        raise RunError(f"{path}: exists and is no study; pass a new directory")
    make_directory(path)
    try:
        lock = acquire(path / LOCK)
    except LockedError as error:
        raise RunError(f"{path}: this study is already running, {error}") from None
    except OSError as error:
        raise RunError(f"{path / LOCK}: cannot be locked: {error.strerror or error}") from None
    try:
        if (path / OPTIONS).is_file():
            _check_options(path, options)
        else:
            write_object(path / OPTIONS, options)
        # A kill may leave half a line.
        drop_incomplete_line(path / TRIALS)
        yield Journal(path / TRIALS, read_trials(path / TRIALS, space))
    finally:
        lock.release()


def _check_options(path: Path, options: Mapping[str, Any]) -> None:
    stored = read_object(path / OPTIONS)
    for name, value in options.items():
        if (before := stored.get(name)) != _as_json(value):
            difference = "differs" if name == "space" else f"is {before!r:.80}, got {value!r:.80}"
            raise RunError(f"{path}: is another study, whose {name} {difference}; pass a new directory")


def _as_json(value: Any) -> Any:
    """Return a value with lists for tuples, as it is read back."""
    if isinstance(value, Mapping):
        return {name: _as_json(inner) for name, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, tuple | list) else value


def read_trials(path: Path, space: Space) -> dict[int, Trial]:
    """Read the trials of a study, by number.

    Raises:
        RunError: a line is damaged, or its settings are not of the space.
    """
    found: dict[int, Trial] = {}
    for line, row in enumerate(read_events(path), start=1):
        try:
            trial = _parse_trial(row, space)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{path}, line {line}: is no trial of this study: {type(error).__name__}: {error}") from None
        found[trial.number] = trial
    return found


def _parse_trial(row: Mapping[str, Any], space: Space) -> Trial:
    trial = Trial(
        number=row["number"],
        state=row["state"],
        settings=row["settings"],
        score=None if row["score"] is None else _number(row["score"]),
        scores=tuple(map(_number, row["scores"])),
        error=row["error"],
        evaluations={int(step): _number(value) for step, value in row["evaluations"].items()},
        rungs={name: _number(value) for name, value in row["rungs"].items()},
        fresh_scores=tuple(map(_number, row["fresh_scores"])),
        fresh_error=row["fresh_error"],
    )
    if type(trial.number) is not int or not 0 <= trial.number < 2**20 or trial.state not in STATES:
        raise ValueError(f"number={trial.number!r:.40} and state={trial.state!r:.40}")
    if trial.settings.keys() != (space.keys() if trial.number else set()):
        raise ValueError(f"its settings are {', '.join(trial.settings)!r:.200}")
    for name, value in trial.settings.items():
        space[name].encode(value)
    if (trial.state == "complete") != bool(trial.scores) or (trial.scores and trial.score is None):
        raise ValueError(f"state={trial.state!r} with score={trial.score!r} and scores={list(trial.scores)!r:.80}")
    return trial


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"a number was expected, got {value!r:.40}")
    return float(value)
