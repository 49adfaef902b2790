"""The compiled loop: environment, policy and update as one XLA program, driven in chunks."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PRNGKeyArray, UInt32

from polyak.core.checks import check_same_types
from polyak.core.policy_faults import ExceptionRelay, check_carry, has_error_flags
from polyak.core.types import Agent, Callback, Env, Metrics, PyTree, Rollout, TimeStep
from polyak.train.episodes import Finished
from polyak.train.loop import (
    ENVS,
    IterationKeys,
    LoopState,
    Reporter,
    Target,
    TrainingDiverged,
    TrainResult,
    cached_per_env,
    check_match,
    env_reset_key,
    initial,
    iteration_keys,
    jitted_init,
    learn,
    mesh_over,
    run_env_key,
    shape_of,
    state_sharding,
    update_on,
)

# Short enough for Ctrl-C and callbacks, long enough to hide the dispatch overhead.
CHUNK_SECONDS = 0.5
# The compiled program counts env_steps in 32 bits.
MAX_CHUNK_STEPS = 2**31 - 1


def compiled(
    agent: Agent,
    env: Env,
    *,
    env_steps: int,
    key: PRNGKeyArray,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    devices: int = 1,
    resume_from: LoopState | None = None,
    env_steps_done: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train in a JAX environment until `env_steps` valid transitions are done.

    The same agent, environment, key and number of devices give the same numbers, independent of `report_every` and of
    stopping and resuming. Training ends after the first iteration that reaches `env_steps`.

    Args:
        agent: the agent to train.
        env: the JAX environment.
        env_steps: total number of valid transitions, including `env_steps_done`.
        key: source of all randomness; not used when resuming.
        callbacks: called at every report with `(progress, metrics, state)`.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        devices: number of host devices or accelerators over which the environments are split.
        resume_from: the state of a stopped run. It is donated.
        env_steps_done: env_steps that the stopped run had completed.
        should_stop: called between chunks, about twice a second; True ends training after a last report.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        TrainingDiverged: see `Agent.diagnose`.
        RuntimeError: the policy reports a failure (a script that has ended).
    """
    target = Target(env_steps, report_every)
    check_match(agent, env, devices)
    mesh = mesh_over(devices, env.num_envs)
    state = start(agent, env, key) if resume_from is None else resume_from
    state = _place(agent, state, mesh, env.num_envs)
    relay = ExceptionRelay(jax.eval_shape(agent.collect_policy, state.agent))
    reporter = Reporter(agent, target, env_steps_done, int(state.iteration), None, relay.inexact)
    with reporter.compiling():
        chunk = _program(env, mesh, _identity, shape_of(agent, state)).lower(agent, state, 1, 1).compile()

    max_iterations, stopped = 1, None
    due = target.next_report(reporter.env_steps)
    while reporter.env_steps < env_steps:
        before = reporter.seconds
        with reporter.training():
            arguments = (agent, state, max_iterations, min(due - reporter.env_steps, MAX_CHUNK_STEPS))
            state, done, finished, metrics = relay.run(chunk, *arguments)
            steps, iterations = (int(x) for x in jax.device_get(done))
        reporter.advance(steps, iterations, finished)
        max_iterations = _iterations_for(CHUNK_SECONDS, (reporter.seconds - before) / iterations)
        stopped = "request" if should_stop() else None
        if stopped or reporter.is_due(metrics, due):
            due = target.next_report(reporter.env_steps)
            go_on = reporter.report(metrics, state, callbacks)
            stopped = stopped or (None if go_on else "callback")
        if stopped:
            break
    return reporter.result(state, stopped if reporter.env_steps < env_steps else None)


def compiled_seeds(
    agent: Agent,
    env: Env,
    *,
    env_steps: int,
    keys: Key[Array, " N"],
    callbacks: Sequence[Sequence[Callback]] = (),
    report_every: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[TrainResult]:
    """Train one agent per key in parallel, as one program mapped over the keys.

    All seeds iterate together until the slowest reaches `env_steps`. Each result can be resumed by itself with `compiled`.

    A seed that diverges is reported a last time with a warning while the others continue. Its result has
    `stopped="diverged"` and the `diagnosis`.

    Args:
        agent: the agent to train.
        env: the JAX environment; each seed has its own copies.
        env_steps: number of valid transitions of each seed.
        keys: `[N]` keys, one per seed.
        callbacks: one sequence of callbacks per key, or empty.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        should_stop: called between chunks; True ends training after a last report.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        RuntimeError: the policy of a seed reports a failure (a script that has ended).
    """
    target = Target(env_steps, report_every)
    check_match(agent, env, 1)
    count = len(keys)
    if callbacks and len(callbacks) != count:
        raise ValueError(
            f"train: len(callbacks)={len(callbacks)} must equal len(keys)={count}; pass one sequence of callbacks per key"
        )
    state = jax.vmap(partial(start, agent, env))(keys)
    active = {i: Reporter(agent, target, 0, 0, None) for i in range(count)}
    diverged: dict[int, TrainResult] = {}
    with _enter_all(reporter.compiling() for reporter in active.values()):
        limits = np.zeros(count, np.uint32)
        chunk = _program(env, None, jax.vmap, shape_of(agent, state)).lower(agent, state, 1, limits).compile()

    max_iterations, stopped = 1, None
    due = target.next_report(0)
    while stopped is None and any(reporter.env_steps < env_steps for reporter in active.values()):
        # The program still computes the diverged seeds, but a limit of 0 never prolongs the chunk.
        left = [due - active[i].env_steps if i in active else 0 for i in range(count)]
        limits = np.clip(left, 0, MAX_CHUNK_STEPS).astype(np.uint32)
        start_time = time.monotonic()
        with _enter_all(reporter.training() for reporter in active.values()):
            state, done, finished, metrics = chunk(agent, state, max_iterations, limits)
            steps, iterations = jax.device_get(done)
        _check_each(active, state.carry)
        max_iterations = _iterations_for(CHUNK_SECONDS, (time.monotonic() - start_time) / int(iterations))
        for i, reporter in active.items():
            reporter.advance(int(steps[i]), int(iterations), _select_seed(i, finished))
        stopped = "request" if should_stop() else None
        has_diverged = any(agent.diagnose(_select_seed(i, metrics)) is not None for i in active)
        if stopped or has_diverged or all(reporter.env_steps >= due for reporter in active.values()):
            go_on, newly_diverged = _report_each(active, metrics, state, callbacks)
            stopped = stopped or (None if go_on else "callback")
            diverged |= newly_diverged
            active = {i: reporter for i, reporter in active.items() if i not in diverged}
            due = target.next_report(min((reporter.env_steps for reporter in active.values()), default=0))
    if all(reporter.env_steps >= env_steps for reporter in active.values()):
        stopped = None
    results = {i: reporter.result(_select_seed(i, state), stopped) for i, reporter in active.items()}
    return [(results | diverged)[i] for i in range(count)]


def _report_each(
    active: Mapping[int, Reporter], metrics: Metrics, state: LoopState, callbacks: Sequence[Sequence[Callback]]
) -> tuple[bool, dict[int, TrainResult]]:
    """Report every seed; returns False if a callback stops training, and the results of the seeds that diverged."""
    go_on, diverged = True, {}
    for i, reporter in active.items():
        seed_state = _select_seed(i, state)
        try:
            go_on &= reporter.report(_select_seed(i, metrics), seed_state, callbacks[i] if callbacks else ())
        except TrainingDiverged as error:
            warnings.warn(f"train: training with keys[{i}] has diverged: {error}", stacklevel=3)
            diverged[i] = reporter.result(seed_state, "diverged", str(error))
    return go_on, diverged


def _check_each(seeds: Iterable[int], carry: PyTree) -> None:
    """Call `check_carry` for each of `seeds`; the error names the seed that failed."""
    if not has_error_flags(carry):
        return
    for i in seeds:
        try:
            check_carry(_select_seed(i, carry))
        except RuntimeError as error:
            error.add_note(f"while training with keys[{i}]")
            raise


def _select_seed(i: int, tree: Any) -> Any:
    return jax.tree.map(itemgetter(i), tree)


@contextmanager
def _enter_all(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def start(agent: Agent, env: Env, key: PRNGKeyArray) -> LoopState:
    """The loop's state before the first iteration."""
    env_state, time_step = jitted_init(env)(env_reset_key(run_env_key(key)))
    return initial(agent, env.num_envs, key, env_state, time_step)


def iteration(
    agent: Agent, env: Env, update: Callable[..., tuple[PyTree, Metrics]], state: LoopState
) -> tuple[LoopState, UInt32[Array, ""], Finished, Metrics]:
    """Collect a rollout and update the agent: the loop's body. Also returns the number of valid transitions."""
    keys = iteration_keys(state.key, state.iteration, agent.num_steps)
    (env_state, time_step, carry), rollout = collect_rollout(agent, env, state, keys)
    agent_state, episodes, metrics, finished = learn(agent, update, state, rollout, keys.update)
    new_state = LoopState(agent_state, env_state, time_step, carry, episodes, state.key, state.iteration + jnp.uint32(1))
    return new_state, rollout.valid.sum(dtype=jnp.uint32), finished, metrics


def collect_rollout(
    agent: Agent, env: Env, state: LoopState, keys: IterationKeys
) -> tuple[tuple[PyTree, TimeStep, PyTree], Rollout]:
    """Step the environment; returns its final state, time step and policy carry, and the rollout."""
    policy = agent.collect_policy(state.agent)

    def step(loop: PyTree, step_inputs: PyTree) -> tuple[PyTree, PyTree]:
        env_state, time_step, carry = loop
        t, env_key = step_inputs
        policy_step = policy.action(time_step, carry, jax.random.fold_in(keys.act, t))
        next_env_state, next_time_step = env.step(env_state, policy_step.action, env_key)
        check_same_types(env.spec.id, "the state", env_state, next_env_state)
        check_same_types(env.spec.id, "the time step", time_step, next_time_step)
        step_outputs = (next_time_step, policy_step.action, policy_step.info)
        return (next_env_state, next_time_step, policy_step.carry), step_outputs

    loop = (state.env, state.time_step, state.carry)
    steps = jnp.arange(agent.num_steps, dtype=jnp.uint32)
    loop, (time_steps, actions, info) = jax.lax.scan(step, loop, (steps, keys.env))
    time_steps = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), state.time_step, time_steps)
    return loop, Rollout(time_steps, actions, info, state.carry)


@cached_per_env
def _program(env: Env, mesh: Mesh | None, over_seeds: Callable[..., Any], shape: tuple[Any, ...]) -> Any:
    """`_chunk`, jitted; one function per argument shape, so that the cache holds only the last few programs."""
    return jax.jit(partial(_chunk, env, mesh, over_seeds), donate_argnums=1)


def _chunk(
    env: Env,
    mesh: Mesh | None,
    over_seeds: Callable[..., Any],
    agent: Agent,
    state: LoopState,
    max_iterations: Array,
    env_steps: Array,
) -> tuple[LoopState, tuple[Array, Array], Finished, Metrics]:
    """Iterate until `env_steps` are done, at most `max_iterations` times.

    Also returns the (env_steps, iterations) done, the finished episodes and the last metrics. Both limits are traced, so one
    compilation serves every chunk. `over_seeds` is the identity or `jax.vmap`; with `jax.vmap`, `env_steps` has one number per
    seed, and all seeds iterate until each has reached its own.
    """

    # Jitted, so that it is traced once, for both the shapes and the loop.
    @partial(jax.jit, inline=True)
    def body(agent: Agent, state: LoopState) -> tuple[LoopState, Array, Finished, Metrics]:
        return over_seeds(partial(iteration, agent, env, update_on(mesh)))(state)

    shapes = jax.eval_shape(body, agent, state)[1:]
    no_steps, no_episodes, no_metrics = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

    def has_next(loop: PyTree) -> Array:
        _, (steps, iterations), _, _ = loop
        return jnp.any(steps < env_steps) & (iterations < max_iterations)

    def iterate(loop: PyTree) -> PyTree:
        state, (steps, iterations), finished, _ = loop
        state, new_steps, newly_finished, metrics = body(agent, state)
        return state, (steps + new_steps, iterations + jnp.uint32(1)), finished + newly_finished, metrics

    loop = (state, (no_steps, jnp.zeros((), jnp.uint32)), no_episodes, no_metrics)
    result: tuple[LoopState, tuple[Array, Array], Finished, Metrics] = jax.lax.while_loop(has_next, iterate, loop)
    return result


def _identity(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _place(agent: Agent, state: LoopState, mesh: Mesh | None, num_envs: int) -> LoopState:
    """Split arrays with an environment axis over the devices, and replicate the rest."""
    if mesh is None:
        return state
    by_env, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((ENVS,), ()))

    def split(tree: Any) -> Any:
        batched = jax.tree.map(lambda x: x.ndim > 0 and x.shape[0] == num_envs, tree)
        return jax.tree.map(lambda x, is_batched: jax.device_put(x, by_env if is_batched else replicated), tree, batched)

    return LoopState(
        agent=jax.device_put(state.agent, state_sharding(agent, mesh)),
        env=split(state.env),
        time_step=split(state.time_step),
        carry=split(state.carry),
        episodes=split(state.episodes),
        key=jax.device_put(state.key, replicated),
        iteration=jax.device_put(state.iteration, replicated),
    )


def _iterations_for(seconds: float, iteration_seconds: float) -> int:
    return int(np.clip(seconds / max(iteration_seconds, 1e-9), 1, 1_000_000))
