"""Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236), with double Q-learning and n-step targets."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.munchausen import MunchausenSettings, soft_value
from polyak.agents.q_learning import QAgent, fold, value_terms
from polyak.core.struct import number, struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.learning.recurrent_replay import apply_to_batch, check_sequences
from polyak.ops.distributions.discrete import where_allowed
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import best_action, huber, of_action, weighted_sum
from polyak.replay.replay import Transition
from polyak.replay.returns import with_returns, without_returns

NO_DEMONSTRATIONS = "margin needs demonstrations: polyak.train.run(..., data=), or polyak.train.offline"


@struct(kw_only=True)
class DQN(MunchausenSettings, QAgent):
    """DQN for Discrete and MultiDiscrete actions.

        L(θ) = E[ huber_κ(r + γ^m Q_target(s', a') - Q_θ(s, a)) ],    a' = argmax_a Q_θ(s', a)

    over n-step transitions drawn from a replay; without `double`, a' is the best action by Q_target itself. Where the
    environment has an action mask, a' is an allowed action. `MunchausenSettings` has the target with `munchausen`. With
    `gap_weight` it is lower by the action gaps of advantage learning, which separate the best action from the others:

        - α_g min(gap(s), gap(s')),    gap(s) = max_b Q_target(s, b) - Q_target(s, a),    0 at a terminal state

    With `monte_carlo_weight`, β, the target y is mixed with the return of the rest of the episode:

        (1 - β) y + β Σ_k γ^k r_{t+k}    if the episode has terminated; else y

    Two terms are for learning from data (`polyak.train.offline`, or `polyak.train.run` with `data`): CQL(H) with `cql_weight`,
    which lowers the values of all actions but the data's, and with `margin` the loss of demonstrations, by which a
    demonstrator's actions are better by m than all others,

        + α_c E[ log Σ_b exp Q_θ(s, b) - Q_θ(s, a) ] + λ E[ max_b (Q_θ(s, b) + m 1[b ≠ a]) - Q_θ(s, a) ]

    over allowed actions b; the second is of transitions from data alone.

    Attributes:
        network: a network that returns `(q, value)`, such as `polyak.MLP(head=polyak.QValues(dueling=True))`; None takes
            `NatureCNN` for images, else `MLP`. The loss applies the network in training mode (dropout, batch normalization),
            except for recurrent networks.
        replay: a `UniformReplay`, a `PrioritizedReplay`, or a `polyak.replay.Replay` of your own; a `SequenceReplay` for
            recurrent networks.
        huber_delta: κ, the error above which the loss is linear; None takes the squared error δ².
        gap_weight: α_g, for persistent advantage learning (Bellemare et al. 2016, arXiv:1512.04860, who have 0.9); None leaves
            the gaps out.
        monte_carlo_weight: β, for mixed Monte Carlo (Bellemare et al. 2016, arXiv:1606.01868; Ostrovski et al. 2017,
            arXiv:1703.01310, have 0.1), with a `UniformReplay`. None leaves returns out.
        cql_weight: α_c (Kumar et al. 2020, CQL, arXiv:2006.04779); None leaves the term out.
        margin: m, in the units of values (Hester et al. 2018, DQfD, arXiv:1704.03732, which has 0.8); None leaves the loss out.
        margin_weight: λ.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = DQN(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    takes_sequences: ClassVar[bool] = True

    huber_delta: Scalar | None = number(default=1.0, above=0, optional=True)
    gap_weight: Scalar | None = number(default=None, at_least=0, at_most=1, optional=True)
    monte_carlo_weight: Scalar | None = number(default=None, at_least=0, at_most=1, optional=True)
    cql_weight: Scalar | None = number(default=None, at_least=0, optional=True)
    margin: Scalar | None = number(default=None, above=0, optional=True)
    margin_weight: Scalar = number(default=1.0, above=0, used_if=("margin", ...))

    def set_defaults(self) -> None:
        """Complete the network, and store returns with `monte_carlo_weight`."""
        super().set_defaults()
        has_returns = self.monte_carlo_weight is not None
        replay = with_returns(type(self).__name__, self.replay, self.gamma) if has_returns else without_returns(self.replay)
        object.__setattr__(self, "replay", replay)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        owner = type(self).__name__
        if self.munchausen is not None and self.gap_weight is not None:
            raise ValueError(f"{owner}: munchausen and gap_weight are two ways to increase the action gap; leave out one")
        check_sequences(owner, self.network, self.replay, self.num_steps)
        super().check_together()

    @property
    def env_error(self) -> str | None:
        """`margin` is of demonstrations, and needs data beside the steps of the environment."""
        return f"{type(self).__name__}: {NO_DEMONSTRATIONS}" if self.margin is not None and not self.replay.has_data else None

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` is |δ| of each sample.

        Args:
            params: θ.
            online: the online network's variables; their parameters are not used.
            target: the target network's.
            key: for noise and dropout.
        """
        online = dataclasses.replace(online, params=params)
        values, stats = self.action_values(online, batch.obs, fold(key, 0), train=True)
        q = of_action(values, batch.action)
        td_error = self.td_target(batch, online=online, target=target, key=key) - q
        terms = value_terms(q, td_error, jnp.abs(td_error), batch.weight)
        loss = huber(td_error, self.huber_delta)
        if self.cql_weight is not None:
            gap = jax.nn.logsumexp(where_allowed(values, batch.action_mask), axis=1) - q
            loss = loss + self.cql_weight * gap
            terms["cql_gap"] = jax.lax.stop_gradient(weighted_sum(gap, batch.weight))
        if self.margin is not None:
            if batch.from_data is None:
                raise ValueError(f"{type(self).__name__}: {NO_DEMONSTRATIONS}")
            margin_loss = jnp.where(batch.from_data, self.margin_loss(values, batch), 0.0)
            loss = loss + self.margin_weight * margin_loss
            terms["margin_loss"] = jax.lax.stop_gradient(weighted_sum(margin_loss, batch.weight))
        return weighted_sum(loss, batch.weight), Aux(terms, stats)

    def margin_loss(self, values: Float[Array, "N n"], batch: Transition) -> Float[Array, " N"]:
        """max_b (Q_θ(s, b) + m 1[b ≠ a]) - Q_θ(s, a) of each transition, over allowed actions."""
        is_other = ~jax.nn.one_hot(batch.action, values.shape[1], dtype=bool)
        others = values + jnp.asarray(self.margin, jnp.float32) * is_other.astype(jnp.float32)
        return jnp.max(where_allowed(others, batch.action_mask), axis=1) - of_action(values, batch.action)

    def td_target(
        self, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> Float[Array, " N"]:
        """The target of each transition, without a gradient; arguments as for `loss`."""
        reward = self.reward_scale * batch.reward
        next_q, _ = self.action_values(target, batch.next_obs, fold(key, 1))
        if self.munchausen is not None:
            q, _ = self.action_values(target, batch.obs, fold(key, 3))
            reward = reward + self.munchausen_bonus(q, batch.action, batch.action_mask)
            next_value = soft_value(next_q, self.munchausen_temperature, batch.next_action_mask)
        else:
            q = self.action_values(online, batch.next_obs, fold(key, 2))[0] if self.double else next_q
            next_value = of_action(next_q, best_action(q, batch.next_action_mask))
        if self.gap_weight is not None:
            q, _ = self.action_values(target, batch.obs, fold(key, 3))
            reward = reward - self.gap_weight * self.action_gap(q, next_q, batch)
        return jax.lax.stop_gradient(self.mix_returns(reward + batch.discount * next_value, batch))

    def mix_returns(self, y: Float[Array, " N"], batch: Transition) -> Float[Array, " N"]:
        """(1 - β) y + β Σ_k γ^k r_{t+k} of targets y, where the whole return is known; else, or without β, y."""
        if self.monte_carlo_weight is None:
            return y
        if batch.whole_return is None or batch.has_whole_return is None:
            owner = type(self).__name__
            raise ValueError(f"{owner}: monte_carlo_weight needs transitions with whole_return, which the agent's replay draws")
        mixed = y + self.monte_carlo_weight * (self.reward_scale * batch.whole_return - y)
        return jnp.where(batch.has_whole_return, mixed, y)

    def action_gap(self, q: Float[Array, "N n"], next_q: Float[Array, "N n"], batch: Transition) -> Float[Array, " N"]:
        """min(gap(s), gap(s')) of values at s and s'."""
        best = jnp.max(where_allowed(q, batch.action_mask), axis=1)
        gap = jnp.maximum(best - of_action(q, batch.action), 0.0)
        # Where the action is not allowed at s', gap(s') is infinite.
        allowed = where_allowed(next_q, batch.next_action_mask)
        next_gap = jnp.max(allowed, axis=1) - of_action(allowed, batch.action)
        return jnp.minimum(gap, jnp.where(batch.discount > 0, next_gap, 0.0))

    def action_values(
        self, variables: Variables, obs: PyTree, key: PRNGKeyArray | None, *, train: bool = False
    ) -> tuple[Float[Array, "N n"], PyTree]:
        """The values of all actions, and the network's statistics; a recurrent network stays in evaluation mode."""
        (q, _), stats = apply_to_batch(self._network, variables, obs, train=train, key=key)
        return q, stats
