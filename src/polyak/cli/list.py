"""polyak list: algorithms, presets and environments."""

import shutil
import textwrap

from polyak import envs
from polyak.agents import AGENTS
from polyak.cli.agent_source import agent_summary
from polyak.presets import DEFAULTS, PRESETS

MAX_WIDTH = 110
"""Maximum number of columns of a line, also in a file."""


def list_names(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments:
        # Lazy: importing the parser of flags takes a fifth of the command's time.
        from polyak.cli.flags import fail, print_usage

        if arguments[0] not in ("-h", "--help"):
            return fail(f"polyak list takes no arguments, got {' '.join(arguments)}")
        return print_usage("polyak list\n\nAlgorithms, presets and environments.", arguments)
    width = max(map(len, AGENTS))
    print("algorithms")
    for name, agent in AGENTS.items():
        _print(f"{name:{width}} {DEFAULTS[name].source if name in DEFAULTS else agent_summary(agent)}")
    print("\npresets (algorithm, environment, env_steps, source)")
    for (algorithm, env_id), preset in PRESETS.items():
        _print(f"{algorithm:{width}} {env_id:28} {preset.env_steps:>10,}  {preset.source}")
    print("\nenvironments")
    for source, names in envs.names().items():
        # Each source has the name of its extra.
        missing = f"not installed; pip install 'polyak[{source}]'"
        _print(f"{source}: {', '.join(names) or missing}")
    return 0


def _print(text: str) -> None:
    """Print an entry, wrapped to the width of the terminal."""
    width = min(shutil.get_terminal_size((MAX_WIDTH, 0)).columns, MAX_WIDTH)
    lines = textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    print("\n".join(lines))
