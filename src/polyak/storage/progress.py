"""Saves the loop's state and counters as a checkpoint of a run, and reads the counters back with checks."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from polyak.core.types import EPISODE_WINDOW, EndedEpisodes, HasReplay, Progress, PyTree
from polyak.storage.checkpoint import CheckpointError, Restored, save
from polyak.storage.json import EXACT_INT
from polyak.storage.run_directory import CONFIG, Run

# A longer value, such as the bounds of a large space, is stored as its hash.
_MAX_VALUE_LENGTH = 64


@dataclass(frozen=True)
class SavedProgress:
    """The progress of training at a checkpoint.

    Attributes:
        env_steps: environment steps done.
        episodes: the last episodes before the checkpoint.
        env: the host environment's snapshot, or None.
        resume: `"bit-exact"`, or why a resumed run is not bit-exact.
        changed_settings: settings of the run's config.json that differ from the checkpoint's settings.
    """

    env_steps: int
    episodes: tuple[EndedEpisodes, ...]
    env: dict[str, Any] | None
    resume: str
    changed_settings: tuple[str, ...]


def replay_path(agent: Any) -> str | None:
    """Return the path of the agent's replay in the loop's state, or None."""
    return f".agent.{agent.replay_field}" if isinstance(agent, HasReplay) else None


def snapshot_of(progress: Progress) -> dict[str, Any] | None:
    """Return the state of the host environment; None without one, or if it has none."""
    return None if progress.env is None else progress.env.snapshot()


def save_state(
    run: Run,
    progress: Progress,
    state: PyTree,
    snapshot: dict[str, Any] | None,
    *,
    keep: int = 3,
    directory: Path | None = None,
    replay: str | None = None,
    save_replay: bool = True,
) -> Path:
    """Save the loop's state at `progress.env_steps`, with counters, environment and settings, which a resume needs.

    Later checkpoints, which do not precede this state, are replaced. NaN and infinity are rejected in the agent's state only:
    outputs of the environment may contain them, as the agent keeps them out of its parameters and reports when training cannot
    go on.

    Args:
        run: the run, whose config is stored with the state.
        progress: the counters.
        state: the loop's state.
        snapshot: the state of a host environment, or None.
        keep: number of checkpoints to keep.
        directory: directory of the checkpoints; None is the run's.
        replay: the path of the replay in the state, of which only parts that have changed are written again.
        save_replay: False leaves the replay out, and a resumed run fills the replay again.

    Raises:
        CheckpointError: the checkpoint cannot be saved.
        RunError: the run was opened for reading.
    """
    run.require_writer()
    meta: dict[str, Any] = {
        "progress": {
            "env_steps": progress.env_steps,
            "target_env_steps": progress.target_env_steps,
            "iteration": progress.iteration,
            "seconds": progress.seconds,
            "compile_seconds": progress.compile_seconds,
        },
        "episodes": [dataclasses.astuple(entry) for entry in progress.episodes],
        "env": snapshot,
        "has_env_state": snapshot is not None,
        "resume": _describe_resume(progress, snapshot, is_complete=replay is None or save_replay),
        "config": settings_by_path(run.read_config(verify=False)),
    }
    return save(
        run.checkpoints if directory is None else directory,
        state,
        step=progress.env_steps,
        meta=meta,
        keep=keep,
        overwrite=True,
        finite=".agent",
        segmented=replay if save_replay else None,
        omitted=None if save_replay else replay,
    )


def read_progress(run: Run, restored: Restored) -> SavedProgress:
    """Return the progress of training at a restored checkpoint.

    Raises:
        CheckpointError: a field is missing or malformed.
        RunError: the run's config cannot be read.
    """
    meta = restored.meta
    fields = ("progress", "episodes", "env", "resume", "config")
    counters, episodes, env, resume, settings = (meta.get(name) for name in fields)
    env_steps = counters.get("env_steps") if isinstance(counters, dict) else None
    has_state = meta.get("has_env_state")
    wanted = {
        f"meta.progress.env_steps must be {restored.step}, the step": type(env_steps) is int and env_steps == restored.step,
        f"the step must be below {EXACT_INT}": restored.step < EXACT_INT,
        "meta.has_env_state must be a bool": isinstance(has_state, bool),
        "meta.env must be a dict if meta.has_env_state, else None": type(env) is (dict if has_state else NoneType),
        "meta.resume must be printable text": isinstance(resume, str) and resume.isprintable(),
        f"meta.episodes must be at most {EPISODE_WINDOW} numbers and sums of episodes": _are_ended_episodes(episodes),
        "meta.config must be a dict of texts": _is_dict_of_text(settings),
    }
    for message, holds in wanted.items():
        if not holds:
            raise CheckpointError(f"{run.checkpoints}: the checkpoint of step {restored.step} is malformed: {message}")
    changed = _changes(meta["config"], settings_by_path(run.read_config(verify=False)))
    ended = tuple(EndedEpisodes(*entry) for entry in meta["episodes"])
    return SavedProgress(restored.step, ended, env, str(resume), changed)


def _are_ended_episodes(value: Any) -> bool:
    """Return True for a list of tuples of `EndedEpisodes`, not longer than the window."""
    return isinstance(value, list) and len(value) <= EPISODE_WINDOW and all(map(_is_ended_episodes, value))


def _is_ended_episodes(entry: Any) -> bool:
    """Return True for the tuple of an `EndedEpisodes` with one episode or more."""
    if not isinstance(entry, tuple) or len(entry) != 4 or not isinstance(entry[3], dict):
        return False
    count, returns, lengths, info = entry
    pairs = [(count, returns), (lengths, 0.0), *info.values()]
    are_sums = all(
        isinstance(pair, tuple) and tuple(map(type, pair)) == (int, float) and 0 <= pair[0] < EXACT_INT for pair in pairs
    )
    return are_sums and count > 0 and all(isinstance(tag, str) for tag in info)


def check_unchanged_settings(run: Run, saved: SavedProgress) -> None:
    """Check that a checkpoint was trained with the settings of the run's config.json.

    Raises:
        CheckpointError: settings differ; the message lists the differences.
    """
    if saved.changed_settings:
        raise CheckpointError(
            f"{run.directory / CONFIG}: differs from the checkpoint of step {saved.env_steps}: "
            f"{', '.join(saved.changed_settings)}; restore it, or pass --force to resume with it"
        )


def _describe_resume(progress: Progress, snapshot: Mapping[str, Any] | None, *, is_complete: bool) -> str:
    reasons = [*progress.nondeterminism, *([] if is_complete else ["the checkpoint has no replay"])]
    if progress.env is not None and snapshot is None:
        reasons.insert(0, f"env {progress.env.spec.id or type(progress.env).__name__} has no state")
    return f"resume is not bit-exact because {'; '.join(reasons)}" if reasons else "bit-exact"


def settings_by_path(config: Mapping[str, Any]) -> dict[str, str]:
    """Return every setting by path, as JSON text, without `env_steps`, which `polyak resume --env-steps` changes."""
    texts: dict[str, str] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, part in value.items():
                add(f"{path}.{name}" if path else name, part)
        else:
            text = json.dumps(value, sort_keys=True)
            texts[path] = text if len(text) <= _MAX_VALUE_LENGTH else hashlib.sha256(text.encode()).hexdigest()

    add("", {name: value for name, value in config.items() if name != "env_steps"})
    return texts


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    missing = "missing"
    return tuple(
        f"{path!r} is {now.get(path, missing)}, the checkpoint has {before.get(path, missing)!r}"
        for path in sorted(before.keys() | now.keys())
        if before.get(path) != now.get(path)
    )


def _is_dict_of_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
