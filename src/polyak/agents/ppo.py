"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): the clipped objective, with GAE."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import Metrics, Network, PyTree, Rollout, Scalar, Variables
from polyak.ops import losses
from polyak.ops.devices import any_over_devices, sum_over_devices
from polyak.ops.distributions import for_space
from polyak.ops.guard import Guard, all_finite
from polyak.ops.normalize import RunningStats
from polyak.ops.returns import gae
from polyak.ops.schedules import Schedule, check_schedule, counted_on, value_at
from polyak.parts.minibatches import accumulate_gradient, check_divides, map_rows, shuffled_minibatches
from polyak.parts.networks import check_actor_critic, network_for
from polyak.parts.normalizer import ObsNormalizer
from polyak.parts.optimizer import Adam, global_norm
from polyak.parts.policies import DiscountedReturn, Greedy, NetworkPolicy, discounted_so_far

# What can be not finite, in the order in which one causes the next.
QUANTITIES = ("obs", "reward", "value", "log_prob", "loss", "gradient")


@struct
class PPOState:
    """All that training changes.

    Attributes:
        variables: the network's.
        optimizer: Adam's moments.
        normalizer: statistics of the observations, or None.
        return_stats: statistics of the discounted return, by whose deviation rewards are divided, or None.
        env_steps: valid transitions learned from; what schedules follow.
        updates: rollouts learned from.
        guard: counts of refused steps.
    """

    variables: Variables
    optimizer: PyTree
    normalizer: ObsNormalizer | None
    return_stats: RunningStats | None
    env_steps: UInt32[Array, ""]
    updates: UInt32[Array, ""]
    guard: Guard


@struct
class Rows:
    """A rollout as the loss sees it: `T * B` rows, with what stays fixed while the epochs run.

    Attributes:
        weight: 1 for a transition, 0 for a row that only reset the environment.
    """

    obs: PyTree
    action: PyTree
    action_mask: PyTree
    log_prob: Float[Array, " N"]
    value: Float[Array, " N"]
    advantage: Float[Array, " N"]
    value_target: Float[Array, " N"]
    weight: Float[Array, " N"]


@struct
class PPO:
    """Clipped PPO with GAE, for Discrete, MultiDiscrete, MultiBinary and Box actions and trees of them.

        L(θ) = E[ -min(r A, clip(r, 1-ε, 1+ε) A) + c_v (V - V̂)² - c_e H ],    r = π_θ(a|s) / π_old(a|s)

    Expectations are over valid transitions. Old log-probabilities and values are computed from the collected observations
    in one pass before the first epoch: the same network on the same numbers, and cheaper than keeping them while acting.

    Attributes:
        spec: the environment's spaces (`env.spec`).
        network: answers `(action_params, value)`; None takes `network_for(spec)`. It is never put into training mode: dropout
            stays off, and statistics stay as they were initialised.
        num_steps: rollout length T, in steps of each environment.
        num_epochs: passes over a rollout.
        num_minibatches: parts of a rollout per epoch; must divide `num_steps * num_envs`.
        learning_rate: Adam's, a number or `Linear`.
        gamma: discount per step.
        gae_lambda: trace decay of GAE.
        clip_range: ε, a number or `Linear`.
        clip_range_vf: the value moves at most so far from its old one; None leaves it free.
        ent_coef: c_e.
        vf_coef: c_v.
        max_grad_norm: global norm that gradients are clipped to; None leaves them.
        target_kl: an update ends once the approximate KL divergence of a minibatch exceeds 1.5 times this; None never.
        normalize_advantage: advantages of a minibatch get mean 0 and deviation 1, over its valid entries.
        normalize_obs: float observations are normalised by their running mean and deviation, clipped to ±10.
        normalize_reward: rewards are divided by the running deviation of the discounted return, clipped to ±10.
        adam_eps: Adam's ε.
        max_bad_steps: updates in a row without one good gradient step after which training stops with an error.

    Raises:
        TypeError, ValueError: a setting out of its range, by name.

    >>> from polyak.core.spaces import Box, Discrete
    >>> agent = PPO(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static()
    network: Network | None = static(default=None)
    num_steps: int = static(default=256)
    num_epochs: int = static(default=10)
    num_minibatches: int = static(default=32)
    learning_rate: Schedule = 3e-4
    gamma: Scalar = 0.99
    gae_lambda: Scalar = 0.95
    clip_range: Schedule = 0.2
    clip_range_vf: Scalar | None = None
    ent_coef: Scalar = 0.0
    vf_coef: Scalar = 0.5
    max_grad_norm: Scalar | None = 0.5
    target_kl: Scalar | None = None
    normalize_advantage: bool = static(default=True)
    normalize_obs: bool = static(default=False)
    normalize_reward: bool = static(default=False)
    adam_eps: Scalar = 1e-5
    max_bad_steps: int = static(default=10)

    def __post_init__(self) -> None:
        if not isinstance(self.spec, EnvSpec):
            raise TypeError(f"PPO: spec must be an EnvSpec such as env.spec, got {self.spec!r}")
        for name in ("num_steps", "num_epochs", "num_minibatches", "max_bad_steps"):
            check_integer("PPO", name, getattr(self, name))
        for name in ("normalize_advantage", "normalize_obs", "normalize_reward"):
            check_choice("PPO", name, getattr(self, name), (True, False))
        for name in ("gamma", "gae_lambda"):
            check_number("PPO", name, getattr(self, name), at_least=0, at_most=1)
        for name in ("ent_coef", "vf_coef"):
            check_number("PPO", name, getattr(self, name), at_least=0)
        check_number("PPO", "adam_eps", self.adam_eps, above=0)
        for name in ("clip_range_vf", "max_grad_norm", "target_kl"):
            check_number("PPO", name, getattr(self, name), above=0, optional=True)
        for name in ("learning_rate", "clip_range"):
            check_schedule("PPO", name, getattr(self, name))
        if self.network is None:
            object.__setattr__(self, "network", network_for(self.spec))
        elif not isinstance(self.network, Network):
            raise TypeError(f"PPO: network must have init and apply, such as mlp(), got {self.network!r}")

    def init(self, key: PRNGKeyArray) -> PPOState:
        """A fresh state."""
        variables = self._network.init(key, self.spec)
        check_actor_critic(self._network, variables, self.spec)
        params, _ = ravel_pytree(variables.params)
        return PPOState(
            variables=variables,
            optimizer=self._adam.init(params),
            normalizer=ObsNormalizer.fresh(self.spec.obs) if self.normalize_obs else None,
            return_stats=RunningStats.init(()) if self.normalize_reward else None,
            env_steps=jnp.zeros((), jnp.uint32),
            updates=jnp.zeros((), jnp.uint32),
            guard=Guard.fresh(),
        )

    def check(self, num_envs: int) -> None:
        """Refuse a number of environments (on each device) that rollouts cannot be split into minibatches with.

        Raises:
            ValueError: `num_minibatches` does not divide `num_steps * num_envs`.
        """
        check_divides(self.num_steps, num_envs, self.num_minibatches)

    def policy(self, state: PPOState) -> Greedy:
        """The most probable action."""
        return Greedy(NetworkPolicy(state.variables, state.normalizer, self._network, self.spec))

    def collect_policy(self, state: PPOState) -> NetworkPolicy | DiscountedReturn:
        """A sample from the policy."""
        policy = NetworkPolicy(state.variables, state.normalizer, self._network, self.spec)
        return DiscountedReturn(policy, self.gamma) if self.normalize_reward else policy

    def update(
        self, state: PPOState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
    ) -> tuple[PPOState, Metrics]:
        """Several epochs of clipped gradient steps on one rollout, then the statistics.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions collected with `collect_policy(state)`.
            key: decides the minibatches.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            ValueError: `T * B` rows cannot be split into `num_minibatches` (while tracing).
        """
        num_steps, num_envs = rollout.valid.shape
        params, unravel = ravel_pytree(state.variables.params)
        learning_rate = value_at(self.learning_rate, state.env_steps)
        clip_range = value_at(self.clip_range, state.env_steps)
        rows, data_bad = self._rows(state, rollout, axis_name)

        def step(carry: PyTree, minibatch: PyTree) -> tuple[PyTree, PyTree]:
            index, centre, scale, total = minibatch
            params, optimizer, stopped = carry

            def loss(params: Float[Array, " n"], index: Int32[Array, " m"]) -> tuple[Float[Array, ""], Metrics]:
                part = jax.tree.map(lambda x: x[index], rows)
                part = dataclasses.replace(part, advantage=(part.advantage - centre) * scale)
                variables = dataclasses.replace(state.variables, params=unravel(params))
                return self._loss(variables, part, total, clip_range)

            gradient, terms = accumulate_gradient(loss, params, index, axis_name)
            terms["grad_norm"] = global_norm(gradient)
            bad = ~jnp.stack([jnp.isfinite(terms["loss"]), self._adam.accepts(terms["grad_norm"])])
            if self.target_kl is not None:
                stopped = stopped | (terms["approx_kl"] > 1.5 * self.target_kl)
            # Adam moves on its momentum even without a gradient, so a minibatch without a transition is no step.
            keep = ~jnp.any(bad) & ~stopped & ~jnp.any(data_bad) & (total > 0)
            params, optimizer = self._adam.step(params, optimizer, gradient, learning_rate, keep)
            refused = ~keep & ~stopped
            return (params, optimizer, stopped), (terms, bad, keep, refused)

        def epoch(carry: PyTree, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
            index = shuffled_minibatches(key, num_steps, num_envs, self.num_minibatches, axis_name)
            return jax.lax.scan(step, carry, (index, *self._advantage_scaling(rows, index, axis_name)))

        start = (params, state.optimizer, jnp.array(False))
        keys = jax.random.split(key, self.num_epochs)
        (params, optimizer, _), (terms, terms_bad, kept, refused) = jax.lax.scan(epoch, start, keys)

        skipped, taken = (flags.sum(dtype=jnp.uint32) for flags in (refused, kept))
        normalizer, return_stats = self._statistics(state, rollout, ~jnp.any(data_bad), axis_name)
        state = PPOState(
            variables=dataclasses.replace(state.variables, params=unravel(params)),
            optimizer=optimizer,
            normalizer=normalizer,
            return_stats=return_stats,
            env_steps=counted_on(state.env_steps, sum_over_devices(rollout.valid.sum(dtype=jnp.uint32), axis_name)),
            updates=counted_on(state.updates, jnp.uint32(1)),
            guard=state.guard.after_update(skipped, skipped + taken, jnp.concatenate([data_bad, terms_bad.any((0, 1))])),
        )
        metrics = self._metrics(state, rows, terms, kept, axis_name)
        return state, metrics | {"train/learning_rate": learning_rate, "train/clip_range": clip_range}

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """Names the first bad quantity once `max_bad_steps` updates in a row learned nothing."""
        in_a_row = int(metrics["train/skipped_in_a_row"])
        if in_a_row < self.max_bad_steps:
            return None
        quantity = QUANTITIES[int(metrics["train/first_bad"]) - 1]
        return (
            f"PPO: {in_a_row} updates in a row had no finite gradient step (max_bad_steps={self.max_bad_steps}); the first "
            f"quantity that was not finite is {quantity!r}. The parameters are those from before."
        )

    def _rows(self, state: PPOState, rollout: Rollout, axis_name: str | None) -> tuple[Rows, Bool[Array, " 4"]]:
        """The rollout's rows before the first epoch, and which of obs, reward, value and log_prob are not finite."""
        valid = rollout.valid
        obs = rollout.time_steps.obs if state.normalizer is None else state.normalizer.normalize(rollout.time_steps.obs)
        reward = self._scaled_reward(state, rollout.reward)
        value, log_prob = self._evaluate(state, obs, rollout)
        advantage = gae(
            reward, value[:-1], value[1:], rollout.terminated, rollout.truncated, gamma=self.gamma, gae_lambda=self.gae_lambda
        )
        rows = Rows(
            obs=jax.tree.map(lambda x: x[:-1], obs),
            action=rollout.actions,
            action_mask=rollout.action_mask,
            log_prob=log_prob,
            value=value[:-1],
            advantage=advantage,
            value_target=advantage + value[:-1],
            weight=valid.astype(jnp.float32),
        )
        next_counts = valid & ~rollout.terminated
        bad = ~jnp.stack([
            all_finite(rollout.obs, valid) & all_finite(rollout.next_obs, next_counts),
            all_finite(rollout.reward, valid),
            all_finite(value[:-1], valid) & all_finite(value[1:], next_counts),
            all_finite(log_prob, valid),
        ])  # fmt: skip
        return _flat_and_hidden(rows, valid), any_over_devices(bad, axis_name)

    def _evaluate(self, state: PPOState, obs: PyTree, rollout: Rollout) -> tuple[Float[Array, "times B"], Float[Array, "T B"]]:
        """The network's values of all observations, and the log-probabilities of the actions taken."""
        num_steps = rollout.valid.shape[0]

        def forward(obs: PyTree) -> tuple[PyTree, Float[Array, " B"]]:
            (params, value), _, _ = self._network.apply(state.variables, obs)
            return params, value

        params, value = map_rows(forward, obs)
        params = jax.tree.map(lambda x: x[:num_steps], params)
        distribution = for_space(self.spec.action, params, rollout.action_mask)
        return value, distribution.log_prob(rollout.actions)

    def _loss(self, variables: Variables, part: Rows, total: Scalar, clip_range: Scalar) -> tuple[Float[Array, ""], Metrics]:
        """The share of some rows in the minibatch's loss, and its terms; `total` is the weight of the whole minibatch."""
        # Not in training mode: a ratio compares two policies, and dropout or a minibatch's own statistics would be in it.
        (params, value), _, _ = self._network.apply(variables, part.obs)
        distribution = for_space(self.spec.action, params, part.action_mask)
        log_prob = distribution.log_prob(part.action)

        def mean(x: Float[Array, " N"]) -> Float[Array, ""]:
            return losses.masked_mean(x, part.weight, total=total)

        policy_loss = mean(losses.clipped_surrogate(log_prob, part.log_prob, part.advantage, clip_range))
        if self.clip_range_vf is None:
            value_loss = mean(losses.value_loss(value, part.value_target))
        else:
            value_loss = mean(losses.clipped_value_loss(value, part.value, part.value_target, self.clip_range_vf))
        entropy = mean(distribution.entropy())
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy
        return loss, {
            "loss": loss,
            "policy_gradient_loss": policy_loss,
            "value_loss": value_loss,
            "entropy_loss": -entropy,
            "approx_kl": mean(losses.approx_kl(log_prob, part.log_prob)),
            "clip_fraction": mean(losses.clip_fraction(log_prob, part.log_prob, clip_range)),
        }

    def _advantage_scaling(
        self, rows: Rows, index: Int32[Array, "K M"], axis_name: str | None
    ) -> tuple[Float[Array, " K"], Float[Array, " K"], Float[Array, " K"]]:
        """For every minibatch of an epoch: the mean of its advantages, one over their deviation, and its total weight."""
        weight = rows.weight[index]
        total = sum_over_devices(weight.sum(axis=1), axis_name)
        if not self.normalize_advantage:
            return jnp.zeros_like(total), jnp.ones_like(total), total
        moments = jax.vmap(partial(losses.masked_mean_and_variance, axis_name=axis_name))
        mean, variance = moments(rows.advantage[index], weight)
        # One valid entry has no deviation: it keeps its advantage.
        several = total > 1
        return jnp.where(several, mean, 0.0), jnp.where(several, 1.0 / (jnp.sqrt(variance) + 1e-8), 1.0), total

    def _scaled_reward(self, state: PPOState, reward: Float[Array, "T B"]) -> Float[Array, "T B"]:
        if state.return_stats is None:
            return reward
        return jnp.clip(reward / state.return_stats.stddev(), -10.0, 10.0)

    def _statistics(
        self, state: PPOState, rollout: Rollout, ok: Bool[Array, ""], axis_name: str | None
    ) -> tuple[ObsNormalizer | None, RunningStats | None]:
        """The normalisers after the rollout; they move last, so that all epochs saw the numbers that the policy acted on."""
        weight = (rollout.valid & ok).astype(jnp.float32)
        normalizer, return_stats = state.normalizer, state.return_stats
        if normalizer is not None:
            normalizer = normalizer.update(rollout.obs, weight, axis_name)
        if return_stats is not None:
            _, before = rollout.carry
            returns = discounted_so_far(rollout.time_steps.reward, rollout.time_steps.first, before, gamma=self.gamma)
            return_stats = return_stats.update(returns[1:], weight, axis_name)
        return normalizer, return_stats

    def _metrics(self, state: PPOState, rows: Rows, terms: Metrics, kept: Bool[Array, "E K"], axis_name: str | None) -> Metrics:
        """Terms averaged over the gradient steps that were taken, and what describes the update as a whole."""
        taken = kept.astype(jnp.float32)
        metrics = {f"train/{name}": losses.masked_mean(term, taken) for name, term in terms.items()}
        metrics["train/explained_variance"] = losses.explained_variance(rows.value, rows.value_target, rows.weight, axis_name)
        metrics["train/n_updates"] = state.updates
        metrics["train/skipped_steps"] = state.guard.skipped
        metrics["train/skipped_in_a_row"] = state.guard.in_a_row
        metrics["train/first_bad"] = state.guard.first_bad
        return metrics

    @property
    def _adam(self) -> Adam:
        return Adam(max_grad_norm=self.max_grad_norm, eps=self.adam_eps)

    @property
    def _network(self) -> Network:
        assert self.network is not None, "__post_init__ puts the default in"
        return self.network


def _flat_and_hidden(rows: Rows, valid: Bool[Array, "T B"]) -> Rows:
    """`[T * B]` rows, with zeros (for masks: all allowed) in those that are no transition.

    A weight of 0 alone would not do: the gradient of a hidden row's loss is 0 times what the network made of it, and 0 times
    NaN is NaN.
    """

    def hide(x: Array) -> Array:
        shown = valid.reshape(*valid.shape, *(1,) * (x.ndim - 2))
        hidden = jnp.where(shown, x, jnp.zeros((), x.dtype))
        return hidden.reshape(-1, *x.shape[2:])

    def allow(mask: Array) -> Array:
        shown = valid.reshape(*valid.shape, *(1,) * (mask.ndim - 2))
        return (mask | ~shown).reshape(-1, *mask.shape[2:])

    hidden: Rows = jax.tree.map(hide, dataclasses.replace(rows, action_mask=None))
    return dataclasses.replace(hidden, action_mask=jax.tree.map(allow, rows.action_mask))
