"""Conservative Q-learning of Box actions, on SAC (Kumar et al. 2020, arXiv:2006.04779)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.off_policy import OffPolicyState
from polyak.agents.settings import TargetSettings
from polyak.agents.soft_actor import ActorLoss, SoftActorAgent, SoftActorCopies, Temperature
from polyak.core.checks import check_created_with
from polyak.core.spaces import leaf_spaces, unflatten
from polyak.core.struct import choice, integer, number, setting, struct
from polyak.core.types import Metrics, PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import action_dimensions, append_logs, check_critics, check_unit_actions, critic_terms
from polyak.networks.critics import Critics
from polyak.networks.layers import has_images
from polyak.ops.gradient_step import Aux, StepLog, apply_gradient
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Schedule, StepCount, check_schedule
from polyak.replay.replay import Transition

MAX_LOG_WEIGHT = 6 * float(np.log(10.0))
"""Largest log α_c that is learned, as in the authors' code; beyond it the optimizer's moments overflow."""


@struct
class CQLCopies(SoftActorCopies):
    """The networks of CQL, its temperature, and the weight of the conservative term.

    Attributes:
        weight: a learned α_c; None is a fixed one.
    """

    weight: Temperature | None


@struct(kw_only=True)
class CQL(TargetSettings, SoftActorAgent):
    """CQL for Box actions, learned from a data set; see `polyak.train.offline`. `DQN(cql_weight=...)` is for Discrete actions.

        L(θ) = E[ Σ_i ½ (Q_θi(s, a) - y)² + α_c (log Σ_k exp(Q_θi(s, a_k) - log μ(a_k)) - log K - Q_θi(s, a)) ]
        y = r + γ^m min_i Q_target,i(s', a'),  a' ~ π(·|s')
        J_π(φ) = E[ α log π_φ(a|s) - min_i Q_θi(s, a) ],    a ~ π_φ(·|s)

    The second term, CQL(H), lowers the values of all actions but the data's. Its integral over actions is estimated from
    K = 3 n samples a_k, with their densities μ: n of the actor in s, n of the actor in s', and n uniform ones. Actions lie in
    [-1, 1]: `envs.make(..., action_scaling="rescale")`. With `target_gap`, α_c is learned too: it grows while the second term's
    mean over the critics, G, is larger than the target τ, up to 10⁶,

        J(α_c) = -α_c (G - τ)

    The first `num_bc_steps` gradient steps start the actor from the data's actions, as in the authors' code and in TF-Agents:

        J_BC(φ) = E[ α log π_φ(ã|s) - log π_φ(a|s) ],    ã ~ π_φ(·|s)

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them.
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`; None takes `Critics()`, which has N = 2.
        cql_weight: α_c, the weight of the conservative term; 0 is SAC. With `target_gap` the initial value.
        target_gap: τ, in the units of values; None keeps α_c fixed.
        cql_learning_rate: learning rate of a learned α_c; None is `learning_rate`.
        num_action_samples: n.
        num_bc_steps: number of first steps in which the actor minimizes J_BC: gradient steps on a data set, env_steps with an
            environment, of which `learning_starts` pass without a gradient step.
        entropy_in_target: y has the entropy's term of SAC, -α log π(a'|s').

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = CQL(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    cql_weight: Scalar = number(default=5.0, at_least=0)
    target_gap: Scalar | None = number(default=None, optional=True)
    cql_learning_rate: Schedule | None = setting(
        default=None, check=partial(check_schedule, optional=True), used_if=("target_gap", ...)
    )
    num_action_samples: int = integer(default=10)
    num_bc_steps: int = integer(default=0, at_least=0)
    entropy_in_target: bool = choice(default=False, choices=(True, False))

    def set_defaults(self) -> None:
        """Check the spec, and complete the networks."""
        self.set_views()
        check_unit_actions("CQL", self.spec, "DQN with cql_weight takes Discrete actions")
        self.set_networks(self.default_actor(), Critics())

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        if self.target_gap is not None and not isinstance(self.cql_weight, jax.core.Tracer) and not np.all(self.cql_weight):
            raise ValueError(f"CQL: cql_weight must be above 0 where target_gap learns it, got {self.cql_weight!r:.80}")

    def create_copies(self, key: PRNGKeyArray) -> CQLCopies:
        """An actor, critics with a target, a temperature, and a learned α_c."""
        weight = None
        if self.target_gap is not None:
            log_alpha = jnp.log(jnp.asarray(self.cql_weight, jnp.float32))
            weight = Temperature(log_alpha, self.optimizer_at().init(jnp.array(log_alpha, copy=True)))
        return CQLCopies(**vars(super().create_copies(key)), weight=weight)

    def check_copies(self, copies: CQLCopies) -> None:
        """Check that copies were created with the agent's `target_gap` too; see `OffPolicyAgent.check_copies`."""
        super().check_copies(copies)
        check_created_with(self, equal={}, present={"target_gap": copies.weight})

    def train_step(
        self,
        copies: SoftActorCopies,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[CQLCopies, StepLog]:
        """The step of SAC, with the critics' loss of CQL; and a step of α_c, by the terms of the critics before their step."""
        assert isinstance(copies, CQLCopies), "create_copies made them"
        weight, agent = copies.weight, self
        if weight is not None:
            learned = jnp.exp(weight.log_alpha)
            agent = dataclasses.replace(self, cql_weight=learned, target_gap=None, cql_learning_rate=None)
        trained, log = super(CQL, agent).train_step(copies, batch, key, enabled, env_steps=env_steps, axis_name=axis_name)
        if weight is not None and self.target_gap is not None:
            gradient = -jnp.exp(weight.log_alpha) * (log.terms["cql_gap"] - self.target_gap)
            optimizer = self.optimizer_at(env_steps, self.cql_learning_rate)
            before, state = Variables(weight.log_alpha), weight.optimizer_state
            after, state, weight_log = apply_gradient(optimizer, before, state, gradient, Aux({}), {}, log.applied[0])
            weight, log = Temperature(jnp.minimum(after.params, MAX_LOG_WEIGHT), state), append_logs(log, weight_log)
        return CQLCopies(**vars(trained), weight=weight), log

    def actor_loss_at(
        self, env_steps: StepCount, *, actor: Variables, critics: Variables, alpha: Float[Array, ""], key: PRNGKeyArray
    ) -> ActorLoss:
        """J_BC in the first `num_bc_steps`, then J_π."""
        value_loss = partial(self.actor_loss, actor=actor, critics=critics, alpha=alpha, key=key)
        if not self.num_bc_steps:
            return value_loss
        bc_loss = partial(self.bc_loss, actor=actor, critics=critics, alpha=alpha, key=key)
        has_ended = env_steps >= StepCount.of(self.num_bc_steps)
        return lambda params, batch: jax.lax.cond(has_ended, value_loss, bc_loss, params, batch)

    def bc_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        actor: Variables,
        critics: Variables,
        alpha: Float[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """J_BC(φ) of a batch whose weights sum to 1, and its terms; arguments as for `actor_loss`."""
        actor = self.share_encoder(dataclasses.replace(actor, params=params), critics)
        distribution, stats = self.action_distribution(actor, batch.obs, None, key, train=True)
        _, log_prob = distribution.sample_and_log_prob(seed=key)
        loss = jax.lax.stop_gradient(alpha) * log_prob - distribution.log_prob(batch.action)
        entropy = weighted_sum(-jax.lax.stop_gradient(log_prob), batch.weight)
        return weighted_sum(loss, batch.weight), Aux({"entropy": entropy}, stats)

    def metrics(self, before: OffPolicyState, after: OffPolicyState) -> Metrics:
        """The learning rate, α, and a learned α_c."""
        weight = after.copies.weight
        learned = {} if weight is None else {"train/cql_weight": jnp.exp(weight.log_alpha)}
        return super().metrics(before, after) | learned

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
        q = self._q_of_samples(critics, obs, actions)
        return jax.nn.logsumexp(q - log_density[..., None], axis=0) - np.log(len(log_density))

    def _q_of_samples(self, critics: Variables, obs: PyTree, actions: PyTree) -> Float[Array, "K B N"]:
        """Q_i(s, a_k), as K B rows of one product, which is faster on a CPU than K products; images are encoded only once."""
        if has_images(self.spec_of("critic").obs):
            return jax.vmap(lambda action: self.q_values(critics, obs, action))(actions)
        shape = jax.tree.leaves(actions)[0].shape[:2]
        repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (shape[0], *x.shape)), obs)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (repeated, actions))
        return self.q_values(critics, *rows).reshape(*shape, -1)

    def combine_critics(self, q: Float[Array, "B N *M"]) -> Float[Array, "..."]:
        """The minimum of the critics."""
        return jnp.min(q, axis=1)
