"""Policies that other libraries saved: `polyak.importers.from_stable_baselines3("model.zip", env.spec)`."""

from polyak.importers.brax_ppo import from_brax
from polyak.importers.from_stable_baselines import from_stable_baselines3
from polyak.importers.tf_agents import from_tf_agents

__all__ = ["from_brax", "from_stable_baselines3", "from_tf_agents"]
