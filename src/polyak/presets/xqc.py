"""Presets of XQC, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

# fmt: off
NORM = {"norm": "batch", "norm_inputs": True}
PENDULUM = {
    "actor": {"hidden": (64, 64), **NORM}, "critics": {"hidden": (128, 128), **NORM}, "updates_per_step": 1.0, "gamma": 0.975,
    "learning_rate": LinearOverTraining(1e-3, 1e-4), "learning_starts": 200, "replay": {"capacity": 20_000},
}
# The authors' discount is 1 - 5 / T for episodes of T steps. Their rates of actor and α fall with the steps of these, a third
# of the critics' steps, so they end at 3e-4 (1 - 0.9 / 3). The other numbers are the agent's defaults.
RATE, THIRD = LinearOverTraining(3e-4, 3e-5), LinearOverTraining(3e-4, 2.1e-4)
MUJOCO = Preset(
    1_000_000, 1, {"gamma": 0.995, "learning_rate": RATE, "actor_learning_rate": THIRD, "alpha_learning_rate": THIRD},
    "the authors' code, github.com/danielpalenicek/xqc",
)
# fmt: on

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(20_000, 1, PENDULUM, "polyak's preset"),
    **dict.fromkeys(("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"), MUJOCO),
}
