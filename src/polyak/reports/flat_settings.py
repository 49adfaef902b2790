"""The settings of a run by name, and those in which runs differ."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from polyak.core.printing import text_of
from polyak.storage.json import decode

_NOT_SETTINGS = ("format", "agent")

_MAX_VALUES = 64
"""Maximum size of an array whose values are listed; a larger one is described with the start of its SHA-256."""

WITHOUT_EFFECT = (
    *("seed", "env_steps", "threads", "devices", "report_every", "checkpoint_every", "checkpoint_replay", "replay_on"),
    *("eval_every", "eval_episodes", "final_eval_episodes", "eval_max_steps"),
    *("worker_timeout", "worker_start_timeout", "worker_restarts", "video_every", "track"),
)
"""Settings that change nothing in how an agent learns: runs that differ in these alone are seeds of one training."""


def flatten_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `config.json` by name: settings of the agent without a prefix, nested ones as `network.hidden`.

    An object is stored under its name as the name of its class, and its fields as `NAME.FIELD`. The agent's spec, which
    follows from the environment, is left out.
    """
    flat: dict[str, Any] = {}
    run = {name: value for name, value in config.items() if name not in _NOT_SETTINGS}
    agent = config.get("agent")
    agent = {name: value for name, value in agent.items() if name not in ("spec", "$class")} if isinstance(agent, dict) else {}
    for name, value in _decode(run).items():
        _add(flat, name, value)
    for name, value in _decode(agent).items():
        _add(flat, name if name not in flat else f"agent.{name}", value)
    return flat


def _decode(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON data as plain data; an object is a dict with its class as `$class`."""
    decoded: dict[str, Any] = {}
    for name, value in settings.items():
        try:
            decoded[name] = decode(value, name, _to_dict)
        except (ValueError, RecursionError):
            decoded[name] = str(value)
    return decoded


def _to_dict(content: Any, path: str) -> Any:
    return content.get("$unsupported", content) if isinstance(content, dict) else content


def _add(flat: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict):
        if "$class" in value:
            flat[name] = value["$class"]
        for part, content in value.items():
            # RND has an agent inside, with a spec.
            if part not in ("$class", "spec"):
                _add(flat, f"{name}.{part}", content)
    else:
        flat[name] = _plain(value)


def _plain(value: Any) -> Any:
    """Return a value of a setting as a number, a bool, a text, None, or a list of these."""
    if isinstance(value, np.ndarray | np.generic):
        if value.size > _MAX_VALUES:
            return f"{text_of(value)} {hashlib.sha256(value.tobytes()).hexdigest()[:8]}"
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str | None) else text_of(value)


def find_differences(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings with an effect that differ between runs, in the order of the first run that has them."""
    runs = list(settings)
    names = {name: None for run in runs for name in run if name not in WITHOUT_EFFECT}
    missing = object()
    return [name for name in names if any(not _is_equal(run.get(name, missing), runs[0].get(name, missing)) for run in runs)]


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b) or repr(a) == repr(b)  # NaN equals NaN
