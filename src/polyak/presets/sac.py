"""Presets of SAC, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

# With a discount of 0.99, and other layers and update ratio, a lander learned to hover above the ground until the time limit:
# that costs about 0.1 a step, 10 in all at 0.99, less than a crash, and 100 at 0.999.
LUNAR_LANDER = {
    "actor": {"hidden": (128, 128)}, "critics": {"hidden": (128, 128)}, "updates_per_step": 0.5, "batch_size": 128,
    "n_step": 3, "replay": {"capacity": 300_000}, "learning_rate": LinearOverTraining(1e-3), "gamma": 0.999, "tau": 0.01,
    "learning_starts": 10_000,
}  # fmt: skip
# The Zoo's take twice the gradient steps, with layers of (400, 300), a discount of 0.98 and targets over one step.
BIPEDAL_WALKER = {
    "actor": {"hidden": (256, 256)}, "critics": {"hidden": (256, 256), "norm": "layer"}, "updates_per_step": 0.5,
    "n_step": 3, "replay": {"capacity": 500_000}, "learning_rate": LinearOverTraining(1e-3), "tau": 0.01,
    "learning_starts": 10_000,
}  # fmt: skip
MUJOCO = {"learning_starts": 10_000}
# Half the multiplications of the Zoo's, and a larger rate that falls.
HALF_CHEETAH = {**MUJOCO, "batch_size": 128, "learning_rate": LinearOverTraining(1e-3)}
# A quarter of the multiplications of the Zoo's: half as many gradient steps, on half as many transitions.
LIGHT = {**BIPEDAL_WALKER, "batch_size": 128, "replay": {"capacity": 1_000_000}}
MOUNTAIN_CAR = {
    "actor": {"hidden": (64, 64), "std": "sde", "log_std": -3.67}, "critics": {"hidden": (64, 64)}, "sde_sample_freq": 32,
    "num_steps": 32, "batch_size": 512, "replay": {"capacity": 50_000}, "learning_starts": 0, "gamma": 0.9999,
    "tau": 0.01, "alpha": 0.1,
}  # fmt: skip
CARTPOLE = {
    "actor": {"hidden": (128, 128)}, "critics": {"hidden": (128, 128)}, "batch_size": 64, "replay": {"capacity": 50_000},
    "learning_rate": 1e-3, "gamma": 0.98, "tau": 0.01, "target_entropy": 0.1,
}  # fmt: skip

FETCH_REACH = {
    "actor": {"hidden": (64, 64)}, "critics": {"hidden": (64, 64)}, "learning_rate": 1e-3, "gamma": 0.95,
    "normalize_obs": True, "replay": {"kind": "hindsight", "replay": 1_000_000},
}  # fmt: skip
# Of two seeds with the default target entropy of -4, one had not learned after 224,000 env_steps.
FETCH_PUSH = {
    **FETCH_REACH, "actor": {"hidden": (256,) * 3}, "critics": {"hidden": (256,) * 3}, "tau": 0.05,
    "updates_per_step": 0.5, "learning_starts": 2_000, "target_entropy": 0.0,
}  # fmt: skip

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(50_000, 1, CARTPOLE, "polyak's preset"),
    "Pendulum-v1": Preset(20_000, 1, {"learning_rate": 1e-3, "replay": {"capacity": 20_000}}, "RL Zoo"),
    "MountainCarContinuous-v0": Preset(50_000, 1, MOUNTAIN_CAR, "RL Zoo"),
    "LunarLanderContinuous-v3": Preset(300_000, 8, LUNAR_LANDER, "polyak's preset"),
    "BipedalWalker-v3": Preset(500_000, 8, BIPEDAL_WALKER, "polyak's preset"),
    "HalfCheetah-v5": Preset(1_000_000, 8, HALF_CHEETAH, "polyak's preset"),
    "Hopper-v5": Preset(1_000_000, 1, MUJOCO, "RL Zoo"),
    "Walker2d-v5": Preset(1_000_000, 8, LIGHT, "polyak's preset"),
    "Ant-v5": Preset(1_000_000, 1, MUJOCO, "RL Zoo"),
    "Humanoid-v5": Preset(2_000_000, 1, MUJOCO, "RL Zoo"),
    "FetchReach-v4": Preset(20_000, 1, FETCH_REACH, "RL Zoo"),
    "FetchPush-v4": Preset(500_000, 8, FETCH_PUSH, "polyak's preset"),
}
