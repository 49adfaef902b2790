"""XQC (Palenicek et al. 2025, arXiv:2509.25174): soft actor-critic with well-conditioned categorical critics."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.atom_settings import AtomSettings
from polyak.agents.settings import TargetSettings
from polyak.agents.soft_actor import SoftActorAgent
from polyak.core.struct import struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import check_critics
from polyak.networks.critics import Critics
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import weighted_sum
from polyak.ops.value_distributions import project_categorical
from polyak.replay.replay import Transition


@struct(kw_only=True)
class XQC(AtomSettings, TargetSettings, SoftActorAgent):
    """XQC for Box actions: SAC with batch and weight normalization, and critics of the distribution of returns.

        p_i, p'_i = softmax of Q_θi([s; s'], [a; a']) in training mode, one forward pass,    a' ~ π(·|s')
        m      = Φ(r + γ^m (z - α log π(a'|s')), p'_j of the target critics),    j = argmin_i Σ_k z_k p'_i,k
        J_Q(θ) = E[ -Σ_i Σ_k m_k log p_i,k(s, a) ],    without a gradient in m
        J_π(φ) = E[ α log π_φ(a|s) - min_i Σ_k z_k p_i,k(s, a) ],    a ~ π_φ(·|s)
        J(α)   = E[ -α (log π(a|s) + H̄) ]

    over n-step transitions drawn from a replay, with atoms z_1 ... z_K and the projection Φ onto them of C51. Actions lie in
    [-1, 1]: `envs.make(..., action_scaling="rescale")`. After each gradient step the weight vectors of the dense layers are
    scaled to norm 1 (`weight_norm`), so that with batch normalization the size of a step stays in proportion to the weights.
    A gradient step trains the critics, and the target critics follow; every `policy_delay`-th step then trains the actor
    against the new critics, and α with the new actor. The defaults are the authors', but for two that depend on the task and
    which presets have: gamma, 1 - 5 / T between 0.95 and 0.995 for episodes of T steps, and the learning rates, which fall
    linearly to a tenth, for actor and α to 2.1e-4, as they count only their own steps.

    Returns must lie between v_min and v_max, which `normalize_reward="return"` is for.

    Actor and critics are in evaluation mode, with their running statistics, wherever they are not trained: the actor in m and
    in J(α), the critics in J_π.

    Differences from the authors' code: weights start as PyTorch's, scaled to norm 1, instead of orthogonal; dense layers have
    biases, which batch normalization cancels; the ε of batch normalization is 1e-5 instead of 1e-3; log σ starts at 0, is
    clipped to [-20, 2] instead of [-10, 2], and its layer has no weight normalization; J(α) draws actions of the new actor,
    where theirs has the actions of J_π; and the actor's running statistics follow the batches that train it, where theirs
    follow all.

    Attributes:
        actor: a network that returns `(action_params, value)`, the value unused; None takes `Actor((256, 256, 256, 256),
            norm="batch", norm_inputs=True)`. In its own loss it is in training mode.
        critics: a network of `(obs, action)` that returns `(logits, None)`, logits `[B, N, K]`; None takes `Critics((512, 512,
            512, 512), norm="batch", norm_inputs=True)`. A built-in network gets K = `num_atoms`. Dropout is on in their loss
            and the target, and in the actor's loss if the critics have no batch normalization.
        target_entropy: H̄, the entropy of the policy that a learned α aims at, of actions in [-1, 1]; at most dim A log 2, the
            entropy of random actions. `"auto"`, or None, takes -dim A / 2.
        alpha_loss: `"alpha"`: J(α) as above; `"log_alpha"`: with log α in place of α.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = XQC(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> agent.critics.num_atoms
    101
    """

    entropy_of_dimension: ClassVar[float] = -0.5
    has_categorical_critics: ClassVar[bool] = True

    updates_per_step: float = 2.0
    learning_starts: int = 5_000
    normalize_reward: Literal["return", "reward"] | None = "return"
    initial_alpha: Scalar = 0.01
    alpha_loss: Literal["log_alpha", "alpha"] = "alpha"
    policy_delay: int = 3
    weight_norm: bool = True

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.check_boxes()
        actor = dataclasses.replace(self.default_actor(), hidden=(256,) * 4, norm="batch", norm_inputs=True)
        self.set_networks(actor, Critics((512,) * 4, norm="batch", norm_inputs=True))
        self.set_outputs_of_critics("num_atoms", self.num_atoms)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        self.check_atoms()

    def check_critics(self, variables: Variables) -> None:
        """Check that critics return logits of `num_atoms` atoms each."""
        check_critics(self._critics, variables, self.spec_of("critic"), outputs=self.num_atoms)

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
        """J_Q of a batch whose weights sum to 1, and its terms; `priority` is the mean KL(m ‖ p_i) of each sample.

        Args:
            params: θ of the online critics.
            critics: the online critics; their parameters are not used.
            target: the target critics; the step counts of batch renormalization are the online critics'.
            actor: the actor that a' is drawn from.
            alpha: the weight of the entropy.
            key: for a', and dropout.
        """
        action_key, target_key, dropout_key = jax.random.split(key, 3)
        draw, _ = self.draw_actions(actor, batch.next_obs, batch.next_action_mask, action_key)
        # One forward pass: the statistics are of the recorded actions and the policy's actions together.
        now, later = (batch.obs, batch.action), (batch.next_obs, draw.action)
        obs, action = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), now, later)
        target = dataclasses.replace(target, stats=_copy_counts(target.stats, critics.stats))
        target_logits, _ = self.q_values_in_training(target, obs, action, target_key)
        logits, stats = self.q_values_in_training(dataclasses.replace(critics, params=params), obs, action, dropout_key)
        target_probs = self.td_target(batch, jnp.split(target_logits, 2)[1], alpha * draw.log_prob)
        cross_entropy, terms = self.cross_entropy(jnp.split(logits, 2)[0], target_probs, batch.weight)
        return weighted_sum(jnp.sum(cross_entropy, axis=1), batch.weight), Aux(terms, stats)

    def td_target(
        self, batch: Transition, next_logits: Float[Array, "B N K"], entropy_cost: Float[Array, " B"]
    ) -> Float[Array, "B K"]:
        """The target distribution m, without a gradient.

        Args:
            next_logits: of the target critics at (s', a').
            entropy_cost: α log π(a'|s').
        """
        next_probs = self.lowest_of(jax.nn.softmax(next_logits))
        values = self.atoms[None] - entropy_cost[:, None]
        values = self.reward_scale * batch.reward[:, None] + batch.discount[:, None] * values
        return jax.lax.stop_gradient(project_categorical(next_probs, values, self.atoms))

    def combine_critics(self, q: Float[Array, "B N *M"]) -> Float[Array, "..."]:
        """The minimum of the critics' expected returns, which the actor maximizes."""
        return self.min_of_means(q)


def _copy_counts(stats: PyTree, online: PyTree) -> PyTree:
    """The target's statistics with the online integers, such as step counts, which a soft update does not copy."""
    return jax.tree.map(lambda x, y: x if jnp.issubdtype(x.dtype, jnp.floating) else y, stats, online)
