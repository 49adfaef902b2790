"""Presets of SR-SAC (D'Oro et al. 2023, openreview.net/forum?id=OpC-9aBBVJe): SAC with many gradient steps and resets."""

from polyak.presets.preset import Preset

# fmt: off
ACTOR = {"squash_log_std": True, "log_std": -4.0}
SR_SAC = {
    "actor": ACTOR, "alpha_loss": "alpha", "updates_per_step": 32.0, "reset_period": 2_560_000, "learning_starts": 10_000,
}
PENDULUM = {
    **SR_SAC, "actor": {**ACTOR, "hidden": (64, 64)}, "critics": {"hidden": (64, 64)}, "updates_per_step": 16.0,
    "reset_period": 20_000, "learning_starts": 200, "replay": {"capacity": 20_000},
}
# fmt: on

DEFAULT = Preset(500_000, 1, SR_SAC, "SR-SAC: SAC with 32 gradient steps a step, and a reset after 80,000 steps")

PRESETS: dict[str, Preset] = {"Pendulum-v1": Preset(5_000, 1, PENDULUM, "polyak's preset")}
