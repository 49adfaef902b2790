"""Read action masks from `info["action_mask"]` into one array of flags for each part of the action.

No JAX here: worker processes use this.
"""

from typing import Any, TypeAlias

import gymnasium.spaces as gym
import numpy as np
import numpy.typing as npt

from polyak.envs.obs_reader import space_keys

Flags: TypeAlias = npt.NDArray[np.bool_]


def check_maskable(has_mask: bool, space: Any, name: str) -> None:
    """Check that the action space supports masks: has a Discrete or MultiDiscrete space.

    Raises:
        TypeError: there is a mask, but the space supports none.
    """
    if has_mask and not mask_widths(space):
        raise TypeError(f"{name}: info['action_mask'] is supported for Discrete and MultiDiscrete actions, got {space}")


def mask_widths(space: Any) -> list[int]:
    """Return the number of flags of each Discrete (n) and MultiDiscrete (Σ nvec) in an action space, in polyak's order."""
    if isinstance(space, gym.Dict | gym.Tuple):
        return [width for key in space_keys(space) for width in mask_widths(space.spaces[key])]
    sizes = _sizes(space)
    return [sum(sizes)] if sizes else []


def read_masks(space: Any, mask: Any, location: str, *, is_last: bool = False, path: str = "") -> list[Flags]:
    """Convert one environment's mask, in the form of Gymnasium's `space.sample(mask)`, to flags in the order of `mask_widths`.

    The mask of a MultiDiscrete is a tuple of arrays, one for each entry, or one flat array. In a tree, None allows everything.

    Args:
        location: environment and step, for errors.
        is_last: the episode has ended and no action is chosen, so a mask that forbids everything is ignored.
        path: path of the part in its tree.

    Raises:
        ValueError: the mask has another tree or shape, other values than 0 and 1, or allows nothing; or a part supports none.
    """
    if mask is None:
        return [np.ones(width, bool) for width in mask_widths(space)]
    what = f"{location}: the action_mask" + (f" {path!r}" if path else "")
    if isinstance(space, gym.Dict | gym.Tuple):
        _check_tree(space, mask, what)
        parts = [(key, f"{path}/{key}" if path else str(key)) for key in space_keys(space)]
        return [
            x for key, name in parts for x in read_masks(space.spaces[key], mask[key], location, is_last=is_last, path=name)
        ]
    if isinstance(space, gym.Discrete):
        return [_flags(mask, int(space.n), what, is_last)]
    if isinstance(space, gym.MultiDiscrete):
        sizes = _sizes(space)
        entries = enumerate(zip(_entries(mask, sizes, what), sizes, strict=True))
        return [np.concatenate([_flags(entry, n, f"{what} of entry {i}", is_last) for i, (entry, n) in entries])]
    raise ValueError(f"{what} must be None, as {type(space).__name__} has no mask, got {mask!r:.80}")


def mask_of_env(space: Any, masks: Any, env: int, num_envs: int, location: str) -> Any:
    """Select one environment's mask from the masks of a vector environment.

    Gymnasium merges the environments' dicts into one dict, in which `_key` flags the environments with `key`; other masks are
    arrays with one entry for each environment.

    Raises:
        ValueError: there is not one entry for each environment.
    """
    if isinstance(space, gym.Dict) and isinstance(masks, dict):
        has_key = {key: masks.get(f"_{key}") for key in masks if key in space.spaces or f"_{key}" in masks}
        parts = {key: space.spaces.get(key) for key, flags in has_key.items() if flags is None or flags[env]}
        return {key: mask_of_env(part, masks[key], env, num_envs, location) for key, part in parts.items()}
    if masks is None:
        return None
    # A tuple may also have one array [B, n] for each part, and is then not indexed by environment.
    has_env_axis = not isinstance(masks, dict) and (isinstance(space, gym.Discrete) or not isinstance(masks, tuple))
    length = len(masks) if isinstance(masks, dict | tuple | list) or np.ndim(masks) > 0 else None
    if not has_env_axis or length != num_envs:
        got = type(masks).__name__ + ("" if length is None else f" of length {length}")
        raise ValueError(f"{location}: the action_mask of a vector environment must have {num_envs} entries, got {got}")
    return masks[env]


def _sizes(space: Any) -> list[int]:
    if isinstance(space, gym.MultiDiscrete):
        sizes: list[int] = space.nvec.tolist()
        return sizes
    return [int(space.n)] if isinstance(space, gym.Discrete) else []


def _check_tree(space: Any, mask: Any, what: str) -> None:
    if isinstance(space, gym.Dict):
        got = f"a dict with keys {sorted(map(str, mask))}" if isinstance(mask, dict) else type(mask).__name__
        if not isinstance(mask, dict) or set(mask) != set(space.spaces):
            raise ValueError(f"{what} must be a dict with keys {space_keys(space)}, got {got}")
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


def _flags(mask: Any, n: int, what: str, is_last: bool) -> Flags:
    """The mask of one choice, as bools."""
    try:
        array = np.asarray(mask)
    except ValueError as error:
        raise ValueError(f"{what} is not an array: {error}") from None
    if array.shape != (n,):
        raise ValueError(f"{what} must have shape {(n,)}, got {array.shape}")
    if is_last and not array.any():
        return np.ones(n, bool)
    if array.dtype != bool and (array.dtype.kind not in "iu" or not np.all((array == 0) | (array == 1))):
        raise ValueError(f"{what} must hold bools (or 0 and 1), got {array.tolist()}")
    if not array.any():
        raise ValueError(f"{what} must allow at least one action, got {array.tolist()}")
    return array.astype(bool)
