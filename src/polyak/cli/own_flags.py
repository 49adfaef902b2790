"""The flags that name an agent, an environment and a wrapper of the person's own; parsed without importing JAX."""

import dataclasses
import shlex
from typing import Annotated, TypeAlias

import tyro

from polyak.cli.flags import default_hint, parse_settings


@dataclasses.dataclass(frozen=True)
class OwnFlags:
    """An agent and an environment of your own. Modules are found in the working directory too."""

    agent: Annotated[str | None, default_hint("ALGO's", "MODULE:NAME")] = None
    """class of an agent, or function of the environment's spec that makes one, in place of ALGO"""
    env: Annotated[str | None, default_hint("ENV", "MODULE:NAME")] = None
    """function or class that makes a Gymnasium environment, in place of ENV"""
    wrapper: Annotated[str | None, default_hint("none", "MODULE:NAME")] = None
    """Gymnasium wrapper around each environment"""
    env_kwargs: Annotated[tuple[str, ...] | None, default_hint("its own", "NAME=VALUE [NAME=VALUE ...]")] = None
    """settings of the environment, numbers, True, False or texts: `--env-kwargs frameskip=2 xml_file=mine.xml`"""

    @property
    def kwargs(self) -> dict[str, bool | int | float | str]:
        """The settings of the environment."""
        return {} if self.env_kwargs is None else parse_settings("--env-kwargs", self.env_kwargs)

    @property
    def stored(self) -> dict[str, str | list[str]]:
        """What a run stores of these flags: `env` and `wrapper`, and the names of texts in `env_kwargs`."""
        named = {"env": self.env, "wrapper": self.wrapper}
        texts = [name for name, value in self.kwargs.items() if isinstance(value, str)]
        return {name: value for name, value in {**named, "env_kwargs": texts}.items() if value}

    def __str__(self) -> str:
        """The flags that are set, as they are passed."""
        words: dict[str, tuple[str, ...]] = {
            f"--{field.name.replace('_', '-')}": value if isinstance(value, tuple) else (value,)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        return shlex.join(word for flag, values in words.items() for word in (flag, *values))


def resume_flags(own: OwnFlags, ray_address: str | None) -> str:
    """The flags of `polyak resume` that name what a run does not store."""
    address = "" if ray_address is None else f"--ray-address {shlex.quote(ray_address)}"
    return " ".join(filter(None, [str(own), address]))


@dataclasses.dataclass(frozen=True)
class OwnFlagsOfRun(OwnFlags):
    """What a run does not store: an agent and an environment of your own, and texts in the environment's settings."""

    agent: Annotated[str | None, default_hint("the run's", "MODULE:NAME")] = None
    """class of an agent, or function of the environment's spec that makes one, in place of the run's"""
    env: Annotated[str | None, default_hint("the run's", "MODULE:NAME")] = None
    """function or class that makes a Gymnasium environment, in place of the run's"""
    env_kwargs: Annotated[tuple[str, ...] | None, default_hint("the run's", "NAME=VALUE [NAME=VALUE ...]")] = None
    """settings of the environment, which change the run's: `--env-kwargs frameskip=2 xml_file=mine.xml`"""


GROUP = tyro.conf.arg(name="your own agent and environment")
"""In `--help` the title of these flags."""

OwnGroup: TypeAlias = Annotated[OwnFlags, GROUP]
OwnGroupOfRun: TypeAlias = Annotated[OwnFlagsOfRun, GROUP]
