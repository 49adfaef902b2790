"""Spaces of studies, one for each algorithm, in the form of a space file.

Source of A2C, PPO, DQN, QR-DQN, DDPG, TD3, SAC and TQC: the ranges of RL Baselines3 Zoo, `rl_zoo3/hyperparams_opt.py` of 2026
(commit 22e3ff24). Differences: numbers that the Zoo draws as 1 - x or as powers of two are lists here; `num_minibatches` stands
for its batch_size; its target_update_interval counts env_steps, `target_period` gradient steps; `dropped_quantiles` ends at 4,
which 5 quantiles allow. The other algorithms have the ranges of the nearest one of these, and around their papers' numbers for
the settings that only they have.
"""

from collections.abc import Mapping
from typing import Any

Space = Mapping[str, Any]

SHARED: Space = {
    "learning_rate": {"low": 1e-5, "high": 2e-3, "log": True},
    "gamma": [0.97, 0.98, 0.99, 0.995, 0.999, 0.9999],
}
SMALL, MEDIUM, BIG = [64, 64], [256, 256], [400, 300]
ACTIVATIONS = ["tanh", "relu"]

# fmt: off
ON_POLICY: Space = {
    **SHARED,
    "gae_lambda": [0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 0.9999],
    "ent_coef": {"low": 1e-8, "high": 0.1, "log": True},
    "max_grad_norm": {"low": 0.3, "high": 2.0},
}
A2C: Space = {
    **ON_POLICY, "num_steps": [32, 64, 128, 256, 512, 1024, 2048],
    "network": {"hidden": [SMALL, MEDIUM], "activation": ACTIVATIONS},
}
# Mnih et al. 2016 and Espeholt et al. 2018 take rollouts of 5 to 20 steps, which the Zoo leaves out.
SHORT_ROLLOUTS: Space = {**A2C, "num_steps": [5, 10, 20, 40, 80]}
MINIBATCHES: Space = {
    **ON_POLICY, "num_steps": [32, 64, 128, 256, 512, 1024, 2048, 4096], "num_minibatches": [1, 2, 4, 8, 16, 32, 64],
    "num_epochs": [1, 5, 10, 20], "network": {"hidden": [[64], SMALL, MEDIUM], "activation": ACTIVATIONS},
}
PPO: Space = {**MINIBATCHES, "clip_range": [0.1, 0.2, 0.3, 0.4]}

OFF_POLICY: Space = {
    **SHARED, "batch_size": [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048], "network": {"hidden": [SMALL, MEDIUM, BIG]},
}
# The Zoo's train_freq / subsample_steps, and its exploration_final_eps and exploration_fraction.
Q_LEARNING: Space = {
    **OFF_POLICY, "updates_per_step": [0.125, 0.25, 0.5, 1.0],
    "target_period": {"low": 1, "high": 20_000, "log": True},
    "epsilon": [f"linear:1:{end}:{fraction}" for end in (0.01, 0.05, 0.2) for fraction in (0.05, 0.2, 0.5)],
}
ACTOR_CRITIC: Space = {
    **OFF_POLICY, "num_steps": {"low": 1, "high": 10}, "tau": {"low": 0.001, "high": 0.08, "log": True},
}
NOISY: Space = {**ACTOR_CRITIC, "exploration_noise": {"low": 0.0, "high": 0.5}}
# fmt: on

SPACES: Mapping[str, Space] = {
    "a2c": A2C,
    "a3c": SHORT_ROLLOUTS,
    # Around the numbers of Osband et al. 2016; it explores by its heads.
    "bootstrapped_dqn": {
        **{name: values for name, values in Q_LEARNING.items() if name != "epsilon"},
        "num_heads": [5, 10, 20],
        "bootstrap_probability": [0.5, 0.8, 1.0],
    },
    # Around the numbers of Nauman et al. 2024, arXiv:2405.16158; one width for all residual blocks. The number of
    # gradient steps is the preset's, by which its reset_period counts.
    "bro": {
        **{name: values for name, values in ACTOR_CRITIC.items() if name != "num_steps"},
        "batch_size": [64, 128, 256, 512],
        "num_quantiles": {"low": 5, "high": 100},
        "kl_target": [0.01, 0.05, 0.2],
        "network": {"hidden": [[64, 64], [128, 128], [256, 256]]},
    },
    # Bellemare et al. 2017, figure 3.
    "c51": {**Q_LEARNING, "num_atoms": [5, 11, 21, 51, 101]},
    # It has no targets.
    "crossq": {name: values for name, values in ACTOR_CRITIC.items() if name != "tau"} | {"policy_delay": [1, 2, 3]},
    "ddpg": {**NOISY, "exploration": ["ou", "gaussian"]},
    "dqn": Q_LEARNING,
    # As many gradient steps of the critics as for one of the actor, 20, in a step of the environment.
    "droq": ACTOR_CRITIC,
    # Around the numbers of Seo et al. 2025, arXiv:2505.22642, and of their code.
    "fast_td3": {
        **{name: values for name, values in ACTOR_CRITIC.items() if name != "num_steps"},
        "batch_size": [512, 2048, 8192, 32_768],
        "tau": {"low": 0.01, "high": 0.2, "log": True},
        "num_atoms": [51, 101, 251],
        "max_exploration_noise": [0.2, 0.4, 0.8],
        "target_noise": [0.001, 0.1, 0.2],
    },
    # Around the numbers of Kim et al. 2026, arXiv:2604.04539; one width for all residual blocks.
    "flash_sac": {
        **{name: values for name, values in ACTOR_CRITIC.items() if name != "num_steps"},
        "batch_size": [256, 512, 1024, 2048],
        "num_atoms": [51, 101],
        "max_noise_repeats": [1, 4, 16],
        "network": {"hidden": [[64, 64], [128, 128], [256, 256]]},
    },
    "impala": {**SHORT_ROLLOUTS, "rho_clip": [1.0, 2.0, 4.0]},
    # Dabney et al. 2018, arXiv:1806.06923, figure 2.
    "iqn": {**Q_LEARNING, "num_tau": [1, 8, 32, 64], "num_target_tau": [1, 8, 32, 64]},
    "naf": {**NOISY, "exploration": ["ou", "gaussian"]},
    "ppo": PPO,
    # Schulman et al. 2017, section 6.1.
    "ppo_kl": {**MINIBATCHES, "kl_target": [0.003, 0.01, 0.03]},
    # Around the numbers of Gallici et al. 2024, arXiv:2407.04811, appendix C.
    "pqn": {
        **SHARED,
        "q_lambda": [0.0, 0.3, 0.65, 0.85, 0.95],
        "num_steps": [1, 8, 16, 32, 64, 128],
        "num_minibatches": [1, 2, 4, 8, 16, 32],
        "num_epochs": [1, 2, 4],
        "max_grad_norm": [0.5, 1.0, 5.0, 10.0],
        "epsilon": Q_LEARNING["epsilon"],
        "network": {"hidden": [SMALL, [128, 128], MEDIUM]},
    },
    "qrdqn": {**Q_LEARNING, "num_quantiles": {"low": 5, "high": 200}},
    # Around the numbers of the paper, section 4.2, and of TF-Agents.
    "qt_opt": {
        **NOISY,
        "num_samples": [16, 32, 64, 128],
        "num_elites": [2, 4, 6, 10],
        "num_iterations": [2, 3, 5],
        "lag_period": [1, 5, 100, 1_000],
    },
    # It explores by the noise of its network. Hessel et al. 2018, figure 2 and table 1.
    "rainbow": {name: values for name, values in Q_LEARNING.items() if name != "epsilon"} | {"n_step": [1, 3, 5]},
    # The number of gradient steps as in droq.
    "redq": {**ACTOR_CRITIC, "num_target_critics": [1, 2, 3]},
    # Its rollouts are longer than episodes, and it has no λ.
    "reinforce": {name: values for name, values in A2C.items() if name != "gae_lambda"}
    | {"num_steps": [256, 512, 1024, 2048], "vf_coef": [0.0, 0.2, 0.5]},
    # Around the numbers of Burda et al. 2018 for PPO, and of Badia et al. 2020 for the discount.
    "rnd_dqn": {**Q_LEARNING, "coefficient": {"low": 0.05, "high": 2.0, "log": True}, "intrinsic_gamma": [0.97, 0.99, 0.997]},
    "sac": ACTOR_CRITIC,
    # One width for all residual blocks.
    "simbav2": {
        **ACTOR_CRITIC,
        "num_atoms": [51, 101],
        "updates_per_step": [1.0, 2.0],
        "network": {"hidden": [[128], [256], [128, 128], [256, 256]]},
    },
    # The number of gradient steps as in droq.
    "sr_sac": ACTOR_CRITIC,
    "td3": NOISY,
    "tqc": {**ACTOR_CRITIC, "num_quantiles": {"low": 5, "high": 50}, "dropped_quantiles": {"low": 0, "high": 4}},
    "xqc": {**ACTOR_CRITIC, "num_atoms": [51, 101], "policy_delay": [1, 2, 3], "updates_per_step": [1.0, 2.0]},
}
