"""Settings of every agent: wrong ones are rejected by name before anything is traced, and defaults learn.

Which of them are valid together stands in the test of each agent.
"""

import dataclasses
import typing

import pytest

from polyak.agents import AGENTS, agent_class
from polyak.ops.schedules import Linear
from polyak.presets import PRESETS
from polyak.replay import PrioritizedReplay, SequenceReplay, UniformReplay
from tests.agents.test_unused_settings import make

NAN, INF = float("nan"), float("inf")
NO_COUNT = (-1, 2.0, True, "8", NAN)
NO_NUMBER = (NAN, INF, "1", True)
NOT_POSITIVE = (0.0, -1.0, *NO_NUMBER)
NO_RATE = (*NOT_POSITIVE, Linear(-1.0), Linear(1e-3, -1.0))
NO_SHARE = (-0.1, 1.5, *NO_NUMBER)
NO_SHARES = (*NO_SHARE, Linear(1.5), Linear(0.5, -0.1))
NO_NAME = ("another", 1, True)
NO_SWITCH = ("yes", 1, 0)
NO_NETWORK = ("mlp", 3)

# A name means the same in all agents that have it.
WRONG = {
    "spec": ("CartPole-v1", 3),
    "optimizer": ("adam", 3e-4),
    **dict.fromkeys(("actor_obs", "critic_obs"), ("state", 3, ())),
    "replay": ("prioritized", 3, SequenceReplay()),
    **dict.fromkeys(("network", "actor", "critics", "value", "flow", "random_network", "optimistic_actor"), NO_NETWORK),
    **dict.fromkeys(("num_steps", "num_epochs", "num_minibatches", "microbatch_size", "batch_size"), (0, *NO_COUNT)),
    **dict.fromkeys(("target_period", "policy_delay", "num_target_critics", "sde_sample_freq", "reset_period"), (0, *NO_COUNT)),
    "max_noise_repeats": (0, *NO_COUNT),
    "reset_keeps": (3, (), ("dense", None), ""),
    **dict.fromkeys(("max_skipped_updates", "num_quantiles", "num_action_samples"), (0, *NO_COUNT)),
    **dict.fromkeys(("num_tau", "num_target_tau", "num_policy_tau"), (0, *NO_COUNT)),
    **dict.fromkeys(("dropped_quantiles",), NO_COUNT),
    **dict.fromkeys(("num_samples", "num_elites", "lag_period", "num_heads", "num_features"), (0, *NO_COUNT)),
    **dict.fromkeys(("flow_steps", "num_iterations"), (0, 101, *NO_COUNT)),
    **dict.fromkeys(("initial_std", "std_scale"), NOT_POSITIVE),
    **dict.fromkeys(("min_std", "ucb_scale", "coefficient"), (-0.1, *NO_NUMBER)),
    "bootstrap_probability": (0.0, *NO_SHARE),
    "num_atoms": (1, *NO_COUNT),
    "n_step": (0, 1_001, *NO_COUNT),
    "learning_starts": (2**31 + 1, *NO_COUNT),
    "adam_b1": (-0.1, 1.0, *NO_NUMBER),
    **dict.fromkeys(("max_grad_norm", "max_dqda", "clip_obs", "clip_reward"), NOT_POSITIVE),
    **dict.fromkeys(("adam_eps", "rms_eps"), (1e-40, *NOT_POSITIVE)),
    "max_return": NOT_POSITIVE,
    **dict.fromkeys(("clip_range_vf", "clip_log_prob", "rho_clip", "target_kl"), NOT_POSITIVE),
    **dict.fromkeys(("kl_beta", "kl_target", "kl_cutoff_coef", "kl_cutoff_factor"), NOT_POSITIVE),
    **dict.fromkeys(
        ("initial_alpha", "reward_scale", "updates_per_step", "max_weight", "margin", "margin_weight"), NOT_POSITIVE
    ),
    **dict.fromkeys(("alpha", "ent_coef", "vf_coef", "l2_policy", "l2_value", "l2_shared"), (-0.1, *NO_NUMBER)),
    **dict.fromkeys(
        ("c_clip", "huber_delta", "cql_weight", "inverse_temperature", "q_weight", "distill_weight"), (-0.1, *NO_NUMBER)
    ),
    **dict.fromkeys(("target_noise", "target_noise_clip"), (-0.1, *NO_NUMBER)),
    **dict.fromkeys(("min_exploration_noise", "max_exploration_noise"), (-0.1, *NO_NUMBER)),
    "parameter_noise": (1.5, *NOT_POSITIVE),
    "exploration_noise": (-0.1, *NO_NUMBER, Linear(1.0, -0.1)),
    **dict.fromkeys(("gamma", "gae_lambda", "q_lambda", "ema_tau", "kl_tolerance", "rms_decay", "intrinsic_gamma"), NO_SHARE),
    **dict.fromkeys(("munchausen", "gap_weight", "monte_carlo_weight"), NO_SHARE),
    "munchausen_temperature": NOT_POSITIVE,
    "num_bc_steps": NO_COUNT,
    **dict.fromkeys(("critic_penalty", "weight_decay"), (-0.1, *NO_NUMBER)),
    **dict.fromkeys(("initial_optimism", "initial_kl_weight"), (1e-5, 2e3, *NOT_POSITIVE)),
    "munchausen_clip": (0.1, *NO_NUMBER),
    **dict.fromkeys(("tau", "theta", "expectile"), (0.0, *NO_SHARE)),
    "epsilon": NO_SHARES,
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "alpha_learning_rate", "clip_range", "temperature"), NO_RATE),
    **dict.fromkeys(("cql_learning_rate", "optimism_learning_rate"), NO_RATE),
    "target_gap": NO_NUMBER,
    **dict.fromkeys(("v_min", "v_max"), NO_NUMBER),
    "target_entropy": (*NO_NUMBER, "Auto"),
    **dict.fromkeys(("advantages", "value_targets", "values_when", "alpha_loss", "optimizer_name", "exploration"), NO_NAME),
    **dict.fromkeys(("normalize_reward", "q_aggregation", "actor_q", "cem_action"), NO_NAME),
    **dict.fromkeys(("normalize_obs", "double", "shared_encoder", "squash", "weight_norm"), NO_SWITCH),
    **dict.fromkeys(("histograms", "recompute_values", "normalize_advantage"), NO_SWITCH),
    **dict.fromkeys(("entropy_in_target", "normalize_q"), NO_SWITCH),
}


@pytest.mark.parametrize("algorithm", AGENTS)
def test_a_wrong_setting_is_one_error_that_names_agent_field_and_value(algorithm):
    """Bad values, in every setting."""
    reject_wrong_settings(make(algorithm), WRONG)


WRONG_OF_REPLAYS = {
    **dict.fromkeys(("capacity", "sequence_length"), (0, *NO_COUNT)),
    "burn_in": NO_COUNT,
    "frame_stack": (0, 65, *NO_COUNT),
    "frame_padding": NO_NAME,
    **dict.fromkeys(("alpha", "eps"), (-0.1, *NO_NUMBER)),
    "beta": NO_SHARES,
}


@pytest.mark.parametrize("kind", [UniformReplay, PrioritizedReplay, SequenceReplay])
def test_a_wrong_setting_of_a_replay_is_one_error_that_names_replay_field_and_value(kind):
    reject_wrong_settings(kind(), WRONG_OF_REPLAYS)
    if kind is not SequenceReplay:
        with pytest.warns(UserWarning, match="frame_padding='first' has no effect with frame_stack=1"):
            kind(frame_padding="first")


def test_a_replay_that_is_no_struct_is_rejected():
    bare = type("Bare", (UniformReplay,), {})
    with pytest.raises(TypeError, match=r"DQN: replay must be a pytree: decorate Bare with polyak\.core\.struct\.struct"):
        make("dqn", replay=bare())


def reject_wrong_settings(right, wrong):
    cls = type(right)
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        required = () if type(None) in typing.get_args(types[field.name]) else (None,)
        for value in (*wrong[field.name], *required):
            with pytest.raises((TypeError, ValueError)) as caught:
                dataclasses.replace(right, **{field.name: value})
            message, shown = str(caught.value), value
            if isinstance(value, Linear):
                shown = value.start if value.start not in (0.5, 1e-3, 1.0) else value.end
            assert message.startswith(f"{cls.__name__}: "), (field.name, value, message)
            for part in (field.name, repr(shown), "must"):
                assert part in message, (field.name, value, message)
            assert "\n" not in message


def test_every_wrong_value_belongs_to_a_field():
    assert set(WRONG) == {field.name for name in AGENTS for field in dataclasses.fields(agent_class(name))}


def test_the_nearest_class_sets_each_default():
    """Of two bases with a common one, dataclasses take all fields of the first, also those that only the second changed."""
    for agent in map(agent_class, AGENTS):
        fields = [field for field in dataclasses.fields(agent) if field.default is not dataclasses.MISSING]
        other = [field.name for field in fields if getattr(agent, field.name) is not field.default]
        assert not other, f"{agent.__name__}: {other}"


@pytest.mark.parametrize("algorithm", AGENTS)
def test_defaults_discount_and_keep_a_target_that_differs_from_the_online_network(algorithm):
    """TF-Agents ships gamma 1, tau 1 and period 1, with which returns do not converge and the target is the online network."""
    defaults = {field.name: field.default for field in dataclasses.fields(agent_class(algorithm))}
    presets = [found.settings(found.env_steps) for (name, _), found in PRESETS.items() if name == algorithm]
    for used in (defaults, *(defaults | preset for preset in presets)):
        assert 0.9 <= used["gamma"] < 1
        if "tau" in used:
            assert 0 < used["tau"] <= 1 <= used["target_period"] and (used["tau"] < 1 or used["target_period"] > 1)
        assert ("tau" in used) == ("target_period" in used) == ("replay" in used and algorithm not in ("bc", "crossq"))
