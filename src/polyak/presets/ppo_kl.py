"""Presets of PPOKL, by environment."""

from polyak.presets import ppo
from polyak.presets.preset import Preset

# Clipped, with an L2 penalty in place of a KL penalty: without it a few episodes in a hundred fail, and actions oscillate
# between their bounds (docs/results.md).
INVERTED_DOUBLE_PENDULUM = {**ppo.INVERTED_DOUBLE_PENDULUM, "clip_range": 0.2, "kl_beta": None, "l2_policy": 0.01}

PRESETS: dict[str, Preset] = {
    "InvertedDoublePendulum-v5": Preset(1_000_000, 32, INVERTED_DOUBLE_PENDULUM, ppo.THIRTY_TWO_ENVS),
}
