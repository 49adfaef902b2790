"""Action masks as environments hand them out in `info["action_mask"]`, and as one array of flags for each part of the action.

No JAX here: worker processes read their environments with this.
"""

from typing import Any, TypeAlias

import gymnasium.spaces as gym
import numpy as np
import numpy.typing as npt

Flags: TypeAlias = npt.NDArray[np.bool_]


def check_maskable(has_mask: bool, space: Any, name: str) -> None:
    """Masks are over the choices of Discrete and MultiDiscrete spaces.

    Raises:
        TypeError: there is a mask and the action space has none of these.
    """
    if has_mask and not mask_widths(space):
        raise TypeError(f"{name}: info['action_mask'] is supported for Discrete and MultiDiscrete actions, got {space}")


def mask_widths(space: Any) -> list[int]:
    """The flags of each Discrete (n) and MultiDiscrete (Σ nvec) in an action space, in the order of polyak's own spaces."""
    if isinstance(space, gym.Dict | gym.Tuple):
        return [width for key in _keys(space) for width in mask_widths(space.spaces[key])]
    sizes = _sizes(space)
    return [sum(sizes)] if sizes else []


def read_masks(space: Any, mask: Any, where: str, *, over: bool = False, path: str = "") -> list[Flags]:
    """One environment's mask, as what `space.sample(mask)` of Gymnasium takes, in flags as `mask_widths` has them.

    A MultiDiscrete's is a tuple of one array for each entry, or one flat array of all. In a tree, None allows all.

    Args:
        where: environment and step, for errors.
        over: the episode is over, so that no action is chosen: a choice for which all is forbidden has no mask.
        path: of the part in its tree.

    Raises:
        ValueError: another tree or shape, other values than 0 and 1, a mask for a part that has none, or nothing is allowed.
    """
    if mask is None:
        return [np.ones(width, bool) for width in mask_widths(space)]
    what = f"{where}: the action_mask" + (f" {path!r}" if path else "")
    if isinstance(space, gym.Dict | gym.Tuple):
        _check_tree(space, mask, what)
        parts = [(key, f"{path}/{key}" if path else str(key)) for key in _keys(space)]
        return [x for key, name in parts for x in read_masks(space.spaces[key], mask[key], where, over=over, path=name)]
    if isinstance(space, gym.Discrete):
        return [_flags(mask, int(space.n), what, over)]
    if isinstance(space, gym.MultiDiscrete):
        sizes = _sizes(space)
        entries = enumerate(zip(_entries(mask, sizes, what), sizes, strict=True))
        return [np.concatenate([_flags(entry, n, f"{what} of entry {i}", over) for i, (entry, n) in entries])]
    raise ValueError(f"{what} must be None, for a {type(space).__name__} has no mask; got {mask!r:.80}")


def mask_of_row(space: Any, masks: Any, row: int, num_envs: int, where: str) -> Any:
    """One environment's mask among those of a vector environment.

    Gymnasium makes one dict of its environments' dicts, with `_key` beside `key` to say who had it; all else stands in an array
    with one entry for each environment.

    Raises:
        ValueError: there is not one entry for each environment.
    """
    if isinstance(space, gym.Dict) and isinstance(masks, dict):
        given = {key: masks.get(f"_{key}") for key in masks if key in space.spaces or f"_{key}" in masks}
        parts = {key: space.spaces.get(key) for key, who in given.items() if who is None or who[row]}
        return {key: mask_of_row(part, masks[key], row, num_envs, where) for key, part in parts.items()}
    if masks is None:
        return None
    # A tuple may as well be one array [B, n] for each part, which must not be taken for rows.
    rows = not isinstance(masks, dict) and (isinstance(space, gym.Discrete) or not isinstance(masks, tuple))
    length = len(masks) if isinstance(masks, dict | tuple | list) or np.ndim(masks) > 0 else None
    if not rows or length != num_envs:
        got = type(masks).__name__ + ("" if length is None else f" of length {length}")
        raise ValueError(f"{where}: the action_mask of a vector environment must be an array of {num_envs} rows, got {got}")
    return masks[row]


def _keys(space: Any) -> list[Any]:
    return sorted(space.spaces, key=str) if isinstance(space, gym.Dict) else list(range(len(space.spaces)))


def _sizes(space: Any) -> list[int]:
    if isinstance(space, gym.MultiDiscrete):
        sizes: list[int] = space.nvec.tolist()
        return sizes
    return [int(space.n)] if isinstance(space, gym.Discrete) else []


def _check_tree(space: Any, mask: Any, what: str) -> None:
    if isinstance(space, gym.Dict):
        got = f"a dict with keys {sorted(map(str, mask))}" if isinstance(mask, dict) else type(mask).__name__
        if not isinstance(mask, dict) or set(mask) != set(space.spaces):
            raise ValueError(f"{what} must be a dict with keys {_keys(space)}, got {got}")
    elif not isinstance(mask, tuple | list) or len(mask) != len(space.spaces):
        got = f"{type(mask).__name__} of length {len(mask)}" if isinstance(mask, tuple | list) else type(mask).__name__
        raise ValueError(f"{what} must be a tuple of length {len(space.spaces)}, got {got}")


def _entries(mask: Any, sizes: list[int], what: str) -> list[Any]:
    """The masks of a MultiDiscrete's entries."""
    is_flat = isinstance(mask, tuple | list) and all(np.ndim(entry) == 0 for entry in mask)
    if not is_flat and (isinstance(mask, tuple | list) or np.ndim(mask) == 2):
        entries = list(mask)
        if len(entries) == len(sizes):
            return entries
        got = f"{type(mask).__name__} of length {len(entries)}"
    else:
        array = np.asarray(mask)
        if array.shape == (sum(sizes),):
            return np.split(array, np.cumsum(sizes)[:-1])
        got = f"{array.shape}"
    raise ValueError(f"{what} must be a tuple of {len(sizes)} arrays or have shape {(sum(sizes),)}, got {got}")


def _flags(mask: Any, n: int, what: str, over: bool) -> Flags:
    """The mask of one choice, as bools."""
    try:
        array = np.asarray(mask)
    except ValueError as error:
        raise ValueError(f"{what} is no array: {error}") from None
    if array.shape != (n,):
        raise ValueError(f"{what} must have shape {(n,)}, got {array.shape}")
    if over and not array.any():
        return np.ones(n, bool)
    if array.dtype != bool and (array.dtype.kind not in "iu" or not np.all((array == 0) | (array == 1))):
        raise ValueError(f"{what} must hold bools (or 0 and 1), got {array.tolist()}")
    if not array.any():
        raise ValueError(f"{what} forbids every action")
    return array.astype(bool)
