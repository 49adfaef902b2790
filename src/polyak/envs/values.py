"""What goes into and comes out of Gymnasium environments, looked at in batches: one comparison a step when all is well."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, Leaf, MultiDiscrete, Space, Tuple, leaf_spaces, map_space
from polyak.envs.leaves import FLOAT32_MAX, ObsLeaf

Where = Callable[[int], str]
"""Says which environment and step, given the environment's index."""


class ObsCheck:
    """One array of a batch of observations: in its space, and in the dtype and from the start that agents know.

    Args:
        leaf: the array in the environment's terms.
        space: the same in ours.
        nonfinite: `"error"`, or `"pass"` for an agent that can bear NaN.
        out_of_bounds: of finite floats (an integer out of bounds is always an error).
    """

    def __init__(
        self,
        leaf: ObsLeaf,
        space: Leaf,
        num_envs: int,
        nonfinite: Literal["error", "pass"],
        out_of_bounds: Literal["warn", "error", "clip"],
    ) -> None:
        self.name = f"observation {leaf.path!r}" if leaf.path else "observation"
        self.leaf = leaf
        self.dtype = space.dtype
        self.nonfinite = nonfinite
        self.out_of_bounds = out_of_bounds
        self.warned = False
        self.start: Any = getattr(space, "start", 0)
        self.start = np.asarray(self.start, leaf.dtype) if np.any(self.start) else None
        shape = (num_envs, *leaf.shape)
        self.size = int(np.prod(shape))
        # Whole, not broadcast: that is faster.
        self.low = None if leaf.low is None else np.array(np.broadcast_to(leaf.low, shape))
        self.high = None if leaf.high is None else np.array(np.broadcast_to(leaf.high, shape))
        self.symmetric = leaf.dtype.kind == "f" and bool(np.all(leaf.low == -np.asarray(leaf.high)))

    def __call__(self, array: npt.NDArray[Any], where: Where) -> npt.NDArray[Any]:
        """The array, checked and cast.

        Raises:
            ValueError: NaN, infinity, or an integer out of its space; a float out of bounds, where that is asked for.
        """
        if self.low is not None:
            # NaN fails any comparison, and infinity one of them: no bound is infinite here.
            good = np.abs(array) <= self.high if self.symmetric else (array >= self.low) & (array <= self.high)
            if np.count_nonzero(good) != self.size:
                array = self._outside(array, where)
        if self.start is not None:
            array = array - self.start
        return array if array.dtype is self.dtype else array.astype(self.dtype, copy=False)

    def _outside(self, array: npt.NDArray[Any], where: Where) -> npt.NDArray[Any]:
        low, high = self.low, self.high
        assert low is not None and high is not None
        floats = array.dtype.kind == "f"
        finite = np.isfinite(array) & (np.abs(array) <= FLOAT32_MAX) if floats else np.ones(array.shape, bool)
        if self.nonfinite == "error" and not finite.all():
            env, at = _first(~finite)
            raise ValueError(f"{where(env)}: the {self.name} is {array[env][at]}{_at(at)}")
        outside = finite & ((array < low) | (array > high))
        if outside.any() and not (self.warned and self.out_of_bounds == "warn" and floats):
            env, at = _first(outside)
            bounds = f"[{low[env][at]:g}, {high[env][at]:g}]"
            message = f"{where(env)}: the {self.name} is {array[env][at]:g}{_at(at)}, its space says {bounds}"
            if self.out_of_bounds == "error" or not floats:
                raise ValueError(message)
            if self.out_of_bounds == "warn":
                self.warned = True
                warnings.warn(f"{message} (this is said once)", stacklevel=4)
        if self.out_of_bounds == "clip" or not floats:
            array = np.clip(array, low, high)
        if not finite.all():
            # Floats too large for float32 become infinite here, as is asked for, and without NumPy's warning.
            with np.errstate(over="ignore"):
                array = array.astype(self.dtype)
        return array


def check_reward(reward: npt.NDArray[Any], nonfinite: Literal["error", "pass"], where: Where) -> npt.NDArray[np.float32]:
    """Rewards in float32, the same array if it has them.

    Raises:
        ValueError: NaN, infinity, or more than a float32 holds.
    """
    # In float64 a number may be finite and still too large.
    narrow = reward.dtype.char == "f"
    good = np.isfinite(reward) if narrow else np.abs(reward) <= FLOAT32_MAX
    if np.count_nonzero(good) == good.size:
        return reward if narrow else reward.astype(np.float32)
    if nonfinite == "error":
        env = int(np.flatnonzero(~good)[0])
        raise ValueError(f"{where(env)}: the reward is {reward[env]}")
    with np.errstate(over="ignore"):
        return reward.astype(np.float32)


def _first(bad: npt.NDArray[np.bool_]) -> tuple[int, tuple[int, ...]]:
    env, *at = (int(i) for i in np.argwhere(bad)[0])
    return env, tuple(at)


def _at(index: tuple[int, ...]) -> str:
    return f" at {list(index)}" if index else ""


class ActionCheck:
    """One array of a batch of an agent's actions, checked and in the environment's units and dtype.

    Args:
        name: what errors call it.
        spec: of the environment, with this array's space as the action space.
        gym_space: the same space in Gymnasium's terms.
    """

    def __init__(self, name: str, spec: EnvSpec, gym_space: Any, num_envs: int) -> None:
        self.name = name
        self.spec = spec
        self.gym_space = gym_space
        space = spec.action
        assert isinstance(space, Leaf)
        self.shape = (num_envs, *space.shape)
        self.size = int(np.prod(self.shape))
        self.dtype = np.dtype(gym_space.dtype)
        self.box = isinstance(space, Box)
        self.converts = self.box or bool(np.any(getattr(space, "start", 0)))
        counts = space.n if isinstance(space, Discrete) else space.nvec if isinstance(space, MultiDiscrete) else 2
        self.counts = np.array(np.broadcast_to(np.asarray(counts, np.uint64), self.shape))

    def __call__(self, action: Any) -> npt.NDArray[Any]:
        """The environment's actions, in a fresh array.

        Raises:
            TypeError: floats for integers or the other way round.
            ValueError: a wrong shape, NaN, infinity, or an integer out of its space.
        """
        array = np.asarray(action)
        if array.dtype.kind not in ("f" if self.box else "iub"):
            raise TypeError(f"{self.name} must be {'floats' if self.box else 'integers'}, got {array.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"{self.name} must have shape {self.shape}, got {array.shape}")
        # As an unsigned number, a negative one is too large as well.
        good = np.isfinite(array) if self.box else array.astype(np.uint64) < self.counts
        if np.count_nonzero(good) != self.size:
            env, at = _first(~good)
            wanted = "a finite number" if self.box else f"0 to {self.counts[env][at] - 1}"
            raise ValueError(f"{self.name} of env {env} is {array[env][at]}{_at(at)}, wanted {wanted}")
        native: npt.NDArray[Any] = (self.spec.native_action(array) if self.converts else array).astype(self.dtype)
        if native.dtype == np.float64:
            # A bound in float64 need not be one in float32.
            native = np.clip(native, self.gym_space.low, self.gym_space.high)
        return native


def action_checks(spec: EnvSpec, gym_space: Any, num_envs: int) -> list[ActionCheck]:
    """A check for each array of an action."""
    pairs = zip(leaf_spaces(spec.action), _gym_leaves(gym_space), strict=True)
    return [
        ActionCheck(f"{spec.id}: the action{path and f' {path!r}'}", dataclasses.replace(spec, action=leaf), part, num_envs)
        for (path, leaf), part in pairs
    ]


def check_action(checks: list[ActionCheck], space: Space, action: Any) -> Any:
    """A whole action.

    Raises:
        TypeError: another tree than the space's.
    """
    if not isinstance(space, Dict | Tuple):
        return checks[0](action)
    check = iter(checks)
    try:
        return map_space(lambda _, part: next(check)(part), space, action)
    except (KeyError, IndexError) as error:
        raise TypeError(f"{checks[0].name} is missing; the action space is {space}, got {type(action).__name__}") from error


def _gym_leaves(space: Any) -> list[Any]:
    """The leaves of a Gymnasium space in the order of ours."""
    parts = getattr(space, "spaces", None)
    if parts is None:
        return [space]
    if isinstance(parts, dict):
        parts = [part for _, part in sorted(parts.items(), key=lambda item: str(item[0]))]
    return [leaf for part in parts for leaf in _gym_leaves(part)]
