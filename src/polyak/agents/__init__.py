"""The algorithms, by their command-line names."""

import importlib
from typing import Any

AGENTS = {
    "c51": "polyak.agents.c51:C51",
    "dqn": "polyak.agents.dqn:DQN",
    "iqn": "polyak.agents.iqn:IQN",
    "ppo": "polyak.agents.ppo:PPO",
    "qrdqn": "polyak.agents.qr_dqn:QRDQN",
}
"""The class of each algorithm as `"module:Class"`, imported on first use because importing JAX is slow. Add an entry to train
your own algorithm with `polyak.cli.main`."""


def agent_class(name: str) -> Any:
    """Import the class of an algorithm in `AGENTS`."""
    module, _, class_name = AGENTS[name].partition(":")
    return getattr(importlib.import_module(module), class_name)
