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

# A chunk should end often enough for Ctrl-C and callbacks, and seldom enough for its dispatch not to show.
CHUNK_SECONDS = 0.5
# What a program counts in 32 bits.
MOST_IN_A_CHUNK = 2**31 - 1


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

    The same agent, environment, key and number of devices give the same numbers, whatever the reports and however often
    training was stopped and resumed. Training ends with the first iteration that reaches `env_steps`.

    Args:
        agent: what learns.
        env: where.
        env_steps: valid transitions in all, those of `env_steps_done` included.
        key: decides everything random; not used when resuming.
        callbacks: called at every report with `(progress, metrics, state)`.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        devices: host devices or accelerators that share the environments.
        resume_from: the state of a run that was stopped. It is donated.
        env_steps_done: how many env_steps that run had done.
        should_stop: asked between chunks, about twice a second; True ends training after a last report.

    Raises:
        TypeError, ValueError: an argument, before anything has run.
        TrainingDiverged: see `Agent.diagnose`.
        RuntimeError: the policy could not go on (a script that has ended).
    """
    target = Target(env_steps, report_every)
    check_match(agent, env, devices)
    mesh = mesh_over(devices, env.num_envs)
    state = start(agent, env, key) if resume_from is None else resume_from
    state = _place(agent, state, mesh, env.num_envs)
    relay = ExceptionRelay(jax.eval_shape(agent.collect_policy, state.agent))
    reporter = Reporter(agent, target, env_steps_done, int(state.iteration), None, relay.inexact)
    with reporter.compiling():
        chunk = _program(env, mesh, _alone, shape_of(agent, state)).lower(agent, state, 1, 1).compile()

    most, stopped = 1, None
    due = target.next_report(reporter.env_steps)
    while reporter.env_steps < env_steps:
        before = reporter.seconds
        with reporter.training():
            arguments = (agent, state, most, min(due - reporter.env_steps, MOST_IN_A_CHUNK))
            state, done, finished, metrics = relay.run(chunk, *arguments)
            steps, iterations = (int(x) for x in jax.device_get(done))
        reporter.advance(steps, iterations, finished)
        most = _iterations_for(CHUNK_SECONDS, (reporter.seconds - before) / iterations)
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
    """Train one agent per key at once, as one program mapped over the keys.

    All iterate together until the slowest has done `env_steps`. What each returns can go on by itself in `compiled`.

    One that diverges is reported a last time and warned of; the others go on. Its result is that of this moment, with
    `stopped="diverged"` and the `diagnosis`.

    Args:
        agent: what learns.
        env: where; each training has its own copies.
        env_steps: valid transitions of each.
        keys: `[N]` keys.
        callbacks: for each key its own, or none at all.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        should_stop: asked between chunks.

    Raises:
        TypeError, ValueError: an argument, before anything has run.
        RuntimeError: the policy of one could not go on (a script that has ended).
    """
    target = Target(env_steps, report_every)
    check_match(agent, env, 1)
    count = len(keys)
    if callbacks and len(callbacks) != count:
        raise ValueError(f"train: callbacks for {len(callbacks)} seeds, but {count} keys")
    state = jax.vmap(partial(start, agent, env))(keys)
    learning = {i: Reporter(agent, target, 0, 0, None) for i in range(count)}
    diverged: dict[int, TrainResult] = {}
    with _all(reporter.compiling() for reporter in learning.values()):
        limits = np.zeros(count, np.uint32)
        chunk = _program(env, None, jax.vmap, shape_of(agent, state)).lower(agent, state, 1, limits).compile()

    most, stopped = 1, None
    due = target.next_report(0)
    while stopped is None and any(reporter.env_steps < env_steps for reporter in learning.values()):
        # Those that have diverged are computed on, since the program is for all, but nobody waits for them.
        left = [due - learning[i].env_steps if i in learning else 0 for i in range(count)]
        began = time.monotonic()
        with _all(reporter.training() for reporter in learning.values()):
            state, done, finished, metrics = chunk(agent, state, most, np.clip(left, 0, MOST_IN_A_CHUNK).astype(np.uint32))
            steps, iterations = jax.device_get(done)
        _check_each(learning, state.carry)
        most = _iterations_for(CHUNK_SECONDS, (time.monotonic() - began) / int(iterations))
        for i, reporter in learning.items():
            reporter.advance(int(steps[i]), int(iterations), _of_seed(i, finished))
        stopped = "request" if should_stop() else None
        ends = any(agent.diagnose(_of_seed(i, metrics)) is not None for i in learning)
        if stopped or ends or all(reporter.env_steps >= due for reporter in learning.values()):
            go_on, newly_diverged = _report_each(learning, metrics, state, callbacks)
            stopped = stopped or (None if go_on else "callback")
            diverged |= newly_diverged
            learning = {i: reporter for i, reporter in learning.items() if i not in diverged}
            due = target.next_report(min((reporter.env_steps for reporter in learning.values()), default=0))
    if all(reporter.env_steps >= env_steps for reporter in learning.values()):
        stopped = None
    ended = {i: reporter.result(_of_seed(i, state), stopped) for i, reporter in learning.items()}
    return [(ended | diverged)[i] for i in range(count)]


def _report_each(
    learning: Mapping[int, Reporter], metrics: Metrics, state: LoopState, callbacks: Sequence[Sequence[Callback]]
) -> tuple[bool, dict[int, TrainResult]]:
    """Report every seed; returns False if a callback asks to stop, and how those ended that cannot go on."""
    go_on, diverged = True, {}
    for i, reporter in learning.items():
        own_state = _of_seed(i, state)
        try:
            go_on &= reporter.report(_of_seed(i, metrics), own_state, callbacks[i] if callbacks else ())
        except TrainingDiverged as error:
            warnings.warn(f"train: the seed of keys[{i}] has diverged: {error}", stacklevel=3)
            diverged[i] = reporter.result(own_state, "diverged", str(error))
    return go_on, diverged


def _check_each(seeds: Iterable[int], carry: PyTree) -> None:
    """`check_carry` for each of these seeds; one that could not go on is named."""
    if not has_error_flags(carry):
        return
    for i in seeds:
        try:
            check_carry(_of_seed(i, carry))
        except RuntimeError as error:
            error.add_note(f"in the training of keys[{i}]")
            raise


def _of_seed(i: int, tree: Any) -> Any:
    return jax.tree.map(itemgetter(i), tree)


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
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
    """Collect a rollout and learn from it: the loop's body. Also returns the valid transitions."""
    keys = iteration_keys(state.key, state.iteration, agent.num_steps)
    (env_state, time_step, carry), rollout = collect_rollout(agent, env, state, keys)
    agent_state, episodes, metrics, finished = learn(agent, update, state, rollout, keys.update)
    moved = LoopState(agent_state, env_state, time_step, carry, episodes, state.key, state.iteration + jnp.uint32(1))
    return moved, rollout.valid.sum(dtype=jnp.uint32), finished, metrics


def collect_rollout(
    agent: Agent, env: Env, state: LoopState, keys: IterationKeys
) -> tuple[tuple[PyTree, TimeStep, PyTree], Rollout]:
    """Step the environment; returns its state, the time step and the policy's carry at the end, and the rollout."""
    policy = agent.collect_policy(state.agent)

    def step(now: PyTree, step_keys: PyTree) -> tuple[PyTree, PyTree]:
        env_state, time_step, carry = now
        t, env_key = step_keys
        acted = policy.action(time_step, carry, jax.random.fold_in(keys.act, t))
        next_env_state, next_time_step = env.step(env_state, acted.action, env_key)
        check_same_types(env.spec.id, "the state", env_state, next_env_state)
        check_same_types(env.spec.id, "the time step", time_step, next_time_step)
        return (next_env_state, next_time_step, acted.carry), (next_time_step, acted.action, acted.info)

    now = (state.env, state.time_step, state.carry)
    steps = jnp.arange(agent.num_steps, dtype=jnp.uint32)
    after, (time_steps, actions, info) = jax.lax.scan(step, now, (steps, keys.env))
    time_steps = jax.tree.map(lambda one, rest: jnp.concatenate([one[None], rest]), state.time_step, time_steps)
    return after, Rollout(time_steps, actions, info, state.carry)


@cached_per_env
def _program(env: Env, mesh: Mesh | None, over_seeds: Callable[..., Any], shape: tuple[Any, ...]) -> Any:
    """`_chunk`, jitted; one function for each shape of its arguments, so that only the last few programs are kept."""
    return jax.jit(partial(_chunk, env, mesh, over_seeds), donate_argnums=1)


def _chunk(
    env: Env, mesh: Mesh | None, over_seeds: Callable[..., Any], agent: Agent, state: LoopState, most: Array, env_steps: Array
) -> tuple[LoopState, tuple[Array, Array], Finished, Metrics]:
    """Iterate until `env_steps` are done, at most `most` times; returns (env_steps, iterations) done and the last metrics.

    Both limits are traced, so that one compilation serves every chunk. `over_seeds` maps the iteration, if at all; `env_steps`
    is then a number for each seed, and all iterate until the last has done its own.
    """

    # Jitted, so that it is traced once: for the shapes first, and then for the loop.
    @partial(jax.jit, inline=True)
    def body(agent: Agent, state: LoopState) -> tuple[LoopState, Array, Finished, Metrics]:
        return over_seeds(partial(iteration, agent, env, update_on(mesh)))(state)

    shapes = jax.eval_shape(body, agent, state)[1:]
    no_steps, no_episodes, no_metrics = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def more(now: PyTree) -> Array:
        _, (steps, iterations), _, _ = now
        return jnp.any(steps < env_steps) & (iterations < most)

    def once(now: PyTree) -> PyTree:
        state, (steps, iterations), finished, _ = now
        state, new_steps, newly_finished, metrics = body(agent, state)
        return state, (steps + new_steps, iterations + jnp.uint32(1)), finished + newly_finished, metrics

    now = (state, (no_steps, jnp.zeros((), jnp.uint32)), no_episodes, no_metrics)
    result: tuple[LoopState, tuple[Array, Array], Finished, Metrics] = jax.lax.while_loop(more, once, now)
    return result


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _place(agent: Agent, state: LoopState, mesh: Mesh | None, num_envs: int) -> LoopState:
    """Put what belongs to environments on their devices, and the rest on all of them."""
    if mesh is None:
        return state
    by_env, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((ENVS,), ()))

    def split(tree: Any) -> Any:
        batched = jax.tree.map(lambda x: x.ndim > 0 and x.shape[0] == num_envs, tree)
        return jax.tree.map(lambda x, is_batched: jax.device_put(x, by_env if is_batched else whole), tree, batched)

    return LoopState(
        agent=jax.device_put(state.agent, state_sharding(agent, mesh)),
        env=split(state.env),
        time_step=split(state.time_step),
        carry=split(state.carry),
        episodes=split(state.episodes),
        key=jax.device_put(state.key, whole),
        iteration=jax.device_put(state.iteration, whole),
    )


def _iterations_for(seconds: float, each: float) -> int:
    return int(np.clip(seconds / max(each, 1e-9), 1, 1_000_000))
