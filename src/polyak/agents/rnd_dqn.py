"""DQN with random network distillation (Burda et al. 2018, arXiv:1810.12894): a second Q-function of intrinsic rewards."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from polyak.agents.off_policy import OffPolicyState
from polyak.agents.q_learning import QAgent, fold, value_terms
from polyak.copies.network_copies import NetworkCopies
from polyak.core.struct import integer, number, static, struct
from polyak.core.types import Metrics, Network, PyTree, Scalar, Terms, Variables
from polyak.learning.actor_critic_updates import join_logs
from polyak.networks.layers import is_narrow
from polyak.networks.sum_of_values import SumOfValues, join_values
from polyak.ops.distributions.combinations import as_discrete, combine_actions
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import best_action, huber, of_action, weighted_sum
from polyak.ops.normalize import RunningStats
from polyak.ops.schedules import StepCount
from polyak.policies.distillation import (
    Distillation,
    create_obs_stats,
    diagnose_stats,
    feature_networks,
    feature_spec,
    random_network_or_default,
)
from polyak.policies.network_policy import Greedy, NetworkPolicy
from polyak.replay.replay import Transition

CLIP_OBS = 5.0
"""Normalized observations of f and f̂ are clipped to ± this value, the paper's."""


@struct
class RNDCopies:
    """The networks of `RNDDQN`, and the statistics of its intrinsic rewards.

    Attributes:
        extrinsic: Q_E and its target.
        intrinsic: Q_I and its target.
        predictor: f̂.
        random: f, which does not change.
        obs_stats: statistics of observations; see `Distillation`.
        error_stats: statistics of the errors of f̂.
    """

    extrinsic: NetworkCopies
    intrinsic: NetworkCopies
    predictor: NetworkCopies
    random: Variables
    obs_stats: PyTree
    error_stats: RunningStats


@struct(kw_only=True)
class RNDDQN(QAgent):
    """DQN for Discrete and MultiDiscrete actions that explores what is new, by a Q-function for each of two rewards.

        i   = mean_k (f̂_k(s') - f_k(s'))² / std                                      std: of all these errors so far
        L_E = E[ huber_κ(r + γ Q_E,target(s', a_E) - Q_E(s, a)) ],      a_E = argmax_b Q_E(s', b)
        L_I = E[ huber_κ(i + γ_I Q_I,target(s', a_B) - Q_I(s, a)) ],    a_B = argmax_b Q_E(s', b) + c Q_I(s', b)
        L_f = E[ mean_k (f̂_k(s') - f_k(s'))² ]

    over one-step transitions drawn from a replay, one gradient step each on the same batch. f is a random network that f̂ learns
    to predict, which it does well where it has been often. The agent explores ε-greedily by Q_E + c Q_I. Q_E learns as in
    `DQN`, and `policy` is greedy in Q_E alone. Intrinsic rewards are computed when transitions are drawn, so they are of
    today's f̂, and the priorities of a `PrioritizedReplay` are |δ| of Q_E.

    Q_I has the value of the greedy action of Q_E + c Q_I, as in Agent57 (Badia et al. 2020, arXiv:2003.13350), which also has
    one network for each reward; there Q_E has the value of this action too. Without `double`, the target networks choose a_E
    and a_B. An intrinsic return ends where an episode terminates, unlike in `RND`: a transition of a replay does not know the
    first observation of the next episode. The intrinsic reward of the last observation counts. A truncated episode bootstraps
    both values. With `normalize_obs`, f and f̂ get the normalized observations. A reset (`reset_period`) renews f, f̂ and their
    statistics too, so that everything is new again, but for layers that `reset_keeps` names.

    Attributes:
        network: a network that returns `(q, value)`, such as `polyak.MLP(head=polyak.QValues(dueling=True))`, for Q_E and for
            Q_I, which share no weights; None takes `NatureCNN` for images, else `MLP`. The losses apply it in training mode.
        random_network: f, with at least one layer and without a head; f̂ has two more layers of its last width. None takes
            `NatureCNN` for images, else `MLP`.
        num_features: number of outputs of f.
        coefficient: c, the weight of Q_I in the policy that explores.
        gamma: γ, above 0: a discount of 0 marks terminal states.
        intrinsic_gamma: γ_I, the discount of intrinsic rewards.
        huber_delta: κ, the error above which the losses of both Q-functions are linear; None takes the squared error δ².
        n_step: 1: the replay has no intrinsic rewards of the observations between.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = RNDDQN(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    random_network: Network | None = static(default=None)
    num_features: int = integer(default=64)
    coefficient: Scalar = number(default=0.5, at_least=0)
    gamma: Scalar = number(default=0.99, above=0, at_most=1)
    intrinsic_gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    huber_delta: Scalar | None = number(default=1.0, above=0, optional=True)

    def set_defaults(self) -> None:
        """Complete the networks."""
        super().set_defaults()
        random = random_network_or_default("RNDDQN", self.random_network, self.spec, "random_network")
        object.__setattr__(self, "random_network", random)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        if self.n_step != 1:
            raise ValueError(f"RNDDQN: n_step={self.n_step} must be 1: a replay has no intrinsic rewards of the steps between")
        super().check_together()

    def create_copies(self, key: PRNGKeyArray) -> RNDCopies:  # type: ignore[override]
        """New networks; Q_E is the same as DQN's."""
        keys, optimizer = jax.random.split(jax.random.fold_in(key, 1), 3), self.optimizer_at()
        spec, features = as_discrete("RNDDQN", self.spec), feature_spec(self.spec, self.num_features)
        of_f, of_predictor = feature_networks(self.random_network)
        follow = self.follow()
        intrinsic = NetworkCopies.create(self._network, keys[0], spec, optimizer=None, target=follow, name="intrinsic")
        predictor = NetworkCopies.create(of_predictor, keys[1], features, optimizer=None, name="predictor")
        return RNDCopies(
            extrinsic=super().create_copies(key),
            intrinsic=intrinsic.with_optimizer_state(optimizer),
            predictor=predictor.with_optimizer_state(optimizer),
            random=of_f.init(keys[2], features),
            obs_stats=create_obs_stats(self.spec),
            error_stats=RunningStats.init(()),
        )

    def policy(self, state: OffPolicyState) -> Greedy:
        """The action of the largest Q_E."""
        return Greedy(self.network_policy(state, state.copies.extrinsic.evaluated()))

    def learner_policy(self, state: OffPolicyState) -> NetworkPolicy:
        """The policy of Q_E + c Q_I, to which `collect_policy` adds random actions."""
        copies = state.copies
        variables = join_values(copies.extrinsic.online, copies.intrinsic.online, self.coefficient)
        return dataclasses.replace(self.network_policy(state, variables), network=SumOfValues(self._network))

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """Why training cannot go on, or why there are no intrinsic rewards; None if it can and there are."""
        return super().diagnose(metrics) or diagnose_stats("RNDDQN", metrics, self.max_skipped_updates)

    def metrics(self, before: OffPolicyState, after: OffPolicyState) -> Metrics:
        """Also the standard deviation of the errors of f̂, and whether there are statistics of observations, or were."""
        has_stats = self.distillation(after.copies).has_stats
        if after.resets is not None:
            has_stats = has_stats | (after.resets.count > 0)
        return super().metrics(before, after) | {
            "train/intrinsic_error_std": after.copies.error_stats.stddev(),
            "train/intrinsic_stats": has_stats.astype(jnp.float32),
        }

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True for narrow layers, also of f̂, and small batches; see `is_narrow`."""
        predictor: Any = feature_networks(self.random_network)[1]
        return is_narrow(self._network, self.spec, self.batch_size if devices == 1 else 1, predictor.layer_widths)

    def distillation(self, copies: RNDCopies) -> Distillation:
        """The networks and statistics of the intrinsic reward."""
        options = (feature_networks(self.random_network), self.spec, CLIP_OBS)
        return Distillation(copies.random, copies.predictor.online, copies.obs_stats, *options)

    def train_step(  # type: ignore[override]
        self,
        copies: RNDCopies,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[RNDCopies, StepLog]:
        """One gradient step of Q_E as DQN takes it, then one of Q_I and one of f̂, and the targets follow."""
        options: Any = {"enabled": enabled, "axis_name": axis_name}
        extrinsic, log = super().train_step(copies.extrinsic, batch, key, enabled, env_steps=env_steps, axis_name=axis_name)
        batch, optimizer = combine_actions(self.spec.action, batch), self.optimizer_at(env_steps)

        # Intrinsic rewards; the first batch sets the first statistics.
        distillation = self.distillation(copies).update_stats(batch.next_obs, batch.weight, axis_name)
        error = distillation.error(batch.next_obs)
        error_stats = copies.error_stats.update(error, (batch.weight > 0) & distillation.has_stats, axis_name)
        reward = jax.lax.stop_gradient(error / error_stats.stddev())

        intrinsic = copies.intrinsic
        discount = jnp.where(batch.discount > 0, jnp.asarray(self.intrinsic_gamma, jnp.float32), 0.0)
        loss = partial(
            self.intrinsic_loss,
            online=intrinsic.online,
            target=intrinsic.variables("target"),
            next_action=self.exploring_action(copies, batch, key),
            key=fold(key, 3),
        )
        of_intrinsic = dataclasses.replace(batch, reward=reward, discount=discount)
        intrinsic, intrinsic_log = intrinsic.train(loss, optimizer, of_intrinsic, **options)
        intrinsic = intrinsic.follow(updates=intrinsic_log.applied.astype(jnp.uint32))

        def predictor_loss(params: PyTree, batch: Transition) -> tuple[Float[Array, ""], Aux]:
            return distillation.loss(params, batch.next_obs, batch.weight)

        predictor, predictor_log = copies.predictor.train(predictor_loss, optimizer, batch, **options)
        new = RNDCopies(extrinsic, intrinsic, predictor, copies.random, distillation.obs_stats, error_stats)
        return new, join_logs(extrinsic=log, intrinsic=intrinsic_log, predictor=predictor_log)

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """L_E of a batch whose weights sum to 1, and its terms; `priority` is |δ| of each sample.

        Args:
            params: θ of Q_E.
            online: its online variables; their parameters are not used.
            target: the target network's.
            key: for noise and dropout.
        """
        online = dataclasses.replace(online, params=params)
        chooser, number = (online, 2) if self.double else (target, 1)
        next_action = best_action(self.action_values(chooser, batch.next_obs, fold(key, number))[0], batch.next_action_mask)
        batch = dataclasses.replace(batch, reward=self.reward_scale * batch.reward)
        return self._td_loss(batch, next_action, online=online, target=target, key=key)

    def intrinsic_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        online: Variables,
        target: Variables,
        next_action: Int32[Array, " N"],
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, ""], Aux]:
        """L_I of a batch with intrinsic rewards and discounts, and its terms; other arguments as for `loss`.

        Args:
            next_action: a_B of each transition.
        """
        online = dataclasses.replace(online, params=params)
        loss, aux = self._td_loss(batch, next_action, online=online, target=target, key=key)
        terms: Terms = {"intrinsic_q": aux.terms["q"], "intrinsic_reward": weighted_sum(batch.reward, batch.weight)}
        return loss, dataclasses.replace(aux, terms=terms)

    def exploring_action(self, copies: RNDCopies, batch: Transition, key: PRNGKeyArray | None = None) -> Int32[Array, " N"]:
        """a_B, the best allowed next action by Q_E + c Q_I."""
        name = "online" if self.double else "target"
        networks = [network.variables(name) for network in (copies.extrinsic, copies.intrinsic)]
        of_e, of_i = (self.action_values(variables, batch.next_obs, fold(key, 4))[0] for variables in networks)
        return best_action(of_e + self.coefficient * of_i, batch.next_action_mask)

    def _td_loss(
        self, batch: Transition, next_action: Int32[Array, " N"], *, online: Variables, target: Variables, key: Any
    ) -> tuple[Float[Array, ""], Aux]:
        """E[ huber_κ(reward + discount Q_target(s', a') - Q(s, a)) ] of `online`, and its terms."""
        values, stats = self.action_values(online, batch.obs, fold(key, 0), train=True)
        next_q, _ = self.action_values(target, batch.next_obs, fold(key, 1))
        q = of_action(values, batch.action)
        td_error = jax.lax.stop_gradient(batch.reward + batch.discount * of_action(next_q, next_action)) - q
        terms = value_terms(q, td_error, jnp.abs(td_error), batch.weight)
        return weighted_sum(huber(td_error, self.huber_delta), batch.weight), Aux(terms, stats)

    def action_values(
        self, variables: Variables, obs: PyTree, key: PRNGKeyArray | None, *, train: bool = False
    ) -> tuple[Float[Array, "N n"], PyTree]:
        """The values of all actions, and the network's statistics."""
        (q, _), _, stats = self._network.apply(variables, obs, train=train, key=key)
        return q, stats
