"""The compiled loop: environment, policy and update as one XLA program, driven in chunks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, UInt32

from polyak.core.checks import check_same_types
from polyak.core.policy_faults import ExceptionRelay, has_error_flags
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import EPISODE_WINDOW, Agent, Callback, EndedEpisodes, Env, Metrics, PyTree, Rollout, State, TimeStep
from polyak.loops.episodes import EpisodeTotals
from polyak.loops.loop import (
    ENVS,
    IterationKeys,
    LoopState,
    Reporter,
    Target,
    TrainResult,
    check_in_jax,
    check_match,
    env_reset_key,
    first_state,
    initial,
    iteration_keys,
    mesh_over,
    run_env_key,
    state_sharding,
    update_agent,
    update_on,
)
from polyak.loops.metrics import PackedMetrics
from polyak.loops.processes import agree, gather, is_first_process, put, spans_processes
from polyak.loops.program_cache import cached_per_env, jitted_init, shape_of
from polyak.loops.replay_memory import put_on_devices

# Short enough for Ctrl-C and callbacks, long enough to hide the dispatch overhead.
CHUNK_SECONDS = 0.5
# The compiled program counts env_steps in 32 bits.
MAX_CHUNK_STEPS = 2**31 - 1

Body: TypeAlias = Callable[[Agent, LoopState], tuple[LoopState, Array, EpisodeTotals, PackedMetrics]]
"""One iteration; also returns env_steps, completed episodes and metrics."""


@suggest_arguments("train")
def compiled(
    agent: Agent[State],
    env: Env,
    *,
    env_steps: int,
    key: PRNGKeyArray,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    devices: int = 1,
    data: PyTree = None,
    resume_from: LoopState | None = None,
    donate: bool = False,
    env_steps_done: int = 0,
    episodes_done: Sequence[EndedEpisodes] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult[State]:
    """Train in a JAX environment until `env_steps` valid transitions are done.

    The same agent, environment, key and number of devices give the same numbers, independent of `report_every` and of
    stopping and resuming. Training ends after the first iteration that reaches `env_steps`.

    If `jax.distributed` has connected processes, all processes call this function with equal arguments; `devices` counts the
    devices of all processes. Only the first process calls callbacks and `should_stop`; each returns the complete result.

    Args:
        agent: the agent to train.
        env: the JAX environment.
        env_steps: total number of valid transitions, including `env_steps_done`.
        key: source of all randomness; not used when resuming.
        callbacks: called at every report with `(progress, metrics, state)`.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        devices: number of host devices or accelerators, in all processes, over which the environments are split.
        data: the state of the replay of a `MixedReplay`'s data; not used when resuming.
        resume_from: the state of a stopped run; copied, unless `donate` takes its arrays, which are deleted.
        env_steps_done: env_steps that the stopped run had completed.
        episodes_done: the last episodes of the stopped run, `Progress.episodes`, from which the means over episodes continue.
        should_stop: called between chunks, about twice a second; True ends training after a last report.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        TrainingDiverged: see `Agent.diagnose`.
        RuntimeError: the policy reports a failure (a script that has ended).
    """
    target = Target(env_steps, report_every)
    check_in_jax("loops.compiled", env)
    check_match(agent, env, devices, key, callbacks)
    mesh = mesh_over(devices, env.num_envs)
    state = first_state(agent, mesh, resume_from, donate, lambda: start_compiled(agent, env, key), env.num_envs, data=data)
    state = _place(agent, state, mesh, env.num_envs)
    relay = ExceptionRelay(jax.eval_shape(agent.collect_policy, state.agent))
    if spans_processes(mesh) and (relay.active or has_error_flags(state.carry)):
        raise ValueError("train: a policy in Python, or a script, acts in one process only; train without other learners")
    callbacks = callbacks if is_first_process(mesh) else ()
    reporter = Reporter(agent, target, env_steps_done, int(state.iteration), None, relay.nondeterminism, episodes_done)
    with reporter.compiling():
        program, metrics = _program(env, mesh, shape_of(agent, state))
        chunk = program.lower(agent, state, metrics, 1, 1).compile()
    max_iterations, stopped = 1, None
    report_at = target.next_report(reporter.env_steps)
    while reporter.env_steps < env_steps:
        before = reporter.seconds
        with reporter.training():
            arguments = (agent, state, metrics, max_iterations, min(report_at - reporter.env_steps, MAX_CHUNK_STEPS))
            state, *outputs = relay.run(chunk, *arguments)
            (steps, iterations), finished, metrics = jax.device_get(outputs)
        reporter.advance(int(steps), int(iterations), finished)
        max_iterations = iterations_for(CHUNK_SECONDS, (reporter.seconds - before) / int(iterations))
        # The first process decides, as clocks, signals and callbacks differ between processes.
        decisions = (max_iterations, should_stop(), reporter.is_due(metrics.unpack, report_at))
        max_iterations, must_stop, must_report = agree(mesh, *decisions)
        stopped = "request" if must_stop else None
        if must_stop or must_report:
            report_at = target.next_report(reporter.env_steps)
            go_on, gathered = reporter.report(metrics.unpack(), gather(mesh, state), callbacks)
            metrics = metrics.without_means()
            state = state if spans_processes(mesh) else gathered
            stopped = stopped or (None if all(agree(mesh, go_on)) else "callback")
        if stopped:
            break
    return reporter.result(gather(mesh, state), stopped if reporter.env_steps < env_steps else None)


def start_compiled(agent: Agent, env: Env, key: PRNGKeyArray) -> LoopState:
    """Return the loop's state before the first iteration."""
    env_state, time_step = jitted_init(env)(env_reset_key(run_env_key(key)))
    return initial(agent, env.num_envs, key, env_state, time_step)


def iteration(
    agent: Agent, env: Env, update: Callable[..., tuple[PyTree, Metrics]], state: LoopState
) -> tuple[LoopState, UInt32[Array, ""], EpisodeTotals, PackedMetrics]:
    """Collect a rollout and update the agent; also returns the number of valid transitions."""
    keys = iteration_keys(state.key, state.iteration, agent.num_steps)
    (env_state, time_step, carry), rollout = collect_compiled(agent, env, state, keys)
    agent_state, episodes, metrics, finished = update_agent(agent, update, state, rollout, keys.update)
    new_state = LoopState(agent_state, env_state, time_step, carry, episodes, state.key, state.iteration + jnp.uint32(1))
    return new_state, rollout.valid.sum(dtype=jnp.uint32), finished, PackedMetrics.pack(metrics)


def collect_compiled(
    agent: Agent, env: Env, state: LoopState, keys: IterationKeys
) -> tuple[tuple[PyTree, TimeStep, PyTree], Rollout]:
    """Step the environment; returns its final state, time step and policy carry, and the rollout."""
    policy = agent.collect_policy(state.agent)

    def step(loop: PyTree, step_inputs: PyTree) -> tuple[PyTree, PyTree]:
        env_state, time_step, carry = loop
        act_key, env_key = step_inputs
        policy_step = policy.action(time_step, carry, act_key)
        next_env_state, next_time_step = env.step(env_state, policy_step.action, env_key)
        check_same_types(env.spec.id, "the state", env_state, next_env_state)
        check_same_types(env.spec.id, "the time step", time_step, next_time_step)
        step_outputs = (next_time_step, policy_step.action, policy_step.info)
        return (next_env_state, next_time_step, policy_step.carry), step_outputs

    loop = (state.env, state.time_step, state.carry)
    # All at once, as a key alone takes as long as a hundred together.
    act_keys = jax.vmap(partial(jax.random.fold_in, keys.act))(jnp.arange(agent.num_steps, dtype=jnp.uint32))
    loop, (time_steps, actions, info) = jax.lax.scan(step, loop, (act_keys, keys.env))
    time_steps = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), state.time_step, time_steps)
    return loop, Rollout(time_steps, actions, info, state.carry)


@cached_per_env
def _program(env: Env, mesh: Mesh | None, shape: tuple[Any, ...]) -> tuple[Any, PackedMetrics]:
    """Return `run_chunk`, jitted, and empty metrics.

    There is one function per argument shape, so that the cache holds only the last few programs.
    """

    @partial(jax.jit, inline=True)
    def body(agent: Agent, state: LoopState) -> tuple[LoopState, Array, EpisodeTotals, PackedMetrics]:
        return iteration(agent, env, update_on(mesh), state)

    return jax.jit(partial(run_chunk, body), donate_argnums=1), no_metrics(body, shape)


def no_metrics(body: Callable[..., tuple[Any, ...]], shape: tuple[Any, ...]) -> PackedMetrics:
    """Return the metrics, last in the body's result, of no iterations, on the host; `shape` is from `shape_of`."""
    metrics = jax.eval_shape(body, *jax.tree.unflatten(*shape[:2]))[-1]
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), metrics)


def run_chunk(
    body: Body, agent: Agent, state: LoopState, metrics: PackedMetrics, max_iterations: Array, env_steps: Array
) -> tuple[LoopState, tuple[Array, Array], EpisodeTotals, PackedMetrics]:
    """Iterate until `env_steps` are done, at most `max_iterations` times.

    Also returns the (env_steps, iterations) done, the totals of the newest iterations in which episodes have ended, and the
    metrics. Both limits are traced, so every chunk uses the same compiled program. Neither episodes nor metrics depend on how
    iterations are divided into chunks, which is up to the clock.

    Args:
        body: one iteration, of one seed or of several seeds; jitted, so that it is traced once, for both the shapes and the
            loop. With several seeds, `env_steps` is a vector, and all seeds iterate until each has reached its number of
            env_steps.
        metrics: the metrics of the iterations since the last report.
    """
    _, steps, finished, _ = jax.eval_shape(body, agent, state)
    no_steps = jnp.zeros(steps.shape, steps.dtype)
    no_episodes = jax.tree.map(lambda shape: jnp.zeros((*shape.shape, EPISODE_WINDOW), shape.dtype), finished)

    def has_next(loop: PyTree) -> Array:
        _, (steps, iterations), _, _ = loop
        return jnp.any(steps < env_steps) & (iterations < max_iterations)

    def iterate(loop: PyTree) -> PyTree:
        state, (steps, iterations), finished, metrics = loop
        state, new_steps, newly_finished, new_metrics = body(agent, state)
        done = (steps + new_steps, iterations + jnp.uint32(1))
        return state, done, finished.append(newly_finished), new_metrics.after(metrics.means)

    loop = (state, (no_steps, jnp.zeros((), jnp.uint32)), no_episodes, metrics)
    return jax.lax.while_loop(has_next, iterate, loop)


def _place(agent: Agent, state: LoopState, mesh: Mesh | None, num_envs: int) -> LoopState:
    """Split arrays with an environment axis over the devices, and replicate the rest."""
    if mesh is None:
        return state
    by_env, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((ENVS,), ()))

    def split(tree: Any) -> Any:
        # XLA replicates arrays without an element.
        batched = jax.tree.map(lambda x: x.ndim > 0 and x.shape[0] == num_envs and x.size > 0, tree)
        return jax.tree.map(lambda x, is_batched: put(x, by_env if is_batched else replicated), tree, batched)

    return LoopState(
        agent=put_on_devices(state.agent, state_sharding(agent, mesh)),
        env=split(state.env),
        time_step=split(state.time_step),
        carry=split(state.carry),
        episodes=split(state.episodes),
        key=put(state.key, replicated),
        iteration=put(state.iteration, replicated),
    )


def iterations_for(seconds: float, iteration_seconds: float) -> int:
    """Return the number of iterations in `seconds`, from the time of one iteration."""
    return int(np.clip(seconds / max(iteration_seconds, 1e-9), 1, 1_000_000))
