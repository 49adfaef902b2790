"""Read the values of `info` that loops report: success, the recorded return, and metrics that the user names.

No JAX here: worker processes use this.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyak.core.tags import RETURN, SUCCESS


def check_info_metrics(names: Any) -> tuple[str, ...]:
    """Check the names of metrics; returns a tuple.

    Raises:
        TypeError: the names are not a sequence of strings.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"make: info_metrics must be a tuple of names such as ('x_velocity',), got {names!r:.80}")
    return tuple(names)


def read_info(info: Mapping[str, Any], names: tuple[str, ...], is_last: bool, location: Callable[[], str]) -> dict[str, float]:
    """Return values of one environment's `info` by tag: `env/NAME` for the metrics named by the user, if present.

    At the end of an episode, `info["is_success"]` and `info["episode"]["r"]` (from `RecordEpisodeStatistics`) are added. These
    two are ignored if they are no numbers, as an environment may give these names another meaning.

    Raises:
        TypeError: a named metric is not a number.
    """
    values = {}
    for name in names:
        if name in info:
            number = _number(info[name])
            if number is None:
                raise TypeError(f"{location()}: info[{name!r}] must be one number, got {info[name]!r:.80}")
            values[f"env/{name}"] = number
    if is_last:
        episode = info.get("episode")
        own = {SUCCESS: info.get("is_success"), RETURN: episode.get("r") if isinstance(episode, dict) else None}
        values |= {tag: number for tag, value in own.items() if (number := _number(value)) is not None}
    return values


def info_of_env(info: Mapping[str, Any], names: tuple[str, ...], env: int, location: str) -> dict[str, Any]:
    """Return one environment's entries of a vector environment's `info`, in which `_key` flags the environments with `key`.

    If an episode ended in the same-step mode, entries of `info["final_info"]` replace these entries.

    Raises:
        TypeError: a named metric has no entry for each environment; other names may have another meaning.
    """
    own = {}
    for key in (*names, "is_success", "episode"):
        if key in info and _has(info, key, env):
            parts = info[key]
            if isinstance(parts, dict):
                own[key] = {k: v[env] for k, v in parts.items() if np.ndim(v)}
            elif isinstance(parts, list | tuple) or np.ndim(parts):
                own[key] = parts[env]
            elif key in names:
                raise TypeError(f"{location}: info[{key!r}] must have an entry for each environment, got {parts!r:.80}")
    final = info.get("final_info")
    if final is not None and _has(info, "final_info", env):
        # A dict of arrays, or before Gymnasium 1.0 an array of dicts.
        own |= info_of_env(final, names, env, location) if isinstance(final, dict) else final[env] or {}
    return own


def stack_info(values: Sequence[Mapping[str, float]]) -> dict[str, npt.NDArray[np.float64]]:
    """Stack values into arrays `[B]` by tag; NaN for environments without a value."""
    if not any(values):
        return {}
    tags = dict.fromkeys(tag for each in values for tag in each)
    return {tag: np.array([each.get(tag, np.nan) for each in values]) for tag in tags}


def _has(info: Mapping[str, Any], key: str, env: int) -> bool:
    return f"_{key}" not in info or bool(info[f"_{key}"][env])


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        return float(value)
    # Only objects with a dtype, which arrays of other libraries have too; no lists.
    array = None if getattr(value, "dtype", None) is None else np.asarray(value)
    return float(array.item()) if array is not None and array.size == 1 and array.dtype.kind in "biuf" else None
