"""Sources of rollouts for the host loop: environments in this process, stepped by an actor, or a protocol for others."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from polyak.core.policy_faults import check_error_flags
from polyak.core.types import Agent, HostEnv, PyTree, TimeStep
from polyak.loops.episodes import EpisodeTotals, InfoSums
from polyak.loops.host_actor import Actor
from polyak.loops.loop import LoopState
from polyak.loops.metrics import PackedMetrics
from polyak.loops.rollout_actors import RolloutActors

# After a request to stop, a rollout that takes longer than this is discarded.
ROLLOUT_SECONDS = 1.0


@dataclass(frozen=True)
class Collected:
    """A rollout as NumPy arrays, and the sums of `info`.

    Attributes:
        arrays: time steps `[T+1, B]`, actions and info `[T, B]`, and the carry after the last step.
        info_sums: sums of the values that the environments reported in `info`.
    """

    arrays: tuple[TimeStep, PyTree, PyTree, PyTree]
    info_sums: InfoSums

    @property
    def env_steps(self) -> int:
        """The number of valid transitions."""
        is_last = self.arrays[0].last[:-1]
        return is_last.size - int(np.count_nonzero(is_last))


@dataclass(frozen=True)
class Learned:
    """The result of an update.

    Attributes:
        leaves: leaves of the loop's state.
        metrics: metrics of the updates since the last report.
        finished: totals of the episodes that ended in the rollout.
        actor_inputs: input of `RolloutActors.from_inputs` for the next actor, if the update program computes it, else None.
    """

    leaves: list[Any]
    metrics: PackedMetrics
    finished: EpisodeTotals
    actor_inputs: PyTree | None


@runtime_checkable
class Rollouts(Protocol):
    """The rollouts of one training run, in order."""

    def collect(self, leaves: list[Any]) -> Collected | None:
        """Collect the next rollout for the leaves of the loop's state; None if training should stop before its end."""
        ...

    def learn(self, update: Callable[[], Learned]) -> Learned:
        """Call `update`, which trains on the rollout."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of collection since the last report."""
        ...


@runtime_checkable
class MakesRollouts(Protocol):
    """Environments that collect rollouts themselves, such as environments in worker processes.

    Attributes:
        nondeterminism: why a resumed run may differ from an uninterrupted one.
    """

    nondeterminism: tuple[str, ...]

    def rollouts(self, agent: Agent, state: LoopState, settings: list[Any], should_stop: Callable[[], bool]) -> Rollouts:
        """Create the rollouts of a training run.

        Args:
            agent: the agent that is trained.
            state: the loop's state.
            settings: leaves of the agent.
            should_stop: True discards a rollout that takes longer than a second.
        """
        ...


class LocalRollouts:
    """Rollouts of environments in this process.

    Args:
        env: the environments.
        actors: creates the actor of each rollout.
        state: the loop's state.
        num_steps: steps of a rollout.
        should_stop: see `host`.
    """

    def __init__(
        self,
        env: HostEnv,
        actors: RolloutActors,
        state: LoopState,
        num_steps: int,
        should_stop: Callable[[], bool],
    ) -> None:
        self._env, self._actors, self._num_steps, self._should_stop = env, actors, num_steps, should_stop
        self._time_step, self._carry = jax.tree.map(np.asarray, (state.time_step, state.carry))
        self._is_slow = True
        self._actor_inputs: PyTree | None = None

    def collect(self, leaves: list[Any]) -> Collected | None:
        """Step the environments; environments with snapshots are restored if the rollout is discarded."""
        # Only a rollout that began with a snapshot may be discarded.
        before = self._env.snapshot() if self._is_slow else None
        deadline, sums = Deadline(self._should_stop, can_discard=self._is_slow), InfoSums()
        inputs, self._actor_inputs = self._actor_inputs, None
        actor = self._actors.from_state(leaves) if inputs is None else self._actors.from_inputs(inputs)
        arrays = collect_on_host(actor, self._carry, self._env, self._time_step, self._num_steps, sums, deadline)
        if arrays is None:
            if before is not None:
                self._env.restore(before)
            return None
        self._is_slow = deadline.has_passed
        self._time_step, self._carry = jax.tree.map(lambda x: x[-1], arrays[0]), arrays[3]
        return Collected(arrays, sums)

    def learn(self, update: Callable[[], Learned]) -> Learned:
        """Call `update`."""
        learned = update()
        self._actor_inputs = learned.actor_inputs
        return learned

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


class Deadline:
    """Decides when to discard a rollout because training has been asked to stop."""

    def __init__(self, should_stop: Callable[[], bool], *, can_discard: bool) -> None:
        self._should_stop = should_stop
        self._can_discard = can_discard
        self._start_time = time.monotonic()

    @property
    def has_passed(self) -> bool:
        """True if the rollout has taken longer than `ROLLOUT_SECONDS`."""
        return time.monotonic() - self._start_time > ROLLOUT_SECONDS

    def should_discard(self) -> bool:
        """Return True if training should stop and the deadline has passed."""
        return self._can_discard and self._should_stop() and self.has_passed


def collect_on_host(
    actor: Actor,
    carry: PyTree,
    env: HostEnv,
    time_step: TimeStep,
    num_steps: int,
    info_sums: InfoSums | None = None,
    deadline: Deadline | None = None,
) -> tuple[TimeStep, PyTree, PyTree, PyTree] | None:
    """Step the environment; returns time steps `[T+1, B]`, actions and info `[T, B]` in NumPy, and the final carry.

    Values that the environment reports in `info` are added to `info_sums`. Returns None if `deadline` discards the rollout.

    Raises:
        RuntimeError: the policy reports a failure.
    """
    carry = jax.tree.map(np.asarray, carry)
    time_steps, outputs = [time_step], []
    for t in range(num_steps):
        step = actor(t, time_step, carry)
        carry = step.carry
        action = step.action
        if not isinstance(action, np.ndarray):
            action = jax.tree.map(np.asarray, action)
        time_step = env.step(action)
        if deadline is not None and deadline.should_discard():
            return None
        if info_sums is not None:
            info_sums.add(getattr(env, "info", {}))
        time_steps.append(time_step)
        outputs.append((action, step.info))
    check_error_flags(carry)
    return stack(time_steps), *stack(outputs), jax.tree.map(np.asarray, carry)


def stack(trees: list[Any]) -> Any:
    """Stack trees leaf by leaf, as np.stack does but twice as fast: it is called for every leaf of a rollout."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves).reshape(len(leaves), *leaves[0].shape), *trees)
