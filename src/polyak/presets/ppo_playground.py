"""Presets of PPO for the DM Control suite and the robots of MuJoCo Playground, from the settings that it publishes for Brax."""

from polyak.presets.preset import LinearOverTraining, Preset

# Of an environment, a rollout is batch_size * num_minibatches * unroll_length / num_envs steps there. Actions pass through
# tanh there, which needs action_scaling="rescale" and squash=True here.
# fmt: off
BRAX = {"num_minibatches": 32, "adam_eps": 1e-8, "ent_coef": 0.01, "clip_range": 0.3, "clip_obs": None, "normalize_obs": True}
NETWORK = {"activation": "silu", "std": "state", "log_std": -0.365, "orthogonal": False}

# With an entropy bonus of 0.001 and a constant learning rate of 1e-3 the return falls from 964 to 440.
CARTPOLE_BALANCE = {
    "num_steps": 64, "num_epochs": 8, "num_minibatches": 16, "gamma": 0.995, "learning_rate": LinearOverTraining(1e-3),
    "normalize_obs": True, "normalize_reward": "return",
}

# 1024 * 32 * 30 / 2048 steps. Rewards are multiplied by 10 there.
DM_CONTROL = {
    **BRAX, "num_steps": 480, "num_epochs": 16, "gamma": 0.995, "learning_rate": 1e-3, "max_grad_norm": None,
    "normalize_reward": "return", "network": {**NETWORK, "hidden": (32,) * 4, "value_hidden": (256,) * 5},
}
DM_CONTROL_ENVS = (
    "AcrobotSwingup", "AcrobotSwingupSparse", "BallInCup", "CartpoleBalanceSparse", "CartpoleSwingup", "CartpoleSwingupSparse",
    "CheetahRun", "FingerSpin", "FingerTurnEasy", "FingerTurnHard", "FishSwim", "HopperHop", "HopperStand", "HumanoidRun",
    "HumanoidStand", "HumanoidWalk", "PendulumSwingup", "PointMass", "ReacherEasy", "ReacherHard", "SwimmerSwimmer6",
    "WalkerRun", "WalkerStand", "WalkerWalk",
)
LONG_DM_CONTROL = ("AcrobotSwingup", "AcrobotSwingupSparse", "SwimmerSwimmer6", "WalkerRun")
SHORT_SIGHTED_DM_CONTROL = ("BallInCup", "FingerSpin")

# 256 * 32 * 20 / 8192 steps. Rewards are not scaled.
ROBOT = {
    **BRAX, "num_steps": 20, "num_epochs": 4, "gamma": 0.97, "learning_rate": 3e-4, "max_grad_norm": 1.0,
    "network": {**NETWORK, "hidden": (128,) * 4, "value_hidden": (256,) * 5},
}
# The critic sees what sensors do not measure.
ASYMMETRIC = {
    **ROBOT, "actor_obs": "state", "critic_obs": "privileged_state",
    "network": {**NETWORK, "hidden": (512, 256, 128), "value_hidden": (512, 256, 128)},
}
HUMANOID = {**ASYMMETRIC, "clip_range": 0.2, "ent_coef": 0.005}

ROBOTS = (
    (200_000_000, ASYMMETRIC, ("Go1JoystickFlatTerrain", "Go1JoystickRoughTerrain")),
    (100_000_000, ASYMMETRIC, ("Go1Footstand", "Go1Handstand")),
    (50_000_000, ASYMMETRIC, ("Go1Getup",)),
    (200_000_000, HUMANOID, ("ApolloJoystickFlatTerrain", "G1JoystickFlatTerrain", "G1JoystickRoughTerrain")),
    (200_000_000, HUMANOID, ("T1JoystickFlatTerrain", "T1JoystickRoughTerrain")),
    (150_000_000, HUMANOID, ("BerkeleyHumanoidJoystickFlatTerrain", "BerkeleyHumanoidJoystickRoughTerrain")),
    (100_000_000, {**ROBOT, "actor_obs": "state", "critic_obs": "state"}, ("SpotFlatTerrainJoystick",)),
    (100_000_000, ROBOT, ("BarkourJoystick", "H1InplaceGaitTracking", "H1JoystickGaitTracking", "Op3Joystick")),
    (100_000_000, ROBOT, ("SpotGetup", "SpotJoystickGaitTracking")),
)
# fmt: on

SOURCE = "MuJoCo Playground, without tanh; not scored"

PLAYGROUND: dict[str, Preset] = {
    "playground/CartpoleBalance": Preset(1_000_000, 64, CARTPOLE_BALANCE, "polyak's preset"),
    **{
        f"playground/{name}": Preset(
            100_000_000 if name in LONG_DM_CONTROL else 60_000_000,
            2048,
            {**DM_CONTROL, "gamma": 0.95} if name in SHORT_SIGHTED_DM_CONTROL else DM_CONTROL,
            SOURCE,
        )
        for name in DM_CONTROL_ENVS
    },
    **{f"playground/{name}": Preset(env_steps, 8192, values, SOURCE) for env_steps, values, names in ROBOTS for name in names},
}
