"""Presets of conservative Q-learning, by environment."""

from polyak.presets.preset import Preset

# The actor's learning rate of the paper; a higher one follows errors of the values.
DEFAULT = Preset(1_000_000, 8, {"actor_learning_rate": 1e-4}, "the paper's")

PRESETS: dict[str, Preset] = {}
