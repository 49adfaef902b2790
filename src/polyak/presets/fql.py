"""Presets of flow Q-learning, by environment."""

from polyak.presets.preset import Preset

PRESETS: dict[str, Preset] = {}
