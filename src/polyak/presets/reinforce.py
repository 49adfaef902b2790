"""Presets of REINFORCE, by environment."""

from polyak.presets.preset import LinearOverTraining, Preset

# Mean return 500 at the end of training with seeds 0, 1 and 2; with a baseline (vf_coef=0.2, no max_grad_norm) 431.
CARTPOLE = {"num_steps": 512, "vf_coef": 0.0, "optimizer_name": "adam", "learning_rate": LinearOverTraining(1e-2)}

PRESETS: dict[str, Preset] = {
    "CartPole-v1": Preset(500_000, 8, CARTPOLE, "TF-Agents' example without a value network, with longer rollouts"),
}
