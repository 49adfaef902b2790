"""Conservative Q-learning of Box actions, on SAC (Kumar et al. 2020, arXiv:2006.04779)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.settings import TargetSettings
from polyak.agents.soft_actor import SoftActorAgent
from polyak.core.spaces import leaf_spaces, unflatten
from polyak.core.struct import check_settings, choice, integer, number, struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import action_dimensions, check_critics, check_unit_actions, critic_terms
from polyak.networks.critics import Critics
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import weighted_sum
from polyak.replay.replay import Transition


@struct(kw_only=True)
class CQL(TargetSettings, SoftActorAgent):
    """CQL for Box actions, learned from a data set; see `polyak.train.offline`. `DiscreteCQL` is for Discrete actions.

        L(θ) = E[ Σ_i ½ (Q_θi(s, a) - y)² + α_c (log Σ_k exp(Q_θi(s, a_k) - log μ(a_k)) - log K - Q_θi(s, a)) ]
        y = r + γ^m min_i Q_target,i(s', a'),  a' ~ π(·|s')
        J_π(φ) = E[ α log π_φ(a|s) - min_i Q_θi(s, a) ],    a ~ π_φ(·|s)

    The second term, CQL(H), lowers the values of all actions but those of the data. Its integral over actions is estimated from
    K = 3 n samples a_k, with their densities μ: n of the actor in s, n of the actor in s', and n uniform ones. Actions lie in
    [-1, 1]: `envs.make(..., action_scaling="rescale")`.

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them.
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`; None takes `Critics()`, which has N = 2.
        cql_weight: α_c, the weight of the conservative term; 0 is SAC.
        num_action_samples: n.
        entropy_in_target: y has the entropy's term of SAC, -α log π(a'|s').

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = CQL(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    cql_weight: Scalar = number(default=5.0, at_least=0)
    num_action_samples: int = integer(default=10)
    entropy_in_target: bool = choice(default=False, choices=(True, False))

    def __post_init__(self) -> None:
        self._set_views()
        check_unit_actions("CQL", self.spec, "DiscreteCQL takes Discrete actions")
        self._set_networks(self._default_actor(), Critics())
        check_settings(self)
        self._check_together()

    def check_critics(self, variables: Variables) -> None:
        """Check that critics return `(q, None)`."""
        check_critics(self._critics, variables, self.spec_of("critic"))

    def critic_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        critics: Variables,
        target: Variables,
        actor: Variables,
        alpha: Float[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """L(θ) of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ of the online critics.
            critics: the online critics; their parameters are not used.
            target: the target critics.
            actor: the actor that a' and the samples are drawn from.
            alpha: the weight of the entropy.
            key: for a', the samples, and dropout.
        """
        target_key, dropout_key, sample_key = jax.random.split(key, 3)
        online = dataclasses.replace(critics, params=params)
        q, stats = self.q_values_in_training(online, batch.obs, batch.action, dropout_key)
        td_error = self.td_target(batch, target=target, actor=actor, alpha=alpha, key=target_key)[:, None] - q
        actions, log_density = self.sample_actions(actor, batch, sample_key)
        gap = self.log_mean_exp(online, batch.obs, actions, log_density) - q
        loss = jnp.sum(0.5 * jnp.square(td_error) + self.cql_weight * gap, axis=1)
        terms = {"cql_gap": jax.lax.stop_gradient(weighted_sum(jnp.mean(gap, axis=1), batch.weight))}
        return weighted_sum(loss, batch.weight), Aux(critic_terms(q, td_error, batch.weight) | terms, stats)

    def td_target(
        self, batch: Transition, *, target: Variables, actor: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> Float[Array, " B"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""
        action_key, dropout_key = jax.random.split(key)
        draw, _ = self.draw_actions(actor, batch.next_obs, None, action_key)
        next_q = jnp.min(self.q_values(target, batch.next_obs, draw.action, dropout_key), axis=1)
        next_q = next_q - alpha * draw.log_prob if self.entropy_in_target else next_q
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_q)

    def sample_actions(self, actor: Variables, batch: Transition, key: PRNGKeyArray) -> tuple[PyTree, Float[Array, "K B"]]:
        """The actions a_k, leaves `[K, B, ...]`, and their log μ, without a gradient."""
        keys = jax.random.split(key, (3, self.num_action_samples))

        def of_actor(obs: PyTree, keys: Array) -> tuple[PyTree, Array]:
            draws = jax.vmap(lambda key: self.draw_actions(actor, obs, None, key)[0])(keys)
            return draws.action, draws.log_prob

        def uniform(key: PRNGKeyArray) -> PyTree:
            leaves = [leaf for _, leaf in leaf_spaces(self.spec.action)]
            parts = zip(jax.random.split(key, len(leaves)), leaves, strict=True)
            shape = batch.weight.shape
            return unflatten(self.spec.action, [jax.random.uniform(k, (*shape, *x.shape), minval=-1.0) for k, x in parts])

        density = jnp.full((self.num_action_samples, *batch.weight.shape), -action_dimensions(self.spec) * np.log(2.0))
        samples = [of_actor(batch.obs, keys[0]), of_actor(batch.next_obs, keys[1])]
        samples.append((jax.vmap(uniform)(keys[2]), density.astype(jnp.float32)))
        joined: tuple[PyTree, Array] = jax.tree.map(lambda *x: jnp.concatenate(x), *samples)
        return jax.lax.stop_gradient(joined)

    def log_mean_exp(
        self, critics: Variables, obs: PyTree, actions: PyTree, log_density: Float[Array, "K B"]
    ) -> Float[Array, "B N"]:
        """The estimate log 1/K Σ_k exp(Q_i(s, a_k) - log μ(a_k)) of log ∫ exp Q_i(s, a) da, for each critic."""
        q = jax.vmap(lambda action: self.q_values(critics, obs, action))(actions)
        return jax.nn.logsumexp(q - log_density[..., None], axis=0) - np.log(len(log_density))

    def combine_critics(self, q: Float[Array, "B N *M"]) -> Float[Array, "..."]:
        """The minimum of the critics."""
        return jnp.min(q, axis=1)
