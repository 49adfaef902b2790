"""Updates of parameter trees with the interface of Optax: `params + updates`, an average of two trees, and periodic copies.

They treat dtypes, special leaves and errors as `soft_update` does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from polyak.core.checks import check_integer
from polyak.core.tree_check import check_same_tree, flatten, named_leaves, quoted
from polyak.core.types import PyTree
from polyak.ops.updates import Tau, tau_at, update_leaf, wide_dtype


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """`params + updates`, leaf by leaf, with the tree, the shapes and the dtypes of `params`.

    Narrow floats are added in float32 and rounded once. Integers are added to integers of the same dtype. A leaf that is
    None on both sides stays None, and one whose update is `float0` (what `jax.grad` returns for integers) is unchanged.
    Gradients flow to both.

    Raises:
        ValueError: trees, shapes or kinds differ (a leaf that is None on one side only; a float update of an integer).
        TypeError: a leaf is not an array, or is a bool or a PRNG key and its update is not `float0`.

    Source: the interface of `optax.apply_updates`.

    >>> apply_updates({"w": jnp.ones(2)}, {"w": -0.25 * jnp.ones(2)})
    {'w': Array([0.75, 0.75], dtype=float32)}
    """
    p_leaves, structure = flatten(params)
    u_leaves, u_structure = flatten(updates)
    specs = [_update_spec(u, p) for u, p in zip(u_leaves, p_leaves, strict=True)] if structure == u_structure else u_leaves
    check_same_tree(params, jax.tree.unflatten(u_structure, specs), "apply_updates", sides=("params", "updates"))
    names = [name for name, _ in named_leaves(params)]
    new_params = [_add_update(name, p, u) for name, p, u in zip(names, p_leaves, u_leaves, strict=True)]
    return jax.tree.unflatten(structure, new_params)


def incremental_update(new_tensors: PyTree, old_tensors: PyTree, step_size: Tau) -> PyTree:
    """`old + step_size · (new - old)`, with the tree, the shapes and the dtypes of `old`.

    Follows the rules of `soft_update` for special leaves and values, but gradients flow: `step_size` to `new`,
    `1 - step_size` to `old`, `new - old` to `step_size`.

    Raises:
        ValueError: trees, shapes or kinds differ, or `step_size` is not a scalar in [0, 1].
        TypeError: `step_size` is not a number, or a leaf is not an array.

    Source: Polyak and Juditsky 1992, SIAM J. Control Optim. 30(4); the interface of `optax.incremental_update`.
    """
    check_same_tree(new_tensors, old_tensors, "incremental_update", sides=("new", "old"))
    tau = tau_at("incremental_update", "step_size", step_size)
    is_none = lambda leaf: leaf is None  # noqa: E731
    return jax.tree.map(lambda new, old: update_leaf(new, old, tau), new_tensors, old_tensors, is_leaf=is_none)


def periodic_update(new_tensors: PyTree, old_tensors: PyTree, steps: Any, update_period: Any) -> PyTree:
    """`new` where `steps` is a multiple of `update_period` (so also at step 0), else `old`; dtypes as in `old`.

    Steps larger than 1 can miss the multiples; `Follow` counts the elapsed steps instead.

    Args:
        steps: an integer, traced or not, of any integer dtype.
        update_period: a positive integer. If traced and not positive, the result is always `old`.

    Raises:
        ValueError: trees, shapes or kinds differ, or the period is not positive.
        TypeError: `steps` or `update_period` is not an integer scalar, or a leaf is not an array.

    Source: the interface of `optax.periodic_update`.
    """
    owner = "periodic_update"
    check_same_tree(new_tensors, old_tensors, owner, sides=("new", "old"))
    steps, period = _integer(owner, "steps", steps), _integer(owner, "update_period", update_period)
    if isinstance(period, int):
        check_integer(owner, "update_period", period)
    if isinstance(steps, int) and isinstance(period, int):
        return incremental_update(new_tensors, old_tensors, 1.0 if steps % period == 0 else 0.0)
    old_tensors = jax.tree.map(jnp.asarray, old_tensors)
    return jax.lax.cond(
        _is_multiple(steps, period),
        lambda new, old: incremental_update(new, old, 1.0),
        lambda new, old: old,
        new_tensors,
        old_tensors,
    )


def _update_spec(update: Any, param: Any) -> Any:
    """The update, or for `float0` its shape with the dtype of the parameter, to compare with the parameter."""
    return (
        jax.ShapeDtypeStruct(np.shape(update), jax.typeof(param).dtype) if _is_float0(update) and param is not None else update
    )


def _is_float0(update: Any) -> bool:
    return isinstance(update, np.ndarray) and update.dtype == jax.dtypes.float0


def _add_update(name: str, param: Any, update: Any) -> Any:
    if param is None or _is_float0(update):
        return param
    param, update = jnp.asarray(param), jnp.asarray(update)
    if jnp.issubdtype(param.dtype, jnp.inexact):
        wide = wide_dtype(param.dtype, update.dtype)
        return (param.astype(wide) + update.astype(wide)).astype(param.dtype)
    if not jnp.issubdtype(param.dtype, jnp.integer):
        raise TypeError(f"apply_updates: {quoted(name)}: the update of {param.dtype} must be float0. Nothing was changed.")
    return param + update


def _integer(owner: str, name: str, value: Any) -> Any:
    """A concrete integer scalar as a Python int; a traced one unchanged.

    Raises:
        TypeError: `value` is not an integer scalar.
    """
    is_traced = isinstance(value, jax.core.Tracer)
    dtype = value.dtype if is_traced else np.asarray(value).dtype
    if np.shape(value) != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{owner}: {name} must be an integer scalar, got {value!r}")
    return value if is_traced else int(value)


def _is_multiple(steps: Any, period: Any) -> Array:
    """True if `steps` is a multiple of a positive `period`; at least one of them is traced."""
    widest = jax.dtypes.canonicalize_dtype(np.uint64)
    if isinstance(period, int) and period > jnp.iinfo(widest).max:
        return steps == 0
    size, divisor = _absolute(steps, widest), _absolute(period, widest)
    return (period > 0) & (size % jnp.maximum(divisor, 1) == 0)


def _absolute(value: Any, dtype: Any) -> Array:
    """|value|, in an unsigned dtype that has room for it, unlike a signed or narrow one."""
    if isinstance(value, int):
        return jnp.asarray(abs(value), dtype)
    # Modulo 2³²: the negative of the cast of -3 is 3.
    wide = value.astype(dtype)
    return jnp.where(value < 0, -wide, wide)
