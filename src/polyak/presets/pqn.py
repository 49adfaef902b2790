"""Presets of PQN, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

CARTPOLE = {
    "network": {"hidden": (128, 128), "norm": "layer"},
    "num_steps": 16,
    "num_epochs": 4,
    "num_minibatches": 4,
    "learning_rate": LinearOverTraining(1e-3),
    "q_lambda": 0.95,
    "epsilon": LinearOverTraining(1.0, 0.05, fraction=0.2),
}

# The authors' settings for MinAtar, with dense layers on the flattened grid in place of a convolution.
MINATAR = {
    "network": {"hidden": (256,), "norm": "layer"},
    "num_steps": 32,
    "num_epochs": 2,
    "num_minibatches": 32,
    "learning_rate": LinearOverTraining(5e-4),
    "q_lambda": 0.65,
    "epsilon": LinearOverTraining(1.0, 0.05, fraction=0.1),
}
# One seed of 1 million steps: 4.4 with these layers; 2.1 with a learning rate of 2.5e-4.
ASTERIX = {**MINATAR, "network": {"hidden": (256, 256), "norm": "layer"}}

# The authors' settings for Atari, with an eighth of the environments and minibatches of 32, a size for a few cores.
ATARI = {
    "num_steps": 32,
    "num_epochs": 2,
    "num_minibatches": 16,
    "learning_rate": LinearOverTraining(2.5e-4),
    "q_lambda": 0.65,
    "epsilon": LinearOverTraining(1.0, 0.01, fraction=0.1),
}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(300_000, 32, CARTPOLE, "polyak's preset"),
    "gymnax/Breakout-MinAtar": Preset(2_000_000, 128, MINATAR, "Gallici et al. 2024, with dense layers"),
    "gymnax/SpaceInvaders-MinAtar": Preset(5_000_000, 128, MINATAR, "Gallici et al. 2024, with dense layers"),
    "gymnax/Freeway-MinAtar": Preset(5_000_000, 128, MINATAR, "Gallici et al. 2024, with dense layers"),
    "gymnax/Asterix-MinAtar": Preset(5_000_000, 128, ASTERIX, "Gallici et al. 2024, with dense layers"),
    "ALE/...": Preset(10_000_000, 16, ATARI, "Gallici et al. 2024, with 16 environments"),
}
