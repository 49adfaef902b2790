"""Presets of SimbaV2 (Lee et al. 2025, arXiv:2502.15280): XQC with networks on hyperspheres, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

# fmt: off
SIMBA_V2 = {
    "actor": {"hidden": (128,), "residual": "hypersphere"}, "critics": {"hidden": (512, 512), "residual": "hypersphere"},
    "normalize_obs": True, "policy_delay": 1, "updates_per_step": 1.0, "learning_rate": LinearOverTraining(1e-4, 5e-5),
}
PENDULUM = {
    **SIMBA_V2, "actor": {"hidden": (64,), "residual": "hypersphere"}, "critics": {"hidden": (64,), "residual": "hypersphere"},
    "learning_rate": LinearOverTraining(1e-3, 5e-4), "gamma": 0.975, "learning_starts": 200, "replay": {"capacity": 20_000},
}
# fmt: on

DEFAULT = Preset(1_000_000, 1, SIMBA_V2, "SimbaV2: XQC with networks on hyperspheres")
# The authors' discount is 1 - 5 / T for episodes of T steps.
MUJOCO = Preset(1_000_000, 1, {**SIMBA_V2, "gamma": 0.995}, "the authors' code, of github.com/DAVIAN-Robotics")

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(20_000, 1, PENDULUM, "polyak's preset"),
    **dict.fromkeys(("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"), MUJOCO),
}
