"""From a NumPy observation to the environment's action: what a policy's `predict` does."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import PRNGKeyArray

from polyak.core.carries import check_carry
from polyak.core.policy_faults import ExceptionRelay, python_calls_in
from polyak.core.space_check import ArraySpec, action_specs, check_range, check_shape, obs_specs, read_leaves, to_array
from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiBinary, Space, leaf_spaces, only_value, unflatten
from polyak.core.types import Policy, PyTree, TimeStep

Mode: TypeAlias = Callable[[Any], Any]


class PolicyWithSpec(Policy, Protocol):
    """A policy that knows the spaces it acts in."""

    @property
    def spec(self) -> EnvSpec:
        """The environment's."""
        ...


@runtime_checkable
class ModeInNumPy(Protocol):
    """A policy without a memory whose greedy action NumPy can find, where that is cheaper than a call of JAX."""

    def most_rows_in_numpy(self) -> int:
        """For how many observations at once it is; 0 for never."""
        ...

    def mode_in_numpy(self) -> Mode:
        """`mode(obs)`, of a policy whose arrays are NumPy's."""
        ...


@jax.jit
def _sample(policy: Policy, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
    step = policy.action(time_step, carry, key)
    return step.action, step.carry


@jax.jit
def _mode(policy: Policy, time_step: TimeStep, carry: PyTree) -> tuple[PyTree, PyTree]:
    distribution, carry = policy.distribution(time_step, carry)
    return distribution.mode(), carry


def predict(
    policy: PolicyWithSpec,
    obs: Any,
    carry: PyTree = None,
    *,
    deterministic: bool = True,
    action_mask: Any = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Any, PyTree]:
    """NumPy in, NumPy out: the environment's own action (clipped or rescaled, counted from its `start`) for an observation.

    The greedy action of a small `mlp` is found in NumPy, where one observation costs less than handing the policy's arrays to
    JAX: the same bits at every call, and up to rounding what `policy.distribution(...)` says compiled.

    What a Python policy raises, also one inside wrappers, comes out as it was raised.

    Args:
        obs: one observation, or a batch of them along a first axis.
        carry: what the call before returned; None at the start of an episode.
        deterministic: the mode of the distribution; else a sample, for which a `key` is needed.
        action_mask: which actions are allowed, as the observation single or batched, and in the tree of the action space.

    Raises:
        TypeError: an observation of the wrong kind of number.
        ValueError: the observation does not fit the space (leaf, shape got, shape wanted) or holds what is not finite; a
            mask that does not fit the action space or allows nothing; a carry of another batch; a sample without a key.
    """
    form = _form_of(policy)
    given = partial(_predicted, policy, form, obs, carry, deterministic, action_mask, key)
    if not form.calls_python:
        return given()
    with ExceptionRelay(policy):
        return given()


def _predicted(
    policy: PolicyWithSpec,
    form: "_Form",
    obs: Any,
    carry: PyTree,
    deterministic: bool,
    action_mask: Any,
    key: PRNGKeyArray | None,
) -> tuple[Any, PyTree]:
    spec = policy.spec
    rows, batch = rows_of(spec.obs, obs)
    size = batch or 1
    for leaf in jax.tree.leaves(carry):
        if np.shape(leaf)[:1] != (size,):
            raise ValueError(f"predict: carry must have {size} rows as obs, got an array of shape {np.shape(leaf)}")
    if not deterministic and key is None:
        raise ValueError("predict: deterministic=False draws a sample and needs a key, e.g. key=jax.random.key(0)")
    in_numpy = form.mode if deterministic and action_mask is None and size <= form.most_rows else None
    if in_numpy is not None:
        # What overflows in the network is silent in JAX too.
        with np.errstate(all="ignore"):
            action, carry = in_numpy(rows), () if carry is None else carry
    else:
        mask = None if action_mask is None else _mask_rows(spec, action_mask, batch)
        flags = np.zeros(size, bool)
        time_step = TimeStep(rows, np.zeros(size, np.float32), flags, flags, np.full(size, carry is None), mask)
        carry = policy.initial_state(size) if carry is None else carry
        acted = _mode(policy, time_step, carry) if key is None or deterministic else _sample(policy, time_step, carry, key)
        # Copies, for what JAX hands out is read-only.
        action, carry = jax.tree.map(np.array, acted[0]), acted[1]
    check_carry(carry)
    native = spec.native_action(action)
    return (native if batch else only_value(spec.action, native)), carry


class _Form(NamedTuple):
    """What is kept of a policy for as long as it lives."""

    policy: "weakref.ref[Any]"
    arrays: list[Any]
    most_rows: int
    mode: Mode | None
    calls_python: bool


_forms: dict[int, _Form] = {}


def watching(policy: PolicyWithSpec) -> AbstractContextManager[Any]:
    """A context in which what a policy raises that calls Python comes out as it was raised."""
    return ExceptionRelay(policy) if _form_of(policy).calls_python else nullcontext()


def _form_of(policy: PolicyWithSpec) -> _Form:
    """What is known of it, looked up anew where it is another than before."""
    form, arrays = _forms.get(id(policy)), jax.tree.leaves(policy)
    # The arrays too: a policy is frozen, but the dicts in it are not.
    if form is None or form.policy() is not policy or not all(map(is_, form.arrays, arrays)):
        form = _new_form(policy, arrays)
    return form


def _new_form(policy: PolicyWithSpec, arrays: list[Any]) -> _Form:
    known, number = weakref.ref(policy, lambda _: _forms.pop(number, None)), id(policy)
    most = policy.most_rows_in_numpy() if isinstance(policy, ModeInNumPy) else 0
    # Copies, for a buffer that is donated is written over.
    mode = jax.tree.map(np.array, policy).mode_in_numpy() if most else None
    form = _Form(known, arrays, most, mode, bool(python_calls_in(policy)))
    if all(isinstance(x, jax.Array) for x in arrays):  # others can be written to
        _forms[number] = form
    return form


def rows_of(space: Space, obs: Any, *, native: bool = False) -> tuple[Any, int | None]:
    """An observation in its space's dtype, with a first axis; and the length of that axis, None for one observation alone.

    Args:
        native: integers as the environment counts them; else from 0, as agents see them.

    Raises:
        TypeError, ValueError: as `predict`.
    """
    specs = obs_specs(space)
    leaves = read_leaves("predict: obs", specs, obs)
    sizes = [_batch_size(spec, leaf) for spec, leaf in zip(specs, leaves, strict=True)]
    if len(set(sizes)) > 1:
        raise ValueError(f"predict: the leaves of obs must have the same batch size, got {sizes}")
    rows = [_obs_rows(spec, leaf, sizes[0], native) for spec, leaf in zip(specs, leaves, strict=True)]
    return unflatten(space, rows), sizes[0]


def _batch_size(spec: ArraySpec, leaf: Any) -> int | None:
    """The length of the first axis, or None for a single observation."""
    shape = np.shape(leaf)
    if len(shape) == len(spec.shape) + 1 and shape[1:] == spec.shape and shape[0] > 0:
        return shape[0]
    if shape != spec.shape:
        batch = ", ".join(map(str, ("N", *spec.shape)))
        check_shape(spec.name("predict: obs"), leaf, spec.shape, hint=f"; a batch has shape ({batch})")
    return None


def _obs_rows(spec: ArraySpec, leaf: Any, batch: int | None, native: bool) -> npt.NDArray[Any]:
    name, shape = spec.name("predict: obs"), np.shape(leaf)
    array = np.asarray(leaf)
    array = to_array(name, array.view(np.int8) if array.dtype == bool else array, shape, spec.dtype)
    if spec.low is not None:
        check_range(name, array, spec.low, spec.high, batched=batch is not None)
        if not native and spec.dtype.kind == "i":
            array = array.astype(np.int64) - spec.low
    return array.astype(spec.dtype).reshape(batch or 1, *spec.shape)


def _mask_rows(spec: EnvSpec, action_mask: Any, batch: int | None) -> PyTree:
    """The mask in the tree of the action space, with a first axis; None for the parts that are not masked."""
    masks = read_leaves("predict: action_mask", action_specs(spec), action_mask)
    parts = zip(leaf_spaces(spec.action), masks, strict=True)
    return unflatten(spec.action, [_leaf_mask_rows(path, space, mask, batch) for (path, space), mask in parts])


def _leaf_mask_rows(path: str, space: Leaf, mask: Any, batch: int | None) -> npt.NDArray[np.bool_] | None:
    if mask is None:
        return None
    name = "predict: action_mask" + (f" {path!r}" if path else "")
    if isinstance(space, Box | MultiBinary):
        raise ValueError(f"{name} must be None, for {space} has no mask")
    sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
    flags = np.asarray(mask, bool)
    check_shape(name, flags, (sum(sizes),) if batch is None else (batch, sum(sizes)))
    rows = flags.reshape(-1, sum(sizes))
    if not all(part.any(axis=1).all() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)):
        raise ValueError(f"{name} allows no action in some row; got {mask}")
    return rows
