"""Presets of FlashSAC (Kim et al. 2026, arXiv:2604.04539): XQC with inverted residual blocks, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

# fmt: off
BLOCKS = {"residual": "inverted"}
ACTOR = {**BLOCKS, "squash_log_std": True, "log_std": -4.0}
# The authors' rates fall by half along a cosine; the rates of actor and α with the steps of these, half of the critics' steps.
RATE, HALF = LinearOverTraining(3e-4, 1.5e-4), LinearOverTraining(3e-4, 2.25e-4)
FLASH_SAC = {
    "actor": {"hidden": (128, 128), **ACTOR}, "critics": {"hidden": (256, 256), **BLOCKS}, "policy_delay": 2, "tau": 0.01,
    "max_noise_repeats": 16, "max_return": 5.0, "learning_starts": 10_000,
    "learning_rate": RATE, "actor_learning_rate": HALF, "alpha_learning_rate": HALF,
}
MANY_ENVS = {
    **FLASH_SAC, "batch_size": 2048, "updates_per_step": 2 / 1024, "gamma": 0.97, "learning_starts": 100_000,
    "replay": {"capacity": 10_000_000},
}
PENDULUM = {
    **FLASH_SAC, "actor": {"hidden": (32,), **ACTOR}, "critics": {"hidden": (64,), **BLOCKS}, "batch_size": 256,
    "updates_per_step": 1 / 32, "gamma": 0.975, "learning_starts": 4_096, "replay": {"capacity": 100_000},
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "alpha_learning_rate"), LinearOverTraining(1e-3, 5e-4)),
}
SOURCE = "the authors' code, github.com/Holiday-Robot/FlashSAC"
# fmt: on

DEFAULT = Preset(50_000_896, 1024, MANY_ENVS, "FlashSAC: XQC with inverted residual blocks, for 1,024 environments")
MUJOCO = Preset(1_000_000, 1, {**FLASH_SAC, "batch_size": 512, "updates_per_step": 1.0}, SOURCE)

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(200_000, 64, PENDULUM, "polyak's preset"),
    **dict.fromkeys(("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"), MUJOCO),
}
