"""Several seeds, or settings, in one compiled program: the compiled loop mapped over keys and over a batch of agents."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from polyak.core.checks import check_integer
from polyak.core.policy_faults import check_error_flags, has_error_flags
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Agent, Callback, Env, Metrics, PyTree, State
from polyak.core.warn import warn
from polyak.loops.agent_check import check_callbacks
from polyak.loops.compiled_loop import (
    CHUNK_SECONDS,
    MAX_CHUNK_STEPS,
    iteration,
    iterations_for,
    no_metrics,
    run_chunk,
    start_compiled,
)
from polyak.loops.episodes import EpisodeTotals
from polyak.loops.loop import (
    LoopState,
    Reporter,
    Target,
    TrainingDiverged,
    TrainResult,
    check_in_jax,
    check_match,
    update_on,
)
from polyak.loops.metrics import PackedMetrics, as_numbers
from polyak.loops.program_cache import cached_per_env, shape_of
from polyak.loops.replay_memory import check_memory

# The mesh axis over which seeds are split.
SEEDS = "seeds"


@suggest_arguments("train")
def compiled_seeds(
    agent: Agent[State],
    env: Env,
    *,
    env_steps: int,
    keys: Key[Array, " N"],
    callbacks: Sequence[Sequence[Callback]] = (),
    report_every: int | None = None,
    devices: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[TrainResult[State]]:
    """Train one agent per key in parallel, as one program mapped over the keys.

    The settings may differ: in a batch of agents, made by `jax.vmap` or by stacking agents, settings have a leading axis of
    length N, one value per seed. The seeds are split over as many of JAX's devices as divide N. The seeds of a device iterate
    together until the slowest reaches `env_steps`. Each result can be resumed separately with `compiled`.

    A seed that diverges is reported once more, with a warning, and the other seeds continue. The result of a diverged seed has
    `stopped="diverged"` and a `diagnosis`.

    Args:
        agent: the agent to train, or a batch of N agents; `result.agent` is the agent of each seed.
        env: the JAX environment; each seed has separate copies.
        env_steps: number of valid transitions of each seed.
        keys: `[N]` keys, one per seed.
        callbacks: one sequence of callbacks per key, or empty.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        devices: number of devices; None is the largest number that JAX has and that divides N.
        should_stop: called between chunks; True ends training after a last report.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        RuntimeError: the policy of a seed reports a failure (a script that has ended).
    """
    target = Target(env_steps, report_every)
    check_in_jax("loops.compiled_seeds", env)
    _check_arguments(agent, env, keys, callbacks)
    count = len(keys)
    check_memory(_select_agent(0, agent), seeds=count, num_envs=env.num_envs)
    mesh = _mesh_over_seeds(count, devices)
    state = jax.vmap(lambda agent, key: start_compiled(agent, env, key), in_axes=(_batch_axes(agent), 0))(agent, keys)
    state = state if mesh is None else jax.device_put(state, NamedSharding(mesh, PartitionSpec(SEEDS)))
    active = {i: Reporter(_select_agent(i, agent), target, 0, 0, None) for i in range(count)}
    diverged: dict[int, TrainResult] = {}
    with _enter_all(reporter.compiling() for reporter in active.values()):
        limits = np.zeros(count, np.uint32)
        program, metrics = _program(env, mesh, shape_of(agent, state))
        chunk = program.lower(agent, state, metrics, 1, limits).compile()

    max_iterations, stopped, report_at = 1, None, target.next_report(0)
    # The metrics of the last report: a seed without an iteration since then repeats them.
    newest, since_report = dict[int, Metrics](), np.zeros(count, np.int64)
    while stopped is None and any(reporter.env_steps < env_steps for reporter in active.values()):
        # The program still computes the diverged seeds, but a limit of 0 never prolongs the chunk.
        left = [report_at - active[i].env_steps if i in active else 0 for i in range(count)]
        limits = np.clip(left, 0, MAX_CHUNK_STEPS).astype(np.uint32)
        start_time = time.monotonic()
        with _enter_all(reporter.training() for reporter in active.values()):
            state, *outputs = chunk(agent, state, metrics, max_iterations, limits)
            (steps, iterations), finished, metrics = jax.device_get(outputs)
        _check_each(active, state.carry)
        max_iterations = iterations_for(CHUNK_SECONDS, (time.monotonic() - start_time) / int(iterations.max()))
        for i, reporter in active.items():
            reporter.advance(int(steps[i]), int(iterations[i]), _select_seed(i, finished))
        since_report += iterations
        stopped = "request" if should_stop() else None
        has_diverged = any(agent.diagnose(as_numbers(_select_seed(i, metrics).unpack())) is not None for i in active)
        if stopped or has_diverged or all(reporter.env_steps >= report_at for reporter in active.values()):
            newest |= {i: _select_seed(i, metrics).unpack() for i in active if since_report[i]}
            metrics, since_report = metrics.without_means(), np.zeros_like(since_report)
            go_on, newly_diverged = _report_each(active, newest, _on_one_device(state, mesh), callbacks)
            stopped = stopped or (None if go_on else "callback")
            diverged |= newly_diverged
            active = {i: reporter for i, reporter in active.items() if i not in diverged}
            report_at = target.next_report(min((reporter.env_steps for reporter in active.values()), default=0))
    state = _on_one_device(state, mesh)
    results = dict(diverged)
    for i, reporter in active.items():
        results[i] = reporter.result(_slice_seed(i, state), stopped if reporter.env_steps < env_steps else None)
    return [results[i] for i in range(count)]


def _check_arguments(agent: Agent, env: Env, keys: Key[Array, " N"], callbacks: Sequence[Sequence[Callback]]) -> None:
    """Check that there is one key, one sequence of callbacks and, in a batch of agents, one number per seed.

    Raises:
        TypeError, ValueError: an argument is invalid, by name.
    """
    if not isinstance(keys, jax.Array | np.ndarray):
        example = f"jax.random.split(jax.random.key(0), {len(keys)})"
        raise TypeError(f"train: keys must be JAX keys [N], got {keys!r:.80}; pass keys={example}")
    check_match(agent, env, 1, keys)
    if callbacks and len(callbacks) != len(keys):
        raise ValueError(
            f"train: len(callbacks)={len(callbacks)} must equal len(keys)={len(keys)}; pass one sequence of callbacks per key"
        )
    for seed_callbacks in callbacks:
        check_callbacks("train", seed_callbacks)
    for path, leaf in jax.tree_util.tree_leaves_with_path(agent):
        if np.ndim(leaf) and np.shape(leaf)[0] != len(keys):
            name, got = jax.tree_util.keystr(path, simple=True, separator="."), np.shape(leaf)[0]
            raise ValueError(f"train: {name} of the batch of agents must have len(keys)={len(keys)} values, got {got}")
    if any(map(np.ndim, jax.tree.leaves(agent))):
        for i in range(len(keys)):
            _check_settings(i, _select_agent(i, agent))


def _check_settings(i: int, agent: Agent) -> None:
    """Check the settings of one agent of a batch: `vmap` built the batch from traced numbers, which constructors cannot check.

    Raises:
        TypeError, ValueError: a setting is invalid; the message names the setting, and a note the agent.
    """
    if not dataclasses.is_dataclass(agent):
        return
    try:
        dataclasses.replace(agent)
    except (TypeError, ValueError) as error:
        error.add_note(f"in agent {i} of the batch")
        raise


def _batch_axes(agent: Agent) -> Any:
    """Return the mapped axis of each setting of a batch of agents; None for a setting that all agents share."""
    return jax.tree.map(lambda x: 0 if np.ndim(x) else None, agent)


def _select_agent(i: int, agent: Agent) -> Agent:
    return jax.tree.map(lambda x: x[i] if np.ndim(x) else x, agent)


def _mesh_over_seeds(count: int, devices: int | None) -> Mesh | None:
    """Return a mesh of devices over which the seeds are split, or None for one device.

    Raises:
        ValueError: JAX has fewer devices, or `count` is not divisible by `devices`.
    """
    available = jax.local_device_count()
    if devices is None:
        devices = max(n for n in range(1, min(available, count) + 1) if count % n == 0)
    check_integer("train", "devices", devices, at_most=available)
    if count % devices:
        raise ValueError(f"train: len(keys)={count} cannot be split over devices={devices}")
    if devices == 1:
        return None
    return jax.make_mesh((devices,), (SEEDS,), (AxisType.Auto,), devices=jax.local_devices()[:devices])


def _on_one_device(state: LoopState, mesh: Mesh | None) -> LoopState:
    """Gather the state on the first device, so that callbacks and results can use it as the state of a single run."""
    gathered: LoopState = state if mesh is None else jax.device_put(state, mesh.devices.flat[0])
    return gathered


@cached_per_env
def _program(env: Env, mesh: Mesh | None, shape: tuple[Any, ...]) -> tuple[Any, PackedMetrics]:
    """Return `run_chunk` for all seeds, jitted, which returns the iterations as one number per seed; and empty metrics."""
    # Jitted, so that it is traced once, both for all seeds and for the seeds of one device.
    step = jax.jit(partial(_iteration, env), inline=True)

    @partial(jax.jit, inline=True)
    def body(agent: Agent, state: LoopState) -> tuple[LoopState, Array, EpisodeTotals, PackedMetrics]:
        return jax.vmap(step, in_axes=(_batch_axes(agent), 0))(agent, state)

    def chunk(agent: Agent, state: LoopState, metrics: PackedMetrics, max_iterations: Array, env_steps: Array) -> PyTree:
        state, (steps, iterations), finished, metrics = run_chunk(body, agent, state, metrics, max_iterations, env_steps)
        return state, (steps, jnp.full_like(steps, iterations)), finished, metrics

    empty = no_metrics(body, shape)
    if mesh is None:
        return jax.jit(chunk, donate_argnums=1), empty
    seeds, replicated = PartitionSpec(SEEDS), PartitionSpec()
    agent: Agent = jax.tree.unflatten(*shape[:2])[0]
    settings = jax.tree.map(lambda leaf: seeds if leaf.ndim else replicated, agent)
    sharded = jax.shard_map(
        chunk, mesh=mesh, in_specs=(settings, seeds, seeds, replicated, seeds), out_specs=seeds, check_vma=False
    )
    return jax.jit(sharded, donate_argnums=1), empty


def _iteration(env: Env, agent: Agent, state: LoopState) -> tuple[LoopState, Array, EpisodeTotals, PackedMetrics]:
    return iteration(agent, env, update_on(None), state)


def _report_each(
    active: Mapping[int, Reporter], metrics: Mapping[int, Any], state: LoopState, callbacks: Sequence[Sequence[Callback]]
) -> tuple[bool, dict[int, TrainResult]]:
    """Report every seed; returns False if a callback stops training, and the results of diverged seeds."""
    go_on, diverged = True, {}
    for i, reporter in active.items():
        seed_state = _slice_seed(i, state)
        try:
            # The slices are new arrays, so a callback may keep them; the loop continues with `state`.
            seed_goes_on, _ = reporter.report(metrics[i], seed_state, callbacks[i] if callbacks else ())
            go_on &= seed_goes_on
        except TrainingDiverged as error:
            warn(f"train: training with keys[{i}] has diverged: {error}")
            diverged[i] = reporter.result(seed_state, "diverged", str(error))
    return go_on, diverged


def _check_each(seeds: Iterable[int], carry: PyTree) -> None:
    """Call `check_error_flags` for each of `seeds`; the error names the seed that failed."""
    if not has_error_flags(carry):
        return
    for i in seeds:
        try:
            check_error_flags(_select_seed(i, carry))
        except RuntimeError as error:
            error.add_note(f"while training with keys[{i}]")
            raise


def _select_seed(i: int, tree: Any) -> Any:
    return jax.tree.map(itemgetter(i), tree)


@jax.jit
def _slice_seed(i: int, state: LoopState) -> LoopState:
    """Return the state of one seed in one call: a call for each leaf made reports take longer than short trainings."""
    return jax.tree.map(itemgetter(i), state)


@contextmanager
def _enter_all(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
