"""Flags of intrinsic rewards: an agent around the agent of ALGO."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import tyro

from polyak.agents import AGENTS, WRAPPERS, agent_class
from polyak.cli.agent_flags import agent_flags
from polyak.cli.agent_source import class_sources
from polyak.cli.flags import UsageError, default_hint, hide
from polyak.presets import preset
from polyak.presets.preset import with_length

GROUP = tyro.conf.arg(name="intrinsic reward")
"""Title of these flags in `--help`."""

PREFIX = "rnd_"
BASE = "OnPolicyAgent"
"""The base of the agents that learn from rollouts, which RND surrounds."""


@dataclasses.dataclass(frozen=True)
class IntrinsicFlags:
    """Rewards for what is new, in addition to the environment's."""

    intrinsic_reward: Annotated[Literal["rnd"] | None, default_hint("none", "{rnd}")] = None
    """rnd: random network distillation around ppo, ppo_kl, a2c, impala or reinforce; rnd_dqn has it built in"""


def intrinsic_flags() -> type[IntrinsicFlags]:
    """Create `IntrinsicFlags` with a flag `--rnd-NAME` for each setting of `polyak.RND`."""
    settings = agent_flags(WRAPPERS["rnd"], {}, prefix=PREFIX)
    return dataclasses.make_dataclass(
        IntrinsicFlags.__name__,
        [(field.name, field.type, dataclasses.field(default=field.default)) for field in dataclasses.fields(settings)],
        bases=(IntrinsicFlags,),
        namespace={"__doc__": IntrinsicFlags.__doc__},
        frozen=True,
    )


def intrinsic_flags_in_help(algorithm: str | None) -> type[IntrinsicFlags]:
    """Return `intrinsic_flags()`, hidden for `--agent` and for algorithms that learn from no rollouts or send gradients."""
    flags = intrinsic_flags()
    bases = [declaration.name for declaration in class_sources(AGENTS[algorithm])] if algorithm else []
    if BASE in bases and preset(algorithm or "", "").loop == "auto":
        return flags
    return hide(flags, {field.name for field in dataclasses.fields(flags)})


def add_intrinsic_reward(agent: Any, given: Mapping[str, Any], env_steps: int) -> Any:
    """Return the agent with the intrinsic reward that flags set around it; without one, the agent itself.

    Args:
        given: the flags of `intrinsic_flags()` that are set, also to their defaults.
        env_steps: length of training.

    Raises:
        UsageError: a setting has no intrinsic reward.
        TypeError, ValueError: the agent does not learn from rollouts, or a setting is out of range.
    """
    changes = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    if given.get("intrinsic_reward") is None:
        if changes:
            raise UsageError(f"--{next(iter(changes)).replace('_', '-')} needs --intrinsic-reward rnd")
        return agent
    settings = {name.removeprefix(PREFIX): with_length(value, env_steps) for name, value in changes.items()}
    return agent_class("rnd")(agent, **settings)
