"""Presets of NAF, by environment."""

from polyak.presets.preset import Preset

PENDULUM = {
    "gamma": 0.98,
    "learning_rate": 1e-3,
    "replay": {"capacity": 20_000},
    "learning_starts": 1_000,
    "exploration": "gaussian",
    "exploration_noise": 0.1,
}

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(20_000, 1, PENDULUM, "DDPG's numbers"),
}
