"""Presets of A2C, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

ZOO = "RL Baselines3 Zoo"

PENDULUM = {
    "network": {"log_std": -2.0, "orthogonal": False},
    "num_steps": 8,
    "gae_lambda": 0.9,
    "gamma": 0.9,
    "vf_coef": 0.4,
    "learning_rate": LinearOverTraining(7e-4),
    "normalize_obs": True,
    "normalize_reward": "return",
}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(500_000, 8, {}, ZOO),
    "Pendulum-v1": Preset(1_000_000, 8, PENDULUM, f"{ZOO}, without gSDE"),
    "ALE/...": Preset(10_000_000, 16, {"ent_coef": 0.01, "vf_coef": 0.25}, ZOO),
}
