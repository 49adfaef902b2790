"""The source of an environment, from which equal environments can be created for evaluation and resumed runs."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyak.core.types import Env, HostEnv
from polyak.envs.autoreset import AutoReset
from polyak.envs.built_in import DYNAMICS


@dataclass(frozen=True)
class EnvSource:
    """The arguments of `polyak.envs.make` that create equal environments.

    Attributes:
        id: a name, or a function or class that creates an environment.
        options: all other arguments except `num_envs`.
    """

    id: Any
    options: Mapping[str, Any]


def can_make_again(id: Any) -> bool:
    """Return True if `make` can create new environments from an argument repeatedly: a name or a function.

    Environments that define `__call__` do not count as functions.
    """
    if isinstance(id, str) or not callable(id):
        return isinstance(id, str)
    import gymnasium  # Lazy, as JAX environments do not need it.

    return not isinstance(id, gymnasium.Env | gymnasium.vector.VectorEnv)


def source_of(env: Env | HostEnv) -> EnvSource | None:
    """Return the source of environments, or None if it is unknown, as for environments passed to `make` as objects."""
    if isinstance(env, AutoReset):
        name = next((f"jax/{name}" for name, cls in DYNAMICS.items() if type(env.dynamics) is cls), None)
        dynamics: Any = env.dynamics
        if name is None:
            return None
        settings = {field.name: getattr(dynamics, field.name) for field in dataclasses.fields(dynamics) if field.init}
        changed = {key: value for key, value in settings.items() if value != getattr(DYNAMICS[name[4:]](), key)}
        options = {"action_scaling": env.action_scaling, "env_kwargs": changed}
        return EnvSource(name, options if env.reset_pool is None else options | {"reset_pool": env.reset_pool})
    source = getattr(env, "source", None)
    return source if isinstance(source, EnvSource) else None
