"""The flags that name a user-defined agent, environment and wrapper; parsed without importing JAX."""

import dataclasses
import shlex
from typing import Annotated, TypeAlias

import tyro

from polyak.cli.flags import default_hint, parse_settings


@dataclasses.dataclass(frozen=True)
class EnvFlags:
    """A user-defined environment. Modules are also found in the working directory."""

    env: Annotated[str | None, default_hint("ENV", "MODULE:NAME")] = None
    """function or class that creates a Gymnasium environment, or class of an environment in JAX; replaces ENV"""
    wrapper: Annotated[str | None, default_hint("none", "MODULE:NAME")] = None
    """Gymnasium wrapper around each environment"""
    env_kwargs: Annotated[tuple[str, ...] | None, default_hint("none", "NAME=VALUE [NAME=VALUE ...]")] = None
    """settings of the environment; numbers, True, False or texts: `--env-kwargs frameskip=2 xml_file=mine.xml`"""

    @property
    def kwargs(self) -> dict[str, bool | int | float | str]:
        """Settings of the environment."""
        return {} if self.env_kwargs is None else parse_settings("--env-kwargs", self.env_kwargs)


@dataclasses.dataclass(frozen=True)
class UserFlags(EnvFlags):
    """A user-defined agent and environment. Modules are also found in the working directory."""

    agent: Annotated[str | None, default_hint("ALGO's", "MODULE:NAME")] = None
    """class of an agent, or function that creates an agent from the environment's spec; replaces ALGO"""

    @property
    def stored(self) -> dict[str, str | list[str]]:
        """The flags as stored by a run: `env` and `wrapper`, and the names of texts in `env_kwargs`."""
        named = {"env": self.env, "wrapper": self.wrapper}
        texts = [name for name, value in self.kwargs.items() if isinstance(value, str)]
        return {name: value for name, value in {**named, "env_kwargs": texts}.items() if value}

    def __str__(self) -> str:
        """Return the flags that are set, in command-line syntax."""
        words: dict[str, tuple[str, ...]] = {
            f"--{field.name.replace('_', '-')}": value if isinstance(value, tuple) else (value,)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        return shlex.join(word for flag, values in words.items() for word in (flag, *values))


def resume_flags(user: UserFlags, ray_address: str | None) -> str:
    """Return the flags of `polyak resume` for user-defined code and the Ray cluster, which a run does not store."""
    address = "" if ray_address is None else f"--ray-address {shlex.quote(ray_address)}"
    return " ".join(filter(None, [str(user), address]))


@dataclasses.dataclass(frozen=True)
class UserFlagsOfRun(UserFlags):
    """A user-defined agent and environment, and texts in the environment's settings, which a run does not store."""

    agent: Annotated[str | None, default_hint("the run's", "MODULE:NAME")] = None
    """class of an agent, or function that creates an agent from the environment's spec; replaces the run's"""
    env: Annotated[str | None, default_hint("the run's", "MODULE:NAME")] = None
    """function or class that creates a Gymnasium environment, or class of an environment in JAX; replaces the run's"""
    env_kwargs: Annotated[tuple[str, ...] | None, default_hint("the run's", "NAME=VALUE [NAME=VALUE ...]")] = None
    """settings of the environment, which update the run's: `--env-kwargs frameskip=2 xml_file=mine.xml`"""


GROUP = tyro.conf.arg(name="user-defined agent and environment")
"""Title of these flags in `--help`."""

UserGroup: TypeAlias = Annotated[UserFlags, GROUP]
UserGroupOfRun: TypeAlias = Annotated[UserFlagsOfRun, GROUP]
