"""Data sets from arrays in D4RL's layout: one row for each step, and flags where episodes end."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.goals import has_goals
from polyak.core.space_check import describe
from polyak.core.spaces import EnvSpec, Space, map_space
from polyak.core.types import PyTree
from polyak.core.warn import warn
from polyak.data.content import (
    check_no_masks,
    infer_spec,
    new_data_set,
    read_action,
    read_log_prob,
    read_obs,
    read_reward,
    warn_of_lost_changes,
)
from polyak.data.data_set import DataSet

OBS, ACTION, REWARD, LOG_PROB = "observations", "actions", "rewards", "log_probs"
TERMINATED, TRUNCATED, DONE = ("terminations", "terminals"), ("truncations", "timeouts"), ("dones",)
NEXT, FINAL = "next_observations", "final_observations"


def from_arrays(owner: str, arrays: Mapping[str, Any], spec: EnvSpec | None, name: str) -> DataSet:
    """The data set of arrays with one row for each of N steps.

    Args:
        owner: the function that has read the arrays, and their file, for errors.
        arrays: `observations`, `actions`, `rewards`, `terminations` (or `terminals`) and `truncations` (or `timeouts`), of
            which the last may be missing; arrays of a tree of spaces in dicts. `dones` of Gym's old interface, which are True
            at both kinds of ends, take the place of one of the two. The final observations of episodes are in
            `next_observations` (one for each step) or `final_observations` (one for each episode). Without either, the last
            step of an episode that did not terminate only gives the final observation of the step before. Where
            `next_observations` differs from the next row of `observations`, the episode was cut short.
            `log_probs` may be missing.
        spec: the environment's spaces; None infers them from the arrays.
        name: the source.

    Raises:
        TypeError, ValueError: an array is missing, has another length, or values that the spaces do not have.
    """
    values, count = _required(owner, arrays)
    terminated, truncated = _read_ends(owner, arrays, count)
    used = infer_spec(owner, values[OBS], values[ACTION], name) if spec is None else spec
    check_no_masks(owner, used)
    obs = read_obs(f"{owner}: {OBS}", used, values[OBS], count)
    warn_of_lost_changes(f"{owner}: {OBS}", used, obs)
    action = read_action(f"{owner}: {ACTION}", used, values[ACTION], count)
    reward = read_reward(f"{owner}: {REWARD}", values[REWARD], count)
    log_prob = read_log_prob(f"{owner}: {LOG_PROB}", used, values[LOG_PROB], count) if LOG_PROB in values else None
    following = read_obs(f"{owner}: {NEXT}", used, values[NEXT], count) if NEXT in values else None
    if following is not None:
        truncated = truncated | (_jumps(obs, following) & ~terminated)
    ends = terminated | truncated
    ends[-1] = True
    last, keep = np.flatnonzero(ends), np.ones(count, bool)
    lengths = np.diff(last, prepend=-1)
    if following is not None:
        obs = insert_final(used.obs, obs, jax.tree.map(lambda x: x[last], following), lengths)
    elif FINAL in values:
        _check_rows(f"{owner}: {FINAL}", values[FINAL], len(last), "episodes")
        obs = insert_final(used.obs, obs, read_obs(f"{owner}: {FINAL}", used, values[FINAL], len(last)), lengths)
    else:
        # The value after a terminal state is 0, whatever the observation: any is right. Else the last row has the final one.
        keep = ~ends | terminated
        if has_goals(used) and (ends & terminated).any():
            unknown = "the goals that terminal steps achieved are unknown, which a HindsightReplay needs"
            warn(f"{owner}: {unknown}; add {NEXT} or {FINAL}")
        is_alone = ~keep & np.insert(ends[:-1], 0, True)
        rows = np.repeat(np.arange(count), 1 + (ends & terminated) - is_alone)
        obs = jax.tree.map(lambda x: x[rows], obs)
        lengths = lengths - ~keep[last]
        last, lengths = last[lengths > 0], lengths[lengths > 0]
        if not len(last):
            raise ValueError(f"{owner}: there is no transition; add {NEXT} or {FINAL}")
    return new_data_set(
        used,
        obs=obs,
        # Copies, as the caller may change the arrays.
        action=jax.tree.map(lambda x: x[keep], action),
        reward=reward[keep],
        lengths=lengths,
        terminated=terminated[last],
        name=name,
        has_spaces=spec is not None,
        log_prob=None if log_prob is None else log_prob[keep],
    )


def insert_final(space: Space, obs: PyTree, final: PyTree, lengths: npt.NDArray[np.int64]) -> PyTree:
    """Observations `[N + E, ...]`: the observations `[N, ...]` of each episode, followed by its final one `[E, ...]`."""
    count, episodes = int(lengths.sum()), len(lengths)
    steps = np.arange(count) + np.repeat(np.arange(episodes), lengths)
    ends = np.cumsum(lengths) + np.arange(episodes)

    def insert(leaf: Any, x: Any, y: Any) -> npt.NDArray[Any]:
        rows = np.zeros((count + episodes, *x.shape[1:]), leaf.dtype)
        rows[steps], rows[ends] = x, y
        return rows

    return map_space(insert, space, obs, final)


def _required(owner: str, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The trees of arrays by name, and N."""
    for key in (OBS, ACTION, REWARD):
        if key not in arrays:
            raise ValueError(f"{owner}: {key} must be given, got {sorted(arrays)}")
    _only(owner, arrays, (NEXT, FINAL))
    warn_of_unread(owner, list(arrays))
    values = {key: _numbers(f"{owner}: {key}", arrays[key]) for key in (OBS, ACTION, NEXT, FINAL) if key in arrays}
    values |= {key: _vector(f"{owner}: {key}", arrays[key]) for key in (REWARD, LOG_PROB) if key in arrays}
    count = len(values[REWARD])
    if not count:
        raise ValueError(f"{owner}: there is no step")
    for key in (OBS, ACTION, NEXT, LOG_PROB):
        _check_rows(f"{owner}: {key}", values.get(key), count, REWARD)
    return values, count


def warn_of_unread(owner: str, names: Sequence[Any]) -> None:
    """Warn of arrays whose names begin as one that may be missing, such as `truncated` in place of `truncations`."""
    groups = (NEXT, FINAL), (LOG_PROB,), (*TRUNCATED, *DONE)
    missing = [name for group in groups if not any(name in names for name in group) for name in group]
    for name in missing:
        for key in names:
            if str(key).startswith(name[:7].removesuffix("s")):
                warn(f"{owner}: the array {key!r} is not read; is it {name}?")


def _only(owner: str, arrays: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The name of the array that is given, of names of which one is enough."""
    found = [name for name in names if name in arrays]
    if len(found) > 1:
        raise ValueError(f"{owner}: {' and '.join(found)} are both given; leave one out")
    return found[0] if found else None


def _numbers(name: str, value: Any) -> PyTree:
    """A tree of NumPy arrays of numbers, whose first axis counts rows.

    Raises:
        TypeError: an array holds text or objects.
        ValueError: an array has masked values, or no rows.
    """
    if isinstance(value, Mapping):
        return {key: _numbers(f"{name} {key!r}", part) for key, part in value.items()}
    if isinstance(value, tuple) and value and all(isinstance(part, np.ndarray | Mapping | tuple) for part in value):
        return tuple(_numbers(f"{name} {i}", part) for i, part in enumerate(value))
    if np.ma.is_masked(value):
        raise ValueError(f"{name} must be complete, got {np.ma.count_masked(value)} masked values")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name} must be an array of numbers: {error}") from None
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be numbers, got {describe(array)}")
    if not array.ndim:
        raise ValueError(f"{name} must have one row for each step, got {describe(array)}")
    return array


def _vector(name: str, value: Any) -> npt.NDArray[Any]:
    """An array of one number for each row."""
    array = _numbers(name, value)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be one array, got {describe(array)}")
    array = array[:, 0] if array.shape[1:] == (1,) else array
    if array.ndim != 1:
        raise ValueError(f"{name} must have one number for each step, got {describe(array)}")
    return array


def _check_rows(name: str, tree: PyTree, count: int, of: str) -> None:
    for array in jax.tree.leaves(tree):
        if len(array) != count:
            raise ValueError(f"{name} must have one row for each of the {count} {of}, got {len(array)}")


def _read_ends(owner: str, arrays: Mapping[str, Any], count: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Flags of terminal states, and of other ends of episodes, of each step; done = terminated | truncated."""
    terminated, truncated, done = (_flags(owner, arrays, names, count) for names in (TERMINATED, TRUNCATED, DONE))
    if terminated is None:
        if done is None or truncated is None:
            hint = "" if done is None else "; dones do not tell terminal states from time limits: add timeouts"
            raise ValueError(f"{owner}: terminations (or terminals) must be given, got {sorted(arrays)}{hint}")
        terminated = done & ~truncated
    ends = terminated if truncated is None else terminated | truncated
    done = ends if done is None else done
    if (is_open := ends & ~done).any():
        raise ValueError(f"{owner}: dones must be True at the end of each episode, got False at {np.argmax(is_open)}")
    return terminated, done & ~terminated


def _flags(owner: str, arrays: Mapping[str, Any], names: tuple[str, ...], count: int) -> npt.NDArray[np.bool_] | None:
    """Flags of each step; None where there is no such array."""
    name = _only(owner, arrays, names)
    if name is None:
        return None
    array = _vector(f"{owner}: {name}", arrays[name])
    _check_rows(f"{owner}: {name}", array, count, REWARD)
    if not np.isin(array, (0, 1)).all():
        raise ValueError(f"{owner}: {name} must be True and False, or 1 and 0, got {array[~np.isin(array, (0, 1))][0]}")
    return array.astype(bool)


def _jumps(obs: PyTree, following: PyTree) -> npt.NDArray[np.bool_]:
    """True for steps whose next observation is not the next row's observation, as far as the narrower of both dtypes shows."""
    jumps = np.zeros(len(jax.tree.leaves(obs)[0]), bool)
    for x, y in zip(jax.tree.leaves(obs), jax.tree.leaves(following), strict=True):
        dtype = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize) if x.dtype.kind == y.dtype.kind else None
        with np.errstate(over="ignore"):
            before, after = (part if dtype is None else part.astype(dtype, copy=False) for part in (y[:-1], x[1:]))
        jumps[:-1] |= (after != before).reshape(len(x) - 1, -1).any(axis=1)
    return jumps
