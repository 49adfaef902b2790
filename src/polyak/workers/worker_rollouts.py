"""Rollouts that workers collect: sends the policy to the workers, and joins their results."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, UInt32

from polyak.core.policy_faults import ExceptionRelay
from polyak.core.types import Agent, PyTree, SupportsLag, TimeStep
from polyak.loops.episodes import InfoSums
from polyak.loops.host_actor import acts_in_numpy, find_numpy_actor, step_keys
from polyak.loops.loop import LoopState, iteration_keys
from polyak.loops.program_cache import cached_per_env, shape_of
from polyak.loops.rollouts import Collected, Deadline, Learned
from polyak.workers.packing import Packing
from polyak.workers.rollout_times import RolloutTimes
from polyak.workers.rollout_worker import Acting, Failure, WorkerRollout, WorkerState, slice_rows
from polyak.workers.worker_group import (
    WAIT_SECONDS,
    WorkerGroup,
    array_name,
    describe_difference,
    join,
    seed_of_new_episodes,
    without_weight,
)

LEARNING_SECONDS = 0.005
"""Longest delay in seconds until the end of an update is noticed while workers collect."""

ARRAYS = ("time_steps", "actions", "info", "carry")
"""Names of a worker's arrays in errors."""


@runtime_checkable
class AdvisesOnLag(Protocol):
    """An agent that allows a lag with another setting."""

    @property
    def lag_advice(self) -> str:
        """Describe the setting that allows a lag where `max_lag` is 0; empty if there is none."""
        ...


class WorkerRollouts:
    """The rollouts of one training run, collected by workers that may be ahead of the learner.

    Update r uses rollout r. A worker begins rollout r with the newest policy, as soon as update r - lag is done, so a policy is
    at most `lag` updates old, no rollout is dropped, and every update uses one rollout of every worker. With a lag of 1,
    rollout r always uses the policy of update r - 1, and results are reproducible.

    Args:
        group: the workers.
        agent: the agent that is trained.
        state: the loop's state.
        settings: leaves of the agent.
        should_stop: True discards a rollout that takes longer than a second.

    Raises:
        ValueError: the lag exceeds the agent's `max_lag`.
        TypeError: the policy calls Python.
    """

    def __init__(
        self,
        group: WorkerGroup,
        agent: Agent,
        state: LoopState,
        settings: list[Any],
        should_stop: Callable[[], bool],
    ) -> None:
        self._group, self._settings, self._should_stop, self._lag = group, settings, should_stop, group.options.lag
        policy = jax.eval_shape(agent.collect_policy, state.agent)
        check_lag(agent, self._lag)
        if ExceptionRelay(policy).active:
            raise TypeError("train: a collecting policy that calls Python cannot be sent to workers; use loop='host'")
        share = group.num_envs // group.num_workers
        self._acting = Acting(
            policy=jax.tree.unflatten(jax.tree.structure(policy), range(len(jax.tree.leaves(policy)))),
            packing=Packing.of(policy),
            num_steps=agent.num_steps,
            in_numpy=acts_in_numpy(policy, share),
            key_impl=str(jax.random.key_impl(state.key)),
        )
        self._program = _request_program(
            shape_of(agent, state), self._acting.packing, agent.num_steps, group.num_envs, group.num_workers
        )
        self._expected = _expected_shapes(agent, state, share)
        self._number = self._learned = int(state.iteration)
        self._requested = [self._number] * group.num_workers
        self._versions = [self._number] * group.num_workers
        self._received: list[deque[WorkerRollout]] = [deque() for _ in range(group.num_workers)]
        self._policy: dict[str, npt.NDArray[Any]] = {}
        self._policies: dict[int, tuple[int, Any, dict[str, npt.NDArray[Any]]]] = {}
        under_way = group.under_way
        if self._lag == 1 and under_way is not None and under_way["number"] == self._number:
            vectors = dict(under_way["policy"])
            self._policies[self._number] = int(under_way["version"]), vectors, vectors
        else:
            group.under_way = None
        self._shared_policy: Any = None
        self._random: dict[int, npt.NDArray[Any]] = {}
        self._invalid = 0
        self._times = RolloutTimes(group.num_workers)
        self._begin(state)
        # Compile before the first rollout.
        self._new_policy(jax.tree.leaves(state))

    def collect(self, leaves: list[Any]) -> Collected | None:
        """Wait for the next rollout of every worker."""
        self._new_policy(leaves)
        self._request()
        deadline = Deadline(self._should_stop, can_discard=True)
        start = time.monotonic()
        while not all(self._received):
            if deadline.should_discard():
                return None
            self._serve(WAIT_SECONDS)
            self._go_on_without_absent()
        self._times.waited += time.monotonic() - start
        parts = [received.popleft() for received in self._received]
        # Without the zero-weight parts of workers that returned no rollout.
        collected = [part for part in parts if part.seconds > 0]
        self._times.add([part.seconds for part in collected], [self._learned - part.version for part in collected])
        sums = InfoSums()
        for worker, part in enumerate(parts):
            sums.merge(part.info_sums)
            self._group.snapshots[worker] = part.snapshot
        time_steps, actions, info = (join([part.arrays[i] for part in parts], axis=1) for i in range(3))
        self._random.pop(self._number)
        self._number += 1
        return Collected((time_steps, actions, info, join([part.arrays[3] for part in parts])), sums)

    def learn(self, update: Callable[[], Learned]) -> Learned:
        """Call `update` while workers go on collecting as far as the lag allows."""
        start = time.monotonic()
        if not self._lag:
            result = update()
        else:
            # A new thread for each update, so that none is left when the training ends; it costs 0.2 ms.
            with ThreadPoolExecutor(1) as thread:
                future = thread.submit(update)
                while not future.done():
                    self._serve(LEARNING_SECONDS)
                result = future.result()
        self._learned += 1
        self._note_rollout_under_way()
        self._times.updated += time.monotonic() - start
        return result

    def metrics(self) -> dict[str, float]:
        """Metrics of the workers since the last report."""
        invalid, self._invalid = self._invalid, 0
        metrics = self._times.metrics() | {"rollouts/invalid": float(invalid)} | self._group.metrics()
        self._times = RolloutTimes(self._group.num_workers)
        return metrics

    def _begin(self, state: LoopState) -> None:
        """Send the policy's layout to the workers, with their time steps and carries."""
        group, supervisor = self._group, self._group.supervisor
        group.acting = self._acting
        supervisor.warm_up = 0.0 if self._acting.in_numpy else group.options.start_timeout
        states = []
        for worker in range(group.num_workers):
            time_step, carry = slice_rows((state.time_step, state.carry), group.rows(worker))
            states.append(WorkerState(group.states[worker].seed, group.snapshots[worker], time_step, carry))
        if group.is_ahead:
            group.begin(states)
        else:
            group.states = states
            for worker, one in enumerate(states):
                supervisor.request(worker, "prepare", self._acting, one.time_step, one.carry)
        group.is_ahead = True

    def _new_policy(self, leaves: list[Any]) -> None:
        """Pack the newest policy and the random numbers of the next rollouts."""
        # For all rollouts until the next update, which reuses the buffers of the leaves.
        for number in range(self._learned, self._learned + self._lag + 1):
            if number == self._learned or number not in self._random:
                policy, random = self._program(self._settings, leaves, np.uint32(number))
                self._random.setdefault(number, np.asarray(random))
        self._policy = {dtype: np.asarray(vector) for dtype, vector in policy.items()}
        self._shared_policy = self._group.supervisor.engine.share(self._policy)

    def _note_rollout_under_way(self) -> None:
        """With a lag of 1, store the policy of the next rollout to learn from in snapshots."""
        self._policies = {number: policy for number, policy in self._policies.items() if number >= self._learned}
        if self._learned in self._policies:
            version, _, vectors = self._policies[self._learned]
            self._group.under_way = {"number": self._learned, "version": version, "policy": vectors}

    def _request(self) -> None:
        """Request the next rollout from every idle worker, if the lag allows."""
        group = self._group
        for worker, number in enumerate(self._requested):
            if number > self._learned + self._lag or not group.supervisor.is_idle(worker):
                continue
            policy, version = self._shared_policy, self._learned
            if self._lag == 1:
                # All parts of a rollout use the same policy, repeated parts too.
                version, policy, _ = self._policies.setdefault(number, (version, policy, self._policy))
            group.supervisor.request(worker, "rollout", number, version, policy, self._random_for(worker, number))
            self._requested[worker], self._versions[worker] = number + 1, version

    def _random_for(self, worker: int, number: int) -> npt.NDArray[Any]:
        """Return the random numbers or key bits for a worker's actions in a rollout."""
        random = self._random[number]
        return random[:, self._group.rows(worker)] if self._acting.in_numpy else random[worker]

    def _serve(self, seconds: float) -> None:
        """Handle results of workers for up to `seconds`, and request more rollouts."""
        for worker, method, result in self._group.supervisor.results(seconds):
            if method == "rollout":
                self._take(worker, result)
            elif method in ("start", "begin"):
                self._group.check_start(worker, result)
            else:
                self._group.check_result(worker, result)
        self._request()

    def _go_on_without_absent(self) -> None:
        """If all missing workers are absent, use zero-weight rollouts for them, and let these workers begin new episodes."""
        group, supervisor = self._group, self._group.supervisor
        missing = [worker for worker, received in enumerate(self._received) if not received]
        if not all(supervisor.is_absent(worker) for worker in missing):
            return
        for worker in missing:
            state = group.states[worker]
            if state.snapshot is not None and not supervisor.is_lost(worker):
                group.lose_episodes(worker)
            self._received[worker].append(_without_weight(self._number, self._learned, self._expected, state))
            group.states[worker] = WorkerState(seed_of_new_episodes(state.seed, self._number), carry=state.carry)
            self._requested[worker] = self._number + 1
            supervisor.withdraw(worker)
            # The worker may be starting in the episodes that are cut here.
            supervisor.request(worker, "begin", group.states[worker], self._acting)

    def _take(self, worker: int, result: Any) -> None:
        group = self._group
        number = self._requested[worker] - 1
        state = group.states[worker]
        seed = seed_of_new_episodes(state.seed, number)
        if isinstance(result, Failure) and result.invalid_value is None:
            if group.options.on_env_error == "raise":
                group.check_result(worker, result)
            self._requested[worker] = number
            group.states[worker] = WorkerState(seed, carry=state.carry)
            group.supervisor.fail(worker, f"raised {result.summary}", result.exception(group.name_of(worker)))
            return
        wanted = number, self._versions[worker]
        if isinstance(result, WorkerRollout) and (result.number, result.version) != wanted:
            # An earlier rollout arrived again: repeat the requested one from its snapshot.
            self._requested[worker] = number
            group.supervisor.fail(worker, f"returned rollout {result.number}, not {number}")
            return
        problem = _problem(result, self._expected)
        if problem is None:
            last = jax.tree.map(lambda x: x[-1], result.arrays[0])
            group.states[worker] = WorkerState(seed, result.snapshot, last, result.arrays[3])
            self._received[worker].append(result)
            group.supervisor.accept(worker)
            return
        self._invalid += 1
        self._received[worker].append(_without_weight(number, self._learned, self._expected, state))
        group.states[worker] = WorkerState(seed, carry=state.carry)
        error = result.exception(group.name_of(worker)) if isinstance(result, Failure) else None
        group.supervisor.fail(worker, f"returned a rollout in which {problem}", error)


def check_lag(agent: Agent, lag: int) -> None:
    """Check that an agent can learn from rollouts that are `lag` updates old.

    Raises:
        ValueError: the lag exceeds the agent's `max_lag`.
    """
    limit = agent.max_lag if isinstance(agent, SupportsLag) else 0
    if limit is not None and lag > limit:
        advice = f", or {agent.lag_advice}" if limit == 0 and isinstance(agent, AdvisesOnLag) and agent.lag_advice else ""
        raise ValueError(
            f"train: lag={lag}, but {type(agent).__name__} with these settings learns only from rollouts that are at most "
            f"{limit} updates old; set lag={limit}{advice}, or take an agent that corrects for older policies, such as IMPALA"
        )


@cached_per_env
def _request_program(
    shape: tuple[Any, ...], packing: Packing, num_steps: int, num_envs: int, num_workers: int
) -> Callable[..., tuple[Mapping[str, Array], Array]]:
    """Compile a program that returns the policy's vectors, and noise `[T, B, ...]` or key bits `[W, T, ...]` for actions."""

    def request(settings: list[Array], leaves: list[Array], number: UInt32[Array, ""]) -> tuple[Mapping[str, Array], Array]:
        agent, state = shape[0].unflatten([*settings, *leaves])
        policy = agent.collect_policy(state.agent)
        key = iteration_keys(state.key, number, num_steps).act
        start = jnp.uint32(0)
        actor = find_numpy_actor(policy, num_envs // num_workers)
        if actor is not None:
            noise = jax.vmap(lambda step_key: actor.noise(policy, step_key, num_envs))(step_keys(key, start, num_steps))
            return packing.pack(policy), noise
        # One worker draws the same actions as this process would.
        keys = [key] if num_workers == 1 else [jax.random.fold_in(key, worker) for worker in range(num_workers)]
        return packing.pack(policy), jnp.stack([jax.random.key_data(step_keys(key, start, num_steps)) for key in keys])

    return jax.jit(request)


def _expected_shapes(agent: Agent, state: LoopState, rows: int) -> tuple[TimeStep, PyTree, PyTree, PyTree]:
    """Return the shapes and dtypes of the arrays of a worker with `rows` environments."""

    def one_step(state: LoopState) -> tuple[TimeStep, PyTree, PyTree, PyTree]:
        time_step, carry = jax.tree.map(lambda x: x[:rows], (state.time_step, state.carry))
        step = agent.collect_policy(state.agent).action(time_step, carry, state.key)
        return time_step, step.action, step.info, step.carry

    time_step, action, info, carry = jax.eval_shape(one_step, state)
    steps = agent.num_steps
    return _stacked(time_step, steps + 1), _stacked(action, steps), _stacked(info, steps), carry


def _stacked(tree: Any, steps: int) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((steps, *leaf.shape), leaf.dtype), tree)


def _problem(rollout: Any, expected: tuple[TimeStep, PyTree, PyTree, PyTree]) -> str | None:
    """Describe the first error in a worker's result, or return None."""
    if isinstance(rollout, Failure):
        return f"a value is invalid: {rollout.invalid_value}"
    if not isinstance(rollout, WorkerRollout):
        return f"a WorkerRollout was expected, got {type(rollout).__name__}"
    if not isinstance(rollout.info_sums, InfoSums) or not isinstance(rollout.snapshot, bytes | None):
        return "the state of the environments is missing"
    problem = describe_difference(ARRAYS, rollout.arrays, expected)
    if problem is not None:
        return problem
    for path, got in jax.tree.leaves_with_path(rollout.arrays):
        if got.dtype.kind == "f" and not np.isfinite(got).all():
            return f"{array_name(ARRAYS, path)} has NaN or infinity"
    return None


def _without_weight(
    number: int, version: int, expected: tuple[TimeStep, PyTree, PyTree, PyTree], state: WorkerState
) -> WorkerRollout:
    """Create a rollout of weight 0; see `without_weight`."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), expected)
    carry = zeros[3] if state.carry is None else state.carry
    return WorkerRollout(number, version, (without_weight(zeros[0]), zeros[1], zeros[2], carry), InfoSums(), None, 0.0)
