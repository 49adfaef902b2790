"""Presets of FastTD3, by environment."""

from polyak.presets.preset import Preset

# fmt: off
# The authors' numbers for MuJoCo Playground, whose replay has 10,240 steps of each of 1,024 environments.
PLAYGROUND = {
    "batch_size": 32_768, "updates_per_step": 2 / 1024, "gamma": 0.97, "v_min": -10.0, "v_max": 10.0,
    "learning_starts": 10_240, "replay": {"capacity": 10_485_760},
}
PENDULUM = {
    "actor": {"hidden": (64, 64), "std": "fixed"}, "critics": {"hidden": (64, 64)}, "batch_size": 512,
    "updates_per_step": 1 / 16, "learning_rate": 1e-3, "target_noise": 0.1, "v_min": -300.0, "v_max": 0.0,
    "learning_starts": 2_048, "replay": {"capacity": 100_000},
}
# fmt: on

DEFAULT = Preset(100_000 * 1024, 1024, PLAYGROUND, "FastTD3: TD3 with distributions of returns, for 1,024 environments")

PRESETS: dict[str, Preset] = {"Pendulum-v1": Preset(60_000, 64, PENDULUM, "polyak's preset")}
