"""The asynchronous loop (A3C): workers push gradients to the copy that they share, and pull its weights."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from polyak.copies.receive import Push
from polyak.core.types import Agent, Callback, EndedEpisodes, Metrics, PyTree, Rollout, TimeStep, copy_buffers
from polyak.loops.episodes import Episodes, EpisodeTotals, InfoSums
from polyak.loops.host_loop import start_host
from polyak.loops.loop import LoopState, Reporter, Target, TrainResult, check_match, first_state
from polyak.loops.metrics import add_metrics
from polyak.workers.gradient_worker import GradientTask, WorkerGradients
from polyak.workers.packing import Packing
from polyak.workers.rollout_times import RolloutTimes
from polyak.workers.rollout_worker import Failure, WorkerState, slice_rows
from polyak.workers.worker_envs import WorkerEnvs
from polyak.workers.worker_group import WAIT_SECONDS, WorkerGroup, describe_difference, join, seed_of_new_episodes

NONDETERMINISM = ("the gradients of workers arrive in any order",)


@runtime_checkable
class SharesGradients(Protocol):
    """An agent whose update has two halves, the gradients of a worker and their step by a receiver."""

    def share(self, state: Any, num_workers: int, *, shared_optimizer: bool = True) -> tuple[Any, Any]:
        """Return the state of the receiver, and the counts of its workers."""
        ...

    def unshare(self, state: Any, senders: Any) -> Any:
        """Convert the state of the receiver to a state of `Agent.init`."""
        ...

    def worker_state(self, state: Any) -> Any:
        """Return the part of the receiver's state that a worker pulls."""
        ...

    def gradients(self, state: Any, rollout: Rollout, key: PRNGKeyArray) -> tuple[PyTree, Any]:
        """Return the gradients of a rollout's loss, and a summary for the receiver."""
        ...

    def receive(
        self,
        state: Any,
        senders: Any,
        push: Push,
        gradients: PyTree,
        summary: Any,
        *,
        max_staleness: int | None = None,
        max_bad: int = 10,
    ) -> tuple[Any, Any, Metrics]:
        """Apply a push once."""
        ...


def train_asynchronously(
    agent: Agent,
    envs: WorkerEnvs,
    *,
    env_steps: int,
    key: PRNGKeyArray,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    resume_from: LoopState | None = None,
    donate: bool = False,
    env_steps_done: int = 0,
    episodes_done: Sequence[EndedEpisodes] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train until the workers' gradients cover `env_steps` valid transitions.

    Every worker pulls the newest weights, collects a rollout, and pushes its gradients, without waiting for the others. The
    order in which gradients arrive varies, so two runs differ. Callbacks and the result get the state of the host loop, with
    the shared weights as online copy, so each of the two loops can resume a run of the other.

    Args:
        agent: an agent whose update has two halves (`A2C`, `IMPALA`).
        envs: the workers' environments, with the options for pushes.
        env_steps: total number of valid transitions, including `env_steps_done`.
        key: source of all randomness.
        callbacks: called at every report.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        resume_from: the state of a stopped run; copied, unless `donate` takes its arrays. If each worker has its own optimizer,
            all of these optimizers start from the optimizer state of this argument.
        env_steps_done: env_steps that the stopped run had completed.
        episodes_done: the last episodes of the stopped run, `Progress.episodes`, from which the means over episodes continue.
        should_stop: called while waiting for workers; True ends the training.

    Raises:
        TypeError: the agent does not implement `SharesGradients`.
        ValueError: the agent does not fit the environments.
        Exception: an exception raised in a worker.
        TrainingDiverged: see `Agent.diagnose`.
    """
    target = Target(env_steps, report_every)
    check_match(agent, envs, 1, key, callbacks)
    halves, options = check_shares_gradients(agent), envs.group.options
    agent.check(envs.num_envs // envs.num_workers)
    loop_state = first_state(agent, None, resume_from, donate, lambda: start_host(agent, envs, key), num_envs=envs.num_envs)
    state, senders = halves.share(loop_state.agent, envs.num_workers, shared_optimizer=options.shared_optimizer)
    reporter = Reporter(agent, target, env_steps_done, int(loop_state.iteration), envs, NONDETERMINISM, episodes_done)
    with reporter.compiling():
        pushes = _Pushes(agent, envs.group, state, loop_state)
        receive = jax.jit(
            partial(halves.receive, max_staleness=options.max_staleness, max_bad=options.max_bad), donate_argnums=(0, 1)
        )
        pushes.pull(state)
        pushes.wait(lambda: should_stop() or reporter.env_steps >= env_steps)  # for workers that compile
    stopped, report_at, since_report = None, target.next_report(env_steps_done), dict[str, Any]()
    while reporter.env_steps < env_steps and stopped is None:
        with reporter.training():
            worker, result = pushes.next(should_stop)
            if result is None:
                stopped = "request"
                break
            gradients, summary = pushes.halves(result)
            push = Push.create(worker, result.number, result.version)
            before, valid = pushes.version, int(summary.env_steps)
            state, senders, metrics = receive(state, senders, push, gradients, summary)
            pushes.pull(state)
            senders = pushes.record_outcome(worker, senders)
            pushes.request(worker)
            pushes.record_times(result, before)
        since_report = add_metrics(since_report, metrics)
        reporter.advance(valid, 1, result.finished, result.info_sums)
        if reporter.is_due(partial(dict, since_report), report_at) or should_stop():
            report_at = target.next_report(reporter.env_steps)
            go_on, _ = reporter.report(
                {**since_report, **pushes.metrics(), **_counts(senders)}, pushes.loop_state(state, senders), callbacks
            )
            since_report = {}
            stopped = "request" if should_stop() else None if go_on else "callback"
    if since_report:  # training was stopped while waiting for a worker
        reporter.report({**since_report, **pushes.metrics(), **_counts(senders)}, pushes.loop_state(state, senders), callbacks)
    return reporter.result(pushes.loop_state(state, senders), stopped if reporter.env_steps < env_steps else None)


def check_shares_gradients(agent: Agent) -> SharesGradients:
    """Return the agent, checked to implement `SharesGradients`.

    Raises:
        TypeError: the agent does not implement `SharesGradients`.
    """
    if not isinstance(agent, SharesGradients):
        raise TypeError(f"train: {type(agent).__name__} sends no gradients; use A2C or IMPALA, or workers that send rollouts")
    return agent


class _Pushes:
    """The pushes of workers, as they arrive.

    Attributes:
        version: version of the shared weights that workers pull next.
        invalid: number of results so far that were no push, or not the requested push.
    """

    def __init__(self, agent: Any, group: WorkerGroup, state: Any, loop_state: LoopState) -> None:
        self._agent, self._group, self._key = agent, group, loop_state.key
        self.version, self.invalid = 0, 0
        self._times, self._learning_since = RolloutTimes(group.num_workers), 0.0
        own = jax.eval_shape(agent.worker_state, state)
        time_step, carry = jax.tree.map(np.asarray, (loop_state.time_step, (loop_state.carry, loop_state.episodes)))
        one = partial(slice_rows, rows=group.rows(0))
        halves = jax.eval_shape(partial(_gradients_of_nothing, agent), own, one(time_step), one(carry[0]), self._key)
        self._halves_tree: Any = jax.tree.structure(halves)
        packing, self._result = Packing.of(own), Packing.of(halves)
        template = jax.tree.unflatten(jax.tree.structure(own), range(len(jax.tree.leaves(own))))
        task = GradientTask(agent, template, packing, self._result, str(jax.random.key_impl(self._key)))
        self._pack = jax.jit(lambda state: packing.pack(agent.worker_state(state)))
        self._bits = jax.jit(partial(_key_bits, jax.random.split(self._key, 3)[2]))
        # A resumed run starts above its earlier numbers, so that no key is used twice.
        self._first_number = int(loop_state.iteration)
        self._numbers = [self._first_number] * group.num_workers
        self._requested = [0] * group.num_workers
        self._waiting: list[tuple[int, WorkerGradients]] = []
        self._weights: Any = None
        group.acting, group.is_ahead = task, True
        group.supervisor.warm_up = group.options.start_timeout
        for worker in range(group.num_workers):
            part, own_carry = slice_rows((time_step, carry), group.rows(worker))
            snapshot = group.snapshots[worker]
            group.states[worker] = replace(group.states[worker], snapshot=snapshot, time_step=part, carry=own_carry)
            group.supervisor.request(worker, "prepare", task, part, own_carry)

    def pull(self, state: Any) -> None:
        """Publish these weights to the workers' next requests."""
        self.version = int(state.copies.shared.version)
        weights = {dtype: np.asarray(vector) for dtype, vector in self._pack(state).items()}
        self._weights = self._group.supervisor.engine.share(weights)

    def request(self, worker: int) -> None:
        """Request the gradients of a worker's next rollout, with the newest weights."""
        self._numbers[worker] += 1
        number = self._numbers[worker]
        bits = np.asarray(self._bits(np.uint32(worker), np.uint32(number)))
        self._requested[worker] = self.version
        self._group.supervisor.request(worker, "gradients", number, self.version, self._weights, bits)

    def next(self, should_stop: Callable[[], bool]) -> tuple[int, WorkerGradients | None]:
        """Return the next worker and its push, or None as the push if training should stop."""
        start = time.monotonic()
        self.wait(should_stop)
        if not self._waiting:
            return 0, None
        self._learning_since = time.monotonic()
        self._times.waited += self._learning_since - start
        return self._waiting.pop(0)

    def wait(self, should_stop: Callable[[], bool]) -> None:
        """Wait for a push, unless training should stop."""
        while not self._waiting and not should_stop():
            for worker, method, result in self._group.supervisor.results(WAIT_SECONDS):
                self._take(worker, method, result)

    def record_times(self, result: WorkerGradients, version: int) -> None:
        """Record the times and the staleness of a push that was applied to this version of the weights, or dropped."""
        self._times.updated += time.monotonic() - self._learning_since
        self._times.add([result.seconds], [version - result.version])

    def halves(self, result: WorkerGradients) -> Any:
        """Unpack the gradients and their summary.

        Raises:
            ValueError: the arrays have other dtypes or lengths.
        """
        return jax.tree.unflatten(self._halves_tree, self._result.unpack(result.halves))

    def record_outcome(self, worker: int, senders: Any) -> Any:
        """Record whether a worker's push was accepted; replace a worker after `max_bad` rejected pushes in a row."""
        consecutive_rejected, max_bad = int(senders.consecutive_rejected[worker]), self._group.options.max_bad
        if not consecutive_rejected:
            self._group.supervisor.accept(worker)
        if consecutive_rejected < max_bad:
            return senders
        self.replace(worker, f"sent NaN or infinity in {max_bad} pushes in a row")
        return senders.readmit(worker)

    def replace(self, worker: int, reason: str, error: Exception | None = None) -> None:
        """Restart a worker in new episodes; `error` is the exception that the worker raised."""
        state = self._group.states[worker]
        # Another seed at each failure: equal episodes would fail again.
        seed = seed_of_new_episodes(state.seed, self._numbers[worker] + 1)
        self._group.states[worker] = replace(state, snapshot=None, seed=seed)
        self._group.supervisor.fail(worker, reason, error)

    def metrics(self) -> dict[str, float]:
        """Metrics of the workers since the last report."""
        times, self._times = self._times.metrics(), RolloutTimes(self._group.num_workers)
        return times | {"pushes/invalid": float(self.invalid)} | self._group.metrics()

    def loop_state(self, state: Any, senders: Any) -> LoopState:
        """The state of the host loop, with the shared weights as online copy, in buffers that no later push reuses."""
        states: list[Any] = self._group.states
        time_step = jax.tree.map(jnp.asarray, join([one.time_step for one in states]))
        carry, episodes = jax.tree.map(jnp.asarray, join([one.carry for one in states]))
        assert isinstance(episodes, Episodes), "as the host loop begins"
        own = copy_buffers(self._agent.unshare(state, senders))
        iteration = self._first_number + sum(number - self._first_number for number in self._numbers)
        return LoopState(own, (), time_step, carry, episodes, self._key, jnp.uint32(iteration))

    def _take(self, worker: int, method: str, result: Any) -> None:
        group, state = self._group, self._group.states[worker]
        if method == "start":
            group.check_start(worker, result)
        elif isinstance(result, Failure):
            is_invalid = result.invalid_value is not None and method == "gradients"
            if not is_invalid and (group.options.on_env_error == "raise" or method != "gradients"):
                group.check_result(worker, result)
            self.invalid += is_invalid
            self._numbers[worker] -= 1
            self.replace(worker, f"raised {result.summary}", result.exception(group.name_of(worker)))
            self.request(worker)
        elif method == "prepare":
            self.request(worker)
        elif (problem := self._problem(worker, result)) is not None:
            self.invalid += 1
            self._numbers[worker] -= 1
            group.supervisor.fail(worker, f"returned a push in which {problem}")
            self.request(worker)
        else:
            seed = seed_of_new_episodes(state.seed, result.number)
            group.states[worker] = WorkerState(seed, result.snapshot, result.time_step, result.carry)
            group.snapshots[worker] = result.snapshot
            self._waiting.append((worker, result))

    def _problem(self, worker: int, result: Any) -> str | None:
        """Describe the first error in a worker's result, or return None; the receiver rejects NaN and infinity."""
        if not isinstance(result, WorkerGradients):
            return f"a WorkerGradients was expected, got {type(result).__name__}"
        if result.number != self._numbers[worker]:
            return f"the number is {result.number}, not {self._numbers[worker]}"
        if result.version != self._requested[worker]:
            return f"the version is {result.version!r:.80}, not {self._requested[worker]}"
        if not isinstance(result.halves, dict):
            return "gradients are missing"
        try:
            self.halves(result)
        except ValueError as error:
            return str(error)
        if not isinstance(result.info_sums, InfoSums) or not isinstance(result.snapshot, bytes | None):
            return "the state of the environments is missing"
        state = self._group.states[worker]
        expected = state.time_step, state.carry, EpisodeTotals.none()
        return describe_difference(
            ("time_step", "carry", "finished"), (result.time_step, result.carry, result.finished), expected
        )


def _gradients_of_nothing(agent: Any, own: Any, first: TimeStep, carry: PyTree, key: PRNGKeyArray) -> Any:
    """Compute the gradients of a constant rollout; traced only, for their shapes."""
    step = agent.collect_policy(own).action(first, carry, key)

    def stacked(tree: PyTree, steps: int) -> PyTree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (steps, *x.shape)), tree)

    steps = agent.num_steps
    rollout = Rollout(stacked(first, steps + 1), stacked(step.action, steps), stacked(step.info, steps), carry)
    return agent.gradients(own, rollout, key)


def _key_bits(key: PRNGKeyArray, worker: Array, number: Array) -> Array:
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, worker), number))


def _counts(senders: Any) -> Mapping[str, float]:
    """Number of pushes that were applied, dropped as too old, and rejected so far; workers send no push twice."""
    names = ("applied", "stale", "rejected")
    return {f"pushes/{name}": float(np.sum(getattr(senders, name))) for name in names}
