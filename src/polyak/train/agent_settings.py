"""An agent that is passed to `resume` must have the settings of the run's."""

import json
from typing import Any

import numpy as np

from polyak.core.types import Agent
from polyak.runs import config_classes
from polyak.storage.config import ConfigError, from_json, to_json
from polyak.storage.progress import settings_by_path
from polyak.storage.run_directory import Run

# In place of what a run can only describe: a class, network or optimizer of the caller's own, or a function.
DESCRIBED = "$unsupported"
ABSENT = "nothing"


def check_agent_settings(run: Run, agent: Agent, *, force: bool, owner: str, consent: str) -> None:
    """Check that an agent has the class and the settings of the run's config.json, as far as these can be stored.

    Args:
        force: accept other settings, but no other class.
        owner: what resumes the run, for the error.
        consent: how to force it, for the error.

    Raises:
        ValueError: it has others.
    """
    stored, given = run.read_config()["agent"], _to_json(agent)
    wanted, got = stored.get("$class", type(agent).__name__), given.get("$class", type(agent).__name__)
    if got != wanted:
        raise ValueError(f"{owner}: agent must be a {wanted}, as in {run.directory}, got {got}")
    if (changes := find_changes(run, agent)) and not force:
        raise ValueError(
            f"{owner}: agent must have the settings of {run.directory}, got {', '.join(changes.values())}; {consent}"
        )


def store_agent_settings(run: Run, agent: Agent) -> None:
    """Store the settings of an agent that was accepted although they are not the run's."""
    if find_changes(run, agent):
        run.change_config(agent=_to_json(agent))


def find_changes(run: Run, agent: Agent) -> dict[str, str]:
    """What differs from the run's config.json, such as `gamma=0.5 (the run has 0.99)`, by the path of the setting.

    Settings that were added after the run was stored are not compared, nor is what a run can only describe.
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
    """A stored setting with the fields that its class has got since, at their defaults."""
    try:
        return _to_json(from_json(stored, config_classes()))
    except ConfigError:
        return stored


def _to_json(value: Any) -> Any:
    return to_json(value.item() if isinstance(value, np.generic) else value, on_unknown="describe")
