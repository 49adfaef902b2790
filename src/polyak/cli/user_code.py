"""User-defined agents, environments and wrappers, named on the command line and never by a file."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from polyak import envs
from polyak.cli.flags import UsageError
from polyak.cli.imports import check_import, find_env_module, import_object
from polyak.cli.user_flags import EnvFlags, UserFlags
from polyak.core.spaces import EnvSpec
from polyak.core.types import Agent, Env, HostEnv
from polyak.envs.constructors import is_in_jax
from polyak.envs.rendered_env import takes_render_mode
from polyak.envs.source import EnvSource
from polyak.runs import RunConfig, config_classes, read_config
from polyak.storage.config import ConfigError, from_json
from polyak.storage.run_directory import Run
from polyak.train.training import Training


def env_maker(flags: EnvFlags, env_id: str, stored_kwargs: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the first argument of `polyak.envs.make` and its `env_kwargs`.

    The argument is a name; for user-defined code a function that creates Gymnasium environments, or the class of an environment
    in JAX.

    Args:
        flags: flags that name user-defined code.
        env_id: name of the environment without `--env`.
        stored_kwargs: settings of a run, which the flags update.

    Raises:
        UsageError: a module or a name does not exist, or is no function or class; or a wrapper is for an environment in JAX.
    """
    find_env_module(env_id)
    kwargs = {**(stored_kwargs or {}), **flags.kwargs}
    make = None if flags.env is None else import_callable(flags.env, "--env")
    wrap = None if flags.wrapper is None else import_callable(flags.wrapper, "--wrapper")
    is_jax = is_in_jax(make or env_id)
    if is_jax and wrap is not None:
        raise UsageError(f"--wrapper {flags.wrapper}: wraps Gymnasium's environments, got {flags.env or env_id} in JAX")
    if is_jax or (make is None and wrap is None):
        return make or env_id, kwargs
    if make is None and env_id.startswith("ALE/"):
        raise UsageError(
            f"--wrapper {flags.wrapper}: {env_id} plays all games in one vector environment, which has no single environments "
            "to wrap; give --env MODULE:NAME, a function that creates a game with its preprocessing and wraps it"
        )

    def make_one(render_mode: str | None = None) -> Any:
        import gymnasium

        takes_mode = render_mode is not None and (make is None or takes_render_mode(make))
        settings = kwargs | {"render_mode": render_mode} if takes_mode else kwargs
        env = make(**settings) if make else gymnasium.make(env_id, **{"disable_env_checker": True} | settings)
        return wrap(env) if wrap else env

    make_one.__name__ = env_id if flags.env is None else flags.env
    return make_one, {}


def make_user_agent(name: str, spec: EnvSpec, settings: Mapping[str, Any]) -> Agent:
    """Create the agent of `--agent`.

    Args:
        settings: fields of the class that flags set.

    Raises:
        UsageError: the module or the name does not exist, or creates no agent.
    """
    made = import_callable(name, "--agent")(spec, **settings)
    if not isinstance(made, Agent):
        raise UsageError(f"--agent {name}: must be a function of an EnvSpec that returns an agent, got {made!r:.80}")
    return made


def import_callable(name: str, flag: str) -> Callable[..., Any]:
    """Import the function or class of a flag.

    Raises:
        UsageError: the name does not exist, or is not callable.
    """
    found = import_object(name, flag)
    if not callable(found):
        raise UsageError(f"{flag} {name}: must be a function or a class, got {found!r:.80}")
    called: Callable[..., Any] = found
    return called


@dataclasses.dataclass(frozen=True)
class UserRun:
    """The config of a run, and the source of its environments."""

    config: RunConfig
    source: EnvSource

    def make_env(self, num_envs: int) -> Env | HostEnv:
        """Create the environments."""
        return envs.make(self.source.id, num_envs=num_envs, **self.source.options)


def read_user_run(run: Run, flags: UserFlags, imports: str | None, *, exact: bool = False) -> UserRun:
    """Read the config of a run; user-defined parts, which the run does not store, are taken from flags.

    Args:
        imports: module of `--import`.
        exact: reject another environment than the run's, such as an additional wrapper.

    Raises:
        UsageError: a flag that the run needs is missing or has another value; or the environment needs another module than
            `imports`.
        ConfigError: `config.json` cannot be read.
    """
    config = read_config(run, flags.agent)
    _check_user_flags(run, config, flags, exact=exact)
    may_import = check_import(config.env, imports) if flags.env is None else True
    target, kwargs = env_maker(flags, config.env, config.env_kwargs)
    options = {"action_scaling": config.action_scaling, "env_kwargs": kwargs, "import_modules": may_import}
    return UserRun(config, EnvSource(target, options | dict(config.env_options)))


def store_user_flags(training: Training, flags: UserFlags) -> Training:
    """Store the flags that name the environment in the run directory, for `read_user_run`; returns the training."""
    if flags.stored and training.run is not None:
        numbers = {name: value for name, value in flags.kwargs.items() if not isinstance(value, str)}
        changes: dict[str, Any] = {"user_flags": flags.stored, "env_kwargs": numbers}
        training.run.change_config(**changes)
        training = dataclasses.replace(training, config=dataclasses.replace(training.config, **changes))
    return training


def _check_user_flags(run: Run, config: RunConfig, flags: UserFlags, *, exact: bool) -> None:
    """Check that the flags of the run's environment are given again; names in a file are compared, never imported.

    Raises:
        UsageError: a flag is missing or has another value.
    """
    is_given = (flags.env, flags.wrapper, flags.env_kwargs) != (None, None, None)
    if config.is_user_env and not config.user_flags and not is_given:
        # A run of `polyak.train.run`.
        raise UsageError(
            f"{run.directory}: was trained in {config.env} with --env, --wrapper or a text in --env-kwargs, which a run does "
            "not store; give them again"
        )
    given = {"env": flags.env, "wrapper": flags.wrapper, "env_kwargs": list(flags.kwargs)}
    words: dict[str, str] = {}
    missing: list[str] = []
    for name, stored in config.user_flags.items():
        if isinstance(stored, str):
            words[name] = f"--{name} {stored}"
            if given[name] not in (None, stored):
                raise UsageError(f"{run.directory}: was trained with {words[name]}, got --{name} {given[name]}; give the same")
            missing += [words[name]] if given[name] is None else []
        else:
            words[name] = f"--env-kwargs {' '.join(f'{text}=...' for text in stored)}"
            missing += [] if set(stored) <= set(flags.kwargs) else [words[name]]
    is_known = not config.is_user_env or bool(config.user_flags)
    further = [f"--{name} {value}" for name in ("env", "wrapper") if name not in words and (value := given[name]) is not None]
    if exact and is_known and further:
        raise UsageError(f"{run.directory}: was not trained with {' '.join(further)}; leave it out")
    if missing:
        raise UsageError(
            f"{run.directory}: was trained in {config.env} with {' '.join(words.values())}, which a run does not store; give "
            f"{' '.join(missing)} again"
        )


def config_with_agent(run: Run, flags: UserFlags, imports: str | None) -> RunConfig:
    """Read the config of a run, with the agent of `--agent`, if the flag is set; the run's environment is then created.

    Raises:
        UsageError: see `read_user_run`; or other flags are set without `--agent`.
        ConfigError: see `read_user_run`.
    """
    if flags.agent is None:
        if str(flags) or imports is not None:
            raise UsageError(f"{str(flags) or f'--import {imports}'}: has no effect without --agent; leave it out")
        return read_config(run)
    user_run = read_user_run(run, flags, imports)
    env = user_run.make_env(1)
    try:
        return with_agent(run, user_run.config, flags, env.spec)
    finally:
        if isinstance(env, HostEnv):
            env.close()


def with_agent(run: Run, config: RunConfig, flags: UserFlags, spec: EnvSpec, *, force: bool = False) -> RunConfig:
    """Return the config with the agent of `--agent`, if the flag is set.

    If `--agent` is the class of the run's agent, the class gets the stored settings; settings that a file cannot hold, such
    as a user-defined optimizer or network, have the defaults of the class.

    Args:
        force: use the settings of the class or function instead of the stored settings.
    """
    if flags.agent is None:
        return config
    make, stored = import_callable(flags.agent, "--agent"), run.read_config()["agent"]
    settings: dict[str, Any] = {}
    if isinstance(make, type) and stored.get("$class") == make.__name__ and not force:
        for name in stored.keys() - {"$class", "spec"}:
            with contextlib.suppress(ConfigError):
                settings[name] = from_json(stored[name], config_classes())
    return dataclasses.replace(config, agent=make_user_agent(flags.agent, spec, settings))
