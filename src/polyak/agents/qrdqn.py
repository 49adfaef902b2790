"""QR-DQN: deep Q-learning of quantiles (Dabney et al. 2018, arXiv:1710.10044)."""

import dataclasses

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.q_learning import QAgent, fold, value_terms
from polyak.core.struct import integer, number, struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.networks.heads import QValues
from polyak.networks.q_network import ExpectedValues
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import best_action, of_action, weighted_sum
from polyak.ops.value_distributions import midpoints, quantile_huber_loss
from polyak.replay.replay import Transition


@struct(kw_only=True)
class QRDQN(QAgent):
    """QR-DQN for Discrete and MultiDiscrete actions: the distribution of returns as K quantiles.

        L(θ) = E[ Σ_i 1/K Σ_j |τ_i - 1{u_ij < 0}| L_κ(u_ij) / κ ],    u_ij = r + γ^m θ_j(s', a'; target) - θ_i(s, a)

    with τ_i = (2i - 1) / 2K, L_κ the Huber loss and a' = argmax_a Σ_i θ_i(s', a). With `double` the online network chooses a',
    else the target network.

    Attributes:
        network: a network that returns quantiles `[B, n, num_quantiles]`; None takes `NatureCNN` for images, else `MLP`. A
            built-in network gets `num_quantiles` outputs. The loss applies it in training mode (dropout, batch normalization).
        replay: a `UniformReplay`, a `PrioritizedReplay`, or a `polyak.replay.Replay` of your own; the error of priorities is
            the loss.
        num_quantiles: K, number of quantiles.
        huber_delta: κ; 0 is the quantile loss without Huber's rounding.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = QRDQN(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    num_quantiles: int = integer(default=50)
    huber_delta: Scalar = number(default=1.0, at_least=0)

    @property
    def head(self) -> QValues:
        """`num_quantiles` quantiles of each action."""
        return QValues(outputs=self.num_quantiles)

    def values_network(self) -> ExpectedValues:
        """The network with the means of its quantiles as values."""
        return ExpectedValues(self._network)

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` is the loss of each sample.

        Args:
            params: θ.
            online: the online network's variables; their parameters are not used.
            target: the target network's.
            key: for noise and dropout.
        """
        online = dataclasses.replace(online, params=params)
        of_all, stats = self._outputs(online, batch.obs, fold(key, 0), train=True)
        quantiles = of_action(of_all, batch.action)
        targets = self.td_target(batch, online=online, target=target, key=key)
        losses = quantile_huber_loss(quantiles, midpoints(self.num_quantiles)[None], targets, self.huber_delta)
        q = quantiles.mean(axis=1)
        terms = value_terms(q, targets.mean(axis=1) - q, losses, batch.weight)
        return weighted_sum(losses, batch.weight), Aux(terms, stats)

    def td_target(
        self, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> Float[Array, "N K"]:
        """The targets r + γ^m θ_j(s', a'), without a gradient; arguments as for `loss`."""
        target_quantiles, _ = self._outputs(target, batch.next_obs, fold(key, 1))
        quantiles = self._outputs(online, batch.next_obs, fold(key, 2))[0] if self.double else target_quantiles
        next_action = best_action(quantiles.mean(axis=2), batch.next_action_mask)
        next_quantiles = of_action(target_quantiles, next_action)
        return jax.lax.stop_gradient(self.reward_scale * batch.reward[:, None] + batch.discount[:, None] * next_quantiles)
