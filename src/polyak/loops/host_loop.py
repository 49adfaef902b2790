"""The host loop: environments stepped from Python, with a jitted update."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from polyak.core.policy_faults import ExceptionRelay
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import (
    Agent,
    Callback,
    EndedEpisodes,
    Env,
    HostEnv,
    Mean,
    Metrics,
    PolicyStep,
    PyTree,
    Rollout,
    State,
    TimeStep,
)
from polyak.loops.episodes import EpisodeTotals
from polyak.loops.host_replay import DeviceReplay, HostReplay, ReplayOn, ReplayPlace, Update, check_replay_on, default_memory
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import (
    LoopState,
    Reporter,
    Target,
    TrainResult,
    check_match,
    first_state,
    host_seed,
    initial,
    iteration_keys,
    mesh_over,
    run_env_key,
    state_sharding,
    update_agent,
    update_on,
)
from polyak.loops.metrics import PackedMetrics
from polyak.loops.processes import spans_processes
from polyak.loops.program_cache import cached_per_env, shape_of
from polyak.loops.replay_memory import put_on_devices
from polyak.loops.rollout_actors import ActorInputs, RolloutActors
from polyak.loops.rollouts import (
    Collected,
    Learned,
    LocalRollouts,
    MakesRollouts,
    Rollouts,
    stack,
)


@suggest_arguments("train")
def host(
    agent: Agent[State],
    env: HostEnv | Env,
    *,
    env_steps: int,
    key: PRNGKeyArray,
    callbacks: Sequence[Callback] = (),
    report_every: int | None = None,
    devices: int = 1,
    replay_on: ReplayOn = "device",
    data: PyTree = None,
    resume_from: LoopState | None = None,
    donate: bool = False,
    env_steps_done: int = 0,
    episodes_done: Sequence[EndedEpisodes] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainResult[State]:
    """Train in an environment outside JAX until `env_steps` valid transitions are done.

    A JAX environment is stepped by one jitted call per step and gives the numbers of the compiled loop.

    Args:
        agent: the agent to train.
        env: the environment; reset first, except when resuming (see `HostEnv.restore`).
        env_steps: total number of valid transitions, including `env_steps_done`.
        key: source of all randomness; the environment is seeded from it.
        callbacks: called at every report with `(progress, metrics, state)`.
        report_every: env_steps between reports; None is a hundredth of `env_steps`.
        devices: number of host devices or accelerators over which the update is split.
        replay_on: memory of the agent's replay: `"device"`, the memory of the training device; or `"host"`, from which
            each update gets its batches, so that new priorities take effect at the next update.
        data: the state of the replay of a `MixedReplay`'s data; not used when resuming.
        resume_from: the state of a stopped run; copied, unless `donate` takes its arrays, which are deleted.
        env_steps_done: env_steps that the stopped run had completed.
        episodes_done: the last episodes of the stopped run, `Progress.episodes`, from which the means over episodes continue.
        should_stop: called after every update, and at every step of rollouts that take more than a second; True ends training
            after a last report. A slow rollout is discarded, and the environment is restored to the start of the rollout if the
            environment supports snapshots.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything runs.
        TrainingDiverged: see `Agent.diagnose`.
    """
    target = Target(env_steps, report_every)
    check_match(agent, env, devices, key, callbacks)
    mesh = mesh_over(devices, env.num_envs)
    _check_start(env, resume_from, mesh)
    check_replay_on(agent, "host", devices, replay_on)
    hosted = as_host_env(env, key)
    begin = partial(first_state, agent, mesh, resume_from, donate, partial(start_host, agent, hosted, key), data=data)
    replay, state = _place(agent, mesh, replay_on, env.num_envs, begin)
    relay = ExceptionRelay(jax.eval_shape(agent.collect_policy, state.agent))
    reasons = (*relay.nondeterminism, *(hosted.nondeterminism if isinstance(hosted, MakesRollouts) else ()))
    reporter = Reporter(agent, target, env_steps_done, int(state.iteration), hosted, reasons, episodes_done)
    settings, (leaves, structure) = _settings_on_device(agent, mesh), jax.tree.flatten(state)
    with reporter.compiling():
        rollouts, actors = _make_rollouts(agent, hosted, state, mesh, settings, should_stop)
        learn_compiled, no_means = _compile(agent, mesh, settings, state, replay, None if relay.active else actors)

    def loop_state(leaves: list[Any]) -> LoopState:
        return replay.give_back(jax.tree.unflatten(structure, leaves))

    stopped, metrics, means, report_at = None, None, no_means, target.next_report(reporter.env_steps)
    del state  # Only the leaves are passed from round to round: a tree is flattened in Python.
    while reporter.env_steps < env_steps and stopped is None:
        with reporter.training(), relay:
            collected = rollouts.collect(leaves)
            if collected is not None:
                learned = rollouts.learn(partial(_update, learn_compiled, leaves, means, collected))
                leaves, metrics, means = learned.leaves, learned.metrics, learned.metrics.means
        if collected is not None:
            reporter.advance(collected.env_steps, 1, learned.finished, collected.info_sums)
        stopped = "request" if collected is None or should_stop() else None
        if metrics is not None and (stopped or reporter.is_due(metrics.unpack, report_at)):  # an update since the last
            report_at = target.next_report(reporter.env_steps)
            since_report = {**metrics.unpack(), **rollouts.metrics()}
            go_on, state = reporter.report(since_report, loop_state(leaves), callbacks)
            leaves, metrics, means = jax.tree.leaves(replay.take(state)), None, no_means
            stopped = stopped or (None if go_on else "callback")
    return reporter.result(loop_state(leaves), stopped if reporter.env_steps < env_steps else None)


def _place(
    agent: Agent, mesh: Mesh | None, replay_on: ReplayOn, num_envs: int, first: Callable[..., LoopState]
) -> tuple[ReplayPlace, LoopState]:
    """Return the memory of the replay, and the state to train with."""
    with default_memory(replay_on):
        state = first(num_envs=num_envs, replay_on_host=replay_on == "host")
    state = state if mesh is None else put_on_devices(state, _sharding(agent, mesh))
    (learner,) = jnp.zeros(()).devices()
    replay = DeviceReplay() if replay_on == "device" else HostReplay(agent, learner)
    return replay, replay.take(state)


def _make_rollouts(
    agent: Agent,
    env: HostEnv,
    state: LoopState,
    mesh: Mesh | None,
    settings: list[Any],
    should_stop: Callable[[], bool],
) -> tuple[Rollouts, RolloutActors | None]:
    """Return the source of rollouts, and the source of their actors, or None if other processes act."""
    if isinstance(env, MakesRollouts):
        return env.rollouts(agent, state, settings, should_stop), None
    actors = RolloutActors(agent, state, mesh, settings, exact=isinstance(env, JaxEnvOnHost))
    return LocalRollouts(env, actors, state, agent.num_steps, should_stop), actors


def _check_start(env: HostEnv | Env, resume_from: LoopState | None, mesh: Mesh | None) -> None:
    """Check that one process trains, from the beginning or with an environment that has a state."""
    if spans_processes(mesh):
        raise ValueError("loops.host: several processes train together in the compiled loop only, in environments in JAX")
    if resume_from is not None and not isinstance(env, HostEnv):
        raise ValueError(
            "train: resume_from holds no environment state in the host loop; wrap the JAX environment with JaxEnvOnHost, call "
            "its restore(snapshot) and pass it as env"
        )


def as_host_env(env: HostEnv | Env, key: PRNGKeyArray) -> HostEnv:
    """Return a host environment unchanged; wrap a JAX environment with the run's key."""
    return env if isinstance(env, HostEnv) else JaxEnvOnHost(env, run_env_key(key))


def start_host(agent: Agent, env: HostEnv, key: PRNGKeyArray) -> LoopState:
    """Reset the environment and return the loop's state before the first iteration."""
    return initial(agent, env.num_envs, key, (), reset(env, key))


def reset(env: HostEnv, key: PRNGKeyArray) -> TimeStep:
    """Reset the environment: a JAX environment with its key, any other with a seed derived from the run's key."""
    seed = 0 if isinstance(env, JaxEnvOnHost) else host_seed(run_env_key(key))
    return jax.tree.map(jnp.asarray, env.reset(seed))


def _settings_on_device(agent: Agent, mesh: Mesh | None) -> list[Any]:
    """Return the leaves of the agent; as arrays if one device uses them, so that no iteration moves them there again."""
    return [jnp.asarray(leaf) if mesh is None else leaf for leaf in jax.tree.leaves(agent)]


def _compile(
    agent: Agent, mesh: Mesh | None, settings: list[Any], state: LoopState, replay: ReplayPlace, actors: RolloutActors | None
) -> tuple[Update, Array]:
    """Compile `learn(state, means, (time_steps, actions, info, carry))` before the first step; also returns empty `means`.

    `state` is a list of leaves; `means` belong to metrics since the last report. `learn` returns the fields of `Learned`.

    Args:
        actors: source of actors; the first actor is called, which compiles it. None for a policy that acts in other processes,
            or that calls Python: the shapes of the policy's outputs are then traced.
    """
    time_step, carry = jax.tree.map(np.asarray, (state.time_step, state.carry))
    if actors is None:
        step = jax.eval_shape(_act, agent, state)
        step = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), step)
    else:
        step = jax.tree.map(np.asarray, actors.from_state(jax.tree.leaves(state))(0, time_step, carry))
    actions, info = (stack([tree] * agent.num_steps) for tree in (step.action, step.info))
    time_steps = stack([time_step] * (agent.num_steps + 1))
    rollout = (time_steps, actions, info, step.carry)
    inputs = None if actors is None else actors.inputs
    program, count = _program(mesh, shape_of(agent, state), shape_of(rollout), inputs)
    no_means = jnp.zeros((count, 2, 2))
    compiled = program.lower(settings, jax.tree.leaves(state), no_means, rollout).compile()
    replay.compile(rollout)
    return partial(replay.learn, partial(compiled, settings)), no_means


def _update(program: Update, leaves: list[Any], means: Array, collected: Collected) -> Learned:
    learned = Learned(*program(leaves, means, collected.arrays))
    # Wait here, so that the update counts as training time.
    learned.finished.count.block_until_ready()
    return learned


@cached_per_env
def _program(
    mesh: Mesh | None, shape: tuple[Any, ...], rollout_shape: tuple[Any, ...], inputs: ActorInputs | None
) -> tuple[Any, int]:
    """Return `_learn` followed by `inputs.compute`, jitted, and the number of means.

    There is one function per argument shape, so that the cache of each function stays small.
    """
    structure, avals, _ = shape
    agent, state = jax.tree.unflatten(structure, avals)
    state_structure: Any = jax.tree.structure(state)
    # Jitted, so that it is traced once, for both the shapes and the program.
    learn = jax.jit(partial(_learn, mesh), inline=True)
    _, metrics, _ = jax.eval_shape(learn, agent, state, *jax.tree.unflatten(*rollout_shape[:2])[0])
    count = sum(isinstance(metric, Mean) for metric in metrics.values())

    def learn_from_leaves(
        settings: list[Any], leaves: list[Any], means: Array, rollout: Any
    ) -> tuple[list[Any], PackedMetrics, EpisodeTotals, PyTree | None]:
        arguments = jax.tree.unflatten(structure, [*settings, *leaves])
        new_state, metrics, finished = learn(*arguments, *rollout)
        if jax.tree.structure(new_state) != state_structure:
            raise TypeError(f"train: update must return a state of the same structure, got {jax.tree.structure(new_state)}")
        actor_inputs = None if inputs is None else inputs.compute(arguments[0], new_state)
        return jax.tree.leaves(new_state), PackedMetrics.pack(metrics).after(means), finished, actor_inputs

    if mesh is None:
        return jax.jit(learn_from_leaves, donate_argnums=1), count
    replicated = NamedSharding(mesh, PartitionSpec())
    states = jax.tree.leaves(jax.tree.broadcast(_sharding(agent, mesh), state))
    args, results = (replicated, states, replicated, replicated), (states, replicated, replicated, replicated)
    return jax.jit(learn_from_leaves, donate_argnums=1, in_shardings=args, out_shardings=results), count


def _sharding(agent: Agent, mesh: Mesh) -> Any:
    """Replicate the state on every device, except for the parts that the agent splits by environment."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    return LoopState(state_sharding(agent, mesh), (), *[replicated] * 5)


def _act(agent: Agent, state: LoopState) -> PolicyStep:
    return agent.collect_policy(state.agent).action(state.time_step, state.carry, state.key)


def _learn(
    mesh: Mesh | None, agent: Agent, state: LoopState, time_steps: TimeStep, actions: PyTree, info: PyTree, carry: PyTree
) -> tuple[LoopState, Metrics, EpisodeTotals]:
    rollout = Rollout(time_steps, actions, info, state.carry)
    key = iteration_keys(state.key, state.iteration, agent.num_steps).update
    agent_state, episodes, metrics, finished = update_agent(agent, update_on(mesh), state, rollout, key)
    last = jax.tree.map(lambda x: x[-1], time_steps)
    iteration = state.iteration + jnp.uint32(1)
    return LoopState(agent_state, (), last, carry, episodes, state.key, iteration), metrics, finished
