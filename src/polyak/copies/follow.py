"""Target update schedules: Polyak averaging with `tau` every `period` updates or environment steps."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.struct import static, struct
from polyak.core.tree_check import check_same_tree
from polyak.core.types import PyTree
from polyak.ops.schedules import MAX_COUNT, SCHEDULES, check_schedule, saturating_add
from polyak.ops.updates import Tau, soft_update_if_valid


@struct
class FollowState:
    """Counters of a `Follow`, in its `unit`; they saturate at 2³² - 1.

    Attributes:
        elapsed: count since the last update; compared with `period`.
        total: count since the beginning; the argument of schedules.
        fired: number of updates made.
        skipped: number of updates skipped because tau was NaN or outside [0, 1], or the online tree held NaN or infinity.
    """

    elapsed: UInt32[Array, ""]
    total: UInt32[Array, ""]
    fired: UInt32[Array, ""]
    skipped: UInt32[Array, ""]


@struct
class Follow:
    """Soft (Polyak) update of a target towards an online copy, once every `period`.

        target ← target + τ · (online - target)

    Attributes:
        tau: τ in [0, 1]; 1 copies. A number, or a callable of the total count (a schedule such as `Linear`, or one of
            Optax).
        period: count between updates, and before the first one.
        unit: unit of `period` and of the counters: gradient updates or environment steps.
        stats_tau: τ for statistics; None uses `tau`.
        check_finite: skip an update where the online tree holds NaN or infinity. False spares a pass over it, which takes up to
            5 % of a gradient step; agents set it, because they skip every step with NaN or infinity.

    Raises:
        TypeError, ValueError: a field is invalid; the message names it.
    """

    tau: Tau = 1.0
    period: int = static(default=1)
    unit: Literal["updates", "env_steps"] = static(default="updates")
    stats_tau: Tau = None
    check_finite: bool = static(default=True)

    def __post_init__(self) -> None:
        check_integer("Follow", "period", self.period)
        if self.period > MAX_COUNT:
            raise ValueError(f"Follow: period must be at most {MAX_COUNT}, got {self.period}")
        check_choice("Follow", "unit", self.unit, ("updates", "env_steps"))
        for name in ("tau", "stats_tau"):
            object.__setattr__(self, name, _check_tau(name, getattr(self, name)))

    @property
    def is_soft(self) -> bool:
        """True if the weights may be updated with a tau below 1."""
        return callable(self.tau) or isinstance(self.tau, jax.core.Tracer) or bool(np.any(np.asarray(self.tau) != 1))

    @property
    def is_soft_on_stats(self) -> bool:
        """True if the statistics may be updated with a tau below 1."""
        return self.is_soft if self.stats_tau is None else Follow(self.stats_tau).is_soft

    def init(self) -> FollowState:
        """All counters 0."""
        return FollowState(*(jnp.zeros((), jnp.uint32) for _ in range(4)))

    def step(
        self,
        state: FollowState,
        online: PyTree,
        target: PyTree,
        count: Any = 1,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[PyTree, FollowState]:
        """Advance the counters by `count` and update the target once if `period` has elapsed, else return it unchanged.

        `count` may exceed the period: the target is updated once, and the count restarts from 0. A scheduled update is skipped,
        and counted in `skipped`, if tau is outside [0, 1] or the online tree holds NaN or infinity. If the target is donated, a
        step without an update copies no memory.

        Args:
            count: updates (or environment steps) since the last call, 0 or more; an integer, traced or not.
            key: see `soft_update`.

        Raises:
            ValueError: the trees differ, or `count` is negative.
            TypeError: `count` is not an integer scalar.
        """
        check_same_tree(online, target, "Follow")
        increment = _increment(count)
        elapsed, total = saturating_add(state.elapsed, increment), saturating_add(state.total, increment)
        has_elapsed = elapsed >= jnp.uint32(self.period)

        def update(online: PyTree, target: PyTree) -> tuple[PyTree, Bool[Array, ""]]:
            finite = self.check_finite
            return soft_update_if_valid(online, target, self.tau, self.stats_tau, step=total, key=key, check_finite=finite)

        valid = jnp.array(True)
        is_updated = (isinstance(count, int) and count >= self.period) or has_elapsed
        if isinstance(is_updated, jax.core.Tracer):
            keep = jax.tree.map(jnp.asarray, target)
            target, valid = jax.lax.cond(has_elapsed, update, lambda online, target: (target, valid), online, keep)
        elif bool(is_updated):
            target, valid = update(online, target)
        return target, FollowState(
            elapsed=jnp.where(has_elapsed, jnp.uint32(0), elapsed),
            total=total,
            fired=saturating_add(state.fired, has_elapsed & valid),
            skipped=saturating_add(state.skipped, has_elapsed & ~valid),
        )

    def diagnose(self, state: FollowState) -> str | None:
        """Return why training should stop (updates were skipped), or None."""
        if int(state.skipped) == 0:
            return None
        reason = "tau was outside [0, 1], or the weights to follow held NaN or infinity"
        return f"Follow: {int(state.skipped)} updates were skipped because {reason}"

    def __str__(self) -> str:
        stats = "" if self.stats_tau is None else f", statistics {_format_tau(self.stats_tau)}"
        unit = self.unit.replace("_", " ")
        every = f"every {self.period} {unit}" if self.period > 1 else f"every {unit.removesuffix('s')}"
        return f"tau {_format_tau(self.tau)}{stats}, {every}"


@struct
class _Function:
    """A plain function stored as a static field of a pytree."""

    function: Callable[[Any], Any] = static()

    def __call__(self, step: Any) -> Any:
        return self.function(step)


def _check_tau(name: str, tau: Tau) -> Tau:
    """Check a tau (a number, an array for `vmap`, or a schedule) and wrap a plain function into a pytree."""
    if isinstance(tau, SCHEDULES):
        check_schedule("Follow", name, tau, above=-np.inf, at_least=0, at_most=1)
        return tau
    if callable(tau):
        return _Function(tau) if jax.tree_util.all_leaves([tau]) else tau
    check_number("Follow", name, tau, at_least=0, at_most=1, optional=name == "stats_tau", or_else="a callable of the step")
    return tau


def _increment(count: Any) -> UInt32[Array, ""]:
    """A count as uint32, at most 2³² - 1."""
    is_traced = isinstance(count, jax.core.Tracer)
    number = count if is_traced else np.asarray(count)
    if number.shape != () or not jnp.issubdtype(number.dtype, jnp.integer):
        raise TypeError(f"Follow: count must be an integer scalar, got {count!r}")
    if not is_traced and number < 0:
        raise ValueError(f"Follow: count must be at least 0, got {count}")
    # Before the cast to uint32, which wraps around. A traced negative count is treated as 0.
    return jnp.uint32(number.clip(0, number.dtype.type(min(MAX_COUNT, jnp.iinfo(number.dtype).max))))


def _format_tau(tau: Tau) -> str:
    if callable(tau):
        return f"by {tau.function.__name__}" if isinstance(tau, _Function) else f"by {tau}"
    is_number = not isinstance(tau, jax.core.Tracer) and np.shape(tau) == ()
    return f"{float(tau):g}" if is_number else str(tau)
