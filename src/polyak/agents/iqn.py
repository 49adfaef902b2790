"""IQN: implicit quantile networks (Dabney et al. 2018, arXiv:1806.06923)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.munchausen import MunchausenSettings, soft_value
from polyak.agents.q_learning import QAgent, value_terms
from polyak.core.struct import integer, number, static, struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.networks.heads import Quantiles
from polyak.networks.q_network import QuantileNetwork
from polyak.ops.distributions.discrete import where_allowed
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import best_action, of_action, weighted_sum
from polyak.ops.value_distributions import quantile_huber_loss
from polyak.replay.replay import Transition


@struct(kw_only=True)
class IQN(MunchausenSettings, QAgent):
    """IQN for Discrete and MultiDiscrete actions: the quantile function of returns as a network.

        L(θ) = E[ Σ_i 1/N' Σ_j |τ_i - 1{u_ij < 0}| L_κ(u_ij) / κ ],    u_ij = r + γ^m Z(s', a', τ'_j; target) - Z(s, a, τ_i)

    with τ_1 ... τ_N and τ'_1 ... τ'_N' uniform in (0, 1), L_κ the Huber loss and a' the best action by the mean over other
    K such fractions. Policies take the mean over the midpoints of K equal parts. With `double` the online network chooses a'.
    With `munchausen` u_ij has the target of `MunchausenSettings`: Q is the mean over the K fractions, and Z replaces Q(s', b).

    Attributes:
        network: a network with `quantiles(variables, obs, tau, key)`, such as `polyak.MLP((256, 256))`; None takes
            `NatureCNN` for images, else `MLP`. It is applied in evaluation mode.
        replay: a `UniformReplay`, a `PrioritizedReplay`, or a `polyak.replay.Replay` of your own; the error of priorities is
            the loss.
        num_tau: N, number of fractions of the online network in the loss.
        num_target_tau: N', number of fractions of the target network in the loss.
        num_policy_tau: K, number of fractions averaged to choose actions in the target; policies use the network's own number.
        huber_delta: κ; 0 is the quantile loss without Huber's rounding.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = IQN(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    network: QuantileNetwork | None = static(default=None, kw_only=False)
    num_tau: int = integer(default=32)
    num_target_tau: int = integer(default=32)
    num_policy_tau: int = integer(default=32)
    huber_delta: Scalar = number(default=1.0, at_least=0)

    @property
    def head(self) -> Quantiles:
        """The values at drawn fractions τ."""
        return Quantiles()

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` is the loss of each sample.

        Args:
            params: θ.
            online: the online network's variables; their parameters are not used.
            target: the target network's.
            key: for the fractions, and the noise of noisy networks.
        """
        online = dataclasses.replace(online, params=params)
        tau, quantiles = self._quantiles(online, batch.obs, self.num_tau, jax.random.fold_in(key, 0))
        quantiles = of_action(quantiles, batch.action)
        targets = self.td_target(batch, online=online, target=target, key=key)
        losses = quantile_huber_loss(quantiles, tau, targets, self.huber_delta)
        q = quantiles.mean(axis=1)
        terms = value_terms(q, targets.mean(axis=1) - q, losses, batch.weight)
        return weighted_sum(losses, batch.weight), Aux(terms)

    def td_target(self, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray) -> Float[Array, "N M"]:
        """The targets of u_ij, without a gradient; arguments as for `loss`."""
        keys = [jax.random.fold_in(key, number) for number in (1, 2, 3)]
        _, quantiles = self._quantiles(target, batch.next_obs, self.num_target_tau, keys[1])
        chooser = online if self.double and self.munchausen is None else target
        next_q = self._quantiles(chooser, batch.next_obs, self.num_policy_tau, keys[0])[1].mean(axis=2)
        reward = self.reward_scale * batch.reward
        if self.munchausen is None:
            next_quantiles = of_action(quantiles, best_action(next_q, batch.next_action_mask))
        else:
            q = self._quantiles(target, batch.obs, self.num_policy_tau, keys[2])[1].mean(axis=2)
            reward = reward + self.munchausen_bonus(q, batch.action, batch.action_mask)
            next_quantiles = self.soft_quantiles(quantiles, next_q, batch.next_action_mask)
        return jax.lax.stop_gradient(reward[:, None] + batch.discount[:, None] * next_quantiles)

    def soft_quantiles(
        self, quantiles: Float[Array, "N n M"], q: Float[Array, "N n"], mask: Bool[Array, "N n"] | None
    ) -> Float[Array, "N M"]:
        """Σ_b π(b) (Z_b - t log π(b)), with π = softmax(q / t)."""
        temperature = self.munchausen_temperature
        probs = jax.nn.softmax(where_allowed(q, mask) / temperature, axis=1)
        entropy = soft_value(q, temperature, mask) - jnp.sum(probs * q, axis=1)
        return jnp.sum(probs[:, :, None] * quantiles, axis=1) + entropy[:, None]

    def _quantiles(
        self, variables: Variables, obs: PyTree, count: int, key: PRNGKeyArray
    ) -> tuple[Float[Array, "N K"], Float[Array, "N n K"]]:
        """Fractions that are drawn uniformly, and the quantiles at them."""
        tau_key, noise_key = jax.random.split(key)
        tau = jax.random.uniform(tau_key, (len(jax.tree.leaves(obs)[0]), count), jnp.float32)
        return tau, self._network.quantiles(variables, obs, tau, noise_key)
