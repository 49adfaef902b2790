"""Presets of DQN with random network distillation, by environment."""

from polyak.presets import dqn
from polyak.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    "ALE/...": Preset(10_000_000, 8, dqn.ATARI, "DQN's numbers"),
}
