"""Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971)."""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.checks import check_unset
from polyak.core.spaces import EnvSpec, check_env_spec
from polyak.core.struct import check_settings, choice, integer, number, setting, static, struct
from polyak.core.types import Metrics, Network, PyTree, Rollout, Scalar, Variables
from polyak.learning.actor_critic_updates import (
    ActorCriticCopies,
    check_copies,
    check_critics,
    check_shared_encoder,
    check_state_of,
    check_unit_actions,
    create_actor_critic,
    critic_terms,
    deterministic_action,
    deterministic_action_in_training,
    evaluated_actor,
    feedforward_or_default,
    has_small_products,
    join_logs,
    q_values,
    q_values_in_training,
    share_encoder,
    update_average,
)
from polyak.learning.drawn_batches import draw_batches, return_errors
from polyak.learning.normalizers import check_normalizers
from polyak.learning.off_policy import (
    REPLAY_FIELD,
    OffPolicyState,
    add_and_learn,
    check_off_policy,
    create_state,
    diagnose_off_policy,
    partition_by_env,
    target_follow,
)
from polyak.learning.prefill import add_rollout
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.ops.gradient_step import Aux, StepLog, check_optimizer, optimizer_of
from polyak.ops.losses import huber, weighted_sum
from polyak.ops.schedules import Schedule, check_schedule, value_at
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.noise import GaussianNoise, OUNoise
from polyak.policies.sde import check_no_sde
from polyak.replay.replay import Replay, Transition, check_replay
from polyak.replay.uniform import UniformReplay


@struct
class DDPG:
    """DDPG for Box actions.

        L(θ) = E[ huber_κ(y - Q_θ(s, a)) ],    y = r + γ^m Q_target(s', π_target(s'))
        ∇J(φ) = E[ ∇_a Q_θ(s, a) ∇_φ π_φ(s) ],    a = π_φ(s)

    over n-step transitions drawn from a replay. Actions lie in [-1, 1]: `envs.make(..., action_scaling="rescale")`. The actor
    follows the gradient of the new critic.

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them.
        actor: a network that returns `(action_params, value)`, of which tanh(loc) is the action; None takes
            `Actor(std="fixed")`. In its own loss it is in training mode (dropout, batch normalization).
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, 1]`; None takes `Critics(num_critics=1)`.
            Dropout is on in their loss and target. Batch normalization uses the statistics of the batch in their loss, and
            running ones elsewhere; critics with batch normalization have dropout in their own loss alone.
        num_steps: steps of each environment between updates.
        updates_per_step: gradient steps per transition, so that it means the same with any number of environments; times
            `num_steps * num_envs` it must be a whole number.
        batch_size: transitions of a gradient step.
        replay: a `UniformReplay`, `PrioritizedReplay`, or a `polyak.replay.Replay` of your own.
        learning_starts: transitions that are collected with random actions before the first gradient step.
        learning_rate: Adam's, a number or a schedule such as `Linear`; the critics', and the actor's where it has none.
        actor_learning_rate: the actor's.
        gamma: discount per step.
        n_step: steps that rewards are summed over before bootstrapping.
        reward_scale: factor of all rewards.
        normalize_obs: normalize observations by their running mean and standard deviation (all Boxes but uint8): those of now,
            when acting and when transitions are drawn.
        clip_obs: clip normalized observations to ± this value; None disables clipping.
        normalize_reward: divide rewards by the running standard deviation of the discounted `"return"` or of the `"reward"`;
            None leaves rewards unchanged.
        shared_encoder: the actor sees images through the convolutions of the critics, which only the loss of the critics trains
            (Yarats et al. 2020, arXiv:1910.01741); False gives it its own.
        huber_delta: κ, the error above which the loss is linear; below it is δ²/2. None takes δ² everywhere.
        max_dqda: clip each number of ∇_a Q to ± this; None disables clipping.
        exploration: noise on actions that are collected: `"ou"` (Ornstein-Uhlenbeck) or `"gaussian"`.
        exploration_noise: its standard deviation in one step, a number or a schedule; 0 adds none.
        theta: how fast Ornstein-Uhlenbeck noise returns to 0.
        tau: fraction by which the targets move towards the online networks at each target update.
        target_period: gradient steps between target updates.
        max_grad_norm: clip the gradient of each network to this global norm; None disables clipping.
        adam_eps: Adam's ε.
        optimizer: in place of Adam, for each network.
        ema_tau: keep an average of the actor that moves by this fraction towards the online one after every gradient step, and
            evaluate and export that average; None evaluates the online actor. The target actor is no such average: its pace,
            `tau` and `target_period`, is what the critics need.
        max_skipped_updates: stop training after this many consecutive updates without a finite gradient step of a network.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box
    >>> agent = DDPG(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static()
    actor: Network | None = static(default=None)
    critics: Network | None = static(default=None)
    num_steps: int = integer(default=1)
    updates_per_step: float = number(default=1.0, above=0, static=True)
    batch_size: int = integer(default=256)
    replay: Replay = setting(default=UniformReplay(1_000_000), check=check_replay)
    learning_starts: int = integer(default=1_000, at_least=0)
    learning_rate: Schedule = setting(default=1e-3, check=check_schedule)
    actor_learning_rate: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    n_step: int = integer(default=1, at_most=1_000)
    reward_scale: Scalar = number(default=1.0, above=0)
    normalize_obs: bool = choice(default=False, choices=(True, False))
    clip_obs: float | None = number(default=10.0, above=0, optional=True, static=True, used_if=("normalize_obs", True))
    normalize_reward: Literal["return", "reward"] | None = choice(default=None, choices=("return", "reward", None))
    shared_encoder: bool = choice(default=False, choices=(True, False))
    huber_delta: Scalar | None = number(default=None, above=0, optional=True)
    max_dqda: Scalar | None = number(default=None, above=0, optional=True)
    exploration: Literal["ou", "gaussian"] = choice(default="ou", choices=("ou", "gaussian"))
    exploration_noise: Schedule = setting(default=0.2, check=partial(check_schedule, above=-1.0, at_least=0))
    theta: Scalar = number(default=0.15, above=0, at_most=1)
    tau: Scalar = number(default=0.005, above=0, at_most=1)
    target_period: int = integer(default=1)
    max_grad_norm: Scalar | None = number(default=None, above=0, optional=True)
    adam_eps: Scalar = number(default=1e-8, above=0)
    optimizer: optax.GradientTransformation | None = static(default=None)
    ema_tau: Scalar | None = number(default=None, at_least=0, at_most=1, optional=True)
    max_skipped_updates: int = integer(default=10)

    def __post_init__(self) -> None:
        check_env_spec("DDPG", self.spec)
        check_unit_actions("DDPG", self.spec)
        object.__setattr__(self, "actor", feedforward_or_default("DDPG", "actor", self.actor, Actor(std="fixed")))
        object.__setattr__(self, "critics", feedforward_or_default("DDPG", "critics", self.critics, Critics(num_critics=1)))
        check_settings(self)
        check_optimizer(self)
        check_normalizers(self)
        check_shared_encoder(self)
        check_no_sde("DDPG", self._actor)
        if self.exploration == "gaussian":
            check_unset(self, ("theta",), "has no effect with exploration='gaussian'; leave it out")

    add = add_rollout
    check = check_off_policy
    partition = partition_by_env
    diagnose = diagnose_off_policy
    has_small_products = has_small_products
    replay_field = REPLAY_FIELD
    draw_batches = draw_batches
    return_errors = return_errors
    max_lag = None
    action_scaling = "rescale"

    def init(self, key: PRNGKeyArray) -> OffPolicyState:
        """A new state."""
        copies = create_actor_critic(self, self.spec, (self._actor, self._critics), (target_follow(self),) * 2, key)
        num_critics = check_critics(self._critics, copies[1].online, self.spec)
        if num_critics != 1:
            raise ValueError(f"DDPG: critics must be one critic, Critics(num_critics=1), got {num_critics}; TD3 takes several")
        return create_state(self, ActorCriticCopies(*copies))

    def policy(self, state: OffPolicyState) -> Greedy:
        """The actor's action, that of its average if there is one."""
        check_copies("DDPG.policy", state, ActorCriticCopies)
        return Greedy(self._network_policy(state, evaluated_actor(self, state.copies.actor, state.copies.average)))

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | DiscountedReturn:
        """The actor's action with noise; until `learning_starts` uniformly random actions."""
        check_copies("DDPG.collect_policy", state, ActorCriticCopies)
        # As a number, so that workers evaluate no schedule.
        scale = value_at(self.exploration_noise, state.env_steps)
        policy = self._network_policy(state, state.copies.actor.online)
        noisy = OUNoise(policy, scale, self.theta) if self.exploration == "ou" else GaussianNoise(policy, scale)
        starting = RandomWarmStart(noisy, self.learning_starts, state.env_steps)
        return DiscountedReturn(starting, self.gamma) if self.normalize_reward == "return" else starting

    def update(
        self, state: OffPolicyState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
    ) -> tuple[OffPolicyState, Metrics]:
        """Add a rollout to the replay, then take gradient steps on transitions drawn from it.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions.
            key: decides the transitions.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: the rollout does not fit the spec (while tracing).
        """
        critics_step = optimizer_of(self, state.env_steps)
        actor_step = optimizer_of(self, state.env_steps, self.actor_learning_rate)

        def train_step(
            copies: ActorCriticCopies, batch: Transition, key: PRNGKeyArray, enabled: Bool[Array, ""]
        ) -> tuple[ActorCriticCopies, StepLog]:
            actor, critics = copies.actor, copies.critics
            loss = partial(
                self.critic_loss,
                critics=critics.online,
                target=critics.variables("target"),
                target_actor=actor.variables("target"),
                key=key,
            )
            critics, critic_log = critics.train(loss, critics_step, batch, enabled=enabled, axis_name=axis_name)
            actor_loss = partial(self.actor_loss, actor=actor.online, critics=critics.online, key=jax.random.fold_in(key, 3))
            actor, actor_log = actor.train(actor_loss, actor_step, batch, enabled=enabled, axis_name=axis_name)
            actor = dataclasses.replace(actor, online=share_encoder(self, actor.online, critics.online))
            applied = critic_log.applied.astype(jnp.uint32)
            average = update_average(self.ema_tau, copies.average, actor.online, critic_log.applied)
            copies = ActorCriticCopies(actor.follow(updates=applied), critics.follow(updates=applied), average)
            return copies, join_logs(critic=critic_log, actor=actor_log)

        check_state_of(self, state.copies.critics, state.copies.average)
        return add_and_learn(self, state, rollout, key, train_step, axis_name=axis_name)

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
        """L(θ) of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ.
            critics: the online critics; of their parameters nothing is used.
            target: the target critics.
            target_actor: the actor that a' is from.
            key: for dropout.
        """
        target_key, dropout_key = jax.random.split(key)
        online = dataclasses.replace(critics, params=params)
        q, stats = q_values_in_training(self._critics, online, batch.obs, batch.action, dropout_key)
        td_error = self.td_target(batch, target=target, target_actor=target_actor, key=target_key)[:, None] - q
        loss = weighted_sum(jnp.sum(huber(td_error, self.huber_delta), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

    def td_target(
        self, batch: Transition, *, target: Variables, target_actor: Variables, key: PRNGKeyArray
    ) -> Float[Array, " N"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""
        next_action = deterministic_action(self._actor, target_actor, batch.next_obs, self.spec)
        next_q = q_values(self._critics, target, batch.next_obs, next_action, key)
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_q[:, 0])

    def actor_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        actor: Variables,
        critics: Variables,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, ""], Aux]:
        """-J(φ) of a batch whose weights sum to 1; no terms.

        With `max_dqda` the loss is -Σ clip(∇_a Q) · π_φ(s), whose gradient is the clipped one.

        Args:
            params: φ.
            actor: of its parameters nothing is used.
            critics: the online critic.
            key: for dropout.
        """
        actor = share_encoder(self, dataclasses.replace(actor, params=params), critics)
        action, stats = deterministic_action_in_training(self._actor, actor, batch.obs, self.spec, key)

        def sum_of_q(action: PyTree) -> Float[Array, ""]:
            return jnp.sum(q_values(self._critics, critics, batch.obs, action))

        bound = self.max_dqda
        if bound is None:
            return -weighted_sum(q_values(self._critics, critics, batch.obs, action)[:, 0], batch.weight), Aux({}, stats)
        dqda = jax.lax.stop_gradient(jax.grad(sum_of_q)(action))
        products = jax.tree.map(lambda g, a: jnp.clip(g, -bound, bound) * a, dqda, action)
        each = jnp.concatenate([x.reshape(x.shape[0], -1) for x in jax.tree.leaves(products)], axis=1)
        return -weighted_sum(jnp.sum(each, axis=1), batch.weight), Aux({}, stats)

    def _network_policy(self, state: OffPolicyState, actor: Variables) -> NetworkPolicy:
        return NetworkPolicy(actor, state.normalizers.obs, self._actor, self.spec, squash=True, is_deterministic=True)

    @property
    def _actor(self) -> Network:
        assert self.actor is not None, "__post_init__ sets the default"
        return self.actor

    @property
    def _critics(self) -> Network:
        assert self.critics is not None, "__post_init__ sets the default"
        return self.critics
