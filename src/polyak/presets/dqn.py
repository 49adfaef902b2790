"""Presets of DQN, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

# With the Zoo's 128 gradient steps at a time and a target copied every 10 of them, two of three seeds failed; with a constant
# learning rate two of ten ended below 480.
PLAIN_CARTPOLE = {
    "network": {"hidden": (128, 128)},
    "num_steps": 4,
    "updates_per_step": 0.5,
    "batch_size": 64,
    "learning_rate": LinearOverTraining(1e-3),
    "n_step": 3,
    "target_period": 100,
    "epsilon": LinearOverTraining(1.0, 0.04, fraction=0.16),
}
# Without layer normalization action values passed their bound of 1 / (1 - γ) = 100 with two of 15 seeds in jax/CartPole-v1,
# which ended at 130 and 191; with it the lowest of 30 ended at 463, and with half the learning rate of 20 at 495.
CARTPOLE = {
    **PLAIN_CARTPOLE,
    "network": {"hidden": (128, 128), "norm": "layer"},
    "learning_rate": LinearOverTraining(5e-4),
}

# With layer normalization four seeds in MountainCar-v0 end at -103.6 on average, with these settings but without it at -110.2.
NORMALIZED = {
    "network": {"hidden": (128, 128), "norm": "layer"},
    "num_steps": 2,
    "updates_per_step": 0.5,
    "batch_size": 128,
}
ACROBOT = {
    **NORMALIZED,
    "learning_rate": LinearOverTraining(1e-3),
    "n_step": 3,
    "target_period": 300,
    "epsilon": LinearOverTraining(1.0, 0.05, fraction=0.12),
}
MOUNTAIN_CAR = {
    **NORMALIZED,
    "replay": {"capacity": 120_000},
    "learning_rate": LinearOverTraining(2e-3),
    "n_step": 5,
    "target_period": 600,
    "epsilon": LinearOverTraining(1.0, 0.05, fraction=0.3),
}
# With a target copied every 500 gradient steps, and half as many of these, one seed ended at 145.
LUNAR_LANDER = {
    **NORMALIZED,
    "replay": {"capacity": 300_000},
    "learning_rate": LinearOverTraining(1e-3),
    "n_step": 3,
    "tau": 0.005,
    "target_period": 1,
    "epsilon": LinearOverTraining(1.0, 0.05, fraction=0.15),
}


# As many transitions are learned from as in the paper, which takes a gradient step on 32 at each frame; fewer and larger steps
# are faster. The paper has a convolution, one-step targets and a target network that is copied every 1000 frames.
MINATAR = {
    "network": {"hidden": (256,), "norm": "layer"},
    "num_steps": 2,
    "updates_per_step": 0.25,
    "batch_size": 128,
    "learning_starts": 5_000,
    "learning_rate": LinearOverTraining(5e-4),
    "n_step": 3,
    "target_period": 500,
    "epsilon": LinearOverTraining(1.0, 0.05, fraction=0.1),
}
# One seed of 1 million steps ended at 1.0 with the replay and the gradient steps of Breakout, at 2.3 with ten times the replay,
# and there too with a sixteenth of the gradient steps, which is four times as fast.
ASTERIX = {
    **MINATAR,
    "network": {"hidden": (256, 256), "norm": "layer"},
    "replay": {"capacity": 1_000_000},
    "updates_per_step": 1 / 64,
    "target_period": 125,
}

ATARI_REPLAY = {"capacity": 500_000, "frame_stack": 4}
# Dopamine's with Adam, but for double Q-learning, the Huber loss, gradients clipped to a norm of 10, a replay of half the size,
# 3.5 GB, and 8 environments.
ATARI = {
    "num_steps": 1,
    "updates_per_step": 0.25,
    "batch_size": 32,
    "replay": ATARI_REPLAY,
    "learning_starts": 20_000,
    "learning_rate": 6.25e-5,
    "adam_eps": 1.5e-4,
    "target_period": 2_000,
    "epsilon": LinearOverTraining(1.0, 0.01, fraction=0.025),
}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(50_000, 8, CARTPOLE, "polyak's preset"),
    "Acrobot-v1": Preset(100_000, 8, ACROBOT, "polyak's preset"),
    "MountainCar-v0": Preset(120_000, 8, MOUNTAIN_CAR, "polyak's preset"),
    "LunarLander-v3": Preset(300_000, 8, LUNAR_LANDER, "polyak's preset"),
    "gymnax/Breakout-MinAtar": Preset(1_000_000, 32, MINATAR, "Young and Tian 2019 in part, with dense layers"),
    "gymnax/Asterix-MinAtar": Preset(5_000_000, 32, ASTERIX, "Young and Tian 2019 in part, with dense layers"),
    "ALE/...": Preset(10_000_000, 8, ATARI, "Mnih et al. 2015 and Dopamine, with 8 environments"),
}
