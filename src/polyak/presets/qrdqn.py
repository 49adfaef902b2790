"""Presets of QR-DQN, by environment."""

from polyak.presets import dqn
from polyak.presets.preset import LinearOverTraining, Preset

CARTPOLE = {**dqn.PLAIN_CARTPOLE, "learning_rate": LinearOverTraining(2.3e-3), "num_quantiles": 10}

ATARI = {**dqn.ATARI, "learning_rate": 5e-5, "adam_eps": 3.125e-4, "num_quantiles": 200}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(50_000, 8, CARTPOLE, "polyak's preset"),
    "ALE/...": Preset(10_000_000, 8, ATARI, "Dabney et al. 2018, with 8 environments"),
}
