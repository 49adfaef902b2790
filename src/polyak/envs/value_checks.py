"""Check and convert batches of observations, rewards and actions of Gymnasium environments."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import gymnasium.spaces as gym
import numpy as np
import numpy.typing as npt

from polyak.core.resolution import find_changes
from polyak.core.space_check import (
    FLOAT32_MAX,
    ArraySpec,
    InvalidValue,
    action_specs,
    check_range,
    range_error,
    read_leaves,
    to_array,
)
from polyak.core.spaces import Box, EnvSpec, Leaf, leaf_spaces, unflatten
from polyak.core.warn import warn
from polyak.envs.obs_reader import space_keys

Location = Callable[[int], str]
"""Returns environment and step for errors, given the environment's index."""

FIRST_STEPS = 64
"""Number of batches after which the scale of observations is judged."""


class ResolutionCheck:
    """Warns once of observations that change by less than float32 resolves, of which agents see no change.

    It warns if float32 loses more than a tenth of the changes of an entry in the first steps, where the entry is at least
    16,384 (float32 resolves 0.002 there).

    Args:
        name: the array's name in the warning.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        self.before: npt.NDArray[Any] | None = None
        self.changed: Any = 0
        self.lost: Any = 0

    def __call__(self, array: npt.NDArray[Any], location: Location) -> None:
        """Compare a batch with the one before."""
        before, self.before, self.steps = self.before, array, self.steps + 1
        if before is None:
            return
        is_changed, is_lost = find_changes(before, array)
        self.changed, self.lost = self.changed + is_changed, self.lost + is_lost
        if self.steps < FIRST_STEPS or not (found := 10 * self.lost > self.changed).any():
            return
        env, *index = np.argwhere(found)[0].tolist()
        place = f" at {index}" if index else ""
        warn(
            f"{location(env)}: {self.name}{place} is {array[env, *index]}, near which float32 does not resolve its changes; "
            "subtract an offset in the environment, as normalize_obs comes too late (this warning is shown once)"
        )


class ByteScaleCheck:
    """Warns once of bytes that are far below the largest bound of their Box, by which networks divide them.

    MiniGrid's symbols of 0 to 10 in a Box up to 255 are an example: networks would get at most 0.04. It warns if no byte of the
    first steps reaches a sixteenth of the bound, except where all are 0.

    Args:
        name: the array's name in the warning.
        scale: the largest bound.
    """

    def __init__(self, name: str, scale: float) -> None:
        self.name = name
        self.scale = scale
        self.steps = 0
        self.largest = 0

    def __call__(self, array: npt.NDArray[Any], location: Location) -> None:
        """Look for the largest byte."""
        self.steps, self.largest = self.steps + 1, max(self.largest, int(array.max(initial=0)))
        if self.steps == FIRST_STEPS and 0 < 16 * self.largest < self.scale:
            warn(
                f"{location(0)}: {self.name} has been at most {self.largest}, but networks divide it by {self.scale:g}, the "
                "bound of its Box; if it stays so, lower the bound, or return one-hot symbols (this warning is shown once)"
            )


class ObsCheck:
    """Checks one array of a batch of observations, and converts it to the dtype and start of agents.

    Args:
        leaf: the array in the environment's dtype.
        space: its polyak space.
        nonfinite: raise an error, or pass NaN and infinity on.
        out_of_bounds: handling of finite floats out of bounds (an integer out of bounds always raises).
    """

    def __init__(
        self,
        leaf: ArraySpec,
        space: Leaf,
        num_envs: int,
        nonfinite: Literal["error", "pass"],
        out_of_bounds: Literal["warn", "error", "clip"],
    ) -> None:
        self.name = leaf.name("the observation")
        self.leaf = leaf
        self.dtype = space.dtype
        self.nonfinite = nonfinite
        self.out_of_bounds = out_of_bounds
        self.warned = False
        self.start: Any = getattr(space, "start", 0)
        self.start = np.asarray(self.start, leaf.dtype) if np.any(self.start) else None
        is_exact = not isinstance(space, Box) or np.can_cast(leaf.dtype, np.float32)
        self.check_scale: ResolutionCheck | ByteScaleCheck | None = None if is_exact else ResolutionCheck(self.name)
        if isinstance(space, Box) and space.dtype == np.uint8:
            self.check_scale = ByteScaleCheck(self.name, space.byte_scale)
        shape = (num_envs, *leaf.shape)
        self.size = int(np.prod(shape))
        # Comparisons with full arrays are faster than with broadcast ones.
        self.low = None if leaf.low is None else np.array(np.broadcast_to(leaf.low, shape))
        self.high = None if leaf.high is None else np.array(np.broadcast_to(leaf.high, shape))
        self.symmetric = leaf.dtype.kind == "f" and bool(np.all(leaf.low == -np.asarray(leaf.high)))

    def __call__(self, array: npt.NDArray[Any], location: Location) -> npt.NDArray[Any]:
        """Check and cast the array.

        Raises:
            InvalidValue: NaN, infinity, or an integer out of its space; or a float out of bounds with `out_of_bounds="error"`.
        """
        if self.low is not None:
            # All bounds are finite, so that NaN and infinity fail too.
            is_inside = np.abs(array) <= self.high if self.symmetric else (array >= self.low) & (array <= self.high)
            if np.count_nonzero(is_inside) != self.size:
                array = self._outside(array, location)
        if self.check_scale is not None:
            self.check_scale(array, location)
            if self.check_scale.steps == FIRST_STEPS:
                self.check_scale = None
        if self.start is not None:
            array = array - self.start
        return array if array.dtype is self.dtype else array.astype(self.dtype, copy=False)

    def _outside(self, array: npt.NDArray[Any], location: Location) -> npt.NDArray[Any]:
        low, high = self.low, self.high
        assert low is not None and high is not None
        floats = array.dtype.kind == "f"
        finite = np.isfinite(array) & (np.abs(array) <= FLOAT32_MAX) if floats else np.ones(array.shape, bool)
        if self.nonfinite == "error" and not finite.all():
            raise InvalidValue(self._message(array, ~finite, -FLOAT32_MAX, FLOAT32_MAX, location))
        outside = finite & ((array < low) | (array > high))
        if outside.any() and not (self.warned and self.out_of_bounds == "warn" and floats):
            message = self._message(array, outside, low, high, location) + self._advice(array)
            if self.out_of_bounds == "error" or not floats:
                raise InvalidValue(message)
            if self.out_of_bounds == "warn":
                self.warned = True
                warn(f"{message} (this warning is shown once)")
        if self.out_of_bounds == "clip":
            array = np.clip(array, low, high)
        if not finite.all():
            # Floats too large for float32 become infinite here, which `nonfinite="pass"` requests; without NumPy's warning.
            with np.errstate(over="ignore"):
                array = array.astype(self.dtype)
        return array

    def _advice(self, array: npt.NDArray[Any]) -> str:
        """Return advice for 64-bit integers that do not fit into the 32-bit integers of agents."""
        if self.dtype.kind not in "iu" or self.leaf.dtype.itemsize <= self.dtype.itemsize or self.start is not None:
            return ""
        narrow = np.iinfo(self.dtype)
        fits = (array >= narrow.min) & (array <= narrow.max)
        return "" if fits.all() else f"; agents get integers of 32 bits ({self.dtype}), so return floats, or smaller ones"

    def _message(self, array: npt.NDArray[Any], bad: npt.NDArray[np.bool_], low: Any, high: Any, location: Location) -> str:
        """Return the error message of the first environment with a bad value."""
        env = int(np.argwhere(bad)[0][0])
        low, high = (np.broadcast_to(bound, array.shape)[env] for bound in (low, high))
        return range_error(f"{location(env)}: {self.name}", np.asarray(array[env]), low, high)


def check_reward(reward: npt.NDArray[Any], nonfinite: Literal["error", "pass"], location: Location) -> npt.NDArray[np.float32]:
    """Check rewards and cast them to float32; a float32 array is returned unchanged.

    Raises:
        InvalidValue: NaN, infinity, or beyond the range of float32.
    """
    # A finite float64 may be too large for float32.
    is_float32 = reward.dtype.char == "f"
    is_good = np.isfinite(reward) if is_float32 else np.abs(reward) <= FLOAT32_MAX
    if np.count_nonzero(is_good) == is_good.size:
        return reward if is_float32 else reward.astype(np.float32)
    if nonfinite == "error":
        env = int(np.flatnonzero(~is_good)[0])
        raise InvalidValue(f"{location(env)}: the reward must be finite, got {reward[env]}")
    with np.errstate(over="ignore"):
        return reward.astype(np.float32)


class ActionCheck:
    """Checks one array of a batch of an agent's actions, and converts it to the environment's units and dtype.

    Args:
        array: expected shape, dtype and bounds.
        spec: spec of the environment, with this array's space as the action space.
        gym_space: the same space as a Gymnasium space.
    """

    def __init__(self, array: ArraySpec, spec: EnvSpec, gym_space: Any, num_envs: int) -> None:
        self.name = f"{spec.id}: {array.name('the action')}"
        self.array = array
        self.spec = spec
        space = spec.action
        assert isinstance(space, Leaf)
        self.shape = (num_envs, *space.shape)
        self.size = int(np.prod(self.shape))
        self.dtype = np.dtype(gym_space.dtype)
        self.is_box = isinstance(space, Box)
        self.start = np.asarray(getattr(space, "start", 0), np.int64)
        self.highest = np.array(np.broadcast_to(0 if self.is_box else np.asarray(array.high, np.uint64), self.shape))

    def __call__(self, action: Any) -> npt.NDArray[Any]:
        """Return the environment's actions, in a new array.

        Raises:
            TypeError: floats for integers or the other way round.
            ValueError: a wrong shape, NaN, infinity, or an integer out of its space.
        """
        array = to_array(self.name, action, self.shape, self.array.dtype, exact=True)
        # As an unsigned number, a negative number is too large as well.
        good = np.isfinite(array) if self.is_box else array.astype(np.uint64) <= self.highest
        if np.count_nonzero(good) != self.size:
            # A finite Box action out of bounds is clipped, so only the range of float32 is checked.
            low, high = (-FLOAT32_MAX, FLOAT32_MAX) if self.is_box else (self.array.low, self.array.high)
            check_range(self.name, np.where(good, 0, array), low, high, batched=True)
        # Without `native_action` for integers, as a start may need the 64 bits of the environment's dtype.
        native: npt.NDArray[Any] = self.spec.native_action(array) if self.is_box else array + self.start
        return native.astype(self.dtype)


class ActionReader:
    """Checks a batch of an agent's actions, and converts it to the environment's units and dtypes.

    Args:
        spec: spec of the environment.
        gym_space: its action space as a Gymnasium space.
    """

    def __init__(self, spec: EnvSpec, gym_space: Any, num_envs: int) -> None:
        self.name = f"{spec.id}: the action"
        self.space = spec.action
        self.arrays = action_specs(spec)
        parts = zip(self.arrays, leaf_spaces(spec.action), _gym_leaves(gym_space), strict=True)
        self.checks = [
            ActionCheck(array, dataclasses.replace(spec, action=leaf), part, num_envs) for array, (_, leaf), part in parts
        ]

    def __call__(self, action: Any) -> Any:
        """Return the environment's action.

        Raises:
            TypeError, ValueError: see `ActionCheck`; or a part is missing.
        """
        if isinstance(self.space, Leaf):
            return self.checks[0](action)
        parts = read_leaves(self.name, self.arrays, action)
        return unflatten(self.space, [check(part) for check, part in zip(self.checks, parts, strict=True)])


def _gym_leaves(space: Any) -> list[Any]:
    """Return the leaves of a Gymnasium space in the order of polyak's spaces."""
    if not isinstance(space, gym.Dict | gym.Tuple):
        return [space]
    return [leaf for key in space_keys(space) for leaf in _gym_leaves(space.spaces[key])]
