"""Presets of BRO, by environment."""

from polyak.presets.preset import Preset

# fmt: off
ACTOR = {"residual": "post_norm", "orthogonal": True, "squash_log_std": True, "log_std": -4.0}
PENDULUM = {
    "actor": {**ACTOR, "hidden": (64,)}, "critics": {"hidden": (64, 64), "residual": "post_norm"}, "num_quantiles": 25,
    "reset_period": 25_000, "learning_starts": 200, "replay": {"capacity": 20_000},
}
# fmt: on

DEFAULT = Preset(1_000_000, 1, {"reset_period": 2_500_000}, "BRO: SAC with large networks, quantiles, resets and optimism")

PRESETS: dict[str, Preset] = {"Pendulum-v1": Preset(5_000, 1, PENDULUM, "polyak's preset")}
