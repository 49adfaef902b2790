"""The asynchronous loop (A3C): workers push gradients to the copy that they share, and pull its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from polyak.copies.receive import Push
from polyak.core.types import Agent, Callback, Metrics, PyTree, Rollout, TimeStep, copy_buffers
from polyak.loops.episodes import Episodes
from polyak.loops.host_loop import reset
from polyak.loops.loop import LoopState, Reporter, Target, TrainResult, check_match
from polyak.loops.metrics import add_metrics
from polyak.workers.gradient_worker import GradientTask, WorkerGradients, first_carry
from polyak.workers.packing import Packing
from polyak.workers.rollout_worker import Failure, WorkerState, part_of
from polyak.workers.worker_envs import WorkerEnvs
from polyak.workers.worker_group import WAIT_SECONDS, WorkerGroup, join, seed_of_new_episodes


@runtime_checkable
class SharesGradients(Protocol):
    """An agent whose update has two halves, the gradients of a worker and their step by a receiver."""

    def share(self, state: Any, num_workers: int, *, shared_optimizer: bool = True) -> tuple[Any, Any]:
        """The state of the receiver, and the counts of its workers."""
        ...

    def worker_state(self, state: Any) -> Any:
        """What a worker pulls."""
        ...

    def gradients(self, state: Any, rollout: Rollout, key: PRNGKeyArray) -> tuple[PyTree, Any]:
        """The gradients of a rollout's loss, and what else the receiver needs of it."""
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
    shared_optimizer: bool = True,
    max_staleness: int | None = None,
    max_bad: int = 10,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train until the rollouts whose gradients arrived have `env_steps` valid transitions.

    Every worker pulls the newest weights, collects a rollout, and pushes its gradients, without waiting for the others. The
    order in which they arrive decides, so two runs differ. Callbacks get the state with the shared weights as online copy.

    Args:
        agent: an agent whose update has two halves (`A2C`, `IMPALA`).
        envs: the workers' environments.
        env_steps: valid transitions in all.
        key: source of all randomness.
        shared_optimizer: whether the shared copy has the only optimizer state, or each worker its own.
        max_staleness: gradients of weights more than this many steps old are dropped; None accepts any.
        max_bad: refused pushes in a row (NaN, infinity) after which a worker is replaced.
        callbacks: called at every report.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        should_stop: called while waiting for workers; True ends the training.

    Raises:
        TypeError: the agent has no such halves.
        ValueError: it does not fit the environments.
        Exception: what is raised in a worker.
        TrainingDiverged: see `Agent.diagnose`.
    """
    target = Target(env_steps, report_every)
    check_match(agent, envs, 1, key, callbacks)
    if not isinstance(agent, SharesGradients):
        raise TypeError(f"train: {type(agent).__name__} sends no gradients; use A2C or IMPALA, or workers that send rollouts")
    time_step = reset(envs, key)
    agent.check(envs.num_envs // envs.num_workers)
    state, senders = agent.share(agent.init(jax.random.split(key, 3)[0]), envs.num_workers, shared_optimizer=shared_optimizer)
    reporter = Reporter(agent, target, 0, 0, envs)
    with reporter.compiling():
        pushes = _Pushes(agent, envs.group, state, time_step, key)
        receive = jax.jit(partial(agent.receive, max_staleness=max_staleness, max_bad=max_bad), donate_argnums=(0, 1))
        pushes.pull(state)
    stopped, due, since_report = None, target.next_report(0), dict[str, Any]()
    while reporter.env_steps < env_steps and stopped is None:
        with reporter.training():
            worker, result = pushes.next(should_stop)
            if result is None:
                stopped = "request"
                break
            gradients, summary = pushes.unpack(result)
            push = Push.create(worker, result.number, result.version)
            before, valid = pushes.version, int(summary.env_steps)
            state, senders, metrics = receive(state, senders, push, gradients, summary)
            pushes.pull(state)
            if bool(senders.is_quarantined(max_bad)[worker]):
                senders = senders.readmit(worker)
                pushes.replace(worker, f"sent NaN or infinity in {max_bad} pushes in a row")
            pushes.request(worker)
        since_report = add_metrics(since_report, metrics)
        pushes.staleness.append(before - result.version)
        reporter.advance(valid, 1, result.finished, result.info_sums)
        if reporter.is_due(metrics, due) or should_stop():
            due = target.next_report(reporter.env_steps)
            go_on, _ = reporter.report(
                {**since_report, **pushes.metrics(), **_counts(senders)}, pushes.loop_state(state, key), callbacks
            )
            since_report = {}
            stopped = "request" if should_stop() else None if go_on else "callback"
    return reporter.result(pushes.loop_state(state, key), stopped if reporter.env_steps < env_steps else None)


class _Pushes:
    """The pushes of workers, as they arrive.

    Attributes:
        version: of the shared weights that workers pull next.
        staleness: of the pushes since the last report: steps that were applied between pull and push.
    """

    def __init__(self, agent: Any, group: WorkerGroup, state: Any, time_step: TimeStep, key: PRNGKeyArray) -> None:
        self._agent, self._group = agent, group
        self.version, self.staleness = 0, list[int]()
        own = jax.eval_shape(agent.worker_state, state)
        share = group.num_envs // group.num_workers
        carry = first_carry(agent.collect_policy(agent.worker_state(state)).initial_state, share)
        halves = jax.eval_shape(partial(_gradients_of_nothing, agent, share), own, time_step, carry[0], key)
        self._halves_tree: Any = jax.tree.structure(halves)
        packing, self._result = Packing.of(own), Packing.of(halves)
        template = jax.tree.unflatten(jax.tree.structure(own), range(len(jax.tree.leaves(own))))
        task = GradientTask(agent, template, packing, self._result, str(jax.random.key_impl(key)))
        self._pack = jax.jit(lambda state: packing.pack(agent.worker_state(state)))
        self._bits = jax.jit(partial(_key_bits, jax.random.split(key, 3)[2]))
        self._numbers = [0] * group.num_workers
        self._waiting: list[tuple[int, WorkerGradients]] = []
        self._weights: Any = None
        group.acting, group.is_ahead = task, True
        group.supervisor.warm_up = group.options.start_timeout
        for worker in range(group.num_workers):
            part = part_of(time_step, group.rows(worker))
            group.states[worker] = replace(group.states[worker], snapshot=group.snapshots[worker], time_step=part, carry=carry)
            group.supervisor.request(worker, "prepare", task, part, carry)

    def pull(self, state: Any) -> None:
        """Let workers pull these weights from now on."""
        self.version = int(state.copies.shared.version)
        weights = {dtype: np.asarray(vector) for dtype, vector in self._pack(state).items()}
        self._weights = self._group.supervisor.engine.share(weights)

    def request(self, worker: int) -> None:
        """Ask a worker for the gradients of its next rollout, with the newest weights."""
        self._numbers[worker] += 1
        number = self._numbers[worker]
        bits = np.asarray(self._bits(np.uint32(worker), np.uint32(number)))
        self._group.supervisor.request(worker, "gradients", number, self.version, self._weights, bits)

    def next(self, should_stop: Callable[[], bool]) -> tuple[int, WorkerGradients | None]:
        """The next push that arrives, and its worker; None if training should stop."""
        while not self._waiting:
            if should_stop():
                return 0, None
            for worker, method, result in self._group.supervisor.results(WAIT_SECONDS):
                self._take(worker, method, result)
        return self._waiting.pop(0)

    def unpack(self, result: WorkerGradients) -> Any:
        """The gradients and their summary."""
        return jax.tree.unflatten(self._halves_tree, self._result.unpack(result.halves))

    def replace(self, worker: int, reason: str) -> None:
        """Start a worker again, in new episodes."""
        state = self._group.states[worker]
        self._group.states[worker] = replace(state, snapshot=None)
        self._group.supervisor.fail(worker, reason)

    def metrics(self) -> dict[str, float]:
        """What the workers did since the last report."""
        staleness, self.staleness = self.staleness or [0], []
        ages = {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}
        return ages | dict(self._group.supervisor.metrics())

    def loop_state(self, state: Any, key: PRNGKeyArray) -> LoopState:
        """The state of a loop, with the shared weights as online copy, in buffers that no later push takes."""
        states: list[Any] = self._group.states
        copies = state.copies.update_online()
        time_step = jax.tree.map(jnp.asarray, join([one.time_step for one in states]))
        carry, episodes = jax.tree.map(jnp.asarray, join([one.carry for one in states]))
        assert isinstance(episodes, Episodes), "as first_carry makes it"
        own = copy_buffers(replace(state, copies=copies))
        return LoopState(own, (), time_step, carry, episodes, key, jnp.uint32(sum(self._numbers)))

    def _take(self, worker: int, method: str, result: Any) -> None:
        group, state = self._group, self._group.states[worker]
        if method == "start":
            group.check_start(worker, result)
        elif isinstance(result, Failure):
            if group.options.on_env_error == "raise" or method != "gradients":
                group.check_result(worker, result)
            self._numbers[worker] -= 1
            self.replace(worker, f"raised {result.summary}")
            self.request(worker)
        elif method == "prepare":
            self.request(worker)
        elif method == "gradients":
            seed = seed_of_new_episodes(state.seed, result.number)
            group.states[worker] = WorkerState(seed, result.snapshot, result.time_step, result.carry)
            group.snapshots[worker] = result.snapshot
            group.supervisor.accept(worker)
            self._waiting.append((worker, result))


def _gradients_of_nothing(agent: Any, rows: int, own: Any, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> Any:
    """The gradients of a rollout, only traced for their shapes."""
    first: TimeStep = jax.tree.map(lambda x: x[:rows], time_step)
    step = agent.collect_policy(own).action(first, carry, key)

    def stacked(tree: PyTree, steps: int) -> PyTree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (steps, *x.shape)), tree)

    steps = agent.num_steps
    rollout = Rollout(stacked(first, steps + 1), stacked(step.action, steps), stacked(step.info, steps), carry)
    return agent.gradients(own, rollout, key)


def _key_bits(key: PRNGKeyArray, worker: Array, number: Array) -> Array:
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, worker), number))


def _counts(senders: Any) -> Mapping[str, float]:
    """How many pushes were applied, dropped as too old, and refused so far."""
    names = ("applied", "stale", "refused", "repeated")
    return {f"pushes/{name}": float(np.sum(getattr(senders, name))) for name in names}
