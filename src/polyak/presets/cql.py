"""The preset of conservative Q-learning."""

from polyak.presets.preset import Preset

# The actor's learning rate of the paper; a higher one follows errors of the values.
DEFAULT = Preset(1_000_000, 8, {"actor_learning_rate": 1e-4}, "CQL for Box actions, learned from a data set")
