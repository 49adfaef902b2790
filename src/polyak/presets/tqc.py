"""Presets of TQC, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

TWO = {"critics": {"num_critics": 2}}
WIDE = {"actor": {"hidden": (400, 300)}, "critics": {"hidden": (400, 300), "num_critics": 2}}
LUNAR_LANDER = {**WIDE, "learning_rate": LinearOverTraining(7.3e-4), "tau": 0.01, "learning_starts": 10_000}
BIPEDAL_WALKER = {
    **WIDE,
    "learning_rate": 7.3e-4,
    "gamma": 0.98,
    "tau": 0.02,
    "replay": {"capacity": 300_000},
    "learning_starts": 10_000,
}
MUJOCO = {**TWO, "learning_starts": 10_000}

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(20_000, 1, {**TWO, "learning_rate": 1e-3, "replay": {"capacity": 20_000}}, "RL Zoo"),
    "LunarLanderContinuous-v3": Preset(500_000, 1, LUNAR_LANDER, "RL Zoo"),
    "BipedalWalker-v3": Preset(500_000, 1, BIPEDAL_WALKER, "RL Zoo without gSDE"),
    "HalfCheetah-v5": Preset(1_000_000, 1, MUJOCO, "RL Zoo"),
    "Hopper-v5": Preset(1_000_000, 1, {**MUJOCO, "dropped_quantiles": 5}, "RL Zoo"),
    "Walker2d-v5": Preset(1_000_000, 1, MUJOCO, "RL Zoo"),
    "Ant-v5": Preset(1_000_000, 1, MUJOCO, "RL Zoo"),
    "Humanoid-v5": Preset(2_000_000, 1, MUJOCO, "RL Zoo"),
}
