"""Bootstrapped DQN: an ensemble of Q-learners that explores by its disagreement (Osband et al. 2016, arXiv:1602.04621)."""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from polyak.agents.off_policy import OffPolicyState
from polyak.agents.q_learning import QAgent, fold, value_terms
from polyak.core.struct import choice, integer, number, struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.networks.heads import QValues
from polyak.networks.heads_of_values import AllHeads, UpperBound, best_actions, for_votes
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import huber, of_action, weighted_sum
from polyak.ops.schedules import Schedule
from polyak.policies.episode_head import EpisodeHead
from polyak.policies.network_policy import Greedy, NetworkPolicy
from polyak.replay.replay import Transition


@struct(kw_only=True)
class BootstrappedDQN(QAgent):
    """Bootstrapped DQN for Discrete and MultiDiscrete actions: K heads of action values on common layers.

        L(θ) = E[ 1/K Σ_k m_k huber_κ(r + γ^m Q_k(s', a'_k; target) - Q_k(s, a; θ)) ],    a'_k = argmax_a Q_k(s', a; θ)

    over n-step transitions drawn from a replay; without `double`, a'_k is the best action by the target's head. m_k is 1 with
    probability p and else 0, fixed for each row of the replay, so that each head learns from data of its own. For each episode
    one head is drawn, by which all actions of the episode are chosen, so that exploration is consistent over many steps. The
    greedy policy takes the action that most heads choose.

    With `exploration="ucb"` (Chen et al. 2017, arXiv:1706.01502) every action maximizes the mean over the heads plus λ standard
    deviations, and the greedy policy the mean.

    Attributes:
        network: a network that returns values `[B, n, num_heads]`; None takes `NatureCNN` for images, else `MLP`. A built-in
            network gets `num_heads` outputs, so that its heads share all layers but the last. The loss applies it in training
            mode (dropout, batch normalization).
        replay: a `UniformReplay`, a `PrioritizedReplay`, or a `polyak.replay.Replay` of your own; the error of priorities is
            the mean |δ| of the heads.
        epsilon: probability of a random action in addition, a number or a schedule, after `learning_starts`; None decreases it
            as `DQN` does.
        num_heads: K.
        bootstrap_probability: p; 1 lets all heads learn from all transitions, as in the paper's Atari games: they differ by
            their initial weights, and by their targets.
        exploration: `"head"`: one head an episode; `"ucb"`: upper confidence bounds.
        ucb_scale: λ.
        huber_delta: κ, the error above which the loss is linear. None takes the squared error δ².

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = BootstrappedDQN(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    epsilon: Schedule | None = 0.0
    num_heads: int = integer(default=10)
    bootstrap_probability: float = number(default=1.0, above=0, at_most=1, static=True)
    exploration: Literal["head", "ucb"] = choice(default="head", choices=("head", "ucb"))
    ucb_scale: float = number(default=0.1, at_least=0, static=True, used_if=("exploration", "ucb"))
    huber_delta: Scalar | None = number(default=1.0, above=0, optional=True)

    @property
    def head(self) -> QValues:
        """Values of each action, by `num_heads` heads."""
        return QValues(outputs=self.num_heads)

    def values_network(self) -> UpperBound:
        """The network with the means over its heads as values."""
        return UpperBound(self._network)

    def policy(self, state: OffPolicyState) -> Greedy:
        """The action that most heads choose; with `"ucb"` the action of the largest mean."""
        policy = self.network_policy(state, state.copies.evaluated())
        if self.exploration == "ucb":
            return Greedy(policy)
        return Greedy(dataclasses.replace(policy, network=AllHeads(self._network), for_action=for_votes))

    def learner_policy(self, state: OffPolicyState) -> NetworkPolicy | EpisodeHead:
        """The policy of one head an episode, or of the upper confidence bounds."""
        online = state.copies.online
        if self.exploration == "head":
            return EpisodeHead(online, state.normalizers.obs, self._network, self.spec)
        return dataclasses.replace(self.network_policy(state, online), network=UpperBound(self._network, self.ucb_scale))

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample's heads.

        Args:
            params: θ.
            online: the online network's variables; their parameters are not used.
            target: the target network's.
            key: for noise and dropout.
        """
        online = dataclasses.replace(online, params=params)
        of_all, stats = self._outputs(online, batch.obs, fold(key, 0), train=True)
        q = of_action(of_all, batch.action)
        td_error = self.td_target(batch, online=online, target=target, key=key) - q
        losses = jnp.mean(self.bootstrap_mask(batch.index) * huber(td_error, self.huber_delta), axis=1)
        size = jnp.mean(jnp.abs(td_error), axis=1)
        terms = value_terms(jnp.mean(q, axis=1), size, size, batch.weight)
        terms["head_std"] = jax.lax.stop_gradient(weighted_sum(jnp.std(q, axis=1), batch.weight))
        return weighted_sum(losses, batch.weight), Aux(terms, stats)

    def td_target(
        self, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> Float[Array, "N K"]:
        """The target of each head, without a gradient; arguments as for `loss`."""
        next_q, _ = self._outputs(target, batch.next_obs, fold(key, 1))
        q = self._outputs(online, batch.next_obs, fold(key, 2))[0] if self.double else next_q
        next_action = best_actions(q, batch.next_action_mask)
        next_value = jax.vmap(of_action, in_axes=(2, 1), out_axes=1)(next_q, next_action)
        reward = self.reward_scale * batch.reward
        return jax.lax.stop_gradient(reward[:, None] + batch.discount[:, None] * next_value)

    def bootstrap_mask(self, index: Int32[Array, " N"]) -> Float[Array, "N K"]:
        """The m_k of the transitions in these rows of the replay, which are the same whenever a row is drawn."""
        if self.bootstrap_probability == 1:
            return jnp.ones((len(index), self.num_heads), jnp.float32)
        # With other generators, a draw depends on the batch.
        key = jax.random.key(0, impl="threefry2x32")
        keys = jax.vmap(partial(jax.random.fold_in, key))(index)
        draw = jax.vmap(lambda key: jax.random.bernoulli(key, self.bootstrap_probability, (self.num_heads,)))
        return draw(keys).astype(jnp.float32)
