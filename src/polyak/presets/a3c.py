"""Presets of A3C (Mnih et al. 2016, arXiv:1602.01783): A2C's presets, trained by workers that push gradients."""

import dataclasses

from polyak.presets import a2c
from polyak.presets.preset import Preset

WORKERS = 4


def _pushed(preset: Preset) -> Preset:
    return dataclasses.replace(preset, source=f"A2C: {preset.source}", loop="asynchronous", workers=WORKERS)


DEFAULT = dataclasses.replace(_pushed(Preset(1_000_000, 8, {}, "")), source="A3C: A2C whose workers send gradients")

PRESETS: dict[str, Preset] = {env_id: _pushed(preset) for env_id, preset in a2c.PRESETS.items()}
