"""What arguments of other libraries are called here.

A setting is written `NAME of OWNER` or `NAME=CODE of OWNER`.
"""

from typing import NamedTuple

Replacements = dict[str, str]


class Names(NamedTuple):
    """The names of one library.

    Attributes:
        everywhere: where polyak has what an argument sets.
        by_field: the same where there is a certain other field or argument, or where a name means something else; the last one
            counts.
        of_functions: the same where a function gets them, which knows no agent, and agents differ.
    """

    everywhere: Replacements
    by_field: dict[str, Replacements]
    of_functions: Replacements


STABLE_BASELINES = Names(
    everywhere={
        "policy": "network=polyak.mlp(...) of the agent",
        "policy_kwargs": "network=polyak.mlp(hidden, activation) of the agent",
        "env": "env.spec as the agent's first argument; train.run(agent, env, ...) gets the environment",
        "n_steps": "num_steps of the agent",
        "train_freq": "num_steps of the agent",
        "optimizer_class": "optimizer=, an optax.GradientTransformation",
        "total_timesteps": "env_steps of train.run",
        "callback": "callbacks=[...] of train.run",
        "log_interval": "report_every of train.run, in env_steps",
        "reset_num_timesteps": "resume_from of train.run",
        "progress_bar": "progress of train.run",
        "verbose": "progress of train.run",
        "tensorboard_log": "run_dir of train.run, which holds TensorBoard's files too",
        "seed": "seed of train.run",
        "device": "JAX's own choice of a device (the environment variable JAX_PLATFORMS)",
        "model": "policy=agent.policy(result.state)",
        "n_eval_episodes": "episodes of train.evaluate",
        "n_envs": "num_envs of envs.make",
        "env_id": "id of envs.make",
        "vec_env_cls": "vectorization='async' of envs.make",
    },
    by_field={
        "num_minibatches": {
            "batch_size": (
                "num_minibatches of the agent, num_steps * num_envs / batch_size (microbatch_size is another: it saves memory)"
            ),
        },
        "num_epochs": {"n_epochs": "num_epochs of the agent", "gradient_steps": "num_epochs of the agent"},
        "replay": {
            "buffer_size": "replay=polyak.UniformReplay(capacity) of the agent",
            "replay_buffer_class": "replay of the agent",
            "replay_buffer_kwargs": "replay=polyak.UniformReplay(...) of the agent",
        },
        "learning_starts": {
            "gradient_steps": "updates_per_step of the agent, per transition",
            "n_steps": "n_step of the agent",
            "target_update_interval": "target_period of the agent, in gradient steps",
        },
        "capacity": {"buffer_size": "capacity of the replay"},
        "epsilon": {
            "exploration_fraction": "epsilon=polyak.Linear(start, end, env_steps) of the agent",
            "exploration_initial_eps": "epsilon=polyak.Linear(start, end, env_steps) of the agent",
            "exploration_final_eps": "epsilon=polyak.Linear(start, end, env_steps) of the agent",
            "policy": "network=polyak.q_mlp(...) of the agent",
            "policy_kwargs": "network=polyak.q_mlp(hidden, activation) of the agent",
        },
        "critics": {
            "policy": "actor=polyak.Actor(...) and critics=polyak.Critics(...) of the agent",
            "policy_kwargs": (
                "actor=polyak.Actor(hidden, activation) and critics=polyak.Critics(hidden, activation) of the agent"
            ),
            "net_arch": "actor=polyak.Actor(hidden) and critics=polyak.Critics(hidden) of the agent",
            "n_critics": "critics=polyak.Critics(num_critics=...) of the agent",
            "log_std_init": "actor=polyak.Actor(log_std=...) of the agent",
        },
        "shared_encoder": {"share_features_extractor": "shared_encoder of the agent"},
        "num_critics": {"n_critics": "num_critics of the network"},
        "log_std": {"log_std_init": "log_std of the network"},
        "num_quantiles": {"n_quantiles": "num_quantiles of the agent"},
        "num_tau": {
            "policy": "network=polyak.iqn_mlp(...) of the agent",
            "policy_kwargs": "network=polyak.iqn_mlp(hidden, activation) of the agent",
        },
        "alpha": {"ent_coef": "alpha of the agent; None learns it"},
        "sde_sample_freq": {"use_sde": "sde_sample_freq of the agent"},
        "exploration_noise": {"action_noise": "exploration_noise of the agent"},
        "target_noise": {"target_policy_noise": "target_noise of the agent"},
        "key": {"seed": "key=jax.random.key(seed)"},
        "hidden": {"net_arch": "hidden of the network", "activation_fn": "activation of the network"},
        "dropped_quantiles": {"top_quantiles_to_drop_per_net": "dropped_quantiles of the agent"},
    },
    of_functions={
        "batch_size": "batch_size of the agent (num_minibatches of PPO and PQN)",
        "ent_coef": "ent_coef of the agent (alpha of SAC and TQC)",
        "gradient_steps": "updates_per_step of the agent, per transition (num_epochs of PPO and PQN)",
    },
)

AN_ENVIRONMENTS_SPEC = "env.spec as the agent's first argument"

TF_AGENTS = Names(
    everywhere={
        "time_step_spec": AN_ENVIRONMENTS_SPEC,
        "action_spec": AN_ENVIRONMENTS_SPEC,
        "gradient_clipping": "max_grad_norm of the agent, the global norm of a network",
        "train_step_counter": "updates of the state",
        "num_iterations": "env_steps of train.run",
    },
    by_field={
        "gae_lambda": {"lambda_value": "gae_lambda of the agent"},
        "gamma": {"discount_factor": "gamma of the agent"},
        "network": {
            "actor_net": "network=polyak.mlp(...) of the agent, which has the critic too",
            "value_net": "network=polyak.mlp(...) of the agent, which has the actor too",
        },
        "clip_range": {
            "importance_ratio_clipping": "clip_range of the agent",
            "policy_l2_reg": "l2_policy of the agent",
            "value_function_l2_reg": "l2_value of the agent",
            "shared_vars_l2_reg": "l2_shared of the agent",
            "use_gae": "advantages of the agent",
            "use_td_lambda_return": "value_targets of the agent",
            "log_prob_clipping": "clip_log_prob of the agent",
            "initial_adaptive_kl_beta": "kl_beta of the agent",
            "adaptive_kl_target": "kl_target of the agent",
            "adaptive_kl_tolerance": "kl_tolerance of the agent",
            "value_clipping": "clip_range_vf of the agent",
            "compute_value_and_advantage_in_train": "values_when of the agent",
            "minibatch_size": "num_minibatches of the agent, num_steps * num_envs / minibatch_size",
        },
        "ent_coef": {"entropy_regularization": "ent_coef of the agent"},
        "vf_coef": {"value_pred_loss_coef": "vf_coef of the agent"},
        "normalize_obs": {"normalize_observations": "normalize_obs of the agent"},
        "normalize_reward": {"normalize_rewards": "normalize_reward of the agent, 'reward'"},
        "clip_reward": {"reward_norm_clipping": "clip_reward of the agent"},
        "histograms": {
            "debug_summaries": "histograms of the agent",
            "summarize_grads_and_vars": "histograms of the agent",
        },
        "capacity": {"max_length": "capacity of the replay, over all environments"},
        "learning_starts": {
            "sample_batch_size": "batch_size of the agent",
            "reward_scale_factor": "reward_scale of the agent",
            "target_update_tau": "tau of the agent",
            "target_update_period": "target_period of the agent, in gradient steps",
        },
        "n_step": {"n_step_update": "n_step of the agent"},
        "huber_delta": {"td_errors_loss_fn": "huber_delta of the agent; None is the squared error"},
        # A loss of quantiles is always Huber's.
        "num_quantiles": {"td_errors_loss_fn": "huber_delta of the agent"},
        "num_tau": {"td_errors_loss_fn": "huber_delta of the agent"},
        "epsilon": {
            "q_network": "network=polyak.q_mlp(...) of the agent",
            "epsilon_greedy": "epsilon of the agent",
            "categorical_q_network": "network=polyak.q_mlp(...) of the agent",
        },
        "temperature": {"boltzmann_temperature": "temperature of the agent"},
        "num_atoms": {
            "min_q_value": "v_min of the agent",
            "max_q_value": "v_max of the agent",
        },
        "critics": {
            "actor_network": "actor=polyak.Actor(...) of the agent",
            "critic_network": "critics=polyak.Critics(...) of the agent",
            "critic_network_2": "critics=polyak.Critics(num_critics=2) of the agent",
            "actor_optimizer": "actor_learning_rate of the agent, or its optimizer for all networks",
            "critic_optimizer": "learning_rate of the agent, or its optimizer for all networks",
        },
        "alpha_learning_rate": {"alpha_optimizer": "alpha_learning_rate of the agent, or its optimizer for all networks"},
        "initial_alpha": {"initial_log_alpha": "initial_alpha of the agent, e to the power of initial_log_alpha"},
        "alpha_loss": {"use_log_alpha_in_alpha_loss": "alpha_loss of the agent"},
        "target_noise": {
            "target_policy_noise": "target_noise of the agent",
            "target_policy_noise_clip": "target_noise_clip of the agent",
            "actor_update_period": "policy_delay of the agent",
            "exploration_noise_std": "exploration_noise of the agent",
        },
        "theta": {"ou_stddev": "exploration_noise of the agent", "ou_damping": "theta of the agent"},
        "max_dqda": {"dqda_clipping": "max_dqda of the agent"},
    },
    of_functions={"td_errors_loss_fn": "huber_delta of the agent"},
)

RL_COACH = Names(
    everywhere={
        "discount": "gamma of the agent",
        "num_consecutive_playing_steps": "num_steps of the agent",
        "clip_gradients": "max_grad_norm of the agent",
        "optimizer_epsilon": "adam_eps of the agent",
        "improve_steps": "env_steps of train.run",
        "steps_between_evaluation_periods": "eval_every of train.run",
    },
    by_field={
        "clip_range": {
            "clip_likelihood_ratio_using_epsilon": "clip_range of the agent",
            "optimization_epochs": "num_epochs of the agent",
            "estimate_state_value_using_gae": "value_targets of the agent",
        },
        "ent_coef": {"beta_entropy": "ent_coef of the agent"},
        "capacity": {"max_size": "capacity of the replay"},
        "learning_starts": {
            "num_consecutive_training_steps": "updates_per_step of the agent, per transition",
            "rate_for_copying_weights_to_target": "tau of the agent",
            "num_steps_between_copying_online_weights_to_target": "target_period of the agent, in gradient steps",
            "heatup_steps": "learning_starts of the agent",
        },
        "huber_delta": {
            "huber_loss_interval": "huber_delta of the agent",
            "replace_mse_with_huber_loss": "huber_delta of the agent; None is the squared error",
        },
        "epsilon": {"epsilon_schedule": "epsilon of the agent"},
        "num_atoms": {"atoms": "num_atoms of the agent"},
        "num_quantiles": {
            "atoms": "num_quantiles of the agent",
            "replace_mse_with_huber_loss": "huber_delta of the agent",
        },
        "num_tau": {"replace_mse_with_huber_loss": "huber_delta of the agent"},
        "critics": {"num_q_networks": "critics=polyak.Critics(num_critics=...) of the agent"},
        "target_noise": {
            "policy_noise": "target_noise of the agent",
            "noise_clipping": "target_noise_clip of the agent",
            "update_policy_every_x_episode_steps": "policy_delay of the agent",
        },
    },
    of_functions={
        "atoms": "num_atoms of the agent (num_quantiles of QRDQN)",
        "replace_mse_with_huber_loss": "huber_delta of the agent",
    },
)

LIBRARIES = {"Stable-Baselines3": STABLE_BASELINES, "TF-Agents": TF_AGENTS, "RL Coach": RL_COACH}
"""A name that several have is said to be of the first."""


def find_replacement(name: str, known: tuple[str, ...], what: str) -> tuple[str, str] | None:
    """The library that has an argument of this name, and what it is here; None for other names.

    Of an agent it depends on its other fields; an argument of a function may be meant for any agent.
    """
    for library, names in LIBRARIES.items():
        found = [
            replacements[name] for field, replacements in names.by_field.items() if field in known and name in replacements
        ]
        if not found and name in names.everywhere:
            found = [names.everywhere[name]]
        if not found and what == "argument":
            everywhere = (*names.by_field.values(), names.of_functions)
            found = [replacements[name] for replacements in everywhere if name in replacements]
        if found:
            return library, found[-1]
    return None


def is_name_elsewhere(name: str) -> bool:
    """Whether some agent of another library has such an argument."""
    return any(name in replacements for names in LIBRARIES.values() for replacements in names.by_field.values())
