"""Leaves on their way towards others: t + τ(o - t), exact at both ends and never outside of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray


def follow_leaves(
    onlines: list[Any], targets: list[Any], share: float | Array, keys: list[PRNGKeyArray] | None = None
) -> list[Any]:
    """The targets after they took their share: floats move, everything else is copied where the share is 1; None stays None.

    Args:
        onlines: leaves that fit those of `targets`.
        targets: their dtypes are kept.
        share: in [0, 1]; a Python float, or a traced float32 scalar.
        keys: one a leaf; floats narrower than float32 are then rounded stochastically.
    """
    if not isinstance(share, Array) and share == 0.0:
        return targets
    pairs: list[Any] = [
        (None, None) if target is None else beside(o, target) for o, target in zip(onlines, targets, strict=True)
    ]
    if not isinstance(share, Array) and share == 1.0:
        return [None if target is None else copied(online, target) for online, target in pairs]
    followed: list[Any] = []
    for number, (online, target) in enumerate(pairs):
        if target is None or not jnp.issubdtype(target.dtype, jnp.inexact):
            soft = target is None or not isinstance(share, Array)
            followed.append(target if soft else jnp.where(share == 1.0, online, target))
        elif keys is not None and _is_narrow(target.dtype):
            followed.append(_stochastically(online, target, share, keys[number]))
        elif isinstance(share, Array):
            followed.append(_between(online, target, share))
        else:
            followed.append(_narrowed(_moved(online, target, share), target.dtype))
    return followed


def copied(online: Array, target: Array) -> Array:
    """The online leaf in the target's dtype, in a buffer of its own."""
    return jnp.array(_narrowed(online, target.dtype), copy=True)


def beside(online: Any, target: Any) -> tuple[Array, Array]:
    """Both as arrays, the online one where the target is: outside of `jit` the result is then sharded as the target."""
    online, target = jnp.asarray(online), jnp.asarray(target)
    concrete = not any(isinstance(x, jax.core.Tracer) for x in (online, target))
    if concrete and online.sharding != target.sharding:
        online = jax.device_put(online, target.sharding)
    return online, target


def wide_dtype(*dtypes: Any) -> Any:
    """The dtype to compute in: the widest of these, at least float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*[jnp.float32 if _is_narrow(dtype) else dtype for dtype in dtypes])


@jax.custom_jvp
def _between(online: Array, target: Array, share: Array) -> Array:
    """Moved by a traced share, or the bits of one side where that is 0 or 1.

    A `cond` would copy every leaf on its way out. Few operations on whole leaves: XLA's CPU back end does not vectorise a
    large leaf of one axis whose length its threads do not divide, so that each of them costs (the three that are
    left: three times the memory's time).
    """
    near, far, doubled = _ends(online, target, share)
    moved = near - doubled * (0.5 * near - 0.5 * far)
    return _narrowed(jnp.where(doubled == 0.0, near, moved), target.dtype)


@_between.defjvp
def _between_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    # By hand, since the derivative of the cases is wrong at their borders: 0 to the share where it is 1.
    dtype = primals[1].dtype
    wide = wide_dtype(primals[0].dtype, dtype)
    online, target, share, to_online, to_target, to_share = (x.astype(wide) for x in (*primals, *tangents))
    change = share * to_online + (1.0 - share) * to_target + to_share * (online - target)
    return _between(*primals), change.astype(dtype)


def _moved(online: Array, target: Array, share: float | Array) -> Array:
    """The wide t + τ(o - t), from the nearer end.

    By halves, since two finite numbers can be further apart than the largest one. Less than half of the way, so no rounding
    carries it past the other end. And by differences of differences: a sum would turn -0 into 0.
    """
    near, far, doubled = _ends(online, target, share)
    return near - doubled * (0.5 * near - 0.5 * far)


def _ends(online: Array, target: Array, share: float | Array) -> tuple[Array, Array, float | Array]:
    """Wide: the end that is nearer to where the share leads, the other one, and twice the way from the nearer one."""
    wide = wide_dtype(online.dtype, target.dtype)
    online, target = online.astype(wide), target.astype(wide)
    if not isinstance(share, Array):
        ends = (online, target) if share > 0.5 else (target, online)
        return *ends, 2.0 * min(share, 1.0 - share)
    beyond = share > 0.5
    doubled = (2.0 * jnp.where(beyond, 1.0 - share, share)).astype(wide)
    return jnp.where(beyond, online, target), jnp.where(beyond, target, online), doubled


def _stochastically(online: Array, target: Array, share: float | Array, key: PRNGKeyArray) -> Array:
    """Moved, and rounded to one of the two neighbours with the probability of its nearness."""
    goal = _narrowed(online, target.dtype)
    exact = _moved(goal, target, share)
    nearest = _narrowed(exact, target.dtype)
    error = exact - nearest.astype(exact.dtype)
    towards = jnp.where(error > 0, jnp.inf, -jnp.inf).astype(target.dtype)
    other = jnp.nextafter(nearest, towards)
    gap = jnp.abs(other.astype(exact.dtype) - nearest.astype(exact.dtype))
    chosen = jax.random.uniform(key, exact.shape, exact.dtype) * gap < jnp.abs(error)
    rounded = jnp.where(chosen, other, nearest)
    return jnp.where(share == 1.0, goal, jnp.where(share == 0.0, target, rounded))


def _narrowed(x: Array, dtype: Any) -> Array:
    """A cast by which no finite number becomes infinite."""
    if x.dtype == dtype:
        return x
    cast = x.astype(dtype)
    if not _is_narrow(dtype):
        return cast
    largest = jnp.asarray(jnp.finfo(dtype).max, dtype)
    return jnp.where(jnp.isfinite(x) & ~jnp.isfinite(cast), jnp.where(x > 0, largest, -largest), cast)


def _is_narrow(dtype: Any) -> bool:
    """A float with fewer bits than float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32)
