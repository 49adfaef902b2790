"""Presets of C51, by environment."""

from polyak.presets import dqn
from polyak.presets.preset import Preset

CARTPOLE = {**dqn.PLAIN_CARTPOLE, "v_min": 0.0, "v_max": 100.0}

ATARI = {**dqn.ATARI, "learning_rate": 2.5e-4, "adam_eps": 3.125e-4}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(50_000, 8, CARTPOLE, "polyak's preset"),
    "ALE/...": Preset(10_000_000, 8, ATARI, "Bellemare et al. 2017 and Dopamine, with 8 environments"),
}
