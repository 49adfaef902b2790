"""The algorithms, by their command-line names."""

import importlib
from typing import Any

AGENTS = {"dqn": "polyak.agents.dqn:DQN", "ppo": "polyak.agents.ppo:PPO"}
"""The class of each algorithm as `"module:Class"`, imported on first use because importing JAX is slow. Add an entry to train
your own algorithm with `polyak.cli.main`."""


def agent_class(name: str) -> Any:
    """Import the class of an algorithm in `AGENTS`."""
    module, _, class_name = AGENTS[name].partition(":")
    return getattr(importlib.import_module(module), class_name)
