"""How an environment was made, so that equal ones can be made for evaluation and from a run directory."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyak.core.types import Env, HostEnv
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import DYNAMICS


@dataclass(frozen=True)
class EnvSource:
    """The arguments of `polyak.envs.make` that make equal environments again.

    Attributes:
        id: a name, or a function that creates an environment.
        options: all others but `num_envs`.
    """

    id: Any
    options: Mapping[str, Any]


def can_make_again(id: Any) -> bool:
    """Whether an argument of `make` makes new environments each time: a name or a function, but no environment.

    Environments may define `__call__`, and are no functions for that.
    """
    if isinstance(id, str) or not callable(id):
        return isinstance(id, str)
    import gymnasium  # not at the top: environments in JAX do without it

    return not isinstance(id, gymnasium.Env | gymnasium.vector.VectorEnv)


def source_of(env: Env | HostEnv) -> EnvSource | None:
    """How the environments were made, or None if it is not known: they were passed to `make` as objects."""
    if isinstance(env, AutoReset):
        name = next((f"jax/{name}" for name, cls in DYNAMICS.items() if type(env.dynamics) is cls), None)
        dynamics: Any = env.dynamics
        if name is None:
            return None
        settings = {field.name: getattr(dynamics, field.name) for field in dataclasses.fields(dynamics) if field.init}
        changed = {key: value for key, value in settings.items() if value != getattr(DYNAMICS[name[4:]](), key)}
        return EnvSource(name, {"action_scaling": env.action_scaling, "env_kwargs": changed})
    source = getattr(env, "source", None)
    return source if isinstance(source, EnvSource) else None
