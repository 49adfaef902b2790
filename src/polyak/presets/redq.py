"""Presets of REDQ (Chen et al. 2021, arXiv:2101.05982): SAC with ten critics and a high update ratio, by environment."""

from polyak.presets.preset import Preset

# fmt: off
REDQ = {
    "critics": {"num_critics": 10}, "num_target_critics": 2, "updates_per_step": 20.0, "policy_delay": 20,
    "learning_starts": 5_000,
}
PENDULUM = {
    **REDQ, "actor": {"hidden": (64, 64)}, "critics": {"hidden": (64, 64), "num_critics": 10}, "learning_starts": 200,
    "replay": {"capacity": 20_000},
}
# fmt: on

AUTHORS = "the authors' code, github.com/watchernyu/REDQ"
LENGTHS_AND_ENTROPIES = {
    "Hopper-v5": (125_000, -1.0),
    "Walker2d-v5": (300_000, -3.0),
    "HalfCheetah-v5": (400_000, -3.0),
    "Ant-v5": (300_000, -4.0),
    "Humanoid-v5": (300_000, -2.0),
}
"""Environment steps and target entropy in each environment, of MBPO, which the authors compare with."""

DEFAULT = Preset(300_000, 1, REDQ, "REDQ: SAC with a random pair of ten critics, and twenty gradient steps a step")

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(5_000, 1, PENDULUM, "polyak's preset"),
    **{
        name: Preset(steps, 1, {**REDQ, "target_entropy": entropy}, AUTHORS)
        for name, (steps, entropy) in LENGTHS_AND_ENTROPIES.items()
    },
}
