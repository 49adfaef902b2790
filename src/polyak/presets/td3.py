"""Presets of TD3, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

WIDE = {"actor": {"hidden": (400, 300), "std": "fixed"}, "critics": {"hidden": (400, 300)}}
PENDULUM = {"gamma": 0.98, "replay": {"capacity": 20_000}, "learning_starts": 1_000}
BOX2D = {**WIDE, "gamma": 0.98, "replay": {"capacity": 200_000}, "learning_starts": 10_000}
MUJOCO = {**WIDE, "learning_starts": 10_000}
# Not a third of the multiplications of the Zoo's: batches near the 100 of the paper, and smaller layers.
HALF_CHEETAH = {
    "actor": {"hidden": (256, 256), "std": "fixed"}, "critics": {"hidden": (256, 256)}, "batch_size": 128,
    "learning_starts": 10_000,
}  # fmt: skip
# A quarter of the multiplications of the Zoo's: half as many gradient steps, on half as many transitions. One of three seeds
# stood still in Hopper-v5.
LIGHT = {
    "actor": {"hidden": (256, 256), "std": "fixed"}, "critics": {"hidden": (256, 256), "norm": "layer"},
    "updates_per_step": 0.5, "batch_size": 128, "n_step": 3, "learning_rate": LinearOverTraining(1e-3), "tau": 0.01,
    "learning_starts": 10_000,
}  # fmt: skip

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(20_000, 1, PENDULUM, "RL Zoo with layers of 256 and fewer random actions"),
    "LunarLanderContinuous-v3": Preset(300_000, 1, BOX2D, "RL Zoo"),
    "BipedalWalker-v3": Preset(1_000_000, 1, BOX2D, "RL Zoo"),
    "HalfCheetah-v5": Preset(1_000_000, 8, HALF_CHEETAH, "polyak's preset"),
    "Hopper-v5": Preset(1_000_000, 8, LIGHT, "polyak's preset"),
    "Walker2d-v5": Preset(1_000_000, 8, LIGHT, "polyak's preset"),
    "Ant-v5": Preset(1_000_000, 1, MUJOCO, "RL Zoo"),
    "Humanoid-v5": Preset(2_000_000, 1, MUJOCO, "RL Zoo"),
}
