"""QT-Opt (Kalashnikov et al. 2018, arXiv:1806.10293): Q-learning of Box actions without an actor."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.action_noise import ActionNoiseSettings
from polyak.agents.off_policy import OffPolicyAgent, OffPolicyState
from polyak.agents.settings import TargetSettings
from polyak.copies.network_copies import NetworkCopies, cast_like
from polyak.core.checks import check_created_with
from polyak.core.spaces import check_env_spec
from polyak.core.struct import integer, number, static, struct
from polyak.core.types import Network, PyTree, Scalar, Variables, copy_buffers
from polyak.learning.actor_critic_updates import check_critics, check_unit_actions, critic_terms, feedforward_or_default
from polyak.networks.critics import Critics
from polyak.networks.layers import warn_of_flat_images
from polyak.ops.cross_entropy_method import CEMSettings
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import huber, weighted_sum
from polyak.ops.schedules import StepCount
from polyak.policies.cem_policy import CEMDistribution, CEMPolicy
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn, Greedy, add_return
from polyak.replay.replay import Transition


@struct
class QTOptCopies:
    """The networks of QT-Opt.

    Attributes:
        critics: N critics in one network, online and target.
        lagged: the targets of the last two multiples of `lag_period` gradient steps, the newer one first; None without
            `lag_period`.
    """

    critics: NetworkCopies
    lagged: tuple[Variables, Variables] | None


@struct(kw_only=True)
class QTOpt(CEMSettings, ActionNoiseSettings, TargetSettings, OffPolicyAgent):
    """QT-Opt for Box actions: Q-learning whose maximum over actions is found by the cross-entropy method (CEM).

        L(θ) = E[ Σ_i huber_κ(y - Q_θi(s, a)) ],    y = r + γ^m min_j min_i Q_j,i(s', a'),
                                                    a' = argmax_a min_i Q_target,i(s', a)

    over n-step transitions drawn from a replay. CEM draws N actions, fits mean and standard deviation to the M best, and draws
    again around them; see `polyak.ops.cross_entropy_method.cem_maximum`. Actions lie in [-1, 1]:
    `envs.make(..., action_scaling="rescale")`. A gradient step costs K N evaluations of the critics for each transition.

    The Q_j are the target, or with `lag_period` two older targets, as in TF-Agents; the paper takes the target and one lagged
    copy. The greedy policy maximizes the online critics by samples of fixed random numbers. The paper's loss is a cross-entropy
    of rewards in [0, 1], and TF-Agents' the one above.

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them.
        critics: a network of `(obs, action)` that returns `(q, None)`, q `[B, N]`; None takes `Critics(num_critics=1)`.
            Dropout is on in their loss alone. Batch normalization uses the statistics of the batch in their loss, and running
            statistics elsewhere.
        huber_delta: κ, the error above which the loss is linear; below it is δ²/2. None takes δ² everywhere.
        lag_period: gradient steps between updates of two lagged copies: the first becomes the target, the second what the first
            was. The target takes the minimum of their values. None takes the target's value.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = QTOpt(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    action_scaling: ClassVar[Literal["clip", "rescale"]] = "rescale"

    critics: Network | None = static(default=None, kw_only=False)
    huber_delta: Scalar | None = number(default=1.0, above=0, optional=True)
    lag_period: int | None = integer(default=5, optional=True)

    def set_defaults(self) -> None:
        """Check the spec, and complete the critics."""
        check_env_spec("QTOpt", self.spec)
        check_unit_actions("QTOpt", self.spec)
        network = feedforward_or_default("QTOpt", "critics", self.critics, Critics(num_critics=1))
        if self.critics is None:
            warn_of_flat_images("QTOpt", "critics", network, self.spec)
        object.__setattr__(self, "critics", network)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        self.check_cem()
        self.check_noise()

    def create_copies(self, key: PRNGKeyArray) -> QTOptCopies:
        """Critics with a target, and its lagged copies."""
        critics = NetworkCopies.create(
            self._critics, key, self.spec, optimizer=None, target=self.follow(), name="critics"
        ).with_optimizer_state(self.optimizer_at())
        check_critics(self._critics, critics.online, self.spec)
        target: Any = critics.target
        return QTOptCopies(critics, None if self.lag_period is None else (copy_buffers(target), copy_buffers(target)))

    def check_copies(self, copies: QTOptCopies) -> None:
        """Check that copies were created with the agent's `lag_period` too; see `OffPolicyAgent.check_copies`."""
        super().check_copies(copies)
        check_created_with(self, equal={}, present={"lag_period": copies.lagged})

    def policy(self, state: OffPolicyState) -> Greedy:
        """The best action that CEM finds, by samples of fixed random numbers."""
        return Greedy(self._cem_policy(state, state.copies.critics.evaluated()))

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | DiscountedReturn:
        """The best action that CEM finds, with noise; until `learning_starts` uniformly random actions."""
        noisy = self.add_noise(self._cem_policy(state, state.copies.critics.online), state.env_steps)
        return add_return(RandomWarmStart(noisy, self.learning_starts, state.env_steps), self)

    def train_step(
        self,
        copies: QTOptCopies,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[QTOptCopies, StepLog]:
        """One gradient step of the critics, after which first the lagged copies follow the target, then the target."""
        critics = copies.critics
        target = critics.variables("target")
        lagged = [target] if copies.lagged is None else [cast_like(copy, critics.online) for copy in copies.lagged]
        loss = partial(self.critic_loss, critics=critics.online, target=target, lagged=lagged, key=key)
        critics, log = critics.train(loss, self.optimizer_at(env_steps), batch, enabled=enabled, axis_name=axis_name)
        older = self._update_lagged(copies.lagged, critics, log.applied)
        return QTOptCopies(critics.follow(updates=log.applied.astype(jnp.uint32)), older), log

    def critic_loss(
        self,
        params: PyTree,
        batch: Transition,
        *,
        critics: Variables,
        target: Variables,
        lagged: list[Variables],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], Aux]:
        """L(θ) of a batch whose weights sum to 1, and its terms; `priority` is the mean |δ| of each sample.

        Args:
            params: θ.
            critics: the online critics; their parameters are not used.
            target: the target critics, which a' maximizes.
            lagged: the Q_j.
            key: for the samples of CEM, and for dropout.
        """
        cem_key, dropout_key = jax.random.split(key)
        y = self.td_target(batch, target=target, lagged=lagged, key=cem_key)
        online = dataclasses.replace(critics, params=params)
        (q, _), _, stats = self._critics.apply(online, (batch.obs, batch.action), train=True, key=dropout_key)
        td_error = y[:, None] - q
        loss = weighted_sum(jnp.sum(huber(td_error, self.huber_delta), axis=1), batch.weight)
        return loss, Aux(critic_terms(q, td_error, batch.weight), stats)

    def td_target(
        self, batch: Transition, *, target: Variables, lagged: list[Variables], key: PRNGKeyArray
    ) -> Float[Array, " N"]:
        """The target y, without a gradient; arguments as for `critic_loss`."""
        policy = CEMPolicy(target, None, self._critics, self.spec, self.cem_settings())
        next_action = CEMDistribution(policy, batch.next_obs).sample(seed=key)
        next_q = jnp.stack([self._critics.apply(copy, (batch.next_obs, next_action))[0][0] for copy in lagged])
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * jnp.min(next_q, axis=(0, 2)))

    def _update_lagged(
        self, lagged: tuple[Variables, Variables] | None, critics: NetworkCopies, applied: Bool[Array, ""]
    ) -> tuple[Variables, Variables] | None:
        """The lagged copies after a gradient step, before the target follows."""
        if lagged is None or self.lag_period is None:
            return None
        newest, (first, _) = critics.target, lagged
        is_due = applied & (critics.steps % jnp.uint32(self.lag_period) == 0)
        return jax.lax.cond(is_due, lambda: (newest, first), lambda: lagged)

    def _cem_policy(self, state: OffPolicyState, variables: Variables) -> CEMPolicy:
        return CEMPolicy(variables, state.normalizers.obs, self._critics, self.spec, self.cem_settings())

    @property
    def _critics(self) -> Network:
        assert self.critics is not None, "set_defaults sets it"
        return self.critics
