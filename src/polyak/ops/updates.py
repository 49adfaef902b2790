"""Polyak averaging of parameter trees, t + τ(o - t)."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from polyak.core.checks import check_choice, check_number
from polyak.core.tree_check import check_same_tree, flatten, named_leaves, pair_by_name
from polyak.core.types import PyTree, Variables

Tau: TypeAlias = Any
"""τ in [0, 1]: a number, a traced scalar, or a callable of a step (a `Linear`, an Optax schedule) that returns one."""


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
    """Soft (Polyak) update of the target.

        target ← target + τ · (online - target)

    The result has the target's tree, shapes and dtypes (JAX's dtypes: float32 for float64 unless x64 is on), and no gradient
    flows through it. τ = 1 copies the bits into new buffers, τ = 0 changes nothing; equal leaves are a fixed point to the bit,
    and the result stays within the interval between the two. Arithmetic is float32 even for narrower leaves. Integers,
    bools and PRNG keys are never averaged: they are copied if their τ is 1, else unchanged.

    A bfloat16 or float16 target does not converge with a small τ, since each step rounds to 0: store it in float32 (as
    `NetworkCopies` does), or pass `key` for stochastic rounding, which is unbiased.

    Args:
        online: the source tree.
        target: the tree to update; the result has its dtypes.
        tau: τ in [0, 1]. A traced τ outside it (or NaN) changes nothing, and `is_valid_tau` is False; `Follow` counts
            these.
        stats_tau: τ for statistics; None uses `tau`.
        is_stat: True for names of statistics (`params/Dense_0/kernel`), in addition to leaves under a `Variables.stats`.
        match: `"structure"` requires the same containers; `"name"` pairs leaves by their names.
        step: the argument of a callable `tau` or `stats_tau`.
        key: rounds leaves narrower than float32 stochastically (towards `online` rounded to the dtype of the leaf).

    Raises:
        ValueError: trees, shapes or kinds of leaves differ (the message names each), or a tau is not a scalar in [0, 1].
        TypeError: a tau is not a number, or a leaf is not an array.

    Source: Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1.

    >>> soft_update({"w": jnp.array([1.0, -10.0])}, {"w": jnp.array([0.0, 10.0])}, 0.25)
    {'w': Array([0.25, 5.  ], dtype=float32)}
    """
    check_choice("soft_update", "match", match, ("structure", "name"))
    if match == "name":
        sources = pair_by_name(online, target, "soft_update")
    else:
        check_same_tree(online, target, "soft_update", otherwise=', or pass match="name" to pair leaves by name')
        sources = flatten(online)[0]
    weights_tau = _stop_gradient(tau_at("soft_update", "tau", tau, step))
    stats_tau = weights_tau if stats_tau is None else _stop_gradient(tau_at("soft_update", "stats_tau", stats_tau, step))
    leaves, structure = flatten(target)
    taus = [stats_tau if stat else weights_tau for stat in _stat_flags(target, is_stat)]
    keys = [None if key is None else jax.random.fold_in(key, number) for number in range(len(leaves))]
    pairs = zip(map(_stop_gradient, sources), map(_stop_gradient, leaves), taus, keys, strict=True)
    return jax.tree.unflatten(structure, [update_leaf(*pair) for pair in pairs])


def soft_update_if_valid(
    online: PyTree,
    target: PyTree,
    tau: Tau,
    stats_tau: Tau = None,
    *,
    step: Any = None,
    key: PRNGKeyArray | None = None,
    check_finite: bool = True,
) -> tuple[PyTree, Bool[Array, ""]]:
    """The target after `soft_update`, and True; or unchanged, and False.

    It is unchanged if a traced tau is outside [0, 1], or if the online tree holds NaN, or an infinity that the target does not
    hold too: a constant such as a mask may be infinite in both. `check_finite=False` checks only tau.

    Raises:
        TypeError, ValueError: as `soft_update`.
    """
    updated = soft_update(online, target, tau, stats_tau=stats_tau, step=step, key=key)
    flags = [is_valid_tau(each, step) for each in (tau, stats_tau) if each is not None]
    if check_finite:
        pairs = zip(flatten(online)[0], flatten(target)[0], strict=True)
        flags += [_may_follow(*pair) for pair in pairs if _is_float(pair[1])]
    if not any(isinstance(flag, jax.core.Tracer) for flag in flags):
        # Leaves may be on several devices, and so may their flags.
        valid = all(map(bool, flags))
        return updated if valid else jax.tree.map(jnp.asarray, target), jnp.array(valid)
    all_valid = functools.reduce(jnp.logical_and, flags)
    return jax.tree.map(lambda new, old: jnp.where(all_valid, new, old), updated, target), all_valid


def is_valid_tau(tau: Tau, step: Any = None) -> Bool[Array, ""]:
    """True if τ is in [0, 1]; for a traced τ this is known at run time only."""
    value = jnp.asarray(_call_schedule(tau, step) if callable(tau) else tau).astype(jnp.float32)
    return (value >= 0.0) & (value <= 1.0)


def tau_at(owner: str, name: str, tau: Tau, step: Any = None) -> float | Array:
    """τ as a Python float; a traced τ as a float32 scalar, 0 if it is outside [0, 1] or NaN.

    Raises:
        ValueError: τ is not a scalar in [0, 1].
        TypeError: τ is not a number, or is a callable and `step` is None.
    """
    if callable(tau):
        if step is None:
            raise TypeError(f"{owner}: {name} is a callable, which needs step=, got None")
        tau = _call_schedule(tau, step)
    if isinstance(tau, jax.core.Tracer):
        if tau.shape != () or not (jnp.issubdtype(tau.dtype, jnp.floating) or jnp.issubdtype(tau.dtype, jnp.integer)):
            raise ValueError(f"{owner}: {name} must be a scalar in [0, 1], got {tau.dtype}{list(tau.shape)}")
        return jnp.where(is_valid_tau(tau), tau.astype(jnp.float32), 0.0)
    if np.shape(tau) != ():
        raise ValueError(f"{owner}: {name} must be a scalar in [0, 1], got shape {np.shape(tau)}")
    if isinstance(tau, jax.Array) and jnp.issubdtype(tau.dtype, jnp.floating):
        # NumPy does not treat bfloat16 as a floating dtype.
        tau = float(tau)
    check_number(owner, name, tau, at_least=0, at_most=1)
    return float(np.float32(tau))


def _stat_flags(tree: PyTree, is_stat: Callable[[str], bool] | None) -> list[bool]:
    """True for every leaf that is a statistic rather than a weight."""
    by_position: list[bool] = []
    for part in jax.tree.leaves(tree, is_leaf=lambda x: x is None or isinstance(x, Variables)):
        weights, stats = (part.params, part.stats) if isinstance(part, Variables) else (part, ())
        by_position += [False] * len(flatten(weights)[0]) + [True] * len(flatten(stats)[0])
    if is_stat is None:
        return by_position
    return [stat or is_stat(name) for stat, (name, _) in zip(by_position, named_leaves(tree), strict=True)]


def _call_schedule(schedule: Callable[[Any], Any], step: Any) -> Any:
    # User schedules divide an integer count by a float, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        return schedule(step)


def _stop_gradient(leaf: Any) -> Any:
    """`jax.lax.stop_gradient` for float arrays; anything else is returned unchanged."""
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf


def update_leaf(online: Any, target: Any, tau: float | Array, key: PRNGKeyArray | None = None) -> Any:
    """Compute t + τ(o - t) for a float leaf; any other is copied if τ is 1, else unchanged; None stays None.

    Exact at τ = 0 and τ = 1, and never outside the interval between the two leaves.

    Args:
        target: the result has its dtype.
        tau: in [0, 1]; a Python float, or a traced float32 scalar.
        key: floats narrower than float32 are then rounded stochastically.
    """
    is_traced = isinstance(tau, Array)
    if target is None or (not is_traced and tau == 0.0):
        return target if target is None or isinstance(target, Array) else jnp.array(target)
    online, target = _on_same_devices(online, target)
    if not is_traced and tau == 1.0:
        return jnp.array(_cast_finite(online, target.dtype), copy=True)
    if not jnp.issubdtype(target.dtype, jnp.inexact):
        return jnp.where(tau == 1.0, online, target) if is_traced else target
    tau = jnp.asarray(tau, jnp.float32)
    if key is not None and _is_narrow(target.dtype):
        return _interpolate_stochastically(online, target, tau, key)
    # Compiled: outside of `jit`, one call instead of ten.
    return jax.jit(_interpolate)(online, target, tau)


def _is_float(leaf: Any) -> bool:
    return leaf is not None and jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)


def _may_follow(online: Any, target: Any) -> Bool[Array, ""]:
    """Return True if a leaf holds no NaN, and infinity only where the target holds it too."""
    online, target = _on_same_devices(online, target)
    return jax.jit(_count_bad)(online, target) == 0


def _count_bad(online: Array, target: Array) -> Array:
    is_good = jnp.isfinite(online) | (online == target.astype(online.dtype))
    # Floats, because XLA vectorizes their sum on a CPU, but not a reduction of flags.
    return jnp.sum(jnp.where(is_good, jnp.float32(0), jnp.float32(1)))


def _on_same_devices(online: Any, target: Any) -> tuple[Array, Array]:
    """Both as arrays; outside `jit`, the online one is put into the sharding of the target."""
    online, target = jnp.asarray(online), jnp.asarray(target)
    concrete = not any(isinstance(x, jax.core.Tracer) for x in (online, target))
    if concrete and online.sharding != target.sharding:
        online = jax.device_put(online, target.sharding)
    return online, target


def wide_dtype(*dtypes: Any) -> Any:
    """The dtype of the arithmetic: the widest of these, at least float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*[jnp.float32 if _is_narrow(dtype) else dtype for dtype in dtypes])


@jax.custom_jvp
def _interpolate(online: Array, target: Array, tau: Array) -> Array:
    """Compute t + τ(o - t) in the wide dtype, from the nearer end, exactly where τ is 0 or 1 or both are infinite and equal.

    Halved, since the difference of two finite numbers can overflow. From the nearer end the step is at most half of the
    distance, so rounding cannot pass the other end. Subtraction instead of a sum, which would turn -0 into 0.

    A `cond` would copy every leaf of its result. Use few operations on whole leaves: the CPU backend of XLA does not
    vectorize a large one-axis leaf whose length is not divisible by the number of threads, so each operation costs one pass
    over memory.
    """
    wide = wide_dtype(online.dtype, target.dtype)
    past_half = tau > 0.5
    # Twice the fraction of the way from the nearer end.
    doubled = (2.0 * jnp.where(past_half, 1.0 - tau, tau)).astype(wide)
    o, t = online.astype(wide), target.astype(wide)
    near, far = jnp.where(past_half, o, t), jnp.where(past_half, t, o)
    inner = near - doubled * (0.5 * near - 0.5 * far)
    return _cast_finite(jnp.where((doubled == 0.0) | (near == far), near, inner), target.dtype)


@_interpolate.defjvp
def _interpolate_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    # Written by hand: the derivative through `where` is wrong at τ = 0 and τ = 1, where it is 0 with respect to τ.
    dtype = primals[1].dtype
    wide = wide_dtype(primals[0].dtype, dtype)
    online, target, tau, d_online, d_target, d_tau = (x.astype(wide) for x in (*primals, *tangents))
    tangent = tau * d_online + (1.0 - tau) * d_target + d_tau * (online - target)
    return _interpolate(*primals), tangent.astype(dtype)


def _interpolate_stochastically(online: Array, target: Array, tau: Array, key: PRNGKeyArray) -> Array:
    """Interpolate with stochastic rounding: each neighbour has the probability that makes the result unbiased."""
    source = _cast_finite(online, target.dtype)
    exact = _interpolate(source, target.astype(jnp.float32), tau)
    nearest = _cast_finite(exact, target.dtype)
    error = exact - nearest.astype(jnp.float32)
    direction = jnp.where(error > 0, jnp.inf, -jnp.inf).astype(target.dtype)
    other = jnp.nextafter(nearest, direction)
    gap = jnp.abs(other.astype(jnp.float32) - nearest.astype(jnp.float32))
    use_other = jax.random.uniform(key, exact.shape, exact.dtype) * gap < jnp.abs(error)
    rounded = jnp.where(use_other, other, nearest)
    return jnp.where(tau == 1.0, source, jnp.where(tau == 0.0, target, rounded))


def _cast_finite(x: Array, dtype: Any) -> Array:
    """Cast to `dtype`; finite numbers that overflow become the largest finite one."""
    if x.dtype == dtype:
        return x
    cast = x.astype(dtype)
    if not _is_narrow(dtype):
        return cast
    largest = jnp.asarray(jnp.finfo(dtype).max, dtype)
    return jnp.where(jnp.isfinite(x) & ~jnp.isfinite(cast), jnp.where(x > 0, largest, -largest), cast)


def _is_narrow(dtype: Any) -> bool:
    """True for a float dtype with fewer bits than float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32)
