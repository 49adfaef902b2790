"""How one copy follows another, as settings, and the count of what has elapsed since it last did."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.struct import static, struct
from polyak.core.types import PyTree
from polyak.ops.schedules import OBJECTS, check_schedule
from polyak.ops.trees import check_same_tree
from polyak.ops.updates import Tau, soft_update, valid_share

_MOST = 2**32 - 1


@struct
class FollowState:
    """What a follower counts, in its `unit`; counts stay at 2³² - 1 rather than wrap.

    Attributes:
        counts: the four below in one array, which is one small kernel a step instead of four.
    """

    counts: UInt32[Array, "4"]

    @property
    def elapsed(self) -> UInt32[Array, ""]:
        """Since it last fired; what its period is compared with."""
        return self.counts[0]

    @property
    def total(self) -> UInt32[Array, ""]:
        """Since the beginning; what schedules follow."""
        return self.counts[1]

    @property
    def fired(self) -> UInt32[Array, ""]:
        """How often it fired."""
        return self.counts[2]

    @property
    def refused(self) -> UInt32[Array, ""]:
        """How often it was due and its share was outside [0, 1] or NaN, so that nothing was changed."""
        return self.counts[3]


@struct
class Follow:
    """How a copy follows another: it takes the share `tau` of it whenever `period` have elapsed.

        target ← target + τ · (online - target)

    Attributes:
        tau: the share taken, in [0, 1]; 1 copies. A number, or a callable of the total count (a schedule such as
            `Linear`, one of Optax).
        period: how much must have elapsed since the last time, or since the beginning.
        unit: what is counted: gradient updates, or environment steps.
        stats_tau: the share for statistics; None: as `tau`.

    Raises:
        TypeError, ValueError: a field is not that, by name.
    """

    tau: Tau = 1.0
    period: int = static(default=1)
    unit: Literal["updates", "env_steps"] = static(default="updates")
    stats_tau: Tau = None

    def __post_init__(self) -> None:
        check_integer("Follow", "period", self.period)
        if self.period > _MOST:
            raise ValueError(f"Follow: period must be at most {_MOST}, got {self.period}")
        check_choice("Follow", "unit", self.unit, ("updates", "env_steps"))
        for name in ("tau", "stats_tau"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    @property
    def is_soft(self) -> bool:
        """The weights may take less than all."""
        return callable(self.tau) or isinstance(self.tau, jax.core.Tracer) or bool(jnp.any(jnp.asarray(self.tau) != 1))

    @property
    def is_soft_on_stats(self) -> bool:
        """The statistics may take less than all."""
        return self.is_soft if self.stats_tau is None else Follow(self.stats_tau).is_soft

    def init(self) -> FollowState:
        """Nothing has elapsed."""
        return FollowState(jnp.zeros(4, jnp.uint32))

    def step(
        self,
        state: FollowState,
        online: PyTree,
        target: PyTree,
        count: Any = 1,
        *,
        is_stat: Callable[[str], bool] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[PyTree, FollowState]:
        """The target after `count` more updates (or environment steps): followed once if it is due, else as it was.

        Jump as far as you like: it fires once the period has elapsed, and counts anew from there. Where the target is donated,
        a step that is not due moves no memory.

        Args:
            count: how many since the last call, 0 or more; an integer, traced or not.
            is_stat: as for `soft_update`.
            key: as for `soft_update`.

        Raises:
            ValueError: the trees differ, or `count` is negative.
            TypeError: `count` is no integer scalar.
        """
        check_same_tree(online, target, "Follow")
        raised = _more(state.counts, count)
        total, due = raised[1], raised[0] >= jnp.uint32(self.period)

        def move(online: PyTree, target: PyTree) -> PyTree:
            return soft_update(online, target, self.tau, stats_tau=self.stats_tau, is_stat=is_stat, step=total, key=key)

        if isinstance(count, int) and count >= self.period:
            target = move(online, target)
        elif isinstance(due, jax.core.Tracer):
            target = jax.lax.cond(due, move, lambda online, target: target, online, jax.tree.map(jnp.asarray, target))
        elif bool(due):
            target = move(online, target)
        return target, self._counted(raised, due)

    def diagnose(self, state: FollowState) -> str | None:
        """Why training should not go on (the share left [0, 1] while running), or None."""
        if int(state.refused) == 0:
            return None
        return f"Follow: tau must be a scalar in [0, 1]; it was not, {int(state.refused)} times, and nothing followed then"

    def __str__(self) -> str:
        stats = "" if self.stats_tau is None else f", statistics {_shown(self.stats_tau)}"
        unit = self.unit.replace("_", " ")
        every = f"every {self.period} {unit}" if self.period > 1 else f"every {unit.removesuffix('s')}"
        return f"tau {_shown(self.tau)}{stats}, {every}"

    def _counted(self, raised: UInt32[Array, "4"], due: Bool[Array, ""]) -> FollowState:
        valid = valid_share(self.tau, raised[1])
        if self.stats_tau is not None:
            valid &= valid_share(self.stats_tau, raised[1])
        one_more = jnp.where(valid, jnp.array([0, 0, 1, 0], jnp.uint32), jnp.array([0, 0, 0, 1], jnp.uint32))
        return FollowState(jnp.where(due, raised * jnp.array([0, 1, 1, 1], jnp.uint32) + one_more, raised))


@struct
class _Function:
    """A plain function among the fields of a pytree."""

    function: Callable[[Any], Any] = static()

    def __call__(self, step: Any) -> Any:
        return self.function(step)


def _checked(name: str, tau: Tau) -> Tau:
    """A share that may be a field: a number, an array of them for `vmap`, a schedule."""
    if isinstance(tau, OBJECTS):
        check_schedule("Follow", name, tau, above=-np.inf, at_least=0, at_most=1)
        return tau
    if callable(tau):
        return _Function(tau) if jax.tree_util.all_leaves([tau]) else tau
    check_number("Follow", name, tau, at_least=0, at_most=1, optional=name == "stats_tau", or_else="a callable of the step")
    return tau


def _more(counts: UInt32[Array, "4"], count: Any) -> UInt32[Array, "4"]:
    """The counts with `count` added to elapsed and total; the largest number where that does not fit."""
    traced = isinstance(count, jax.core.Tracer)
    dtype = count.dtype if traced else np.asarray(count).dtype
    if np.shape(count) != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"Follow: count must be an integer scalar, got {count!r}")
    if traced:
        # A traced negative count is none: cast, it would be four billion.
        more = jnp.maximum(count, jnp.zeros((), count.dtype)).astype(jnp.uint32)
    else:
        if int(count) < 0:
            raise ValueError(f"Follow: count must be 0 or more, got {count}")
        more = jnp.uint32(min(int(count), _MOST))
    added = more * jnp.array([1, 1, 0, 0], jnp.uint32)
    return jnp.where(counts > jnp.uint32(_MOST) - added, jnp.uint32(_MOST), counts + added)


def _shown(tau: Tau) -> str:
    if callable(tau):
        return f"by {tau.function.__name__}" if isinstance(tau, _Function) else f"by {tau}"
    is_number = not isinstance(tau, jax.core.Tracer) and np.shape(tau) == ()
    return f"{float(tau):g}" if is_number else str(tau)
