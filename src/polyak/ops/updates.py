"""How one tree of parameters follows another: at once, softly, or every so often."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.types import PyTree, Variables
from polyak.ops.interpolate import follow_leaves, wide_dtype
from polyak.ops.trees import check_same_tree, flatten, named_leaves, pair_by_name, quoted

Tau: TypeAlias = Any
"""A share in [0, 1]: a number, a traced scalar, or a callable of a step (a `Linear`, an Optax schedule) that gives one."""


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """`params + updates`, leaf by leaf, with the tree, the shapes and the dtypes of `params`.

    Narrow floats are added in float32 and rounded once. Integers are added to integers of the same dtype. A leaf that is
    None on both sides stays None, and one whose update is `float0` (what `jax.grad` gives for integers) stays as it is.
    Gradients flow to both.

    Raises:
        ValueError: trees, shapes or kinds differ (a leaf that is None on one side only; a float update of an integer).
        TypeError: a leaf is no array, or is a bool or a PRNG key and its update is not `float0`.

    Source: the interface of `optax.apply_updates`.

    >>> apply_updates({"w": jnp.ones(2)}, {"w": -0.25 * jnp.ones(2)})
    {'w': Array([0.75, 0.75], dtype=float32)}
    """
    p_leaves, structure = flatten(params)
    u_leaves, u_structure = flatten(updates)
    specs = [_as_of(u, p) for u, p in zip(u_leaves, p_leaves, strict=True)] if structure == u_structure else u_leaves
    check_same_tree(params, jax.tree.unflatten(u_structure, specs), "apply_updates", sides=("params", "updates"))
    names = [name for name, _ in named_leaves(params)]
    summed = [_plus(name, p, u) for name, p, u in zip(names, p_leaves, u_leaves, strict=True)]
    return jax.tree.unflatten(structure, summed)


def incremental_update(new_tensors: PyTree, old_tensors: PyTree, step_size: Tau) -> PyTree:
    """`old + step_size · (new - old)`, with the tree, the shapes and the dtypes of `old`.

    As `soft_update`, whose rules on special leaves and values it follows, but gradients flow: `step_size` to `new`,
    `1 - step_size` to `old`, `new - old` to `step_size`.

    Raises:
        ValueError: trees, shapes or kinds differ, or `step_size` is no scalar in [0, 1].
        TypeError: `step_size` is no number, or a leaf no array.

    Source: Polyak and Juditsky 1992, SIAM J. Control Optim. 30(4); the interface of `optax.incremental_update`.
    """
    check_same_tree(new_tensors, old_tensors, "incremental_update", sides=("new", "old"))
    share = share_at("incremental_update", "step_size", step_size)
    new, old = flatten(new_tensors)[0], flatten(old_tensors)
    return jax.tree.unflatten(old[1], follow_leaves(new, old[0], share))


def periodic_update(new_tensors: PyTree, old_tensors: PyTree, steps: Any, update_period: Any) -> PyTree:
    """`new` where `steps` is a multiple of `update_period` (so also at step 0), else `old`; the dtypes are those of `old`.

    Steps that jump can miss their multiples; `Follow` counts what has elapsed instead.

    Args:
        steps: an integer, traced or not, of any integer dtype.
        update_period: a positive integer. A traced one that is not positive never fires.

    Raises:
        ValueError: trees, shapes or kinds differ, or the period is not positive.
        TypeError: `steps` or `update_period` is no integer scalar, or a leaf no array.

    Source: the interface of `optax.periodic_update`.
    """
    what = "periodic_update"
    check_same_tree(new_tensors, old_tensors, what, sides=("new", "old"))
    steps, period = _integer(what, "steps", steps), _integer(what, "update_period", update_period)
    if isinstance(period, int):
        check_integer(what, "update_period", period)
    if isinstance(steps, int) and isinstance(period, int):
        return incremental_update(new_tensors, old_tensors, 1.0 if steps % period == 0 else 0.0)
    old_tensors = jax.tree.map(jnp.asarray, old_tensors)
    return jax.lax.cond(
        _divides(period, steps),
        lambda new, old: incremental_update(new, old, 1.0),
        lambda new, old: old,
        new_tensors,
        old_tensors,
    )


def soft_update(
    online: PyTree,
    target: PyTree,
    tau: Tau,
    *,
    stats_tau: Tau = None,
    is_stat: Callable[[str], bool] | None = None,
    match: Literal["structure", "name"] = "structure",
    step: Any = None,
    key: PRNGKeyArray | None = None,
) -> PyTree:
    """The target after it took the share τ of the online tree.

        target ← target + τ · (online - target)

    The result has the target's tree, shapes and dtypes (JAX's dtypes: float32 for float64 unless x64 is on), and no gradient
    flows through it. τ = 1 copies bits into new buffers, τ = 0 changes nothing; equal leaves are a fixed point to the bit, and
    the result never leaves the interval between the two. Arithmetic is float32 even for narrower leaves. Integers, bools
    and PRNG keys are never averaged: they are copied where their share is 1, else left alone.

    A bfloat16 or float16 target does not arrive by small shares, since each step rounds to nothing: hold it in float32 (as
    `NetworkCopies` does), or pass `key`, which rounds up or down with the probabilities that make it right on average.

    Args:
        online: the tree that is followed.
        target: the tree that follows; its dtypes are kept.
        tau: the share of online taken, in [0, 1]. A traced one outside of it (or NaN) changes nothing, and `is_valid_tau` says
            so; `Follow` counts it.
        stats_tau: the share for statistics; None: as `tau`.
        is_stat: which leaves are statistics beside those under a `Variables.stats`, by name (`params/Dense_0/kernel`).
        match: `"structure"` wants the same containers; `"name"` pairs leaves by their names.
        step: what a callable `tau` or `stats_tau` is called with.
        key: rounds leaves narrower than float32 stochastically (towards `online` as the leaf can hold it).

    Raises:
        ValueError: trees, shapes or kinds of leaves differ (each one named), or a share is no scalar in [0, 1].
        TypeError: a share is no number, or a leaf no array.

    Source: Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1.

    >>> soft_update({"w": jnp.array([1.0, -10.0])}, {"w": jnp.array([0.0, 10.0])}, 0.25)
    {'w': Array([0.25, 5.  ], dtype=float32)}
    """
    check_choice("soft_update", "match", match, ("structure", "name"))
    if match == "name":
        sources = pair_by_name(online, target, "soft_update")
    else:
        check_same_tree(online, target, "soft_update", otherwise=', or match="name" says that names are enough')
        sources = flatten(online)[0]
    share = _stopped(share_at("soft_update", "tau", tau, step))
    stats_share = share if stats_tau is None else _stopped(share_at("soft_update", "stats_tau", stats_tau, step))
    leaves, structure = flatten(target)
    sources, moved = [_stopped(x) for x in sources], [_stopped(x) for x in leaves]
    keys = None if key is None else [jax.random.fold_in(key, number) for number in range(len(leaves))]
    statistics = _statistics(target, is_stat)
    for stat, part in ((False, share), (True, stats_share)):
        of = [number for number, is_one in enumerate(statistics) if is_one is stat]
        part_keys = None if keys is None else [keys[n] for n in of]
        followed = follow_leaves([sources[n] for n in of], [moved[n] for n in of], part, part_keys)
        for number, leaf in zip(of, followed, strict=True):
            moved[number] = leaf
    return jax.tree.unflatten(structure, moved)


def is_valid_tau(tau: Tau, step: Any = None) -> Bool[Array, ""]:
    """The share lies in [0, 1]; what can only be known of a traced one while running."""
    value = jnp.asarray(_called(tau, step) if callable(tau) else tau).astype(jnp.float32)
    return (value >= 0.0) & (value <= 1.0)


def share_at(what: str, name: str, tau: Tau, step: Any = None) -> float | Array:
    """A share as a Python float, or, of a traced one, the float32 scalar that has 0 in place of what is outside [0, 1].

    Raises:
        ValueError: no scalar in [0, 1].
        TypeError: no number, or a callable without a step.
    """
    if callable(tau):
        if step is None:
            raise TypeError(f"{what}: {name} is a callable, which needs step=, got None")
        tau = _called(tau, step)
    if isinstance(tau, jax.core.Tracer):
        if tau.shape != () or not (jnp.issubdtype(tau.dtype, jnp.floating) or jnp.issubdtype(tau.dtype, jnp.integer)):
            raise ValueError(f"{what}: {name} must be a scalar in [0, 1], got {tau.dtype}{list(tau.shape)}")
        value = tau.astype(jnp.float32)
        return jnp.where((value >= 0.0) & (value <= 1.0), value, 0.0)
    if np.shape(tau) != ():
        raise ValueError(f"{what}: {name} must be a scalar in [0, 1], got shape {np.shape(tau)}")
    if isinstance(tau, jax.Array) and jnp.issubdtype(tau.dtype, jnp.floating):
        # NumPy does not know bfloat16 as a kind of number.
        tau = float(tau)
    check_number(what, name, tau, at_least=0, at_most=1)
    return float(np.float32(tau))


def _statistics(tree: PyTree, is_stat: Callable[[str], bool] | None) -> list[bool]:
    """For every leaf: it is no weight but a statistic."""

    def mark(part: PyTree, stat: bool) -> PyTree:
        return jax.tree.map(lambda _: stat, part, is_leaf=lambda x: x is None)

    def marks(part: PyTree) -> PyTree:
        if not isinstance(part, Variables):
            return mark(part, False)
        return Variables(mark(part.params, False), mark(part.stats, True), part.graph)

    marked = jax.tree.leaves(jax.tree.map(marks, tree, is_leaf=lambda x: x is None or isinstance(x, Variables)))
    if is_stat is None:
        return marked
    return [stat or is_stat(name) for stat, (name, _) in zip(marked, named_leaves(tree), strict=True)]


def _as_of(update: Any, param: Any) -> Any:
    """What an update is compared as: `float0` has a shape to compare, but no dtype."""
    return (
        jax.ShapeDtypeStruct(np.shape(update), jax.typeof(param).dtype) if _is_float0(update) and param is not None else update
    )


def _is_float0(update: Any) -> bool:
    return isinstance(update, np.ndarray) and update.dtype == jax.dtypes.float0


def _plus(name: str, param: Any, update: Any) -> Any:
    if param is None or _is_float0(update):
        return param
    param, update = jnp.asarray(param), jnp.asarray(update)
    if jnp.issubdtype(param.dtype, jnp.inexact):
        wide = wide_dtype(param.dtype, update.dtype)
        return (param.astype(wide) + update.astype(wide)).astype(param.dtype)
    if not jnp.issubdtype(param.dtype, jnp.integer):
        raise TypeError(f"apply_updates: {quoted(name)}: nothing can be added to {param.dtype}. Nothing was changed.")
    return param + update


def _called(schedule: Callable[[Any], Any], step: Any) -> Any:
    # A person's schedule divides a count by a number, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        return schedule(step)


def _stopped(leaf: Any) -> Any:
    """Without its gradient; None and what is no float stay what they are."""
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf


def _integer(what: str, name: str, value: Any) -> Any:
    """A Python int of a concrete integer scalar; a traced one as it is.

    Raises:
        TypeError: it is neither.
    """
    is_traced = isinstance(value, jax.core.Tracer)
    dtype = value.dtype if is_traced else np.asarray(value).dtype
    if np.shape(value) != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{what}: {name} must be an integer scalar, got {value!r}")
    return value if is_traced else int(value)


def _divides(period: Any, steps: Any) -> Array:
    """`steps` is a multiple of `period`, at least one of them traced; False for a period that is not positive."""
    if isinstance(steps, int):
        steps = jnp.asarray(steps, period.dtype)
    if isinstance(period, int):
        # A period beyond what steps can count is reached at 0 only.
        fits = period <= jnp.iinfo(steps.dtype).max
        return steps % jnp.asarray(period, steps.dtype) == 0 if fits else steps == 0
    wide = jnp.promote_types(steps.dtype, period.dtype)
    positive = period > 0
    return positive & (steps.astype(wide) % jnp.where(positive, period, 1).astype(wide) == 0)
