"""Presets of QT-Opt, by environment."""

from polyak.presets.preset import Preset

PENDULUM = {
    "critics": {"hidden": (64, 64), "num_critics": 1},
    "gamma": 0.98,
    "learning_rate": 1e-3,
    "batch_size": 64,
    "replay": {"capacity": 20_000},
    "learning_starts": 1_000,
    "num_samples": 32,
    "num_elites": 4,
    "exploration": "gaussian",
    "exploration_noise": 0.1,
}

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(20_000, 1, PENDULUM, "polyak's preset"),
}
