"""Presets of PQN, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

CARTPOLE = {
    "network": {"hidden": (128, 128), "layer_norm": True},
    "num_steps": 16,
    "num_epochs": 4,
    "num_minibatches": 4,
    "learning_rate": LinearOverTraining(1e-3),
    "q_lambda": 0.95,
    "epsilon": LinearOverTraining(1.0, 0.05, fraction=0.2),
}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(300_000, 32, CARTPOLE, "own", "q_mlp"),
}
