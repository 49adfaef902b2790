"""`predict` and `as_python` of all policies: from a NumPy observation to an action."""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import PRNGKeyArray

from polyak.core.policy_faults import CallsPython, ExceptionRelay, check_error_flags, python_calls_in
from polyak.core.printing import short_repr
from polyak.core.space_check import ArraySpec, action_specs, check_range, check_shape, obs_specs, read_leaves, to_array
from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiBinary, Space, leaf_spaces, map_space, only_value, unflatten
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Policy, PolicyStep, PyTree, TimeStep

Mode: TypeAlias = Callable[[Any], Any]


class PolicyWithSpec(Policy, Protocol):
    """A policy that knows the spaces it acts in."""

    @property
    def spec(self) -> EnvSpec:
        """The environment's."""
        ...


@jax.jit
def _sample(policy: Policy, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
    step = policy.action(time_step, carry, key)
    return step.action, step.carry


@jax.jit
def _mode(policy: Policy, time_step: TimeStep, carry: PyTree) -> tuple[PyTree, PyTree]:
    distribution, carry = policy.distribution(time_step, carry)
    return distribution.mode(), carry


@suggest_arguments("predict")
def predict(
    self: PolicyWithSpec,
    obs: Any,
    carry: PyTree = None,
    *,
    deterministic: bool = True,
    first: Any = None,
    action_mask: Any = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Any, PyTree]:
    """NumPy in, NumPy out: the environment's own action (clipped or rescaled, counted from its `start`) for an observation.

    The mode of a small `MLP` is computed in NumPy, which for one observation costs less than the call of a JAX
    function: the same bits at every call, equal to `policy.distribution(...)` up to rounding.

    A Python policy's exceptions are raised as they are, also from inside wrappers.

    Args:
        obs: one observation, or a batch of them along a first axis.
        carry: the carry that the previous call returned; None at the start of an episode.
        deterministic: the mode of the distribution; else a sample, for which each call needs a `key` of its own.
        first: one bool per observation, True where an episode begins: its carry is reset.
        action_mask: the allowed actions, single or batched as the observation, in the tree of the action space; needed if the
            environment has masks.

    Raises:
        TypeError: an observation of the wrong kind of number.
        ValueError: the observation does not fit the space (leaf, shape got, shape expected) or holds NaN or infinity; a
            mask that is missing, does not fit the action space or allows nothing; a carry or `first` of another batch size;
            a sample without a key.
    """
    spec = self.spec
    batched, batch = obs_batch(spec.obs, obs)
    size = batch or 1
    for leaf in () if carry is None else jax.tree.leaves(carry):
        if np.shape(leaf)[:1] != (size,):
            raise ValueError(f"predict: carry must have a batch size of {size} as obs, got an array of shape {np.shape(leaf)}")
    if not deterministic and not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"predict: deterministic=False samples and needs a key, e.g. key=jax.random.key(0), got {key!r}")
    resets = first_of_batch(first, size, carry is None)
    mask = mask_batch(spec, action_mask, batch, "predict")
    numpy_mode = _form_of(self).numpy_mode if deterministic and mask is None else None
    if numpy_mode is not None and size <= numpy_mode[0]:
        # An overflow in the network is silent in JAX too.
        with np.errstate(all="ignore"):
            action, carry = numpy_mode[1](batched), () if carry is None else carry
    else:
        time_step = _time_step(batched, size, resets, mask)
        carry = self.initial_state(size) if carry is None else carry
        action, carry = _act(self, time_step, carry, None if deterministic else key)
    native = spec.native_action(action)
    return (native if batch else only_value(spec.action, native)), carry


def _act(policy: PolicyWithSpec, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray | None) -> tuple[PyTree, PyTree]:
    """The action of a batch, in NumPy, and the next carry; the mode if the key is None."""
    program, arguments = (_mode, (policy, time_step, carry)) if key is None else (_sample, (policy, time_step, carry, key))
    if not _form_of(policy).calls_python:
        action, carry = program(*arguments)
        check_error_flags(carry)
    else:
        relay = ExceptionRelay(policy)
        with relay:
            step = policy.step_in_numpy(time_step, carry, key) if isinstance(policy, CallsPython) else None
        if step is not None:
            return step.action, step.carry
        action, carry = relay.run(program, *arguments)
    # Copies, because JAX's arrays are read-only.
    return jax.tree.map(np.array, action), carry


@short_repr("spec")
class AsPython:
    """A policy as an object with `initial_state` and `action`; without recurrent state also as a function of the observation.

    Actions are the policy's own, bit for bit, as agents choose them (counted from 0, before `spec.native_action`); a Box
    action beyond its bounds is clipped, as by the environment. So `PythonPolicy(policy.as_python(), spec)` acts as the policy
    does; a recurrent policy needs `carry_spec=` this object's `carry_spec`. `predict` returns the environment's own actions.

    Args:
        spec: spec of the policy.
        act: `(time_step, carry, seed) -> (action, carry)`, in NumPy.
        initial_state: the carry at the start of episodes, by the batch size.
    """

    def __init__(
        self,
        spec: EnvSpec,
        initial_state: Callable[[int], PyTree],
        act: Callable[[TimeStep, PyTree, int], tuple[PyTree, PyTree]],
    ) -> None:
        self.spec, self._initial_state, self._act = spec, initial_state, act

    @property
    def carry_spec(self) -> PyTree:
        """The carry of one fresh episode, without a batch dimension."""
        return jax.tree.map(lambda x: x[0], self.initial_state(1))

    def initial_state(self, batch_size: int) -> PyTree:
        """The carry at the start of `batch_size` episodes."""
        return jax.tree.map(np.array, self._initial_state(batch_size))

    def action(self, time_step: TimeStep, carry: PyTree, seed: int = 0) -> PolicyStep:
        """One step of a batch; the seed, 32 bits, determines random draws."""
        action, carry = self._act(time_step, carry, seed)
        return PolicyStep(map_space(self._clip, self.spec.action, action), jax.tree.map(np.array, carry))

    def __call__(self, obs: PyTree, action_mask: PyTree = None, *, seed: int = 0) -> PyTree:
        """The action for one observation, or for a batch along a first axis.

        Args:
            obs: see `predict`.
            action_mask: see `predict`.

        Raises:
            TypeError: the policy is recurrent, and a function of the observation has no carry; the wrong kind of number.
            ValueError: the observation does not fit the space, or holds NaN or infinity.
        """
        if jax.tree.leaves(self._initial_state(1)):
            raise TypeError("as_python: the policy is recurrent; call initial_state(batch_size) and action(time_step, carry)")
        batched, batch = obs_batch(self.spec.obs, obs, owner="as_python")
        size = batch or 1
        mask = mask_batch(self.spec, action_mask, batch, "as_python")
        action = self.action(_time_step(batched, size, np.ones(size, bool), mask), self._initial_state(size), seed).action
        return action if batch else only_value(self.spec.action, action)

    def _clip(self, leaf: Leaf, action: Any) -> Any:
        return np.clip(action, *self.spec.action_bounds(leaf)) if isinstance(leaf, Box) else action


def as_python(policy: PolicyWithSpec, *, deterministic: bool = True) -> AsPython:
    """The policy as a plain NumPy callable, for one observation or a batch: see `AsPython`.

    Args:
        deterministic: return the mode of its distribution; else a draw, by the seed.
    """

    def act(time_step: TimeStep, carry: PyTree, seed: int) -> tuple[PyTree, PyTree]:
        return _act(policy, time_step, carry, None if deterministic else jax.random.key(np.uint32(seed)))

    return AsPython(policy.spec, policy.initial_state, act)


class NumPyMethods:
    """The methods of a policy that take and return NumPy arrays."""

    predict = predict
    as_python = as_python


class _Form(NamedTuple):
    """The cached data of a policy, for its lifetime.

    Attributes:
        parts: each dict and list in the policy, which can be changed though it is frozen, with each key and its value.
    """

    policy: "weakref.ref[Any]"
    parts: list[tuple[Any, Any, Any]]
    numpy_mode: tuple[int, Mode] | None
    calls_python: bool


_forms: dict[int, _Form] = {}


def _form_of(policy: PolicyWithSpec) -> _Form:
    """The policy's form, from the cache unless its arrays are others than before."""
    form = _forms.get(id(policy))
    if form is None or form.policy() is not policy or not all([part[key] is value for part, key, value in form.parts]):
        form = _new_form(policy)
    return form


def _new_form(policy: PolicyWithSpec) -> _Form:
    # Bound methods, because the interpreter clears the names of modules before it frees the last policies.
    number, forget = id(policy), _forms.pop
    known = weakref.ref(policy, lambda _: forget(number, None))
    mode = getattr(policy, "mode_in_numpy", lambda: None)()
    form = _Form(known, list(_mutable_parts(policy)), mode, bool(python_calls_in(policy)))
    if all(isinstance(x, jax.Array) for x in jax.tree.leaves(policy)):  # others can be written to
        _forms[number] = form
    return form


def _mutable_parts(tree: PyTree) -> Iterator[tuple[Any, Any, Any]]:
    """Every dict and list in a tree with each of its keys and the value there."""
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, dict | list)):
        for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
            yield part, key, part[key]
            yield from _mutable_parts(part[key])


def _time_step(obs: PyTree, size: int, first: npt.NDArray[np.bool_], mask: PyTree) -> TimeStep:
    flags = np.zeros(size, bool)
    return TimeStep(obs, np.zeros(size, np.float32), flags, flags, first, mask)


def first_of_batch(first: Any, size: int, starts: bool) -> npt.NDArray[np.bool_]:
    """The user's `first` as `[B]`; True everywhere where `starts`.

    Raises:
        ValueError: `first` is not one bool per observation.
    """
    if first is None or starts:
        return np.full(size, starts)
    array = np.asarray(first)
    if array.dtype != bool or array.shape not in ((size,), () if size == 1 else (size,)):
        raise ValueError(f"predict: first must be one bool per observation, shape ({size},), got {array.dtype} {array.shape}")
    return array.reshape(size)


def obs_batch(space: Space, obs: Any, *, owner: str = "predict", native: bool = False) -> tuple[Any, int | None]:
    """An observation in its space's dtype, with a batch axis; and the batch size, None for a single observation.

    Args:
        owner: for messages.
        native: integers as the environment counts them; else from 0, as agents see them.

    Raises:
        TypeError, ValueError: as `predict`.
    """
    name, specs = f"{owner}: obs", obs_specs(space)
    if type(obs) is np.ndarray and _needs_no_conversion(space, obs.dtype, obs.shape):
        batch = None if obs.shape == specs[0].shape else len(obs)
        check_range(name, obs, specs[0].low, specs[0].high, batched=batch is not None)
        return obs.reshape(batch or 1, *specs[0].shape).copy(), batch
    if isinstance(space, Leaf) and isinstance(obs, tuple) and any(isinstance(part, dict) for part in obs):
        raise TypeError(f"{name} must be an observation, got a tuple with a dict; reset() of Gymnasium returns (obs, info)")
    leaves = read_leaves(name, specs, obs)
    sizes = [_batch_size(spec.name(name), spec, leaf) for spec, leaf in zip(specs, leaves, strict=True)]
    if len(set(sizes)) > 1:
        raise ValueError(f"{owner}: the leaves of obs must have the same batch size, got {sizes}")
    arrays = [_obs_leaf(spec.name(name), spec, leaf, sizes[0], native) for spec, leaf in zip(specs, leaves, strict=True)]
    return unflatten(space, arrays), sizes[0]


@functools.lru_cache(maxsize=64)
def _needs_no_conversion(space: Space, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return True for an array, single or a batch, in the dtype of a Box of floats: nearly every observation is one."""
    fits = isinstance(space, Box) and dtype == space.dtype and space.shape in (shape, shape[1:])
    return fits and dtype.kind == "f" and 0 not in shape


def _batch_size(name: str, spec: ArraySpec, leaf: Any) -> int | None:
    """The length of the first axis, or None for a single observation."""
    shape = np.shape(leaf)
    if len(shape) == len(spec.shape) + 1 and shape[1:] == spec.shape and shape[0] > 0:
        return shape[0]
    batch = ", ".join(map(str, ("N", *spec.shape)))
    check_shape(name, leaf, spec.shape, hint=f"; a batch has shape ({batch})")
    return None


def _obs_leaf(name: str, spec: ArraySpec, leaf: Any, batch: int | None, native: bool) -> npt.NDArray[Any]:
    leaf = np.asanyarray(leaf)  # a masked array stays one
    array = to_array(name, leaf.view(np.int8) if leaf.dtype == bool != spec.dtype else leaf, leaf.shape, spec.dtype)
    if spec.low is not None:
        check_range(name, array, spec.low, spec.high, batched=batch is not None)
        if not native and spec.dtype.kind == "i":
            array = array.astype(np.int64) - spec.low
    return array.astype(spec.dtype).reshape(batch or 1, *spec.shape)


def mask_batch(spec: EnvSpec, action_mask: Any, batch: int | None, owner: str) -> PyTree:
    """The mask in the tree of the action space, with a batch axis; None for the parts that are not masked.

    Raises:
        ValueError: the mask is missing, does not fit the space, or allows nothing.
    """
    if action_mask is None:
        if spec.has_action_mask:
            raise ValueError(
                f"{owner}: action_mask must be given, as {spec.id or 'the environment'} has action masks; pass the mask of the "
                "observation, e.g. action_mask=info['action_mask']"
            )
        return None
    name, specs = f"{owner}: action_mask", action_specs(spec)
    parts = zip(specs, leaf_spaces(spec.action), read_leaves(name, specs, action_mask), strict=True)
    return unflatten(spec.action, [_mask_leaf(of.name(name), space, mask, batch) for of, (_, space), mask in parts])


def _mask_leaf(name: str, space: Leaf, mask: Any, batch: int | None) -> npt.NDArray[np.bool_] | None:
    if mask is None:
        return None
    if isinstance(space, Box | MultiBinary):
        raise ValueError(f"{name} must be None, for {space} has no mask")
    sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
    check_shape(name, mask, (sum(sizes),) if batch is None else (batch, sum(sizes)))
    flags = np.asarray(mask)
    if flags.dtype != bool and not ((flags == 0) | (flags == 1)).all():
        raise ValueError(f"{name} must hold bools, or 0 and 1, got {mask}")
    rows = flags.astype(bool).reshape(-1, sum(sizes))
    if not all(part.any(axis=1).all() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)):
        raise ValueError(f"{name} allows no action in some row; got {mask}")
    return rows
