"""Tables of the documentation: they name every setting and argument, and only names that exist."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import polyak
from polyak.agents.a2c import A2C
from polyak.agents.bootstrapped_dqn import BootstrappedDQN
from polyak.agents.c51 import C51
from polyak.agents.ddpg import DDPG
from polyak.agents.dqn import DQN
from polyak.agents.ppo import PPO
from polyak.agents.ppo_kl import PPOKL
from polyak.agents.qrdqn import QRDQN
from polyak.agents.qt_opt import QTOpt
from polyak.agents.reinforce import REINFORCE
from polyak.agents.sac import SAC
from polyak.agents.td3 import TD3
from polyak.agents.tqc import TQC
from polyak.copies import workers
from polyak.copies.network_copies import NetworkCopies
from polyak.core.suggestions import find_replacement
from polyak.ops.gradient_step import QUANTITIES
from tests.test_architecture import MAY_IMPORT

DOCS = Path(__file__).parent.parent / "docs"
PPO_PAGE = (DOCS / "ppo.md").read_text()
TF_AGENTS_PAGE = (DOCS / "tutorials" / "from-tf-agents.md").read_text()
STABLE_BASELINES3_PAGE = (DOCS / "tutorials" / "from-stable-baselines3.md").read_text()
BRAX_PAGE = (DOCS / "tutorials" / "from-brax.md").read_text()
COACH_PAGE = (DOCS / "tutorials" / "from-rl-coach.md").read_text()
COPIES_PAGE = (DOCS / "copies.md").read_text()
FIELDS = {field.name for field in dataclasses.fields(PPOKL)}
REPLAY_FIELDS = {
    field.name
    for agent in (DQN, C51, QRDQN, SAC, TQC, TD3, DDPG, QTOpt, BootstrappedDQN)
    for field in dataclasses.fields(agent)
}

# The arguments of the constructors of PPOAgent, PPOClipAgent and PPOKLPenaltyAgent (which have no others), TF-Agents 0.19.
TF_AGENTS = """
    time_step_spec action_spec optimizer actor_net value_net greedy_eval importance_ratio_clipping lambda_value discount_factor
    entropy_regularization policy_l2_reg value_function_l2_reg shared_vars_l2_reg value_pred_loss_coef num_epochs use_gae
    use_td_lambda_return normalize_rewards reward_norm_clipping normalize_observations log_prob_clipping kl_cutoff_factor
    kl_cutoff_coef initial_adaptive_kl_beta adaptive_kl_target adaptive_kl_tolerance gradient_clipping value_clipping
    check_numerics compute_value_and_advantage_in_train update_normalizers_in_train aggregate_losses_across_replicas
    debug_summaries summarize_grads_and_vars train_step_counter name
"""

# The arguments of agents with a replay: TF-Agents 0.19, Stable-Baselines3 and sb3-contrib 2.9, and the fields of RL Coach's
# algorithm parameters.
COMMON_TF_AGENTS = """
    time_step_spec action_spec actor_network critic_network actor_optimizer critic_optimizer target_critic_network
    target_update_tau target_update_period td_errors_loss_fn gamma reward_scale_factor gradient_clipping debug_summaries
    summarize_grads_and_vars train_step_counter name
"""
COMMON_STABLE_BASELINES3 = """
    policy env learning_rate buffer_size learning_starts batch_size tau gamma train_freq gradient_steps action_noise
    replay_buffer_class replay_buffer_kwargs optimize_memory_usage n_steps stats_window_size tensorboard_log policy_kwargs
    verbose seed device net_arch activation_fn features_extractor_class features_extractor_kwargs normalize_images
    optimizer_class optimizer_kwargs n_critics share_features_extractor
"""
COACH = """
    discount num_consecutive_playing_steps num_consecutive_training_steps act_for_full_episodes
    rate_for_copying_weights_to_target num_steps_between_copying_online_weights_to_target update_policy_every_x_episode_steps
    policy_noise noise_clipping num_q_networks use_target_network_for_evaluation action_penalty clip_critic_targets
    use_non_zero_discount_for_terminal_states heatup_using_network_decisions load_memory_from_file_path collect_new_data
    store_transitions_only_when_episodes_are_terminated apply_gradients_every_x_episodes
    use_accumulated_reward_as_measurement in_action_space share_statistics_between_workers
    scale_external_reward_by_intrinsic_reward_value
"""
# Those of DqnAgent and CategoricalDqnAgent.
TF_AGENTS_DQN = """
    time_step_spec action_spec q_network optimizer observation_and_action_constraint_splitter epsilon_greedy n_step_update
    boltzmann_temperature emit_log_probability target_q_network target_update_tau target_update_period td_errors_loss_fn gamma
    reward_scale_factor gradient_clipping debug_summaries summarize_grads_and_vars train_step_counter name
    categorical_q_network min_q_value max_q_value target_categorical_q_network
"""

# Those of DQN, Stable-Baselines3 2.9, and QRDQN of sb3-contrib.
STABLE_BASELINES3_DQN = """
    policy env learning_rate buffer_size learning_starts batch_size tau gamma train_freq gradient_steps replay_buffer_class
    replay_buffer_kwargs optimize_memory_usage n_steps target_update_interval exploration_fraction exploration_initial_eps
    exploration_final_eps max_grad_norm stats_window_size tensorboard_log policy_kwargs verbose seed device
"""

# The parameters that RL Coach's agents of the DQN family read, of the algorithm, the network, the memory and the exploration.
COACH_DQN = """
    discount num_consecutive_playing_steps num_consecutive_training_steps n_step v_min v_max atoms huber_loss_interval
    num_steps_between_copying_online_weights_to_target rate_for_copying_weights_to_target heatup_using_network_decisions
    load_memory_from_file_path collect_new_data store_transitions_only_when_episodes_are_terminated
    share_statistics_between_workers input_embedders_parameters middleware_parameters heads_parameters loss_weights
    embedding_merger_type use_separate_networks_per_head batch_size learning_rate learning_rate_decay_rate
    learning_rate_decay_steps optimizer_type optimizer_epsilon adam_optimizer_beta1 adam_optimizer_beta2
    rms_prop_optimizer_decay clip_gradients gradients_clipping_method l2_regularization replace_mse_with_huber_loss
    create_target_network async_training distributed num_threads allow_duplicates_in_batch_sampling alpha beta epsilon
    epsilon_schedule evaluation_epsilon heatup_steps improve_steps steps_between_evaluation_periods evaluation_steps
    pre_network_filter
"""

# The parameters of RL Coach's ClippedPPO, PPO, ActorCritic and PolicyGradients.
COACH_ROLLOUTS = """
    discount policy_gradient_rescaler gae_lambda clip_likelihood_ratio_using_epsilon value_targets_mix_fraction
    estimate_state_value_using_gae use_kl_regularization beta_entropy num_consecutive_playing_steps optimization_epochs
    normalization_stats clipping_decay_schedule act_for_full_episodes update_pre_network_filters_state_on_train
    update_pre_network_filters_state_on_inference num_episodes_in_experience_replay target_kl_divergence
    initial_kl_coefficient high_kl_penalty_coefficient apply_gradients_every_x_episodes num_steps_between_gradient_updates
    batch_size learning_rate optimizer_type optimizer_epsilon clip_gradients async_training shared_optimizer
"""

# The arguments of TF-Agents' agent for each of polyak's.
TF_AGENTS_OF = {
    PPO: TF_AGENTS,
    DQN: TF_AGENTS_DQN,
    C51: TF_AGENTS_DQN,
    SAC: f"""{COMMON_TF_AGENTS} alpha_optimizer actor_loss_weight critic_loss_weight alpha_loss_weight actor_policy_ctor
        critic_network_2 target_critic_network_2 initial_log_alpha use_log_alpha_in_alpha_loss target_entropy""",
    TD3: f"""{COMMON_TF_AGENTS} exploration_noise_std critic_network_2 target_actor_network target_critic_network_2
        actor_update_period target_policy_noise target_policy_noise_clip""",
    QTOpt: """
        time_step_spec action_spec q_network optimizer actions_sampler epsilon_greedy n_step_update emit_log_probability
        in_graph_bellman_update init_mean_cem init_var_cem num_samples_cem num_elites_cem num_iter_cem target_q_network
        target_update_tau target_update_period enable_td3 target_q_network_delayed target_q_network_delayed_2
        delayed_target_update_period td_errors_loss_fn auxiliary_loss_fns gamma reward_scale_factor gradient_clipping
        debug_summaries summarize_grads_and_vars train_step_counter info_spec name""",
    DDPG: f"{COMMON_TF_AGENTS} ou_stddev ou_damping target_actor_network dqda_clipping",
}

# The table of agents with a replay of each page, and the arguments that it must have.
WITH_REPLAY = "Every argument of agents with a replay"
REPLAY_TABLES = {
    "TF-Agents": (
        TF_AGENTS_PAGE,
        WITH_REPLAY,
        " ".join(arguments for agent, arguments in TF_AGENTS_OF.items() if agent is not PPO),
    ),
    "Stable-Baselines3": (
        STABLE_BASELINES3_PAGE,
        WITH_REPLAY,
        f"""{STABLE_BASELINES3_DQN} {COMMON_STABLE_BASELINES3} ent_coef target_entropy top_quantiles_to_drop_per_net use_sde
        sde_sample_freq use_sde_at_warmup log_std_init use_expln clip_mean n_quantiles policy_delay target_policy_noise
        target_noise_clip""",
    ),
    "RL Coach": (
        COACH_PAGE,
        "Every parameter of agents with a replay",
        f"{COACH} {COACH_DQN} use_deterministic_for_evaluation",
    ),
}


def column(page, heading, number):
    """All code spans in one column of the table under a heading."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[number] for line in section.splitlines() if line.startswith("| ")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def without_training(spans):
    """The code spans but `train.run(...)`, whose arguments exist."""
    calls = {span for span in spans if span.startswith("train.run(")}
    named = {name for call in calls for name in re.findall(r"(\w+)=", call)}
    assert named <= set(inspect.signature(polyak.train.run).parameters), named
    return spans - calls


def test_every_function_of_the_ppo_page_is_in_the_named_file():
    rows = [line for line in PPO_PAGE.splitlines() if re.match(r"\| .* \| `\w+/\w+\.py`", line)]
    assert len(rows) >= 5
    for row in rows:
        for path, names in re.findall(r"`(\w+/\w+)\.py`: ((?:`[\w.]+`(?:, )?)+)", row):
            module = importlib.import_module("polyak." + path.replace("/", "."))
            for name in re.findall(r"`([\w.]+)`", names):
                found = module
                for part in name.split("."):
                    found = getattr(found, part)


def test_the_numbers_of_quantities_are_documented():
    numbered = ", ".join(f"{i} {name}" for i, name in enumerate(QUANTITIES, start=1))
    assert f"0 none, {numbered} |" in (DOCS / "runs.md").read_text()


def test_every_setting_of_ppo_is_documented():
    pages = PPO_PAGE + TF_AGENTS_PAGE
    missing = {name for name in FIELDS if not re.search(rf"`[^`]*\b{name}\b[^`]*`", pages)}
    assert not missing


def test_every_argument_of_tf_agents_leads_to_a_setting():
    heading = "Every argument of PPOAgent"
    assert set(TF_AGENTS.split()) <= column(TF_AGENTS_PAGE, heading, 1)
    others = {"PPOKL", "axis_name", "update", "update(state, rollout, key, weights=...)"}
    assert column(TF_AGENTS_PAGE, heading, 2) - others <= FIELDS


def test_every_argument_of_stable_baselines3_leads_to_a_setting():
    heading = "Every argument of PPO"
    ours = {name.split("=")[0] for name in without_training(column(STABLE_BASELINES3_PAGE, heading, 2))}
    assert ours <= FIELDS
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    arguments = {name for name in inspect.signature(stable_baselines3.PPO).parameters if not name.startswith("_")}
    assert arguments <= column(STABLE_BASELINES3_PAGE, heading, 1)


def test_every_argument_of_brax_leads_to_a_setting():
    heading = "Every argument of ppo.train"
    for span in without_training(column(BRAX_PAGE, heading, 2)):
        if part := re.fullmatch(r"(MLP|PolicyAndValue)\((.*)\)", span):
            fields = {field.name for field in dataclasses.fields(getattr(polyak, part[1]))}
            assert set(re.findall(r"(\w+)=", part[2])) <= fields, span
        else:
            assert span in {field.name for field in dataclasses.fields(PPO)} | {"here"}, span
    train = pytest.importorskip("brax.training.agents.ppo.train").train
    networks = importlib.import_module("brax.training.agents.ppo.networks").make_ppo_networks
    arguments = {name for function in (train, networks) for name in inspect.signature(function).parameters}
    assert arguments <= column(BRAX_PAGE, heading, 1)


@pytest.mark.parametrize("library", REPLAY_TABLES)
def test_every_argument_of_agents_with_a_replay_leads_to_a_setting(library):
    page, heading, arguments = REPLAY_TABLES[library]
    assert set(arguments.split()) <= column(page, heading, 1)
    ours = r"(DQN|C51|QRDQN)\(double=False\)|DQN\(\)|(NAF|BootstrappedDQN)\(.*\)|polyak train rainbow"
    agents = re.compile(rf"{ours}|update\(state, rollout, key\)")
    for span in without_training(column(page, heading, 2)):
        if part := re.fullmatch(r"(Actor|Critics|UniformReplay|PrioritizedReplay)\((.*)\)", span):
            names, kind = re.findall(r"(\w+)=", part[2]), getattr(polyak, part[1])
            assert set(names) <= {field.name for field in dataclasses.fields(kind)}, span
        elif not agents.fullmatch(span):
            assert span.split("=")[0] in REPLAY_FIELDS, span
    spans = column(page, heading, 2) | column(page, heading, 3)
    calls = {found[1] for name in spans if (found := re.match(r"(?:network=)?(\w+)\(", name))}
    # One of TF-Agents, and methods of agents.
    calls -= {"QNetwork", "collect_policy", "policy", "update"}
    assert calls and all(any(hasattr(owner, name) for owner in (polyak, polyak.policies, DQN)) for name in calls), calls


def test_every_parameter_of_coach_agents_that_learn_from_rollouts_leads_to_a_setting():
    heading = "Every parameter of agents that learn from rollouts"
    assert set(COACH_ROLLOUTS.split()) <= column(COACH_PAGE, heading, 1)
    fields = FIELDS | {field.name for agent in (A2C, REINFORCE) for field in dataclasses.fields(agent)}
    assert {name for name in column(COACH_PAGE, heading, 2) if re.fullmatch("[a-z_]+", name)} <= fields


@pytest.mark.parametrize(
    ("package", "agent"),
    [("stable_baselines3", name) for name in ("DQN", "SAC", "TD3", "DDPG")]
    + [("sb3_contrib", "QRDQN"), ("sb3_contrib", "TQC")],
)
def test_every_argument_of_stable_baselines3_agents_with_a_replay_is_in_the_table(package, agent):
    parameters = inspect.signature(getattr(pytest.importorskip(package), agent)).parameters
    assert {name for name in parameters if not name.startswith("_")} <= column(STABLE_BASELINES3_PAGE, WITH_REPLAY, 1)


@pytest.mark.parametrize("agent", TF_AGENTS_OF)
def test_an_error_names_the_setting_that_the_table_names(agent):
    heading = "Every argument of PPOAgent" if agent is PPO else WITH_REPLAY
    fields = tuple(field.name for field in dataclasses.fields(agent))
    section, translated = TF_AGENTS_PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0], 0
    for row in (line.split("|") for line in section.splitlines() if line.startswith("| ")):
        theirs, ours = (re.findall(r"`(\w+)[`(]", row[number]) for number in (1, 2))
        ours = {{"Actor": "actor", "Critics": "critics"}.get(name, name) for name in ours} & set(fields)
        for name in (set(theirs) & set(TF_AGENTS_OF[agent].split())) - set(fields) if ours else ():
            found = find_replacement(name, fields, "field")
            assert found and re.match(r"env\.spec|\w+", found[1])[0].removeprefix("env.") in ours, (name, found, ours)
            translated += 1
    assert translated >= 7


@pytest.mark.parametrize(
    ("page", "heading"),
    [(COACH_PAGE, "Verbs"), (COPIES_PAGE, "Coming from Optax"), (COPIES_PAGE, "Workers"), (COPIES_PAGE, "Gradients")],
)
def test_verbs_of_the_network_copies_exist(page, heading):
    ours = column(page, heading, 2 if heading in ("Verbs", "Coming from Optax") else 1)
    names = {found[1] for span in ours if (found := re.match(r"([a-z_]+)\(", span))}
    assert names
    for name in names - {"create"}:
        assert any(name in dir(owner) for owner in (polyak, NetworkCopies, workers)), name


def test_callbacks_of_the_stable_baselines3_table_exist():
    spans = column(STABLE_BASELINES3_PAGE, "Callbacks and evaluation", 2)
    named = {found[1] for span in without_training(spans) if (found := re.match(r"polyak\.train\.callbacks\.(\w+)", span))}
    assert named == set(polyak.train.callbacks.__all__) - {"log_to_mlflow", "log_to_trackio"}


def test_policies_of_the_tf_agents_table_exist():
    names = {name for name in column(TF_AGENTS_PAGE, "Policies", 2) if re.fullmatch(r"[A-Z]\w+", name)}
    assert {"Greedy", "EpsilonGreedy", "Boltzmann", "GaussianNoise", "OUNoise", "Uniform", "Scripted"} == names
    assert all(name in polyak.policies.__all__ for name in names)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_rooms_stand_above_the_rooms_that_they_import(page):
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)?` \| .* \| (.*) \|$", (DOCS.parent / page).read_text(), re.MULTILINE)
    names = [name for name, _ in rows if name in MAY_IMPORT]
    assert len(names) > 15
    for position, name in enumerate(names):
        above = (MAY_IMPORT[name] & set(names)) - set(names[position:])
        assert not above, f"{name} imports {above}, which stand above it"
