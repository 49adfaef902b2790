"""Spaces of observations and actions, and conversion of an agent's actions to the environment's."""

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from polyak.core.printing import short_repr, text_of


class _ByValue:
    """Equality and a cached hash over `_identity()`, for frozen objects that hold NumPy arrays."""

    def _identity(self) -> tuple[Any, ...]:
        raise AssertionError("abstract")

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and self._identity() == other._identity())

    @functools.cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, self._identity()))

    def __hash__(self) -> int:
        # A space is part of a jitted argument's structure, so it is hashed at every call.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # String hashes differ between processes, so the cached hash is left out.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}


@dataclass(frozen=True, eq=False, repr=False)
class Box(_ByValue):
    """Arrays between `low` and `high`, elementwise; bounds may be infinite. The arguments have Gymnasium's order.

    Args:
        low, high: the bounds.
        shape: shape that both bounds are broadcast to; None is their own shape, which is () for numbers.
        dtype: dtype of the arrays.

    Raises:
        ValueError: a bound is NaN, or nothing that an integer `dtype` holds; the bounds' shapes differ, `low > high` somewhere,
            or the space has no element.
        TypeError: a bound or `dtype` is not numeric; `shape` is no sequence of integers.

    >>> Box([-1.0, 0.0], [1.0, 2.0]).shape
    (2,)
    >>> Box(0, 255, (84, 84, 4), np.uint8)
    Box(0, 255, shape=(84, 84, 4), dtype=uint8)
    """

    low: npt.NDArray[Any]
    high: npt.NDArray[Any]
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))

    def __init__(
        self, low: npt.ArrayLike, high: npt.ArrayLike, shape: Iterable[int] | None = None, dtype: npt.DTypeLike = np.float32
    ) -> None:
        sizes = None if shape is None else tuple(map(operator.index, shape))
        dtype = np.dtype(dtype)
        if dtype.kind not in "fiub":
            raise TypeError(f"Box: dtype must be a number type, got {dtype}")
        low_array, high_array = _as_bound("low", low, dtype), _as_bound("high", high, dtype)
        if sizes is not None:
            low_array, high_array = (np.broadcast_to(array, sizes).copy() for array in (low_array, high_array))
        if low_array.shape != high_array.shape:
            raise ValueError(f"Box: low has shape {low_array.shape}, high {high_array.shape}; they must match")
        if low_array.size == 0:
            raise ValueError(f"Box: shape {low_array.shape} has no element; a space needs at least one")
        if not np.all(low_array <= high_array):
            raise ValueError(f"Box: low must not be above high, nor either NaN; got low {low_array}, high {high_array}")
        object.__setattr__(self, "low", _read_only(low_array))
        object.__setattr__(self, "high", _read_only(high_array))
        object.__setattr__(self, "dtype", dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return self.low.shape

    @property
    def bounded(self) -> bool:
        """Every bound is finite."""
        return bool(np.all(np.isfinite(self.low)) and np.all(np.isfinite(self.high)))

    @property
    def byte_scale(self) -> float:
        """The divisor with which networks scale arrays of bytes: the largest bound, 255 for images."""
        return max(float(self.high.max()), 1.0)

    @functools.cached_property
    def float32_bounds(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The bounds in float32, rounded inwards, so that a float32 between them lies in the Box; read-only arrays."""
        low, high = self.low.astype(np.float32), self.high.astype(np.float32)
        inner_low = np.where(low < self.low, np.nextafter(low, np.float32(np.inf)), low)
        inner_high = np.where(high > self.high, np.nextafter(high, np.float32(-np.inf)), high)
        is_empty = inner_low > inner_high  # No float32 lies between the bounds.
        return _read_only(np.where(is_empty, low, inner_low)), _read_only(np.where(is_empty, high, inner_high))

    def _identity(self) -> tuple[Any, ...]:
        return (self.low.shape, str(self.dtype), self.low.tobytes(), self.high.tobytes())

    def __repr__(self) -> str:
        bounds = [self.low.ravel(), self.high.ravel()]
        if all((bound == bound[0]).all() for bound in bounds):
            low, high = (_number_text(bound[0]) for bound in bounds)
        else:
            low, high = (f"[{', '.join([*map(_number_text, bound[:2]), *['...'] * (bound.size > 2)])}]" for bound in bounds)
        return f"Box({low}, {high}, shape={self.shape}, dtype={self.dtype})"


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


def _as_bound(name: str, value: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A bound of a Box in its dtype, checked to be one that an integer dtype holds."""
    array = np.array(value)
    if array.dtype.kind == "O" and dtype.kind == "f":
        array = np.array(value, np.float64)  # integers beyond 64 bits
    if array.dtype.kind not in "fiub":
        raise TypeError(f"Box: {name} must be numbers, got {value!r:.80}")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        # Floats round the largest integer up, to a power of two.
        fits = (array < limits.max + 1) & (array == np.rint(array)) if array.dtype.kind == "f" else array <= limits.max
        if not np.all(fits & (array >= limits.min)):
            raise ValueError(
                f"Box: {name} must be integers in [{limits.min}, {limits.max}] with dtype={dtype}, got {value!r:.80}"
            )
    bound = array.astype(dtype)
    # -0.0 equals 0.0 but has other bytes, by which Boxes are compared.
    bound[bound == 0] = 0
    return bound


def _number_text(x: Any) -> str:
    return f"{x:g}" if isinstance(x, np.floating) else str(x)


@short_repr()
@dataclass(frozen=True, repr=False)
class Discrete:
    """The integers `start, ..., start + n - 1`, as int32. Agents count from 0; the environment sees `start` added.

    Raises:
        ValueError: `n` is not a positive integer that int32 holds, or `start` no integer.
    """

    n: int
    start: int = 0
    shape: ClassVar[tuple[int, ...]] = ()
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int32)

    def __post_init__(self) -> None:
        if int(self.n) != self.n or not 1 <= self.n < 2**31:
            raise ValueError(f"Discrete: n must be a positive int32, got {self.n!r}")
        if int(self.start) != self.start:
            raise ValueError(f"Discrete: start must be an integer, got {self.start!r}")
        object.__setattr__(self, "n", int(self.n))
        object.__setattr__(self, "start", int(self.start))


@short_repr()
@dataclass(frozen=True, repr=False)
class MultiDiscrete:
    """A flat vector of int32, the i-th among `start[i], ..., start[i] + nvec[i] - 1`.

    Raises:
        ValueError: `nvec` is empty, not flat, or has an entry that is not a positive integer that int32 holds; `start` has
            another length, or an entry that is not an integer.
    """

    nvec: tuple[int, ...]
    start: tuple[int, ...] = ()
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int32)

    def __post_init__(self) -> None:
        nvec = np.asarray(self.nvec)
        if nvec.ndim != 1 or nvec.size == 0 or not np.all((nvec >= 1) & (nvec < 2**31) & (nvec == nvec.astype(int))):
            raise ValueError(f"MultiDiscrete: nvec must be a flat, non-empty vector of positive int32, got {self.nvec!r}")
        start = tuple(int(s) for s in self.start) or (0,) * len(nvec)
        if len(start) != len(nvec):
            raise ValueError(f"MultiDiscrete: start has {len(start)} entries, nvec {len(nvec)}; they must match")
        if any(int(s) != s for s in self.start):
            raise ValueError(f"MultiDiscrete: start must be integers, got {self.start!r}")
        object.__setattr__(self, "nvec", tuple(int(n) for n in nvec))
        object.__setattr__(self, "start", start)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return (len(self.nvec),)


@short_repr()
@dataclass(frozen=True, repr=False)
class MultiBinary:
    """Arrays of zeros and ones of a fixed shape, as int8.

    Raises:
        ValueError: a dimension is not positive.
    """

    shape: tuple[int, ...]
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)

    def __post_init__(self) -> None:
        shape = tuple(int(n) for n in np.atleast_1d(np.asarray(self.shape)))
        if not shape or min(shape) < 1:
            raise ValueError(f"MultiBinary: every dimension must be positive, got {self.shape!r}")
        object.__setattr__(self, "shape", shape)


@short_repr()
@dataclass(frozen=True, eq=False, repr=False)
class Dict(_ByValue):
    """Named spaces; a value is a dict with the same keys. Keys are sorted, as in JAX."""

    spaces: Mapping[str, "Space"]

    def __post_init__(self) -> None:
        if not self.spaces:
            raise ValueError("Dict: a Dict space needs at least one key, got none")
        object.__setattr__(self, "spaces", dict(sorted(self.spaces.items())))
        paths = [path for path, _ in leaf_spaces(self)]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise ValueError(f"Dict: paths must be unique, got {twice[0]!r} twice")

    def _identity(self) -> tuple[Any, ...]:
        return tuple(self.spaces.items())

    __str__ = text_of  # On one line, for errors.


@short_repr()
@dataclass(frozen=True, repr=False)
class Tuple:
    """A sequence of spaces; a value is a tuple of the same length."""

    spaces: tuple["Space", ...]

    def __post_init__(self) -> None:
        if not self.spaces:
            raise ValueError("Tuple: a Tuple space needs at least one entry, got none")
        object.__setattr__(self, "spaces", tuple(self.spaces))

    __str__ = text_of  # On one line, for errors.


Leaf: TypeAlias = Box | Discrete | MultiDiscrete | MultiBinary
Space: TypeAlias = Leaf | Dict | Tuple


def map_space(function: Any, space: Space, *values: Any) -> Any:
    """`function(leaf_space, *leaf_values)` over a tree of spaces: a dict for Dict, a tuple for Tuple.

    >>> map_space(lambda s: s.shape, Dict({"a": Discrete(3), "b": Box([0.0], [1.0])}))
    {'a': (), 'b': (1,)}
    """
    if isinstance(space, Dict):
        return {name: map_space(function, part, *(v[name] for v in values)) for name, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(map_space(function, part, *(v[i] for v in values)) for i, part in enumerate(space.spaces))
    return function(space, *values)


def leaf_keys(space: Space, keys: tuple[Any, ...] = ()) -> Iterable[tuple[tuple[Any, ...], Leaf]]:
    """Every leaf with the keys that lead to it through dicts and tuples."""
    if isinstance(space, Dict | Tuple):
        parts: Iterable[tuple[Any, Space]] = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from leaf_keys(part, (*keys, key))
    else:
        yield keys, space


def in_action(path: str) -> str:
    """The path of a leaf of an action, for errors; empty if the action is one leaf."""
    return f" at action {path!r}" if path else ""


def needs_bounds(leaf: "Box", path: str) -> str:
    """The end of an error about a leaf of an action without finite bounds, with advice."""
    return f"needs finite bounds, got {leaf}{in_action(path)}; give the action space some (gymnasium.wrappers.TransformAction)"


def leaf_spaces(space: Space) -> Iterable[tuple[str, Leaf]]:
    """Every leaf with its path (`""` for a space that is itself a leaf, else `camera`, `pair/0`, ...)."""
    for keys, leaf in leaf_keys(space):
        yield "/".join(map(str, keys)), leaf


def unflatten(space: Space, leaves: Iterable[Any]) -> Any:
    """The tree of a space with these leaves, in the order of `leaf_spaces`."""
    iterator = iter(leaves)
    return map_space(lambda _: next(iterator), space)


def zeros(space: Space, batch: tuple[int, ...] = ()) -> Any:
    """A NumPy value of the space's tree, all zeros, with leading `batch` dimensions."""
    return map_space(lambda leaf: np.zeros(batch + leaf.shape, leaf.dtype), space)


def select(space: Space, value: Any) -> Any:
    """The parts of a value that the space has; other entries of its dicts are left out."""
    return map_space(lambda _, x: x, space, value)


PROBE_ROWS = 97
"""Observations that networks are tried with: hardly any other axis has this size, so that none is taken for the rows."""


def only_value(space: Space, batch: Any) -> Any:
    """The value in a batch of one; a Box's value is an array, also without dimensions, as Gymnasium expects."""
    return map_space(lambda leaf, x: np.asarray(x[0]) if isinstance(leaf, Box) else x[0], space, batch)


@short_repr()
@dataclass(frozen=True, repr=False)
class EnvSpec:
    """The spaces and the name of an environment, and the scaling of its actions, which agents need.

    Attributes:
        obs: the observation space.
        action: the action space, in the environment's own units.
        id: the environment's name.
        action_scaling: Box actions are clipped to the bounds (`"clip"`) or rescaled to them from [-1, 1] (`"rescale"`).
        has_action_mask: time steps have an `action_mask`.
        goals: the `polyak.core.goals.Goals` of an environment whose reward is a function of goals, else None; not compared and
            not stored.

    Raises:
        TypeError: `obs` or `action` is no space of polyak's.
        ValueError: `"rescale"` with a Box action whose bounds are not finite.
    """

    obs: Space
    action: Space
    id: str = ""
    action_scaling: Literal["clip", "rescale"] = "clip"
    has_action_mask: bool = False
    goals: Any = field(default=None, compare=False, repr=False, metadata={"stored": False})

    def __post_init__(self) -> None:
        if self.action_scaling not in ("clip", "rescale"):
            raise ValueError(f"EnvSpec: action_scaling must be 'clip' or 'rescale', got {self.action_scaling!r}")
        for name, space in (("obs", self.obs), ("action", self.action)):
            for path, leaf in leaf_spaces(space):
                if not isinstance(leaf, Leaf):
                    got = f"{leaf!r:.80}{f' at {path!r}' if path else ''}"
                    raise TypeError(f"EnvSpec: {name} must be a space of polyak.core.spaces (see gymnasium_spaces), got {got}")
        for path, leaf in leaf_spaces(self.action):
            if isinstance(leaf, Box) and self.action_scaling == "rescale" and not leaf.bounded:
                raise ValueError(f"EnvSpec: action_scaling='rescale' {needs_bounds(leaf, path)}")

    def select_entries(self, entries: tuple[str, ...] | None) -> "EnvSpec":
        """The spec of a network or policy that sees only these entries of a Dict observation; None for all."""
        if entries is None:
            return self
        assert isinstance(self.obs, Dict), "agents check their entries"
        return replace(self, obs=Dict({name: self.obs.spaces[name] for name in entries}))

    def action_bounds(self, leaf: Box) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The bounds of an agent's Box action in float32: the bounds of the space, or -1 and 1 if it is rescaled."""
        if self.action_scaling == "rescale":
            return np.full(leaf.shape, -1.0, np.float32), np.full(leaf.shape, 1.0, np.float32)
        return leaf.float32_bounds if leaf.dtype.kind == "f" else (leaf.low.astype(np.float32), leaf.high.astype(np.float32))

    def native_action(self, action: Any) -> Any:
        """Convert an agent's action to the environment's: Discrete counted from `start`, Box clipped or rescaled to the bounds.

        Works on NumPy and JAX arrays alike, with any leading batch dimensions. A float Box has the space's dtype in NumPy, and
        float32 in JAX.
        """
        return map_space(self._native_leaf, self.action, action)

    def native_obs(self, obs: Any) -> Any:
        """Convert an agent's observation to the environment's: integers counted from `start`."""
        return map_space(lambda leaf, x: x if isinstance(leaf, Box) else self._native_leaf(leaf, x), self.obs, obs)

    def agent_obs(self, obs: Any) -> Any:
        """Convert an environment's observation to the agent's, the inverse of `native_obs`: integers counted from 0."""
        return map_space(_count_from_zero, self.obs, obs)

    def agent_action(self, action: Any) -> Any:
        """The inverse of `native_action` for NumPy arrays: integers from 0, a rescaled Box in [-1, 1], up to rounding."""
        return map_space(self._agent_leaf, self.action, action)

    def _agent_leaf(self, space: Leaf, action: Any) -> Any:
        match space:
            case Discrete() | MultiDiscrete():
                return (action - np.asarray(space.start)).astype(space.dtype)
            case Box() if self.action_scaling == "rescale":
                low, width = np.float64(space.low), np.float64(space.high) - np.float64(space.low)
                unit = np.divide(action - low, width, out=np.full(np.shape(action), 0.5), where=width > 0)
                return (2 * unit - 1).astype(np.float32)
            case Box():
                return np.asarray(action, np.float32)
            case _:
                return action

    def _native_leaf(self, space: Leaf, action: Any) -> Any:
        match space:
            case Discrete() | MultiDiscrete():
                return action + _like(space.start, action) if np.any(space.start) else action
            case Box():
                return self._native_box(space, action)
            case _:
                return action

    def _native_box(self, space: Box, action: Any) -> Any:
        xp: Any = np if isinstance(action, (np.ndarray, np.generic)) else action.__array_namespace__()
        if xp is np and space.dtype == np.float64:
            action = action.astype(np.float64)
        is_exact = space.dtype.kind != "f" or action.dtype == np.float64
        low, high = (_like(x, action) for x in ((space.low, space.high) if is_exact else space.float32_bounds))
        if self.action_scaling == "rescale":
            unit = (xp.minimum(xp.maximum(action, -1.0), 1.0) + 1.0) / 2.0
            # Not low + unit * (high - low): the range of a wide box overflows.
            action = (1.0 - unit) * low + unit * high
        native = xp.minimum(xp.maximum(action, low), high)
        match space.dtype.kind:
            case "f":
                return native.astype(space.dtype, copy=False) if xp is np else native
            case "b":
                return xp.rint(native).astype(space.dtype)
        # float32 rounds bounds such as 2³¹ - 1 up, out of the Box and of its dtype.
        largest = action.dtype.type(np.nextafter(np.float32(np.iinfo(space.dtype).max), np.float32(0)))
        nearest = xp.rint(xp.minimum(native, largest)).astype(space.dtype)
        lower, upper = (_like(bound, action, space.dtype) for bound in (space.low, space.high))
        return xp.where(native >= high, upper, xp.where(native <= low, lower, xp.minimum(xp.maximum(nearest, lower), upper)))


def _count_from_zero(space: Leaf, x: Any) -> Any:
    if not isinstance(space, Discrete | MultiDiscrete) or not np.any(space.start):
        return x
    # In the space's dtype: the difference may not fit into that of the environment.
    x = x.astype(space.dtype)
    return x - _like(space.start, x)


def check_env_spec(owner: str, spec: Any) -> None:
    """Check that a value is an `EnvSpec`; the error says how to get the spec of an environment.

    Raises:
        TypeError: the value is something else.
    """
    if isinstance(spec, EnvSpec):
        return
    if isinstance(getattr(spec, "spec", None), EnvSpec):
        got = "the environment; pass env.spec"
    elif getattr(spec, "observation_space", None) is not None:
        got = "a Gymnasium environment; create env = polyak.envs.make(...) of it and pass env.spec"
    else:
        got = f"{spec!r:.80}; create env = polyak.envs.make(...) and pass env.spec (networks are fields of the agent)"
    raise TypeError(f"{owner}: spec must be an EnvSpec, got {got}")


def _like(value: Any, action: Any, dtype: np.dtype[Any] | None = None) -> Any:
    """A constant of a space in this dtype, or in the action's dtype, with leading axes of length 1."""
    array = np.asarray(value, action.dtype if dtype is None else dtype)
    return array.reshape((1,) * (action.ndim - array.ndim) + array.shape)
