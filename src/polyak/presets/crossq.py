"""Presets of CrossQ, by environment."""

from polyak.presets.preset import Preset

PENDULUM = {"critics": {"hidden": (256, 256), "norm": "batch_renorm", "norm_before": "linear"}}
# The defaults of the agent are the authors' settings of all environments of MuJoCo.
MUJOCO = Preset(5_000_000, 1, {}, "the authors' code, github.com/adityab/CrossQ")

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(20_000, 1, {**PENDULUM, "policy_delay": 2, "learning_starts": 100}, "RL Zoo"),
    **dict.fromkeys(("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"), MUJOCO),
}
