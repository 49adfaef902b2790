"""The preset of TD3+BC."""

from polyak.presets.preset import Preset

DEFAULT = Preset(1_000_000, 8, {"normalize_obs": True}, "TD3+BC for Box actions, learned from a data set")
