"""polyak list: algorithms, presets and environments."""

import textwrap

from polyak import envs
from polyak.agents import AGENTS
from polyak.cli.agent_source import agent_summary
from polyak.presets import DEFAULTS, PRESETS


def list_names(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments:
        # Imported when needed: the parser of flags takes a fifth of the command's time.
        from polyak.cli.flags import fail, print_usage

        if arguments[0] not in ("-h", "--help"):
            return fail(f"polyak list takes no arguments, got {' '.join(arguments)}")
        return print_usage("polyak list\n\nAlgorithms, presets and environments.", arguments)
    print("algorithms")
    for name, agent in AGENTS.items():
        print(f"  {name:7} {DEFAULTS[name].source if name in DEFAULTS else agent_summary(agent)}")
    print("\npresets (algorithm, environment, env_steps, source)")
    for (algorithm, env_id), preset in PRESETS.items():
        print(f"  {algorithm:7} {env_id:28} {preset.env_steps:>10,}  {preset.source}")
    print("\nenvironments")
    for source, names in envs.names().items():
        text = f"{source}: {', '.join(names) if names else 'not installed'}"
        print(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    return 0
