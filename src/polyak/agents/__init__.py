"""The algorithms, one file each, by the name that the command line gives them."""

import importlib
from typing import Any

AGENTS = {"ppo": "polyak.agents.ppo:PPO"}
"""Where the class of each algorithm is, as `"module:Class"`; it is imported once it is used, because JAX takes most of a
second to import. Add an entry to train an algorithm of your own through `polyak.cli.main`."""


def agent_class(name: str) -> Any:
    """The class of an algorithm in `AGENTS`, imported."""
    module, _, class_name = AGENTS[name].partition(":")
    return getattr(importlib.import_module(module), class_name)
