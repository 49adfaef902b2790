"""The offline loop: gradient steps on a data set as one XLA program, driven in chunks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from polyak.core.types import Agent, Callback, EndedEpisodes, HasReplay, Metrics, Rollout, State
from polyak.loops.compiled_loop import CHUNK_SECONDS, iterations_for, no_metrics
from polyak.loops.episodes import EpisodeTotals
from polyak.loops.loop import LoopState, Reporter, Target, TrainResult, first_state
from polyak.loops.metrics import PackedMetrics
from polyak.loops.program_cache import cached_per_env, shape_of
from polyak.loops.replay_memory import copy_except_replay


@runtime_checkable
class LearnsOffline(HasReplay, Protocol):
    """An agent that learns from a data set in its replay, without an environment."""

    @property
    def replay(self) -> Any:
        """The settings of the replay, with a `capacity`."""
        ...

    def add_data(self, state: Any, rollout: Rollout) -> Any:
        """The state with a data set in its replay, and with its statistics."""
        ...

    def learn(self, state: Any, key: PRNGKeyArray) -> tuple[Any, Metrics]:
        """Take one gradient step on the data; returns the state and metrics."""
        ...


def offline(
    agent: Agent[State],
    data: Rollout | None,
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
) -> TrainResult[State]:
    """Take gradient steps on a data set until `env_steps` are done; here one gradient step counts as one step.

    The same agent, data and key give the same numbers, independent of `report_every` and of stopping and resuming.

    Args:
        agent: the agent to train; see `LearnsOffline`.
        data: the data set as a rollout `[T, 1]`; not used when resuming.
        env_steps: total number of gradient steps, including `env_steps_done`.
        key: source of all randomness; not used when resuming.
        callbacks: called at every report with `(progress, metrics, state)`.
        report_every: gradient steps between reports; None is a hundredth of `env_steps`.
        resume_from: the state of a stopped run, with the data; copied, unless `donate` takes its arrays.
        donate: take the arrays of `resume_from`, which are deleted.
        env_steps_done: gradient steps that the stopped run had completed.
        episodes_done: not used, as no episode is played.
        should_stop: called between chunks, about twice a second; True ends training after a last report.

    Raises:
        TrainingDiverged: see `Agent.diagnose`.
    """
    target = Target(env_steps, report_every)
    state = first_state(agent, None, resume_from, donate, lambda: start_offline(agent, key, data), num_envs=1)
    reporter = Reporter(agent, target, env_steps_done, int(state.iteration), None)
    with reporter.compiling():
        program, metrics = _program(shape_of(agent, state))
        chunk = program.lower(agent, state, metrics, jnp.uint32(1)).compile()
    most, stopped, nothing = 1, None, EpisodeTotals.none()
    report_at = target.next_report(reporter.env_steps)
    while reporter.env_steps < env_steps and stopped is None:
        count = min(most, report_at - reporter.env_steps)
        before = reporter.seconds
        with reporter.training():
            state, metrics = chunk(agent, state, metrics, jnp.uint32(count))
            metrics = jax.device_get(metrics)
        reporter.advance(count, count, nothing)
        most = iterations_for(CHUNK_SECONDS, (reporter.seconds - before) / count)
        stopped = "request" if should_stop() else None
        if stopped or reporter.is_due(metrics.unpack, report_at):
            report_at = target.next_report(reporter.env_steps)
            go_on, state = reporter.report(metrics.unpack(), state, callbacks)
            metrics = metrics.without_means()
            stopped = stopped or (None if go_on else "callback")
    return reporter.result(state, stopped if reporter.env_steps < env_steps else None)


def start_offline(agent: Agent[Any], key: PRNGKeyArray, data: Rollout | None) -> LoopState:
    """Return the loop's state before the first gradient step, with the data in the agent's replay; without data it is empty."""
    state = agent.init(jax.random.split(key, 3)[0])
    if data is not None:
        assert isinstance(agent, LearnsOffline), "checked before"
        state = agent.add_data(state, data)
    nothing: Any = ()
    loop_state = LoopState(state, nothing, nothing, nothing, nothing, key, jnp.zeros((), jnp.uint32))
    return loop_state if data is None else copy_except_replay(agent, loop_state)


@cached_per_env
def _program(shape: tuple[Any, ...]) -> tuple[Any, PackedMetrics]:
    """Return the program of a number of gradient steps, jitted, and empty metrics."""
    step = jax.jit(_step, inline=True)
    return jax.jit(partial(_steps, step), donate_argnums=1), no_metrics(step, shape)


def _step(agent: Any, state: LoopState) -> tuple[LoopState, PackedMetrics]:
    """One gradient step; its key follows from the run's key and its number, so chunks do not matter."""
    key = jax.random.fold_in(jax.random.split(state.key, 3)[2], state.iteration)
    agent_state, metrics = agent.learn(state.agent, key)
    return replace(state, agent=agent_state, iteration=state.iteration + jnp.uint32(1)), PackedMetrics.pack(metrics)


def _steps(
    step: Callable[..., tuple[LoopState, PackedMetrics]], agent: Any, state: LoopState, metrics: PackedMetrics, count: Array
) -> tuple[LoopState, PackedMetrics]:
    """Take `count` gradient steps, which is traced, so that every chunk uses the same program."""

    def iterate(_: Array, loop: tuple[LoopState, PackedMetrics]) -> tuple[LoopState, PackedMetrics]:
        state, metrics = loop
        state, new_metrics = step(agent, state)
        return state, new_metrics.after(metrics.means)

    return jax.lax.fori_loop(jnp.uint32(0), count, iterate, (state, metrics))
