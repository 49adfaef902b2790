"""Presets of discrete conservative Q-learning, by environment."""

from polyak.presets.preset import Preset

PRESETS: dict[str, Preset] = {}
