"""polyak train ALGO ENV: parses the flags. JAX is imported after that, so that --help and usage errors come at once."""

import dataclasses
from typing import Any

from polyak.agents import AGENTS
from polyak.cli.agent_flags import agent_flags
from polyak.cli.flags import NetworkFlags, TrainFlags, UsageError, fail, parse, print_usage
from polyak.core.names import unknown_name
from polyak.presets import preset


def train(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        names = f"ALGO: {', '.join(AGENTS)}; ENV: see `polyak list`."
        text = f"polyak train ALGO ENV [flags]\n\n{names}\n`polyak train ppo CartPole-v1 --help` shows every flag."
        return print_usage(text, arguments)
    algorithm = arguments[0]
    if algorithm not in AGENTS:
        return fail(unknown_name(algorithm, AGENTS, "algorithm"))
    if len(arguments) < 2 or arguments[1].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            return train([algorithm, "CartPole-v1", *arguments[1:]])
        return fail(f"an environment is missing, e.g.: polyak train {algorithm} CartPole-v1")
    env_id = arguments[1]
    try:
        flags = _parse(algorithm, env_id, arguments[2:])
    except UsageError as error:
        return fail(error)
    from polyak.cli.new_run import train_new_run

    return train_new_run(algorithm, env_id, flags.train, flags.agent, flags.network)


def _parse(algorithm: str, env_id: str, arguments: list[str]) -> Any:
    defaults = preset(algorithm, env_id)
    agent = agent_flags(AGENTS[algorithm], defaults.values)
    groups: list[Any] = [
        ("train", TrainFlags, dataclasses.field(default=TrainFlags(defaults.env_steps, defaults.num_envs))),
        ("agent", agent, dataclasses.field(default_factory=agent)),
        ("network", NetworkFlags, dataclasses.field(default=NetworkFlags())),
    ]
    description = f"Train {algorithm} in {env_id}. Settings by default: {defaults.source}."
    prog = f"polyak train {algorithm} {env_id}"
    return parse(dataclasses.make_dataclass("Flags", groups), arguments, prog=prog, description=description)
