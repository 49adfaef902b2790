"""Presets of Rainbow (Hessel et al. 2018, arXiv:1710.02298): C51 with all of its parts switched on, by environment."""

from polyak.presets import dqn
from polyak.presets.preset import LinearOverTraining, Preset

# fmt: off
PRIORITIZED = {"kind": "prioritized", "alpha": 0.5, "beta": LinearOverTraining(0.4, 1.0)}
RAINBOW = {
    "network": {"hidden": (512,), "dueling": True, "noisy": True},
    "double": True, "n_step": 3, "replay": PRIORITIZED, "epsilon": 0.0,
}

CARTPOLE = {
    **RAINBOW, "network": {"hidden": (128, 128), "dueling": True, "noisy": True}, "num_steps": 4, "updates_per_step": 0.5,
    "batch_size": 64, "learning_rate": LinearOverTraining(1e-3), "target_period": 100, "v_min": 0.0, "v_max": 100.0,
}

# Of the paper's table 1, but for a replay of half the size, 3.5 GB, and 8 environments.
ATARI = {**dqn.ATARI, **RAINBOW, "replay": {**dqn.ATARI_REPLAY, **PRIORITIZED}}
# fmt: on

DEFAULT = Preset(1_000_000, 8, RAINBOW, "Rainbow: C51 with noisy dueling layers, priorities and three steps")

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(50_000, 8, CARTPOLE, "polyak's preset"),
    "ALE/...": Preset(10_000_000, 8, ATARI, "Hessel et al. 2018, with 8 environments"),
}
