"""polyak list: algorithms, presets and environments."""

import textwrap

from polyak import envs
from polyak.agents import AGENTS
from polyak.cli.flags import usage
from polyak.presets import PRESETS


def listing(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments:
        return usage("polyak list\n\nAlgorithms, presets and environments; it takes no arguments.", arguments)
    print("algorithms")
    for name, agent in AGENTS.items():
        print(f"  {name:6} {(agent.__doc__ or '').strip().splitlines()[0]}")
    print("\npresets (algorithm, environment, env_steps, source)")
    for (algorithm, env_id), found in PRESETS.items():
        print(f"  {algorithm:6} {env_id:28} {found.env_steps:>10,}  {found.source}")
    print("\nenvironments")
    for home, names in envs.names().items():
        text = f"{home}: {', '.join(names) if names else 'not installed'}"
        print(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    return 0
