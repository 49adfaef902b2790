"""Where the host loop's rollouts come from: environments in this process, stepped by an actor."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray

from polyak.core.policy_faults import ExceptionRelay, check_carry
from polyak.core.types import Agent, HostEnv, Policy, PolicyStep, PyTree, ReportsInfo, TimeStep
from polyak.loops.actor import Actor, make_actor
from polyak.loops.episodes import EpisodeTotals, InfoSums
from polyak.loops.loop import LoopState, iteration_keys
from polyak.loops.metrics import PackedMetrics
from polyak.loops.program_cache import cached_per_env, shape_of

# After a request to stop, a rollout that takes longer than this is discarded.
ROLLOUT_SECONDS = 1.0


@dataclass(frozen=True)
class Collected:
    """A rollout in NumPy, as the update takes it, and what the environments reported meanwhile.

    Attributes:
        arrays: time steps `[T+1, B]`, actions and info `[T, B]`, and the carry after the last step.
        info_sums: values of `info`.
    """

    arrays: tuple[TimeStep, PyTree, PyTree, PyTree]
    info_sums: InfoSums

    @property
    def env_steps(self) -> int:
        """The number of valid transitions."""
        return int(np.sum(~self.arrays[0].last[:-1]))


@dataclass(frozen=True)
class Learned:
    """What an update returns.

    Attributes:
        leaves: of the loop's state.
        metrics: of the updates since the last report.
        finished: the episodes that ended in the rollout.
        next_step: the first action of the next rollout, where the same program computes it; else None.
    """

    leaves: list[Any]
    metrics: PackedMetrics
    finished: EpisodeTotals
    next_step: PolicyStep | None


@runtime_checkable
class Rollouts(Protocol):
    """The rollouts of one training, in order."""

    def collect(self, leaves: list[Any]) -> Collected | None:
        """The next rollout, for the leaves of the loop's state; None if it was discarded because training should stop."""
        ...

    def learn(self, update: Callable[[], Learned]) -> Learned:
        """Call `update`, which learns from the rollout and returns when it has."""
        ...

    def metrics(self) -> dict[str, float]:
        """What a report says of collecting, since the last one."""
        ...


@runtime_checkable
class MakesRollouts(Protocol):
    """Environments that collect their rollouts in another way than step by step in this process.

    Attributes:
        nondeterminism: why a resumed run may differ from an uninterrupted one.
    """

    nondeterminism: tuple[str, ...]

    def rollouts(self, agent: Agent, state: LoopState, settings: list[Any], should_stop: Callable[[], bool]) -> Rollouts:
        """The rollouts of a training.

        Args:
            agent: what is trained.
            state: the loop's state.
            settings: the agent's leaves.
            should_stop: True discards a rollout that takes longer than a second.
        """
        ...


class LocalRollouts:
    """Rollouts of environments in this process.

    Args:
        env: the environments.
        new_actor: makes the actor of the next rollout from the leaves of the loop's state.
        state: the loop's state.
        num_steps: steps of a rollout.
        should_stop: called at every step; see `host`.
    """

    def __init__(
        self,
        env: HostEnv,
        new_actor: Callable[[list[Any]], Actor],
        state: LoopState,
        num_steps: int,
        should_stop: Callable[[], bool],
    ) -> None:
        self._env, self._new_actor, self._num_steps, self._should_stop = env, new_actor, num_steps, should_stop
        self._time_step, self._carry = jax.tree.map(np.asarray, (state.time_step, state.carry))
        self._is_slow = True
        self._next_step: PolicyStep | None = None

    def collect(self, leaves: list[Any]) -> Collected | None:
        """Step the environments; a rollout that is discarded leaves no trace in those that support snapshots."""
        # Only a rollout that began with a snapshot may be discarded.
        before = self._env.snapshot() if self._is_slow else None
        deadline, sums = Deadline(self._should_stop, can_discard=self._is_slow), InfoSums()
        first = self._next_step
        actor: Actor = self._new_actor(leaves) if first is None else lambda t, time_step, carry: first
        arrays = collect_rollout(actor, self._carry, self._env, self._time_step, self._num_steps, sums, deadline)
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
        self._next_step = learned.next_step
        return learned

    def metrics(self) -> dict[str, float]:
        """Nothing."""
        return {}


class Deadline:
    """Decides when to discard a rollout because training has been asked to stop."""

    def __init__(self, should_stop: Callable[[], bool], *, can_discard: bool) -> None:
        self._should_stop = should_stop
        self._can_discard = can_discard
        self._start_time = time.monotonic()

    @property
    def has_passed(self) -> bool:
        """Whether the rollout has taken longer than `ROLLOUT_SECONDS`."""
        return time.monotonic() - self._start_time > ROLLOUT_SECONDS

    def should_discard(self) -> bool:
        """Whether to discard the rollout: training should stop, and the deadline has passed."""
        return self._can_discard and self._should_stop() and self.has_passed


def actor_maker(
    agent: Agent, state: LoopState, mesh: Mesh | None, settings: list[Any], *, exact: bool
) -> Callable[[list[Any]], Actor]:
    """A function that makes the actor for the next rollout from the leaves of the state.

    Where it `acts_in_one_call`, that call makes the policy and the key and acts: for NumPy the policy's arrays would have to be
    fetched first. A policy that calls Python is called directly.
    """
    shape = shape_of(agent, state)
    program, num_envs = _policy_program(shape), state.time_step.reward.shape[0]

    def make(leaves: list[Any]) -> Actor:
        policy, key = program(settings, leaves)
        if mesh is not None:
            # The updated policy is on all devices, and each of them would compute the actions.
            policy, key = jax.device_put((policy, key), mesh.devices.flat[0])
        return make_actor(policy, key, num_envs, exact=exact, block=agent.num_steps)

    if not acts_in_one_call(agent, state, mesh):
        return make
    act = _one_step_program(shape)
    return lambda leaves: lambda t, time_step, carry: act(settings, leaves, time_step, carry)


def acts_in_one_call(agent: Agent, state: LoopState, mesh: Mesh | None) -> bool:
    """Whether a rollout has one step, for which a compiled program can act on one device, without calling Python."""
    return (
        agent.num_steps == 1 and mesh is None and not ExceptionRelay(jax.eval_shape(agent.collect_policy, state.agent)).active
    )


def act_once(agent: Agent, state: LoopState) -> PolicyStep:
    """The action of a rollout of one step."""
    key = jax.random.fold_in(iteration_keys(state.key, state.iteration, 1).act, 0)
    # Within the program of an update the bits are those of acting alone, as in the first step of a run that is resumed.
    policy, inputs = jax.lax.optimization_barrier((agent.collect_policy(state.agent), (state.time_step, state.carry, key)))
    step: PolicyStep = policy.action(*inputs)
    return step


def rollout_actor(agent: Agent, state: LoopState, mesh: Mesh | None, *, exact: bool) -> Actor:
    """The actor for the next rollout."""
    return actor_maker(agent, state, mesh, jax.tree.leaves(agent), exact=exact)(jax.tree.leaves(state))


@cached_per_env
def _policy_program(shape: tuple[Any, ...]) -> Callable[[list[Any], list[Any]], tuple[Policy, PRNGKeyArray]]:
    def policy_and_key(settings: list[Array], leaves: list[Array]) -> tuple[Policy, PRNGKeyArray]:
        agent, state = shape[0].unflatten([*settings, *leaves])
        return agent.collect_policy(state.agent), iteration_keys(state.key, state.iteration, agent.num_steps).act

    return jax.jit(policy_and_key)


@cached_per_env
def _one_step_program(shape: tuple[Any, ...]) -> Callable[..., PolicyStep]:
    def act(settings: list[Array], leaves: list[Array], time_step: TimeStep, carry: PyTree) -> PolicyStep:
        agent, state = shape[0].unflatten([*settings, *leaves])
        return act_once(agent, replace(state, time_step=time_step, carry=carry))

    return jax.jit(act)


def collect_rollout(
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
    reporter = env if isinstance(env, ReportsInfo) else None
    carry = jax.tree.map(np.asarray, carry)
    time_steps, actions, infos = [time_step], [], []
    for t in range(num_steps):
        step = actor(t, time_step, carry)
        carry = step.carry
        action = step.action
        if not isinstance(action, np.ndarray):
            action = jax.tree.map(np.asarray, action)
        time_step = env.step(action)
        if deadline is not None and deadline.should_discard():
            return None
        if info_sums is not None and reporter is not None:
            info_sums.add(reporter.info)
        time_steps.append(time_step)
        actions.append(action)
        infos.append(step.info)
    check_carry(carry)
    return stack(time_steps), stack(actions), stack(infos), jax.tree.map(np.asarray, carry)


def stack(trees: list[Any]) -> Any:
    """Stack trees leaf by leaf; equal to np.stack but twice as fast, as it is called for every leaf of a rollout."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves).reshape(len(leaves), *leaves[0].shape), *trees)
