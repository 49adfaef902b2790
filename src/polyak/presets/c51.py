"""Presets of C51, by environment."""

from polyak.presets import dqn
from polyak.presets.preset import LinearOverTraining, Preset

CARTPOLE = {
    "network": {"hidden": (128, 128)},
    "num_steps": 4,
    "updates_per_step": 0.5,
    "batch_size": 64,
    "learning_rate": LinearOverTraining(1e-3),
    "n_step": 3,
    "target_period": 100,
    "epsilon": LinearOverTraining(1.0, 0.04, fraction=0.16),
    "v_min": 0.0,
    "v_max": 100.0,
}

ATARI = {**dqn.ATARI, "learning_rate": 2.5e-4, "adam_eps": 3.125e-4}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(50_000, 8, CARTPOLE, "polyak's preset"),
    "ALE/...": Preset(10_000_000, 8, ATARI, "Bellemare et al. 2017 and Dopamine, with 8 environments"),
}
