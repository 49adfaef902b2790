"""Presets of behavioral cloning, by environment."""

from polyak.presets.preset import Preset

PRESETS: dict[str, Preset] = {}
