"""Data sets from arrays in D4RL's layout: one row for each step, and flags where episodes end."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.space_check import FLOAT32_MAX, check_range, describe, to_array
from polyak.core.spaces import EnvSpec
from polyak.core.types import PyTree
from polyak.data.content import create_data_set, infer_spec
from polyak.data.data_set import DataSet

OBS, ACTION, REWARD = "observations", "actions", "rewards"
TERMINATED, TRUNCATED = ("terminations", "terminals"), ("truncations", "timeouts")
NEXT, FINAL = "next_observations", "final_observations"


def from_arrays(owner: str, arrays: Mapping[str, Any], spec: EnvSpec | None, name: str, *, has_spaces: bool = True) -> DataSet:
    """The data set of arrays with one row for each of N steps.

    Args:
        owner: the function that has read the arrays, for errors.
        arrays: `observations`, `actions`, `rewards`, `terminations` (or `terminals`) and `truncations` (or `timeouts`), of
            which the last may be missing; arrays of a tree of spaces in dicts. The final observations of episodes are in
            `next_observations` (one for each step) or `final_observations` (one for each episode). Without either, the last
            step of an episode that did not terminate only gives the final observation of the step before. Where
            `next_observations` differs from the next row of `observations`, the episode was cut short.
        spec: the environment's spaces; None infers them from the arrays.
        name: the source.
        has_spaces: `spec` is the file's.

    Raises:
        TypeError, ValueError: an array is missing, has another length, or values that the spaces do not have.
    """
    values = _required(owner, arrays, name)
    count = _check_lengths(owner, values)
    inferred = infer_spec(owner, values[OBS], values[ACTION], name) if spec is None else spec
    terminated, truncated = (_flags(owner, arrays, names, count) for names in (TERMINATED, TRUNCATED))
    obs, action = values[OBS], values[ACTION]
    reward = to_array(f"{owner}: rewards", values[REWARD], (count,), np.dtype(np.float32))
    following = values.get(NEXT)
    if following is not None:
        truncated = truncated | (_jumps(owner, obs, following) & ~terminated)
    ends = terminated | truncated
    ends[-1] = True
    last = np.flatnonzero(ends)
    lengths = np.diff(last, prepend=-1)
    if FINAL in arrays:
        final = _final_observations(owner, arrays[FINAL], obs, len(last))
    elif following is not None:
        final = jax.tree.map(lambda x: x[last], following)
    else:
        # The value after a terminal state is 0, whatever the observation: any is right. Else the last row has the final one.
        final = jax.tree.map(lambda x: x[last], obs)
        is_lost = ends & ~terminated
        keep = ~is_lost
        lengths = lengths - is_lost[last]
        obs, action, reward = (jax.tree.map(lambda x: x[keep], tree) for tree in (obs, action, reward))
        is_episode = lengths > 0
        final, last, lengths = jax.tree.map(lambda x: x[is_episode], (final, last, lengths))
    return create_data_set(
        owner,
        inferred,
        obs=insert_final(obs, final, lengths),
        action=action,
        reward=reward,
        lengths=lengths,
        terminated=terminated[last],
        name=name,
        has_spaces=has_spaces and spec is not None,
    )


def insert_final(obs: PyTree, final: PyTree, lengths: npt.NDArray[np.int64]) -> PyTree:
    """Observations `[N + E, ...]`: those of each episode `[N, ...]`, followed by its final observation `[E, ...]`."""
    count, episodes = int(lengths.sum()), len(lengths)
    steps = np.arange(count) + np.repeat(np.arange(episodes), lengths)
    ends = np.cumsum(lengths) + np.arange(episodes)

    def insert(x: Any, y: Any) -> npt.NDArray[Any]:
        rows = np.zeros((count + episodes, *x.shape[1:]), x.dtype)
        rows[steps], rows[ends] = x, y
        return rows

    return jax.tree.map(insert, obs, final)


def _required(owner: str, arrays: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The trees of arrays by name."""
    if not any(flag in arrays for flag in (*TERMINATED, NEXT)):
        hint = " (its dones do not tell terminal states from time limits)" if "dones" in arrays else ""
        raise ValueError(f"{owner}: {name} must have terminations (or terminals), got {sorted(arrays)}{hint}")
    values = {}
    for key in (OBS, ACTION, REWARD, NEXT):
        if key in arrays:
            values[key] = _numbers(f"{owner}: {key}", arrays[key])
        elif key != NEXT:
            raise ValueError(f"{owner}: {name} must have {key}, got {sorted(arrays)}")
    return values


def _numbers(name: str, value: Any) -> PyTree:
    """A tree of NumPy arrays of numbers.

    Raises:
        TypeError: an array holds text or objects.
    """
    if isinstance(value, Mapping):
        return {key: _numbers(f"{name} {key!r}", part) for key, part in value.items()}
    if isinstance(value, tuple) and value and all(isinstance(part, np.ndarray | Mapping | tuple) for part in value):
        return tuple(_numbers(f"{name} {i}", part) for i, part in enumerate(value))
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name} must be an array of numbers: {error}") from None
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be numbers, got {describe(array)}")
    if not array.ndim:
        raise ValueError(f"{name} must have one row for each step, got {describe(array)}")
    if array.dtype.kind == "f":
        check_range(name, array, -FLOAT32_MAX, FLOAT32_MAX)
    return array


def _check_lengths(owner: str, values: Mapping[str, Any]) -> int:
    count = len(values[REWARD])
    for key, tree in values.items():
        for array in jax.tree.leaves(tree):
            if len(array) != count:
                raise ValueError(f"{owner}: {key} must have as many rows as rewards, {count}, got {len(array)}")
    if not count:
        raise ValueError(f"{owner}: there is no step")
    return count


def _flags(owner: str, arrays: Mapping[str, Any], names: tuple[str, ...], count: int) -> npt.NDArray[np.bool_]:
    """Flags of each step; all False where there is no such array."""
    name = next((name for name in names if name in arrays), None)
    if name is None:
        return np.zeros(count, bool)
    array = _numbers(f"{owner}: {name}", arrays[name])
    array = array[:, 0] if array.shape == (count, 1) else array
    if array.shape != (count,):
        raise ValueError(f"{owner}: {name} must have as many rows as rewards, {count}, got shape {array.shape}")
    if not np.isin(array, (0, 1)).all():
        raise ValueError(f"{owner}: {name} must be True and False, or 1 and 0, got {array[~np.isin(array, (0, 1))][0]}")
    return array.astype(bool)


def _jumps(owner: str, obs: PyTree, following: PyTree) -> npt.NDArray[np.bool_]:
    """True for steps whose next observation is not the next row's observation."""
    structures: list[Any] = [jax.tree.structure(obs), jax.tree.structure(following)]
    if structures[0] != structures[1]:
        raise ValueError(f"{owner}: {NEXT} must have the arrays of observations")
    jumps = np.zeros(len(jax.tree.leaves(obs)[0]), bool)
    for x, y in zip(jax.tree.leaves(obs), jax.tree.leaves(following), strict=True):
        if x.shape != y.shape:
            raise ValueError(f"{owner}: {NEXT} must have the shape of observations, {x.shape}, got {y.shape}")
        differs = (x[1:] != y[:-1]).reshape(len(x) - 1, -1).any(axis=1)
        jumps[:-1] |= differs
    return jumps


def _final_observations(owner: str, value: Any, obs: PyTree, episodes: int) -> PyTree:
    final = _numbers(f"{owner}: {FINAL}", value)
    shapes = jax.tree.map(lambda x: (episodes, *x.shape[1:]), obs)
    if jax.tree.map(np.shape, final) != shapes:
        raise ValueError(f"{owner}: {FINAL} must have one row for each episode, {shapes}, got {jax.tree.map(np.shape, final)}")
    return final
