"""`polyak.resume`: continues a run from its newest valid checkpoint."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax

from polyak.core.checks import check_integer
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Agent, Callback, Env, HostEnv
from polyak.core.warn import warn
from polyak.loops.agent_check import check_callbacks, check_should_stop
from polyak.loops.compiled_loop import start_compiled
from polyak.loops.host_actor import acts_in_numpy
from polyak.loops.host_loop import as_host_env, reset
from polyak.loops.host_replay import check_replay_on, default_memory
from polyak.loops.loop import LoopState, check_match, initial, mesh_over
from polyak.loops.replay_memory import check_memory, with_new_replay
from polyak.ops.schedules import Linear
from polyak.runs import LOOPS_OF_WORKERS, OFFLINE, RunConfig, read_config, run_key
from polyak.storage.checkpoint import CheckpointError, restore, steps
from polyak.storage.directory import find
from polyak.storage.progress import check_unchanged_settings, read_progress, replay_path
from polyak.storage.run_directory import Run, open_run
from polyak.train.agent_settings import check_agent_settings, store_agent_settings
from polyak.train.compilation_cache import compilation_cache as cached_programs
from polyak.train.devices import configure_devices, is_jax_started
from polyak.train.display import Screen
from polyak.train.evaluation import check_eval_env, make_again
from polyak.train.learners import as_learners, check_learners
from polyak.train.new_training import close_if_made, with_goals
from polyak.train.offline_resumption import check_offline, offline_resumption
from polyak.train.result import Result
from polyak.train.run_training import run_training
from polyak.train.training import Start, Training, watch_workers
from polyak.train.worker_loops import check_workers, split_over_workers, with_new_episodes
from polyak.train.worker_settings import Workers, as_workers, config_fields, options_of
from polyak.workers.learner_group import Learners
from polyak.workers.worker_envs import WorkerEnvs


@suggest_arguments("polyak.resume")
def resume(
    run_dir: str | os.PathLike[str],
    *,
    env: Env | HostEnv | str | Callable[[], Any] | None = None,
    agent: Agent | None = None,
    env_steps: int | None = None,
    progress: bool = True,
    eval_episodes: int | None = None,
    eval_env: Env | HostEnv | None = None,
    callbacks: Sequence[Callback] = (),
    force: bool = False,
    workers: int | Workers | None = None,
    learners: int | Learners | None = None,
    compilation_cache: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Continue a run from its newest valid checkpoint; the result equals the result of an uninterrupted run.

    The results are equal bit for bit if the environment's state can be saved; otherwise new episodes start, with a warning.
    Without the replay in the checkpoints (`checkpoint_replay=False`), the replay is filled again before learning continues. A
    policy that acts in JAX (recurrent, images) draws other random numbers with another number of workers, with a warning.

    Args:
        run_dir: a run directory.
        env: the environment, as for `polyak.train.run`; required for a user-defined environment, which a run does not store.
        agent: the agent; required if its class or its network is user-defined.
        env_steps: total number of environment steps, including steps already done; stored in the run; None is the run's.
        progress: show a progress bar in a terminal, and plain lines elsewhere.
        eval_episodes: episodes of the evaluation at the end; None is the run's number.
        eval_env: environments for evaluation; None makes copies of `env`.
        callbacks: called at every report.
        force: accept an edited `config.json` or one that differs from the checkpoint's, and store other settings of `agent`.
        workers: number of worker processes for an environment outside JAX, or `Workers`; 0 trains in this process; None is the
            run's number. The number may differ from the run's. Options of `Workers` that are None are the run's options.
        learners: number of processes that train together in the compiled loop, or `Learners`; 1 trains in this process; None is
            the run's number. The number may differ from the run's, but must divide the run's devices.
        compilation_cache: keep compiled programs; see `polyak.train.run`.
        should_stop: called between iterations, and during evaluations, which True skips; True ends the training.

    Raises:
        RunError: the directory holds no run, or another process is writing to the run.
        ConfigError: `config.json` cannot be read; or the run's agent is user-defined, and `agent` is None.
        CheckpointError: no checkpoint is valid, or the checkpoint belongs to another agent or environment.
        ValueError: the environment is user-defined, and `env` is None; the run has already done more than `env_steps`; or
            `agent` has other settings.
        StoppedBeforeStart: a stop was requested before workers had started, or before learners had saved a checkpoint.
    """
    check_callbacks("polyak.resume", callbacks)
    check_should_stop("polyak.resume", should_stop)
    check_integer("polyak.resume", "env_steps", env_steps, optional=True)
    check_integer("polyak.resume", "eval_episodes", eval_episodes, at_least=0, optional=True)
    with open_run(run_dir, write=True) as run, cached_programs(compilation_cache):
        if force:
            run.accept_config()
        config = read_config(run, agent)
        if agent is not None:
            check_agent_settings(run, agent, force=force, owner="polyak.resume", consent="force=True accepts and stores them")
        done = max(steps(run.checkpoints), default=0)
        if env_steps is not None and env_steps < done:
            raise ValueError(f"polyak.resume: env_steps={env_steps:,}: {run.directory} has already done {done:,}")
        if config.loop == OFFLINE:
            check_offline("polyak.resume", workers=workers, learners=learners)
            with offline_resumption(run, _with_env_steps(run, config, env_steps), env, eval_env, eval_episodes, force) as ready:
                return run_training(ready, callbacks=callbacks, progress=progress, should_stop=should_stop)
        config, group = with_learners(config, learners)
        _check_here(group, callbacks=len(callbacks) > 0, eval_env=eval_env is not None)
        if not is_jax_started():
            configure_devices(1 if group else config.devices, config.loop, config.num_envs)
        config, split = with_workers(config, workers)
        made = _make_envs(run, config, env, split, should_stop)
        episodes = config.episodes_at_end(0) if eval_episodes is None else eval_episodes
        try:
            check_eval_env("polyak.resume", config.agent, made, eval_env, config.eval_every, episodes)
            config = _with_env_steps(run, config, env_steps)
            training = prepare_resumption(run, config, made, force=force, learners=group, progress=progress)
            training = dataclasses.replace(training, eval_env=eval_env or training.eval_env, eval_episodes=episodes)
            return run_training(training, callbacks=callbacks, progress=progress, should_stop=should_stop)
        finally:
            close_if_made(made, env)


def _check_here(group: Learners | None, **is_set: bool) -> None:
    """Check that arguments for a training in this process are left out with learners.

    Raises:
        ValueError: an argument is set.
    """
    for name, given in is_set.items():
        if group is not None and given:
            raise ValueError(f"polyak.resume: {name} must be left out with learners={group.number}, which train elsewhere")


def _make_envs(run: Run, config: RunConfig, env: Any, split: Workers | None, should_stop: Callable[[], bool]) -> Env | HostEnv:
    """Create the run's environments, or use the given ones, and split them over workers.

    Raises:
        ValueError: the environment is user-defined and not given; or an existing environment is combined with workers.
    """
    if split is None:
        return make_again(run, config, env, config.num_envs)
    if isinstance(env, Env | HostEnv):
        got = type(env).__name__
        raise ValueError(f"polyak.resume: env must be a name or a function with workers, which make it, got {got}")
    parts = split_over_workers(make_again(run, config, env, 1), config.num_envs, split)
    parts.group.should_stop = should_stop
    return parts


def with_learners(config: RunConfig, learners: int | Learners | None) -> tuple[RunConfig, Learners | None]:
    """Return the config with another number of learners, and the group; None for one learner, which is this process.

    Raises:
        TypeError, ValueError: the number is out of range or does not divide the devices, or the run uses another loop.
    """
    group = as_learners("polyak.resume", config.learners if learners is None else learners)
    number = 1 if group is None else group.number
    if group is not None and config.loop != "compiled":
        raise ValueError(f"polyak.resume: learners={number} requires the compiled loop; this run uses the {config.loop} loop")
    if config.devices % number:
        raise ValueError(f"polyak.resume: learners={number} must divide the run's devices={config.devices}")
    return dataclasses.replace(config, learners=number), group


def with_workers(config: RunConfig, workers: int | Workers | None) -> tuple[RunConfig, Workers | None]:
    """Return the config with other workers, and the workers with all options; None for no workers.

    Raises:
        TypeError, ValueError: the number or an option is out of range, or the run uses the compiled loop.
    """
    if config.loop == "compiled":
        if workers not in (None, 0):
            raise ValueError(f"polyak.resume: workers={workers} requires a host loop; this run uses the compiled loop")
        return config, None
    wanted = config.workers if workers is None else workers
    if wanted is None or (isinstance(wanted, int) and wanted == 0):
        return dataclasses.replace(config, loop="host", workers=None, lag=0), None
    split = as_workers("polyak.resume", wanted)
    default = options_of(config)
    if default.min_workers is not None:
        # The run may have more workers.
        default = dataclasses.replace(default, min_workers=min(default.min_workers, split.number))
    options = split.options(default)
    loop = config.loop if config.loop in LOOPS_OF_WORKERS else "distributed"
    config = dataclasses.replace(config, loop=loop, workers=split.number, **config_fields(options))
    return config, dataclasses.replace(split, **dataclasses.asdict(options))


def prepare_resumption(
    run: Run,
    config: RunConfig,
    env: Env | HostEnv,
    *,
    force: bool = False,
    learners: Learners | None = None,
    progress: bool = True,
) -> Training:
    """Restore the checkpoint, and drop metrics and files that are newer than the checkpoint.

    Args:
        progress: print failures of workers; False warns of them instead.

    Raises:
        ValueError: the environment's spec differs from the agent's, or its number of copies from the run's.
        CheckpointError: no checkpoint is valid, or it belongs to another agent or environment, or to other settings.
    """
    if env.num_envs != config.num_envs:
        raise ValueError(f"polyak.resume: env must have the run's num_envs={config.num_envs}, got {env.num_envs}")
    config = dataclasses.replace(config, agent=with_goals(config.agent, env.spec.goals))
    # Checked before the run changes.
    if learners is None:
        mesh_over(config.devices, config.num_envs)
    else:
        check_learners(learners, env, config.devices)
    if isinstance(env, WorkerEnvs):
        check_workers(config.agent, config.loop, env.group.options, config.devices)
        watch_workers(env.group, run, Screen(quiet=not progress))
    key = run_key(config.seed or 0)
    made = env if config.loop == "compiled" else as_host_env(env, key)
    start = restore_start(run, config, made, force=force)
    if isinstance(made, HostEnv) and start.state is not None:
        _warn_of_other_numbers(read_config(run, config.agent), config, start.state)
    run.change_config(env_steps=config.env_steps)
    store_agent_settings(run, config.agent)
    run.rewind(start.env_steps)
    eval_env = None if isinstance(env, HostEnv) else env
    if learners is not None:
        # Learners restore the state themselves.
        start = Start(env_steps=start.env_steps)
    return Training(config, made, key, start, run, eval_env=eval_env, learners=learners)


def _with_env_steps(run: Run, config: RunConfig, env_steps: int | None) -> RunConfig:
    """The config with this length of the training; warns of schedules that have ended."""
    config = dataclasses.replace(config, env_steps=env_steps or config.env_steps)
    for sentence in ended_schedules(run, config):
        warn(f"polyak.resume: {sentence}")
    return config


def ended_schedules(run: Run, config: RunConfig) -> list[str]:
    """A sentence on each schedule that has ended for the rest of a run that is made longer; at 0 it learns nothing."""
    before = read_config(run, config.agent).env_steps
    fields = {field.name: getattr(config.agent, field.name) for field in dataclasses.fields(config.agent)}
    replay = fields.get("replay")
    while dataclasses.is_dataclass(inner := getattr(replay, "replay", None)):
        replay = inner
    if dataclasses.is_dataclass(replay):
        fields |= {f"{field.name} of the replay": getattr(replay, field.name) for field in dataclasses.fields(replay)}
    return [
        f"{name} stays at {value.end:g} after {value.env_steps:,.0f} {config.unit}, where its schedule ends"
        for name, value in fields.items()
        if isinstance(value, Linear)
        and config.env_steps > max(before, value.env_steps)
        and (value.end == 0 or value.env_steps >= before)
    ]


def _warn_of_other_numbers(before: RunConfig, config: RunConfig, state: LoopState) -> None:
    """Warn if the number of workers that act in JAX, each with separate keys, differs from the run's number."""
    if "asynchronous" in (before.loop, config.loop):
        return  # Results are not reproducible anyway.
    policy = jax.eval_shape(config.agent.collect_policy, state.agent)
    numbers = [one.workers or 1 for one in (before, config)]
    # A single worker, and workers that act in NumPy, draw the same numbers as the host loop.
    sources = {1 if acts_in_numpy(policy, config.num_envs // number) else number for number in numbers}
    if len(sources) > 1:
        warn(
            f"workers={config.workers or 0}, the run has {before.workers or 0}: the policy acts in JAX, where each of several "
            "workers draws its own random numbers; the result differs from an uninterrupted run"
        )


def restore_start(run: Run, config: RunConfig, env: Env | HostEnv, *, force: bool = False) -> Start:
    """Restore the newest valid checkpoint and the environment's state; without a saved environment state, new episodes start.

    A run that was stopped before its first checkpoint starts from the beginning.

    Args:
        run: the run directory.
        config: settings of the run.
        env: environment of the run.
        force: resume even if the checkpoint was trained with other settings than the run's config.json.

    Raises:
        ValueError: the agent's spec is not the environment's.
        CheckpointError: no checkpoint is valid, or it belongs to another agent or environment, or to other settings.
    """
    check_match(config.agent, env, config.devices)
    check_replay_on(config.agent, config.loop, config.devices, config.replay_on)
    check_memory(config.agent, config.devices, num_envs=env.num_envs, on_host=config.replay_on == "host")
    if not find(run.checkpoints):
        _check_for_lost_checkpoints(run, config)
        if config.data is not None:
            raise CheckpointError(
                f"{run.directory}: was stopped before its first checkpoint, which has the data {config.data!r}; train anew"
            )
        print(f"{run.directory}: was stopped before its first checkpoint; starting from the beginning")
        return Start()
    with default_memory(config.replay_on):
        restored = restore(run.checkpoints, loop_shape(config, env), optional=replay_path(config.agent))
    saved, state = read_progress(run, restored), restored.tree
    if not force:
        check_unchanged_settings(run, saved)
    consequences = []
    if not restored.is_complete:
        consequences.append("learning waits until the replay is filled")
        with default_memory(config.replay_on):
            state = dataclasses.replace(state, agent=with_new_replay(config.agent, state.agent))
    if isinstance(env, HostEnv) and saved.env is not None:
        env.restore(saved.env)
    elif isinstance(env, HostEnv):
        consequences.append("new episodes start")
        state = with_new_episodes(env, state, ((config.seed or 0) + saved.env_steps) % 2**31)
    if consequences:
        warn(f"{saved.resume}; {' and '.join(consequences)}")
    return Start(state, saved.env_steps, saved.episodes, is_own=True)


def loop_shape(config: RunConfig, env: Env | HostEnv) -> LoopState:
    """Return the shapes and dtypes of the loop's state, which a checkpoint holds, without compiling."""
    key = run_key(config.seed or 0)
    if isinstance(env, HostEnv):
        shape = jax.eval_shape(partial(initial, config.agent, env.num_envs), key, (), reset(env, key))
    else:
        shape = jax.eval_shape(partial(start_compiled, config.agent, env), key)
    return cast(LoopState, shape)


def _check_for_lost_checkpoints(run: Run, config: RunConfig) -> None:
    """Raise if a checkpoint is lost: two rows of metrics past the first checkpoint prove that a checkpoint was saved."""
    rows = [row["env_steps"] for row in run.read_metrics() if row["env_steps"] >= config.checkpoint_every]
    if len(rows) > 1:
        raise CheckpointError(f"{run.checkpoints}: no checkpoint found, but the metrics reach {rows[-1]:,} {config.unit}")
    if config.seed is None:
        raise CheckpointError(f"{run.checkpoints}: no checkpoint found, and the run's key, which was no seed's, is not stored")
