"""Checks the settings of an agent: that they are single numbers, and for `resume` that they are the settings of the run."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

from polyak.core.types import Agent
from polyak.ops.schedules import SCHEDULES
from polyak.replay.replay import Replay
from polyak.runs import config_classes
from polyak.storage.config import ConfigError, from_json, to_json
from polyak.storage.progress import settings_by_path
from polyak.storage.run_directory import Run

# Key of a description of a function or a user-defined class, network or optimizer, which a config cannot store.
DESCRIBED = "$unsupported"
ABSENT = "nothing"


def check_single_numbers(owner: str, agent: Any) -> None:
    """Check that no setting is, or has as a schedule, an array with axes: that is a batch of agents, which would be mixed up.

    Args:
        agent: the agent; the settings of its replay, and of an agent inside it, are checked too.

    Raises:
        ValueError: a setting is such an array; the message names it.
    """
    for field in dataclasses.fields(agent) if dataclasses.is_dataclass(agent) else ():
        value = getattr(agent, field.name)
        has_numbers = "check" in field.metadata and isinstance(value, (np.ndarray, jax.Array, *SCHEDULES))
        if has_numbers and any(map(np.ndim, jax.tree.leaves(value))):
            wanted = f"{owner}: {field.name} of {type(agent).__name__} must have single numbers"
            raise ValueError(f"{wanted}, got {value!r:.80}; loops.compiled_seeds trains a batch of agents")
        if isinstance(value, Agent | Replay):
            check_single_numbers(owner, value)


def check_agent_settings(run: Run, agent: Agent, *, force: bool, owner: str, consent: str) -> None:
    """Check that an agent has the class and the settings of the run's config.json, as far as the config can store them.

    Args:
        force: accept other settings, but no other class.
        owner: name of the calling function or command, for the error.
        consent: sentence about how to force other settings, for the error.

    Raises:
        ValueError: the agent has another class, or other settings, or a setting is an array.
    """
    check_single_numbers(owner, agent)
    stored, given = run.read_config()["agent"], _to_json(agent)
    wanted, got = stored.get("$class", type(agent).__name__), given.get("$class", type(agent).__name__)
    if got != wanted:
        raise ValueError(f"{owner}: agent must be a {wanted}, as in {run.directory}, got {got}")
    if (changes := find_changes(run, agent)) and not force:
        raise ValueError(
            f"{owner}: agent must have the settings of {run.directory}, got {', '.join(changes.values())}; {consent}"
        )


def store_agent_settings(run: Run, agent: Agent) -> None:
    """Store the settings of an accepted agent in the run's config.json if they differ."""
    if find_changes(run, agent):
        run.change_config(agent=_to_json(agent))


def find_changes(run: Run, agent: Agent) -> dict[str, str]:
    """Return the settings that differ from the run's config.json, by path, each as `gamma=0.5 (the run has 0.99)`.

    Settings that are newer than the run are not compared, and neither are functions and user-defined classes.
    """
    stored, given = run.read_config()["agent"], _to_json(agent)
    if DESCRIBED in stored or DESCRIBED in given:
        return {}
    changes: dict[str, str] = {}
    for name in stored:
        if name in ("$class", "spec") or name not in given:
            continue
        before, now = _as_written_today(stored[name]), _to_json(getattr(agent, name))
        if DESCRIBED in json.dumps([before, now]):
            continue
        wanted, got = (settings_by_path({name: value}) for value in (before, now))
        changes |= {
            path: f"{path}={got.get(path, ABSENT)} (the run has {wanted.get(path, ABSENT)})"
            for path in wanted | got
            if got.get(path) != wanted.get(path)
        }
    return changes


def _as_written_today(stored: Any) -> Any:
    """Return a stored setting, with newer fields of its class at their defaults."""
    try:
        return _to_json(from_json(stored, config_classes()))
    except ConfigError:
        return stored


def _to_json(value: Any) -> Any:
    return to_json(value.item() if isinstance(value, np.generic) else value, on_unknown="describe")
