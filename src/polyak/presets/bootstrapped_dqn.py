"""Presets of bootstrapped DQN, by environment."""

from polyak.presets import dqn
from polyak.presets.preset import Preset

CARTPOLE = {name: value for name, value in dqn.CARTPOLE.items() if name != "epsilon"}

ATARI = {name: value for name, value in dqn.ATARI.items() if name != "epsilon"}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(50_000, 8, CARTPOLE, "DQN's numbers"),
    "ALE/...": Preset(10_000_000, 8, ATARI, "DQN's numbers, with the heads of Osband et al. 2016"),
}
