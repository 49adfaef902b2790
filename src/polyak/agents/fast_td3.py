"""FastTD3 (Seo et al. 2025, arXiv:2505.22642): TD3 with critics of distributions, for many environments and large batches."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.atom_settings import AtomSettings
from polyak.agents.delayed_actor import DelayedActorAgent
from polyak.agents.off_policy import OffPolicyState
from polyak.core.struct import number, struct
from polyak.core.types import PyTree, Scalar, Terms, Variables
from polyak.learning.actor_critic_updates import check_critics
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Schedule
from polyak.ops.value_distributions import project_categorical
from polyak.policies.critic_state import WithCriticState
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn
from polyak.policies.noise import MixedNoise
from polyak.policies.sde import check_no_sde
from polyak.replay.replay import Transition


@struct(kw_only=True)
class FastTD3(AtomSettings, DelayedActorAgent):
    """FastTD3 for Box actions: TD3 whose critics learn the distribution of returns, and whose environments differ in noise.

        m_i  = Φ(r + γ^m z, p_i(s', a'; target)),    a' = clip(π(s') + clip(ε, ±c), ±1),  ε ~ N(0, σ²)
        L(θ) = E[ -Σ_i Σ_k m_j,k log p_i,k(s, a; θ) ],    j = argmin_i Σ_k z_k m_i,k
        J(φ) = E[ min_i Σ_k z_k p_i,k(s, π_φ(s)) ]

    over n-step transitions drawn from a replay, with atoms z_1 ... z_K and the projection Φ onto them of C51. Actions lie in
    [-1, 1]: `envs.make(..., action_scaling="rescale")`. a' is of the online actor: there is no target actor. Every
    `policy_delay`-th gradient step of the critics also takes one of the actor, against the new critics. Each environment
    collects with normal noise of its own standard deviation, drawn uniformly where an episode begins.

    It is made for hundreds or thousands of environments, with few gradient steps of large batches: the preset has the authors'
    `batch_size` and `updates_per_step`. Their optimizer is `optax.adamw(3e-4, weight_decay=0.1)`.

    Differences from the authors' code: the actor's last layer starts as PyTorch's, where their biases are 0 and their weights
    are drawn from N(0, 0.01²); observations are divided by √(σ² + 1e-8) and clipped to ± `clip_obs`, where theirs are divided
    by σ + 0.01 and not clipped; the noisy action is clipped to its bounds before the environment and the replay see it; and
    actions are random until `learning_starts`.

    Attributes:
        actor: a network that returns `(action_params, value)`, of which tanh(loc) is the action; None takes
            `Actor((512, 256, 128), std="fixed")`. In its own loss it is in training mode.
        critics: a network of `(obs, action)` that returns `(logits, None)`, logits `[B, N, K]`; None takes `Critics((1024, 512,
            256))`. A built-in network gets K = `num_atoms`. Dropout is on in their loss and target; critics with batch
            normalization have dropout in their own loss alone.
        min_exploration_noise: the smallest standard deviation of the noise on collected actions.
        max_exploration_noise: the largest one; 0 for both disables the noise.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = FastTD3(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> agent.init(jax.random.key(0)).copies.actor.names
    ('online',)
    """

    has_target_actor: ClassVar[bool] = False

    learning_rate: Schedule = 3e-4
    normalize_obs: bool = True
    tau: Scalar = 0.1
    target_period: int = 1
    target_noise: Scalar = 0.001
    v_min: float = -250.0
    v_max: float = 250.0
    min_exploration_noise: Scalar = number(default=0.001, at_least=0)
    max_exploration_noise: Scalar = number(default=0.4, at_least=0)

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.check_boxes()
        self.set_networks(Actor((512, 256, 128), std="fixed"), Critics((1024, 512, 256)))
        self.set_outputs_of_critics("num_atoms", self.num_atoms)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        check_no_sde("FastTD3", self._actor)
        self.check_atoms()
        least, most = self.min_exploration_noise, self.max_exploration_noise
        if not isinstance(least - most, jax.core.Tracer) and np.any(np.asarray(least) > np.asarray(most)):
            raise ValueError(f"FastTD3: min_exploration_noise={least} must be at most max_exploration_noise={most}")

    def check_critics(self, variables: Variables) -> None:
        """Check that critics return logits of `num_atoms` atoms each."""
        check_critics(self._critics, variables, self.spec_of("critic"), outputs=self.num_atoms)

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | WithCriticState | DiscountedReturn:
        """The actor's action with noise of each environment's own scale; at first uniformly random actions."""
        actor = self.network_policy(state, state.copies.actor.online)
        explorer = MixedNoise(actor, self.min_exploration_noise, self.max_exploration_noise)
        return self.to_collect(RandomWarmStart(explorer, self.learning_starts, state.env_steps), state)

    def critic_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        critics: Variables,
        target: Variables,
        target_actor: Variables,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """L(θ) of a batch whose weights sum to 1, and its terms; `priority` is the mean KL(m ‖ p_i) of each sample."""
        target_key, dropout_key = jax.random.split(key)
        online = dataclasses.replace(critics, params=params)
        logits, stats = self.q_values_in_training(online, batch.obs, batch.action, dropout_key)
        target_probs = self.td_target(batch, target=target, target_actor=target_actor, key=target_key)
        cross_entropy, terms = self.cross_entropy(logits, target_probs, batch.weight)
        return weighted_sum(jnp.sum(cross_entropy, axis=1), batch.weight), Aux(terms, stats)

    def td_target(
        self, batch: Transition, *, target: Variables, target_actor: Variables, key: PRNGKeyArray
    ) -> Float[Array, "N K"]:
        """The target distribution m_j, without a gradient; arguments as for `critic_loss`."""
        noise_key, dropout_key = jax.random.split(key)
        next_action = self._smooth(self.deterministic_action(target_actor, batch.next_obs), noise_key)
        next_probs = jax.nn.softmax(self.q_values(target, batch.next_obs, next_action, dropout_key))
        values = self.reward_scale * batch.reward[:, None] + batch.discount[:, None] * self.atoms[None]
        of_critics = jax.vmap(project_categorical, in_axes=(1, None, None), out_axes=1)(next_probs, values, self.atoms)
        return jax.lax.stop_gradient(self.lowest_of(of_critics))

    def actor_objective(
        self, q: Float[Array, "B N *M"], action: PyTree, batch: Transition, axis_name: str | None
    ) -> tuple[Float[Array, ""], Terms]:
        """-J(φ), of the critic of the lower mean; no terms."""
        return -weighted_sum(self.min_of_means(q), batch.weight), {}
