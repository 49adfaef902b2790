"""Presets of IMPALA, by environment."""

from polyak.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(500_000, 8, {"num_steps": 5}, "those of A2C"),
}
