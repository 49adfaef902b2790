"""Shows that the tests notice faults: makes one deliberate fault at a time in a copy of the source, and runs tests.

    python tests/mutations.py [--jobs 2] [--select "not slow"] [--only SUBSTRING]

Each line of the output is one fault: which selection of the tests notices it, and the first test that fails. A fault that the
selection misses is tried again with all tests, as `.ci/run` has them. The exit code is 1 if a fault is missed, if an entry of
the table is broken, or if the selection notices fewer than `LEAST`; it is 2 if a test fails without a fault.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LEAST = 110
"""Faults that the fast selection must notice."""

TEST_SECONDS, RUN_SECONDS = 120, 900
"""The time limits of one test, and of one run of pytest."""

CHUNK = 30
"""Names of tests that run together without a fault."""

NOT_COPIED = (".git", "__pycache__", ".*_cache", ".hypothesis", ".venv*", "*.egg-info", "dist", "build", "runs")


@dataclass(frozen=True)
class Mutation:
    """A deliberate fault.

    Attributes:
        file: of the source, in `src/polyak`.
        old: text that stands in the file once.
        new: what takes its place.
        tests: files of tests, in `tests`, or tests in them (`FILE::NAME`), one of which must fail.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        """The mutation on one line."""
        return f"{self.file}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


MUTATIONS = (
    # agents
    Mutation(
        "agents/bro.py",
        "quantiles = jnp.mean(self.q_values(target, batch.next_obs, draw.action, dropout_key), axis=1)",
        "quantiles = jnp.min(self.q_values(target, batch.next_obs, draw.action, dropout_key), axis=1)",
        ("agents/test_bro.py::test_a_gradient_step_of_the_critics_is_that_of_a_slow_version",),
    ),
    Mutation("agents/bro.py", "- optimism * q_std", "+ optimism * q_std", ("agents/test_bro.py",)),
    Mutation(
        "agents/bro.py",
        'values["optimism"] - values["kl_weight"])',
        'values["kl_weight"] - values["optimism"])',
        ("agents/test_bro.py",),
    ),
    Mutation("agents/bro.py", "actor=soft.actor.online,", "actor=copies.actor.online,", ("agents/test_bro.py",)),
    Mutation(
        "agents/bro.py",
        "join_actors(copies.actor.online, copies.optimistic_actor.online, self.std_scale)",
        "join_actors(copies.actor.online, copies.optimistic_actor.online, 1.0)",
        ("agents/test_bro.py::test_it_collects_with_the_optimistic_actor_and_is_greedy_with_the_other",),
    ),
    Mutation(
        "agents/dqn.py",
        "q = self.action_values(online, batch.next_obs, fold(key, 2))[0] if self.double else next_q",
        "q = next_q if self.double else self.action_values(online, batch.next_obs, fold(key, 2))[0]",
        ("agents/test_dqn_tf_agents.py",),
    ),
    Mutation(
        "agents/c51.py",
        "best_action(self.values_network().q(logits), batch.next_action_mask)",
        "best_action(self.values_network().q(logits), None)",
        ("agents/test_value_family.py::test_the_bootstrap_takes_allowed_actions_only",),
    ),
    Mutation(
        "agents/munchausen.py",
        "of_action(q, action) - soft_value(q, self.munchausen_temperature, mask)",
        "of_action(q, action) - soft_value(q, self.munchausen_temperature, None)",
        ("agents/test_munchausen.py::test_the_target_of_dqn_is_that_of_slow_numpy",),
    ),
    Mutation(
        "agents/dqn.py",
        "jnp.minimum(gap, jnp.where(batch.discount > 0, next_gap, 0.0))",
        "jnp.minimum(gap, next_gap)",
        ("agents/test_munchausen.py::test_action_gaps_by_hand",),
    ),
    Mutation(
        "agents/qrdqn.py",
        "batch.discount[:, None] * next_quantiles",
        "self.gamma * next_quantiles",
        ("agents/test_value_family.py::test_a_terminal_transition_does_not_see_the_next_observation",),
    ),
    Mutation(
        "agents/iqn.py",
        "best_action(next_q, batch.next_action_mask)",
        "best_action(next_q, batch.action_mask)",
        ("agents/test_value_family.py::test_the_bootstrap_takes_allowed_actions_only",),
    ),
    Mutation(
        "agents/sac.py",
        "min_of_critics(next_q, self.num_target_critics, subset_key) - alpha * draw.log_prob",
        "min_of_critics(next_q, self.num_target_critics, subset_key) + alpha * draw.log_prob",
        ("agents/test_actor_critics.py::test_sac_target_of_known_numbers",),
    ),
    Mutation(
        "agents/sac.py",
        "return jnp.min(q, axis=1) if self.num_target_critics is None else jnp.mean(q, axis=1)",
        "return jnp.mean(q, axis=1) if self.num_target_critics is None else jnp.min(q, axis=1)",
        ("agents/test_actor_critics.py::test_a_subset_of_critics_is_drawn_for_each_target",),
    ),
    Mutation(
        "agents/crossq.py",
        "jnp.min(next_q, axis=1) - alpha * draw.log_prob",
        "jnp.mean(next_q, axis=1) - alpha * draw.log_prob",
        ("agents/test_crossq.py::test_a_gradient_step_of_the_critics_is_that_of_a_slow_version",),
    ),
    Mutation(
        "agents/atom_settings.py",
        "lowest = jnp.argmin(probs",
        "lowest = jnp.argmax(probs",
        (
            "agents/test_fast_td3.py::test_a_gradient_step_of_the_critics_is_that_of_a_slow_version",
            "agents/test_xqc.py::test_a_gradient_step_of_the_critics_is_that_of_a_slow_version",
        ),
    ),
    Mutation(
        "ops/weight_norm.py",
        "math.sqrt(x.shape[-1]) * _unit",
        "_unit",
        ("agents/test_flash_sac.py::test_a_gradient_step_of_the_critics_is_that_of_a_slow_version",),
    ),
    Mutation(
        "policies/repeated_noise.py",
        "jnp.where(is_drawn, repeats, carry.steps) - 1",
        "jnp.where(is_drawn, repeats, carry.steps) - 2",
        ("policies/test_repeated_noise.py",),
    ),
    Mutation(
        "ops/bounded_rewards.py",
        "jnp.where(counts, size, 0.0)",
        "size",
        ("ops/test_bounded_rewards.py",),
    ),
    Mutation(
        "ops/weight_norm.py",
        "new_params = normalize_weights(optax.apply_updates(params, updates), kernels)",
        "new_params = optax.apply_updates(params, updates)",
        ("agents/test_xqc.py::test_a_gradient_step_of_the_critics_is_that_of_a_slow_version",),
    ),
    Mutation(
        "networks/normalization.py",
        "r, d = jax.lax.stop_gradient((r, d))",
        "r, d = (r, d)",
        (
            "networks/test_normalization.py",
            "agents/test_crossq.py::test_a_gradient_step_of_the_critics_is_that_of_a_slow_version",
        ),
    ),
    Mutation(
        "agents/tqc.py",
        "pool[:, : pool.shape[1] - quantiles.shape[1] * self.dropped_quantiles]",
        "pool[:, quantiles.shape[1] * self.dropped_quantiles :]",
        ("agents/test_tqc.py::test_dropped_atoms_of_known_numbers",),
    ),
    Mutation(
        "agents/delayed_actor.py",
        "return jnp.clip(x + jnp.clip(noise, -self.target_noise_clip, self.target_noise_clip), low, high)",
        "return x + jnp.clip(noise, -self.target_noise_clip, self.target_noise_clip)",
        ("agents/test_actor_critics.py::test_td3_asks_critics_only_for_actions_within_the_bounds",),
    ),
    Mutation(
        "agents/bootstrapped_dqn.py",
        "self.bootstrap_mask(batch.index) * huber",
        "self.bootstrap_mask(batch.action) * huber",
        ("agents/test_bootstrapped_dqn.py::test_the_loss_is_that_of_a_slow_version",),
    ),
    Mutation(
        "networks/quadratic.py",
        'jnp.einsum("bij,bi->bj", lower, distance)',
        'jnp.einsum("bij,bj->bi", lower, distance)',
        ("agents/test_naf.py::test_values_are_the_quadratic_form",),
    ),
    Mutation(
        "agents/qt_opt.py",
        "jnp.min(next_q, axis=(0, 2))",
        "jnp.max(next_q, axis=(0, 2))",
        ("agents/test_qt_opt.py::test_the_loss_is_that_of_a_slow_version",),
    ),
    Mutation(
        "agents/ddpg.py",
        'target_actor=actor.variables("target")',
        "target_actor=actor.online",
        ("agents/test_actor_critics_tf_agents.py",),
    ),
    Mutation(
        "agents/ppo.py",
        'terms["approx_kl"] > 1.5 * self.target_kl',
        'terms["approx_kl"] > self.target_kl',
        ("agents/test_ppo_loss.py::test_an_update_stops_at_one_and_a_half_times_the_target_kl",),
    ),
    Mutation(
        "agents/ppo.py",
        'self.vf_coef * terms["value_loss"] + self.ent_coef * terms["entropy_loss"]',
        'self.vf_coef * terms["value_loss"] - self.ent_coef * terms["entropy_loss"]',
        ("agents/test_ppo_loss.py::test_loss_terms_equal_hand_computed_numbers",),
    ),
    Mutation(
        "agents/ppo_kl.py",
        "beta = jnp.where(after.copies.steps > state.copies.steps, adapted, after.kl_beta)",
        "beta = adapted",
        ("agents/test_ppo_options.py::test_update_without_an_applied_step_leaves_kl_beta",),
    ),
    Mutation(
        "agents/ppo.py",
        "copies.update_target(self.ema_tau)",
        "copies.update_target(1.0 - self.ema_tau)",
        ("agents/test_ppo_copies.py::test_the_target_follows_the_online_copy_after_every_update",),
    ),
    Mutation(
        "agents/impala.py",
        "log_rho = log_probs(model, new.rollout, new.params) - log_probs(model, old.rollout, old.params)",
        "log_rho = log_probs(model, old.rollout, old.params) - log_probs(model, new.rollout, new.params)",
        ("agents/test_on_policy.py::test_terms_and_gradient_are_those_of_a_slow_numpy_version",),
    ),
    Mutation(
        "agents/pqn.py",
        '{"terminated": rollout.terminated, "truncated": rollout.truncated}',
        '{"terminated": rollout.terminated | rollout.truncated, "truncated": rollout.truncated}',
        ("agents/test_pqn.py::test_lambda_returns_against_a_slow_loop",),
    ),
    # training mode
    Mutation(
        "agents/actor_critic.py",
        "is_training = key is not None and not has_batch_statistics(variables)",
        "is_training = key is not None",
        ("agents/test_training_mode.py::test_the_critics_loss_has_the_statistics_of_its_batch_and_all_else_the_running_ones",),
    ),
    Mutation(
        "agents/sac.py",
        "return loss, Aux(critic_terms(q, td_error, batch.weight), stats)",
        "return loss, Aux(critic_terms(q, td_error, batch.weight))",
        ("agents/test_training_mode.py::test_statistics_advance_with_every_gradient_step_and_the_target_follows",),
    ),
    Mutation(
        "agents/dqn.py",
        "apply_to_batch(self._network, variables, obs, train=train, key=key)",
        "apply_to_batch(self._network, variables, obs, train=False, key=key)",
        ("agents/test_training_mode.py::test_an_own_network_of_dqn_trains_with_batch_normalization_and_dropout",),
    ),
    Mutation(
        "agents/resets.py",
        "resets.updates >= jnp.uint32",
        "resets.updates > jnp.uint32",
        ("agents/test_resets.py::test_the_update_after_a_period_begins_with_new_networks",),
    ),
    Mutation(
        "replay/returns.py",
        "is_whole = jnp.where(is_last, terminated & valid, after.is_whole)",
        "is_whole = (terminated & valid) | after.is_whole",
        ("replay/test_returns.py::test_returns_are_sums_to_the_end_of_terminated_episodes",),
    ),
    Mutation(
        "policies/parameter_noise.py",
        "carry.distance + jnp.where(valid, distance, 0.0)",
        "carry.distance + distance",
        ("policies/test_parameter_noise.py::test_sigma_changes_after_50_valid_steps_by_their_distance",),
    ),
    Mutation(
        "agents/pqn.py",
        "obs=fill_rows(batch.obs, batch.weight)",
        "obs=batch.obs",
        ("agents/test_training_mode.py::test_pqn_trains_with_batch_normalization_of_the_transitions_alone",),
    ),
    Mutation(
        "agents/off_policy.py",
        "batch = without_hidden_rows(batch, copies)",
        "batch = dataclasses.replace(batch)",
        ("agents/test_training_mode.py::test_rows_that_are_not_learned_from_reach_no_statistics",),
    ),
    Mutation(
        "agents/actor_critic.py",
        'apply_to_batch(self._actor, actor, self.seen_by("actor", obs), train=True, key=key)',
        'apply_to_batch(self._actor, actor, self.seen_by("actor", obs), key=key)',
        ("agents/test_training_mode.py::test_an_own_actor_trains_with_batch_normalization_and_dropout_in_its_own_loss",),
    ),
    Mutation(
        "networks/adapters.py",
        "nnx.update(module, streams)",
        "pass",
        ("agents/test_training_mode.py::test_an_own_network_of_dqn_trains_with_batch_normalization_and_dropout",),
    ),
    Mutation(
        "ops/gradient_step.py",
        "(mean if axis_name is None else jax.lax.pmean(mean, axis_name)).astype(x.dtype)",
        "mean.astype(x.dtype)",
        ("copies/test_train.py::test_statistics_of_several_devices_are_averaged",),
    ),
    Mutation(
        "ops/gradient_step.py",
        '{"statistics": ~all_finite(aux.stats), "step": ~step_is_finite}',
        '{"statistics": jnp.array(False), "step": ~step_is_finite}',
        ("copies/test_train.py::test_statistics_that_are_not_finite_skip_the_step",),
    ),
    # learning
    Mutation(
        "agents/off_policy.py",
        "return StepCount.of(env_steps) >= StepCount.of(self.learning_starts)",
        "return StepCount.of(env_steps) >= StepCount.of(self.learning_starts + 1)",
        ("agents/test_value_family.py::test_actions_are_random_until_learning_starts",),
    ),
    Mutation(
        "agents/off_policy.py",
        "weight=batch.weight / jnp.where(total > 0, total, 1.0)",
        "weight=batch.weight / self.batch_size",
        ("agents/test_dqn_tf_agents.py::test_an_update_through_the_replay_is_theirs_over_the_rows_that_count",),
    ),
    Mutation(
        "replay/uniform.py",
        "weight=(summed[0] & is_stored).astype(jnp.float32)",
        "weight=is_stored.astype(jnp.float32)",
        ("agents/test_dqn_tf_agents.py::test_an_update_through_the_replay_is_theirs_over_the_rows_that_count",),
    ),
    Mutation(
        "agents/off_policy.py",
        "enabled=is_learning, axis_name=axis_name).priorities",
        "enabled=False, axis_name=axis_name).priorities",
        ("agents/test_dqn_prioritized.py::test_the_error_of_a_transition_becomes_its_priority",),
    ),
    Mutation(
        "agents/q_learning.py",
        "return jnp.where(self.has_started(env_steps), after, 1.0)",
        "return after",
        ("agents/test_dqn.py::test_no_gradient_step_before_learning_starts",),
    ),
    Mutation(
        "learning/actor_critic_updates.py",
        "return jnp.min(q, axis=1)",
        "return jnp.max(q, axis=1)",
        ("agents/test_sac_discrete.py::test_targets_and_losses_equal_the_slow_version",),
    ),
    Mutation(
        "learning/actor_critic_updates.py",
        "critics.steps % jnp.uint32(delay) == 0",
        "critics.steps % jnp.uint32(delay) == 1",
        ("agents/test_actor_critics.py::test_updates_of_td3_without_an_actor_step_leave_its_loss_out_of_the_mean",),
    ),
    Mutation(
        "agents/soft_actor.py",
        "-weight * jax.lax.stop_gradient(excess)",
        "weight * jax.lax.stop_gradient(excess)",
        ("agents/test_actor_critics.py::test_a_learned_temperature_moves_the_entropy_towards_its_target",),
    ),
    Mutation(
        "learning/rollout_batch.py",
        "return (has_weight | later) & ~first, has_weight | later",
        "return has_weight | later, has_weight | later",
        ("learning/test_rollout_batch.py::test_what_has_no_weight_is_masked_unless_a_later_row_remembers_it",),
    ),
    Mutation(
        "learning/rollout_batch.py",
        "return jnp.where(several, (advantage - mean) / (jnp.sqrt(variance) + 1e-8), advantage)",
        "return (advantage - mean) / (jnp.sqrt(variance) + 1e-8)",
        ("learning/test_rollout_batch.py::test_a_single_sample_or_none_keeps_its_advantage",),
    ),
    Mutation(
        "learning/epochs.py",
        "enabled=~stopped & (total > 0),",
        "enabled=~stopped,",
        ("learning/test_epochs.py::test_a_minibatch_without_weight_is_no_step",),
    ),
    Mutation(
        "learning/epochs.py",
        "permutation_seeds(key, num_epochs, groups * devices)",
        "jnp.repeat(permutation_seeds(key, 1, groups * devices), num_epochs, axis=0)",
        ("learning/test_epochs.py::test_every_epoch_has_an_order_of_its_own",),
    ),
    Mutation(
        "learning/recurrent_replay.py",
        "_, carry = jax.lax.stop_gradient(unroll(network, variables, before, obs.first[:burn_in], carry))",
        "_, carry = unroll(network, variables, before, obs.first[:burn_in], carry)",
        ("agents/test_dqn_recurrent.py::test_no_gradient_flows_into_the_burn_in",),
    ),
    Mutation(
        "networks/recurrent.py",
        "self.cell(reset(initial, carry, first), features)",
        "self.cell(carry, features)",
        ("agents/test_recurrent_actor_critics.py::test_what_is_hidden_changes_no_bit",),
    ),
    Mutation(
        "policies/critic_state.py",
        "carry = reset_carry(critic.network, carry, time_step.first)",
        "",
        ("agents/test_recurrent_actor_critics.py::test_the_stored_states_are_those_of_actor_and_critics_along_the_episodes",),
    ),
    Mutation(
        "agents/policy_gradient.py",
        "counts = receipt.applied | receipt.empty",
        "counts = True",
        ("agents/test_pushed_gradients.py::test_a_repeated_push_counts_neither_in_the_weights_nor_in_the_statistics",),
    ),
    Mutation(
        "learning/replay_batch.py",
        "reward=batch.reward / divisor",
        "reward=batch.reward",
        ("agents/test_normalized_replay.py::test_batches_are_normalised_by_the_statistics_of_now",),
    ),
    Mutation(
        "learning/prefill.py",
        "jax.lax.scan(add, ring.change_own(replay, end), starts)",
        "jax.lax.scan(add, replay, starts)",
        ("learning/test_prefill.py::test_no_transition_leads_into_or_out_of_an_added_rollout",),
    ),
    # ops
    Mutation(
        "ops/returns.py",
        "delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value",
        "delta = reward + gamma * jnp.where(terminated | truncated, 0.0, next_value) - value",
        ("ops/test_returns.py::test_gae_is_the_sum_of_its_definition",),
    ),
    Mutation(
        "ops/losses.py",
        "return jnp.where(weight > 0, x, 0.0) * weight",
        "return x * weight",
        ("ops/test_losses.py::test_masked_entry_changes_no_bit_of_mean_variance_or_gradient",),
    ),
    Mutation(
        "ops/losses.py",
        "return -jnp.where(unclipped <= clipped, unclipped, clipped)",
        "return -jnp.where(unclipped >= clipped, unclipped, clipped)",
        ("ops/test_losses.py::test_published_number_of_the_clipped_surrogate",),
    ),
    Mutation(
        "ops/gradient_step.py",
        "all_finite((result[0], result[2]))",
        "jnp.array(True)",
        ("copies/test_train.py::test_a_result_that_is_not_finite_skips_the_step",),
    ),
    Mutation(
        "ops/gradient_step.py",
        "consecutive = jnp.where(jnp.all(applied > 0), jnp.uint32(0), self.consecutive_skipped_updates)",
        "consecutive = self.consecutive_skipped_updates",
        ("ops/test_gradient_step.py::test_one_applied_step_ends_the_row_and_the_quantity_is_remembered",),
    ),
    Mutation(
        "ops/updates.py",
        "return jax.jit(_interpolate)(online, target, tau)",
        "return jax.jit(_interpolate)(online, target, 1.0 - tau)",
        ("ops/test_updates.py::test_soft_update_gives_the_published_numbers",),
    ),
    Mutation(
        "ops/normalize.py",
        "accept = (count > 0) & jnp.all(jnp.isfinite(merged.mean) & jnp.isfinite(merged.variance))",
        "accept = count > 0",
        ("ops/test_normalize.py::test_non_finite_entry_leaves_all_statistics_unchanged",),
    ),
    Mutation(
        "ops/schedules.py",
        "return jnp.where(total < more, jnp.uint32(MAX_COUNT), total)",
        "return total",
        ("ops/test_schedules.py::test_saturating_add_stops_at_the_largest_uint32",),
    ),
    Mutation(
        "ops/distributions/continuous.py",
        "return jnp.tanh(u), log_prob - sum_event(_log_tanh_slope(u), self.event_ndims)",
        "return jnp.tanh(u), log_prob + sum_event(_log_tanh_slope(u), self.event_ndims)",
        ("ops/distributions/test_continuous.py::test_a_saturated_sample_knows_its_density",),
    ),
    Mutation(
        "ops/value_distributions.py",
        "(error < 0).astype(jnp.float32)",
        "(error > 0).astype(jnp.float32)",
        ("ops/test_value_distributions.py::test_quantile_loss_of_closed_numbers",),
    ),
    # copies
    Mutation(
        "copies/follow.py",
        "elapsed=jnp.where(has_elapsed, jnp.uint32(0), elapsed),",
        "elapsed=elapsed,",
        ("copies/test_follow.py::test_target_is_updated_once_per_period_and_unchanged_between",),
    ),
    Mutation(
        "copies/network_copies.py",
        "copies.target_follow.step(copies.target_count, copies.online,",
        "copies.target_follow.step(copies.target_count, self.online,",
        ("copies/test_network_copies.py::test_online_is_updated_from_shared_before_target_from_online",),
    ),
    Mutation(
        "copies/network_copies.py",
        "bad, enabled, has_gradient, to=to)[0]",
        "bad, enabled, to=to)[0]",
        ("copies/test_accumulated.py::test_empty_accumulator_makes_no_step_even_with_momentum",),
    ),
    Mutation(
        "copies/receive.py",
        "is_new = ~is_known | (push.sequence > senders.sequence[push.worker])",
        "is_new = ~is_known | (push.sequence >= senders.sequence[push.worker])",
        ("copies/test_receive.py::test_a_push_that_is_sent_again_is_applied_once",),
    ),
    Mutation(
        "copies/shared.py",
        "self.version - version <= jnp.uint32(max_staleness)",
        "self.version - version < jnp.uint32(max_staleness)",
        ("copies/test_receive.py::test_old_gradients_are_dropped_and_so_are_those_of_versions_to_come",),
    ),
    Mutation(
        "copies/outputs.py",
        'train and name != "target"',
        "train",
        ("copies/test_training.py::test_target_predicts_in_inference_mode_even_with_train",),
    ),
    Mutation(
        "copies/accumulated.py",
        "number=self.number + valid.astype(jnp.uint32)",
        "number=self.number + jnp.uint32(1)",
        ("copies/test_accumulated.py::test_non_finite_gradient_is_skipped_and_counted",),
    ),
    # replay
    Mutation(
        "replay/uniform.py",
        "discount = jnp.asarray(gamma, jnp.float32) ** num_summed.astype(jnp.float32)",
        "discount = jnp.full(num_summed.shape, jnp.asarray(gamma, jnp.float32) ** n_step)",
        ("replay/test_uniform.py::test_three_step_transitions_stop_at_ends_and_at_the_newest_row",),
    ),
    Mutation(
        "replay/uniform.py",
        "jnp.any(summed & terminated, axis=0)",
        "jnp.any(summed & (terminated | truncated), axis=0)",
        ("replay/test_uniform.py::test_three_step_transitions_stop_at_ends_and_at_the_newest_row",),
    ),
    Mutation(
        "replay/uniform.py",
        "start, num_envs) & ~rollout.time_steps.first[0]",
        "start, num_envs)",
        ("replay/test_uniform.py::test_new_episodes_after_a_gap_leave_no_transition_across_it",),
    ),
    Mutation(
        "replay/prioritized.py",
        "dataclasses.replace(batch, weight=weight * batch.weight)",
        "batch",
        ("replay/test_prioritized.py::test_probabilities_and_weights_are_those_of_the_paper",),
    ),
    Mutation(
        "replay/prioritized.py",
        "Priorities(tree, jnp.maximum(priorities.largest, largest),",
        "Priorities(tree, priorities.largest,",
        ("replay/test_prioritized.py::test_new_transitions_get_the_largest_priority_so_far",),
    ),
    Mutation(
        "replay/sequences.py",
        "carry = mask_invalid(carry, finite_rows(carry, 1))",
        "carry = carry",
        ("replay/test_sequences.py::test_a_recurrent_state_that_is_not_finite_is_stored_as_the_initial_one",),
    ),
    Mutation(
        "data/data_set.py",
        "return ~self.terminated",
        "return np.zeros_like(self.terminated)",
        ("data/test_from_minari.py::test_an_episode_that_was_cut_off_counts_as_truncated",),
    ),
    # kernels
    Mutation(
        "kernels/sum_tree.py",
        "is_in = (child > 0) & (before <= position)",
        "is_in = (child > 0) & (before + child <= position)",
        ("kernels/test_sum_tree.py::test_draws_are_those_of_a_search_in_the_running_sum",),
    ),
    Mutation(
        "kernels/shuffle.py",
        "for i in range(0, ROUNDS, 2):",
        "for i in range(0, 2, 2):",
        ("kernels/test_shuffle.py::test_neighbours_do_not_stay_together",),
    ),
    Mutation(
        "kernels/matmul.py",
        "terms = [] if isinstance(dx, SymbolicZero) else [dx @ kernel]",
        "terms = [] if isinstance(dx, SymbolicZero) else [-dx @ kernel]",
        ("kernels/test_matmul.py::test_values_and_gradients_are_those_of_the_product",),
    ),
    # networks
    Mutation(
        "networks/recurrent.py",
        "return self._step(reset(initial, carry, first), features)",
        "return self._step(carry, features)",
        ("networks/test_recurrent.py::test_all_steps_at_once_are_one_step_after_the_other",),
    ),
    Mutation(
        "networks/feedforward.py",
        "[:, None] + q - jnp.mean(q, axis=1, keepdims=True)",
        "[:, None] + q - jnp.mean(q, axis=0, keepdims=True)",
        ("networks/test_q_network.py::test_the_mean_advantage_of_a_dueling_network_is_zero",),
    ),
    Mutation(
        "networks/layers.py",
        "jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))",
        "jnp.sign(noise) * jnp.abs(noise)",
        ("networks/test_q_network.py::test_noise_of_a_layer_has_the_mean_and_variance_of_factorised_noise",),
    ),
    Mutation(
        "networks/layers.py",
        "x = x.astype(jnp.float32) / self.byte_scale",
        "x = x.astype(jnp.float32)",
        ("networks/test_actor_critic.py::test_images_of_few_levels_are_divided_by_the_largest_one",),
    ),
    # policies
    Mutation(
        "policies/network_policy.py",
        "carry = reset_carry(self.network, carry, time_step.first)\n        (params, value), carry, _",
        "(params, value), carry, _",
        ("policies/test_network_policy.py::test_carry_is_reset_between_episodes",),
    ),
    Mutation(
        "policies/noise.py",
        "jnp.where(_broadcast_flag(time_step.first, x), 0.0, x) if isinstance(leaf, Box) else x",
        "x if isinstance(leaf, Box) else x",
        ("policies/test_noise.py::test_ou_noise_follows_its_recursion_in_each_environment",),
    ),
    Mutation(
        "policies/sde.py",
        "is_drawn = (steps == 0) | jnp.asarray(time_step.first)",
        "is_drawn = steps == 0",
        ("policies/test_sde.py::test_an_episode_that_begins_draws_its_own_noise",),
    ),
    Mutation(
        "policies/numpy_policies.py",
        "action = np.where(noise[:, 0] < epsilon, noise[:, 1].astype(np.int32), greedy)",
        "action = np.where(noise[:, 0] > epsilon, noise[:, 1].astype(np.int32), greedy)",
        ("loops/test_host_actor.py::test_epsilon_greedy_acts_in_numpy_as_it_is_defined",),
    ),
    Mutation(
        "policies/scripted.py",
        "step = jnp.where(time_step.first, 0, carry.step)",
        "step = carry.step",
        ("policies/test_scripted.py::test_a_script_is_followed_from_the_beginning_of_every_episode",),
    ),
    Mutation(
        "policies/python/validation.py",
        "wrong = np.where(np.isnan(array), array, low) if self._clip else array",
        "wrong = np.broadcast_to(low, array.shape) if self._clip else array",
        ("policies/python/test_validation.py::test_nan_action_raises_with_and_without_clipping",),
    ),
    Mutation(
        "policies/python/timeout.py",
        "except BaseException as late:\n            worker.requests.put(None)",
        "except BaseException as late:\n            self._idle.append(worker)",
        ("policies/python/test_timeout.py",),
    ),
    # off_policy_evaluation
    Mutation(
        "off_policy_evaluation/policy_value.py",
        "np.where(steps.terminated, 0.0, value[steps.row + 1])",
        "value[steps.row + 1]",
        ("off_policy_evaluation/test_policy_value.py::test_a_wrong_q_biases_the_direct_method_and_not_the_doubly_robust_one",),
    ),
    Mutation(
        "off_policy_evaluation/policy_value.py",
        "counts = (critic != np.arange",
        "counts = (critic == np.arange",
        (
            "off_policy_evaluation/test_policy_value.py::test_each_episode_is_corrected_by_a_critic_that_has_not_learned_from_it",
        ),
    ),
    Mutation(
        "off_policy_evaluation/policy_steps.py",
        "return log_prob - _log_units(steps)",
        "return log_prob",
        ("off_policy_evaluation/test_policy_value.py::test_clipped_gaussian_actions_have_probability_masses_on_the_bounds",),
    ),
    Mutation(
        "off_policy_evaluation/importance.py",
        "log_weight -= log_weight.max(axis=0)",
        "log_weight -= 0.0",
        ("off_policy_evaluation/test_importance.py::test_weights_beyond_the_range_of_floats_keep_their_proportions",),
    ),
    Mutation(
        "off_policy_evaluation/importance.py",
        "np.repeat(ratios.log_episode_weight[:, None], int(ratios.lengths.max()), axis=1)",
        "np.full((len(ratios.lengths), int(ratios.lengths.max())), -np.inf)",
        ("off_policy_evaluation/test_importance.py::test_weights_and_sums_are_those_of_a_loop_over_episodes",),
    ),
    Mutation(
        "off_policy_evaluation/fitted_q.py",
        "discount = np.where(steps.terminated, 0.0, gamma)",
        "discount = np.full(len(steps.row), gamma)",
        ("off_policy_evaluation/test_policy_value.py::test_fqe_of_box_actions_and_of_a_deterministic_policy",),
    ),
    Mutation(
        "data/run_replay.py",
        "follows_step[::size] = size == slots - 1",
        "follows_step[::size] = False",
        ("data/test_collection.py::test_the_oldest_episodes_of_a_full_replay_lack_their_beginnings",),
    ),
    # envs
    Mutation(
        "envs/autoreset.py",
        "terminated, truncated = terminated & ~first, truncated & ~first",
        "truncated = truncated & ~first",
        ("envs/test_autoreset.py::test_episodes_of_length_one_alternate_with_resets",),
    ),
    Mutation(
        "envs/autoreset.py",
        "reward = jnp.where(first, 0.0, jnp.asarray(reward, jnp.float32))",
        "reward = jnp.asarray(reward, jnp.float32)",
        ("envs/test_autoreset.py::test_every_row_resets_on_the_step_after_its_end_and_ignores_that_action",),
    ),
    Mutation(
        "envs/reset_pool.py",
        "jnp.cumsum(first, dtype=jnp.int32) - 1",
        "jnp.zeros_like(first, jnp.int32)",
        ("envs/test_autoreset.py::test_starts_differ_between_rows_and_between_resets",),
    ),
    Mutation(
        "envs/reset_pool.py",
        "return loop[0].ready + count <= self.size",
        "return loop[0].ready + 2 * count <= self.size",
        ("envs/test_autoreset.py::test_a_pool_draws_as_many_initial_states_as_are_taken",),
    ),
    Mutation(
        "envs/vector.py",
        "if self.mode is AutoresetMode.SAME_STEP and np.count_nonzero(is_last):",
        "if self.mode is AutoresetMode.DISABLED and np.count_nonzero(is_last):",
        ("envs/test_vector.py::test_every_mode_of_a_foreign_vector_environment_becomes_next_step_exactly",),
    ),
    Mutation(
        "envs/single_env.py",
        "is_last = terminated or truncated",
        "is_last = terminated",
        ("envs/test_single_env.py", "envs/test_masks.py", "envs/test_gymnasium.py"),
    ),
    Mutation(
        "envs/single_env.py",
        'self.steps = int(snapshot["steps"])',
        "self.steps = 0",
        ("envs/test_snapshots.py::test_a_fresh_environment_goes_on_bit_for_bit_from_a_snapshot",),
    ),
    Mutation(
        "envs/value_checks.py",
        'if nonfinite == "error":\n        env = int(np.flatnonzero(~is_good)[0])',
        'if nonfinite == "errors":\n        env = int(np.flatnonzero(~is_good)[0])',
        ("envs/test_value_checks.py::test_a_reward_that_is_not_finite_is_an_error_naming_env_and_step",),
    ),
    Mutation(
        "envs/classic.py",
        "force = jnp.where(action == 1, 10.0, -10.0)",
        "force = jnp.where(action == 1, -10.0, 10.0)",
        ("envs/test_classic.py::test_every_step_of_whole_episodes_is_gymnasiums_within_1e_5",),
    ),
    Mutation(
        "envs/env_batch.py",
        "seeds_of(seed, self._total)[self._start : self._start + self.num_envs]",
        "seeds_of(seed, self._total)[: self.num_envs]",
        ("envs/test_parts.py::test_parts_together_step_the_environments_of_the_whole_batch",),
    ),
    Mutation(
        "envs/process_workers.py",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.signal(signal.SIGINT, signal.SIG_DFL)",
        ("envs/test_process_workers.py::test_ctrl_c_is_left_to_the_trainer",),
    ),
    Mutation(
        "envs/atari.py",
        "np.sign(points) if self._clips else points",
        "points if self._clips else np.sign(points)",
        ("envs/test_atari.py::test_frames_rewards_lives_and_resets_are_those_of_the_emulator",),
    ),
    # dynamics
    Mutation(
        "dynamics/names.py",
        "if found is None or found.origin is None:\n        return []",
        "if found is None or found.origin is None:\n        raise ImportError(package)",
        ("envs/test_constructors.py::test_all_names_are_listed",),
    ),
    Mutation(
        "dynamics/jumanji.py",
        'explain_missing("jumanji", "jumanji")',
        'explain_missing("brax", "jumanji")',
        ("envs/test_constructors.py::test_a_missing_extra_gives_its_pip_line",),
    ),
    # loops
    Mutation(
        "loops/loop.py",
        "update=jax.random.fold_in(iteration_key, 1),",
        "update=jax.random.fold_in(loop_key, 1),",
        ("loops/test_loop.py::test_the_minibatches_of_two_iterations_are_not_alike",),
    ),
    Mutation(
        "loops/loop.py",
        "(env_steps // interval + 1) * interval",
        "-(-env_steps // interval) * interval",
        ("loops/test_loop.py::test_a_report_falls_due_at_the_next_multiple",),
    ),
    Mutation(
        "loops/episodes.py",
        "episodes = _zero_where(time_step.first, after)",
        "episodes = after",
        ("loops/test_episodes.py::test_episodes_are_those_of_the_oracle_however_the_stream_is_cut",),
    ),
    Mutation(
        "loops/episodes.py",
        "_two_sum(total, rounding + lost)",
        "_two_sum(total, lost)",
        ("loops/test_episodes.py::test_returns_of_long_episodes_lose_nothing_to_float32",),
    ),
    Mutation(
        "loops/episodes.py",
        "counts, info = ~time_steps.first[1:]",
        "counts, info = jnp.ones_like(time_steps.first[1:])",
        ("loops/test_jax_env_info.py::test_numbers_are_means_over_transitions_and_success_over_episodes",),
    ),
    Mutation(
        "loops/episodes.py",
        "Mean.of(success[1:], ended)",
        "Mean.of(success[1:])",
        ("loops/test_jax_env_info.py::test_numbers_are_means_over_transitions_and_success_over_episodes",),
    ),
    Mutation(
        "loops/evaluate.py",
        "quota[: episodes % env.num_envs] += 1",
        "quota[: episodes % env.num_envs] += 0",
        ("loops/test_evaluate.py::test_episodes_are_divided_equally_and_the_first_environments_run_one_more",),
    ),
    Mutation(
        "loops/evaluate.py",
        "if len(self._returns[i]) < self._quota[i]:",
        "if len(self._returns[i]) <= self._quota[i]:",
        ("loops/test_evaluate.py::test_short_episodes_are_not_favoured",),
    ),
    Mutation(
        "loops/metrics.py",
        "before[name] + x if isinstance(x, Mean) and name in before else x",
        "x",
        ("loops/test_metrics.py::test_means_of_two_periods_are_weighted_by_their_counts",),
    ),
    Mutation(
        "loops/host_loop.py",
        "iteration = state.iteration + jnp.uint32(1)",
        "iteration = state.iteration",
        (
            "loops/test_host_actor.py::test_the_next_rollout_has_the_next_keys_and_the_weights_of_its_state",
            "loops/test_loops.py",
        ),
    ),
    Mutation(
        "loops/host_actor.py",
        "if t % block == 0:",
        "if t == 0:",
        ("loops/test_host_actor.py::test_random_numbers_drawn_in_blocks_are_those_of_each_step",),
    ),
    Mutation(
        "loops/host_replay.py",
        "self._replay = self._return_errors(self._replay, errors)",
        "self._return_errors(self._replay, errors)",
        ("loops/test_host_replay.py::test_the_numbers_are_those_of_a_replay_on_the_device",),
    ),
    Mutation(
        "loops/replay_memory.py",
        "return max(0, min([free, *_cgroup_limits(root)]))",
        "return max(0, free)",
        ("loops/test_replay_memory.py::test_available_memory_is_the_machines_or_what_its_group_leaves",),
    ),
    # storage
    Mutation(
        "storage/files.py",
        "file.flush()\n        os.fsync(file.fileno())",
        "file.flush()",
        ("storage/test_checkpoint.py::test_files_directory_and_rename_are_synced_in_that_order",),
    ),
    Mutation(
        "storage/directory.py",
        "os.rename(path, final)\n    sync_directory(final.parent)",
        "sync_directory(final.parent)\n    os.rename(path, final)",
        ("storage/test_checkpoint.py::test_files_directory_and_rename_are_synced_in_that_order",),
    ),
    Mutation(
        "storage/directory.py",
        "oldest = valid[:keep][-1]",
        "oldest = valid[: keep + 1][-1]",
        ("storage/test_checkpoint.py::test_save_keeps_the_newest_checkpoints",),
    ),
    Mutation(
        "storage/checkpoint.py",
        "if file.read(1) or digest.hexdigest() != manifest.sha256:",
        "if file.read(1):",
        ("storage/test_checkpoint.py::test_a_flipped_bit_anywhere_is_an_error_that_names_the_file",),
    ),
    Mutation(
        "storage/lock.py",
        "lock.acquire(timeout=SECONDS_OF_TESTS, poll_interval=SECONDS_OF_TESTS / 10)",
        "_ = lock",
        ("storage/test_lock.py::test_one_process_cannot_take_the_lock_twice",),
    ),
    Mutation(
        "storage/files.py",
        "os.ftruncate(descriptor, end)\n            raise",
        "raise",
        ("storage/test_files.py::test_append_writes_all_or_nothing",),
    ),
    Mutation(
        "storage/files.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        ("storage/test_files.py::test_only_plain_files_are_read",),
    ),
    Mutation(
        "storage/run_files.py",
        '["env_steps"] <= env_steps:',
        '["env_steps"] < env_steps:',
        ("storage/test_run_directory.py::test_rows_after_the_restored_step_are_dropped",),
    ),
    Mutation(
        "storage/writers.py",
        "last = max((step for step in steps(run.checkpoints) if step <= now), default=0)",
        "last = 0",
        ("storage/test_writers.py::test_checkpoint_interval_counts_from_the_restored_step",),
    ),
    Mutation(
        "storage/config.py",
        "if not isinstance(name, str) or name not in classes:",
        "if not isinstance(name, str):",
        ("storage/test_config.py::test_only_registered_names_are_built",),
    ),
    # reports
    Mutation(
        "reports/statistics.py",
        "cut = ordered.shape[-1] // 4",
        "cut = ordered.shape[-1] // 3",
        ("reports/test_statistics.py::test_aggregates_by_hand",),
    ),
    Mutation(
        "reports/statistics.py",
        "inner = ranks[:, cut : runs - cut]",
        "inner = ranks[:, cut:]",
        ("reports/test_statistics.py::test_intervals_of_a_curve_are_those_of_each_point",),
    ),
    Mutation(
        "reports/statistics.py",
        "(a > b) + 0.5 * (a == b)",
        "(a > b) + 0.0 * (a == b)",
        ("reports/test_statistics.py::test_the_probability_of_improvement_counts_pairs_and_half_of_equal_ones",),
    ),
    Mutation(
        "reports/curves.py",
        "right=y[-1] if has_diverged else np.nan",
        "right=np.nan",
        ("reports/test_curves.py::test_a_diverged_run_keeps_its_last_value",),
    ),
    Mutation(
        "storage/columns.py",
        "return (before + begin, line) if has_fewer else None",
        "return before + begin, line",
        ("storage/test_columns.py::test_evaluations_are_found_where_lines_and_steps_are_uneven",),
    ),
    # train
    Mutation(
        "train/interrupt.py",
        "raise KeyboardInterrupt",
        "return",
        ("train/test_run.py::test_a_second_interrupt_raises",),
    ),
    Mutation(
        "train/callbacks.py",
        "return not metrics.get(tag, -np.inf) >= reward",
        "return not metrics.get(tag, -np.inf) > reward",
        ("train/test_callbacks.py::test_training_stops_when_the_reward_is_reached",),
    ),
    Mutation(
        "train/callbacks.py",
        "since = 0 if metrics[tag] > best else since + 1",
        "since = since + (metrics[tag] <= best)",
        ("train/test_callbacks.py::test_training_stops_without_improvement_for_so_many_evaluations",),
    ),
    Mutation(
        "train/evaluation.py",
        "evaluation.mean_return > self._best",
        "evaluation.mean_return < self._best",
        ("train/test_run.py::test_evaluation_while_training_changes_no_bit_and_keeps_the_best",),
    ),
    Mutation(
        "train/resumption.py",
        "return Start(state, saved.env_steps, saved.episodes, is_own=True)",
        "return Start(state, 0, saved.episodes, is_own=True)",
        ("train/test_run.py::test_an_interrupt_returns_the_result_which_resumes_to_the_bit",),
    ),
    Mutation(
        "train/resumption.py",
        "run.rewind(start.env_steps)",
        "run.require_writer()",
        ("cli/test_killed.py::test_killed_at_random_moments_and_resumed_is_the_same_as_uninterrupted",),
    ),
    Mutation(
        "train/statistics.py",
        "low, high = np.quantile(iqm(resamples[..., None]), (0.025, 0.975))",
        "low, high = np.quantile(iqm(resamples[..., None]), (0.25, 0.75))",
        ("train/test_statistics.py::test_the_interval_holds_the_iqm_of_the_population_about_as_often_as_it_says",),
    ),
    Mutation(
        "train/no_step.py",
        'return updates > metrics.get("train/consecutive_skipped_updates", 0)',
        "return updates > 0",
        ("train/test_no_step.py",),
    ),
    # workers
    Mutation(
        "workers/supervise.py",
        "self.workers[index].failures, self.workers[index].is_warm, self._has_worked = 0, True, True",
        "self.workers[index].is_warm, self._has_worked = True, True",
        ("workers/test_supervise.py::test_the_pause_before_a_restart_doubles_and_ends_with_a_success",),
    ),
    Mutation(
        "workers/supervise.py",
        "is_spent = sum(one.restarts for one in self.workers) >= self.budget",
        "is_spent = sum(one.restarts for one in self.workers) > self.budget",
        ("workers/test_supervise.py::test_the_budget_of_restarts_ends_the_training_with_the_reason",),
    ),
    Mutation(
        "workers/worker_rollouts.py",
        'if got.dtype.kind == "f" and not np.isfinite(got).all():',
        'if got.dtype.kind == "f" and np.isinf(got).any():',
        ("workers/test_worker_rollouts.py::test_garbage_costs_the_rows_of_its_worker_and_nothing_else",),
    ),
    Mutation(
        "workers/worker_rollouts.py",
        "if limit is not None and lag > limit:",
        "if limit is not None and lag > limit + 1:",
        ("workers/test_worker_rollouts.py::test_the_error_about_a_lag_names_the_setting_that_allows_one",),
    ),
    Mutation(
        "workers/worker_rollouts.py",
        "(result.number, result.version) != wanted",
        "result.number > number",
        ("workers/test_worker_rollouts.py::test_a_rollout_that_arrives_again_is_collected_as_it_was_asked_for",),
    ),
    Mutation(
        "workers/rollout_worker.py",
        "self._time_step, self._carry = jax.tree.map(lambda x: x[-1], arrays[0]), arrays[3]",
        "self._time_step = jax.tree.map(lambda x: x[-1], arrays[0])",
        ("workers/test_worker_rollouts.py::test_one_worker_acts_in_jax_as_the_host_loop",),
    ),
    Mutation(
        "workers/asynchronous_loop.py",
        "return senders.readmit(worker)",
        "return senders",
        ("workers/test_asynchronous_loop.py::test_gradients_with_nan_are_refused_and_their_worker_replaced",),
    ),
    Mutation(
        "workers/learner_group.py",
        "failures, saved = 1 if progress() > saved else failures + 1, progress()",
        "failures, saved = failures + 1, progress()",
        ("workers/test_learner_group.py::test_progress_resets_the_pause",),
    ),
    Mutation(
        "workers/ray_head.py",
        '"is_final": isinstance(error, FINAL)',
        '"is_final": not isinstance(error, FINAL)',
        ("workers/test_ray_head.py::test_the_head_reports_why_ray_cannot_be_imported",),
    ),
    # export
    Mutation(
        "export/archive.py",
        "if files[name] != _describe_member(data):",
        'if files[name]["size"] != len(data):',
        ("export/test_archive.py::test_a_file_more_or_other_bytes_are_rejected",),
    ),
    Mutation(
        "export/archive.py",
        "if sum(info.file_size for info in infos) > len(data):",
        "if not infos:",
        ("export/test_archive.py::test_a_bomb_is_rejected_by_what_it_declares",),
    ),
    # presets
    Mutation(
        "presets/preset.py",
        "return Linear(value.start, value.end, env_steps * value.fraction)",
        "return Linear(value.start, value.end, env_steps)",
        ("presets/test_presets.py::test_presets_of_minatar_are_those_of_dense_layers",),
    ),
    Mutation(
        "presets/preset.py",
        'if changes.get("temperature") is not None:\n        unused += ("epsilon",)',
        'if changes.get("temperature") is None:\n        unused += ("epsilon",)',
        ("presets/test_presets.py::test_settings_without_effect_are_left_out_of_the_preset",),
    ),
    # runs
    Mutation(
        "runs.py",
        "if not isinstance(value, bool | int | float) or (isinstance(value, float) and not math.isfinite(value)):",
        "if isinstance(value, float) and not math.isfinite(value):",
        ("test_runs.py::test_config_value_out_of_range_is_rejected_by_field",),
    ),
    Mutation(
        "runs.py",
        "return self.final_eval_episodes\n        return unknown if self.eval_every is None else self.eval_episodes",
        "return self.final_eval_episodes\n        return unknown",
        ("test_runs.py::test_episodes_at_the_end_are_the_runs_where_it_has_stored_them",),
    ),
    # core
    Mutation(
        "core/tree_check.py",
        "return x_shape == y_shape and (",
        "return len(x_shape) == len(y_shape) and (",
        ("core/test_tree_check.py::test_shapes_that_would_broadcast_raise_with_leaf_sides_and_shapes",),
    ),
    Mutation(
        "core/checks.py",
        "if isinstance(value, bool) or not isinstance(value, int):",
        "if not isinstance(value, int):",
        ("core/test_checks.py::test_integers",),
    ),
    Mutation(
        "core/spaces.py",
        "return action + _like(space.start, action) if np.any(space.start) else action",
        "return action - _like(space.start, action) if np.any(space.start) else action",
        ("core/test_spaces.py::test_native_action_counts_from_the_start",),
    ),
    Mutation(
        "core/policy_faults.py",
        "part.clear(~envs & ~old.failed_envs()) if _is_flag(part) else part",
        "part",
        ("policies/test_scripted.py::test_a_script_may_end_where_another_policy_was_chosen",),
    ),
    # cli
    Mutation(
        "cli/signals.py",
        "return 0 if self.received is None else 128 + self.received",
        "return 0 if self.received is None else self.received",
        ("cli/test_signals.py::test_handlers_and_descriptors_are_restored",),
    ),
    Mutation(
        "cli/signals.py",
        "if number != signal.SIGHUP or not has_nohup",
        "if number != signal.SIGHUP or has_nohup",
        ("cli/test_signals.py::test_nohup_is_respected",),
    ),
    Mutation(
        "cli/__init__.py",
        'print("stopped by Ctrl-C", file=sys.stderr)\n        return 130',
        'print("stopped by Ctrl-C", file=sys.stderr)\n        return 1',
        ("cli/test_cli.py::test_ctrl_c_outside_of_training_is_130",),
    ),
    Mutation(
        "storage/user_cache.py",
        "or stat.S_IMODE(found.st_mode) & 0o077:",
        "or stat.S_IMODE(found.st_mode) & 0o022:",
        ("storage/test_user_cache.py::test_a_directory_that_others_can_enter_is_rejected",),
    ),
    Mutation(
        "cli/training_run.py",
        'return fail(error if isinstance(error, RunError | CheckpointError) else f"{type(error).__name__}: {error}", 1)',
        'return fail(error if isinstance(error, RunError | CheckpointError) else f"{type(error).__name__}: {error}", 2)',
        ("cli/test_train.py::test_a_checkpoint_that_cannot_be_saved_is_exit_code_1",),
    ),
    Mutation(
        "cli/resume.py",
        "if env_steps is not None and done > env_steps:",
        "if env_steps is not None and done < env_steps:",
        ("cli/test_resume.py::test_usage_errors_name_the_flag",),
    ),
)

VERDICTS = {"pytest": "noticed by pytest", "ci": "noticed by .ci/run", "missed": "MISSED", "broken": "BROKEN"}


def run_tests(tree: Path, tests: Sequence[str], select: str) -> tuple[str, str]:
    """Run tests in a tree: `"noticed"` and the first that fails, `"missed"`, or `"broken"` and what is wrong."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTEST_ADDOPTS": ""}
    # A file, for a process that a test has left behind would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        words = [*command, "-m", select, *(f"tests/{test}" for test in tests)]
        try:
            code = subprocess.run(
                words, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=RUN_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return "broken", f"no end in {RUN_SECONDS} s"
        file.seek(0)
        output = file.read()
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", output, re.MULTILINE)
    if code == 1 and failed:
        return "noticed", failed[1]
    # Where the selection leaves out all of the tests, none of them notices anything.
    if code == 0 or (code == 5 and " deselected" in output and " skipped" not in output):
        return "missed", ""
    return "broken", f"pytest ended with {code}: {' '.join(output.split()[-40:])}"


@contextmanager
def fault(tree: Path, mutation: Mutation) -> Iterator[None]:
    """The tree has the fault in this context.

    Raises:
        ValueError: `old` does not stand in the file exactly once.
    """
    path = tree / "src/polyak" / mutation.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutation.old) != 1:
        raise ValueError(f"the old text stands {text.count(mutation.old)} times in the file")

    def write(text: str) -> None:
        path.write_text(text)
        # Python compares only the second of a source's last change and its size, so what was compiled has to go.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    write(text.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        write(text)


def try_mutation(tree: Path, mutation: Mutation, select: str) -> tuple[str, str]:
    """The key of `VERDICTS` for a mutation, and the first test that fails or what is wrong."""
    try:
        with fault(tree, mutation):
            verdict, detail = run_tests(tree, mutation.tests, select)
        if verdict == "missed" and select:
            unchanged = run_tests(tree, mutation.tests, "")
            if unchanged[0] != "missed":
                return "broken", f"without the fault: {' '.join(unchanged)}"
            with fault(tree, mutation):
                verdict, detail = run_tests(tree, mutation.tests, "")
            select = ""
    except ValueError as error:
        return "broken", str(error)
    return ("pytest" if select else "ci") if verdict == "noticed" else verdict, detail


def problems() -> list[str]:
    """Entries of the table whose old text does not stand in the file exactly once, or whose tests do not exist."""
    root, found = Path(__file__).parents[1], []
    for one in MUTATIONS:
        source = root / "src/polyak" / one.file
        count = source.read_text().count(one.old) if source.exists() else 0
        if count != 1:
            found.append(f"{one}: the old text stands {count} times in the file")
        for test in one.tests:
            file, _, name = test.partition("::")
            path = root / "tests" / file
            text = path.read_text() if path.exists() else ""
            if not text or (name and not re.search(rf"^def {name.partition('[')[0]}\(", text, re.MULTILINE)):
                found.append(f"{one}: there is no tests/{test}")
    return found


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="runs of pytest at a time")
    parser.add_argument("--select", default="not slow", help='the expression of pytest -m; "" takes all tests')
    parser.add_argument("--only", default="", help="only mutations with this text in their file, old or new text, or tests")
    options = parser.parse_args()
    if broken := problems():
        print("\n".join(broken))
        return 1
    chosen = [one for one in MUTATIONS if options.only in "\n".join((one.file, one.old, one.new, *one.tests))]
    counts = dict.fromkeys(VERDICTS, 0)
    with tempfile.TemporaryDirectory(prefix="mutations-") as root, ThreadPoolExecutor(options.jobs) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(options.jobs):
            copy = Path(root, str(job))
            trees.put(shutil.copytree(Path(__file__).parents[1], copy, ignore=shutil.ignore_patterns(*NOT_COPIED)))

        def in_a_tree(function, *arguments):
            tree, start = trees.get(), time.monotonic()
            try:
                return *function(tree, *arguments), time.monotonic() - start
            finally:
                trees.put(tree)

        names = sorted({test for one in chosen for test in one.tests})
        chunks = [names[i : i + CHUNK] for i in range(0, len(names), CHUNK)]
        failed = False
        for verdict, detail, seconds in pool.map(lambda chunk: in_a_tree(run_tests, chunk, options.select), chunks):
            print("without a fault: " + ("the tests pass" if verdict == "missed" else detail), f"{seconds:.0f} s", flush=True)
            failed |= verdict != "missed"
        if failed:
            return 2
        tries = {pool.submit(in_a_tree, try_mutation, one, options.select): one for one in chosen}
        for done in as_completed(tries):
            verdict, detail, seconds = done.result()
            counts[verdict] += 1
            print(f"{VERDICTS[verdict]:18}   {tries[done]}   {detail}   {seconds:.0f} s", flush=True)
    broken = f", {counts['broken']} broken" if counts["broken"] else ""
    noticed = f"{counts['pytest']} noticed by pytest, {counts['ci']} only by .ci/run"
    print(f"{len(chosen)} mutations: {noticed}, {counts['missed']} missed{broken}")
    is_few = options.select and not options.only and counts["pytest"] < LEAST
    return int(bool(counts["missed"] or counts["broken"] or is_few))


if __name__ == "__main__":
    sys.exit(main())
