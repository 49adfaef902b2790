"""Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236), with double Q-learning and n-step targets."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from polyak.copies.follow import Follow
from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_state
from polyak.core.spaces import Discrete, EnvSpec, check_env_spec, zeros
from polyak.core.struct import check_settings, choice, integer, number, setting, static, struct
from polyak.core.types import Metrics, Network, PyTree, RecurrentNetwork, Rollout, Scalar, Terms, Variables
from polyak.learning.check_rollout import as_arrays, check_rollout
from polyak.networks.actor_critic import network_or_default
from polyak.networks.layers import is_narrow
from polyak.networks.q_network import check_q_network, q_network_for
from polyak.ops.gradient_step import (
    StepLog,
    adam,
    all_finite,
    describe_skips,
    flag_quantities,
    gradient_step,
    in_float32,
)
from polyak.ops.losses import huber, sum_over_devices, weighted_sum
from polyak.ops.schedules import Linear, Schedule, check_schedule, saturating_add, value_at
from polyak.policies.exploration import EpsilonGreedy
from polyak.policies.network_policy import Greedy, NetworkPolicy
from polyak.replay.uniform import Replay, ReplayState, Transition

EPSILON = Linear(1.0, 0.05, 10_000)


@struct
class DQNState:
    """Everything that training changes.

    Attributes:
        copies: of the network: online and target; with the optimizer state and the counts of skipped steps.
        replay: the transitions to learn from; split by environment over devices.
        env_steps: valid transitions seen; schedules are functions of it.
        updates: gradient steps.
    """

    copies: NetworkCopies
    replay: ReplayState
    env_steps: UInt32[Array, ""]
    updates: UInt32[Array, ""]


@struct
class DQN:
    """DQN for Discrete actions.

        L(θ) = E[ huber_κ(r + γ^m Q_target(s', a') - Q_θ(s, a)) ],    a' = argmax_a Q_θ(s', a)

    over n-step transitions drawn from a replay; without `double`, a' is the best action by Q_target itself. Where the
    environment has an action mask, a' is an allowed action.

    Attributes:
        spec: the environment's spaces (`env.spec`).
        network: a network that returns `(q, value)`, such as `polyak.q_mlp(dueling=True)`; None takes `q_network_for(spec)`. It
            is applied in evaluation mode: dropout is off, and statistics stay as they were initialised.
        num_steps: steps of each environment between updates.
        updates_per_step: gradient steps per transition, so that it means the same with any number of environments; times
            `num_steps * num_envs` it must be a whole number.
        batch_size: transitions of a gradient step.
        capacity: transitions in the replay, over all environments and devices.
        learning_starts: transitions that are collected with random actions before the first gradient step.
        learning_rate: Adam's, a number or a schedule such as `Linear`.
        gamma: discount per step.
        n_step: steps that rewards are summed over before bootstrapping.
        double: double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461).
        huber_delta: κ, the error above which the loss is linear; None takes the squared error ½ δ².
        tau: fraction by which the target moves towards the online network at each target update; 1 copies it.
        period: gradient steps between target updates.
        epsilon: probability of a random action, a number or a schedule, drawn for each environment; None decreases it from 1 to
            0.05 over the first 10,000 transitions.
        max_grad_norm: clip gradients to this global norm; None disables clipping.
        adam_eps: Adam's ε.
        max_bad_steps: stop training after this number of consecutive updates without a finite gradient step.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box
    >>> agent = DQN(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static()
    network: Network | None = static(default=None)
    num_steps: int = integer(default=4)
    updates_per_step: float = number(default=0.25, above=0, static=True)
    batch_size: int = integer(default=64)
    capacity: int = integer(default=100_000)
    learning_starts: int = integer(default=1_000, at_least=0, at_most=2**31)
    learning_rate: Schedule = setting(default=5e-4, check=check_schedule)
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    n_step: int = integer(default=1, at_most=1_000)
    double: bool = choice(default=True, choices=(True, False))
    huber_delta: Scalar | None = number(default=1.0, above=0, optional=True)
    tau: Scalar = number(default=1.0, above=0, at_most=1)
    period: int = integer(default=250)
    epsilon: Schedule | None = setting(
        default=None, check=partial(check_schedule, optional=True, above=-1.0, at_least=0, at_most=1)
    )
    max_grad_norm: Scalar | None = number(default=10.0, above=0, optional=True)
    adam_eps: Scalar = number(default=1e-8, above=0)
    max_bad_steps: int = integer(default=10)

    def __post_init__(self) -> None:
        check_env_spec("DQN", self.spec)
        if not isinstance(self.spec.action, Discrete):
            raise ValueError(f"DQN: actions must be Discrete, got {self.spec.action}; PPO takes every space")
        network = q_network_for(self.spec) if self.network is None else network_or_default("DQN", self.network, self.spec)
        if isinstance(network, RecurrentNetwork):
            raise ValueError(f"DQN: network must not be recurrent, got {network!r}; PPO trains recurrent networks")
        object.__setattr__(self, "network", network)
        check_settings(self)

    def init(self, key: PRNGKeyArray) -> DQNState:
        """A new state."""
        copies = NetworkCopies.create(self._network, key, self.spec, optimizer=None, target=self._follow)
        check_q_network(self._network, copies.online, self.spec)
        params = jax.tree.map(lambda x: jnp.array(x, copy=True), copies.online.params)
        mask = jnp.zeros(self._num_actions, bool) if self.spec.has_action_mask else None
        return DQNState(
            copies=dataclasses.replace(copies, optimizer_state=self._optimizer(0).init(in_float32(params))),
            replay=self._replay.init(zeros(self.spec.obs), zeros(self.spec.action), mask),
            env_steps=jnp.zeros((), jnp.uint32),
            updates=jnp.zeros((), jnp.uint32),
        )

    def check(self, num_envs: int, devices: int = 1) -> None:
        """Check that updates have whole gradient steps, and that devices can share the replay and the batches equally.

        Raises:
            ValueError: they cannot, or the replay has no room for two rollouts and `n_step` steps of each environment.
        """
        self._num_gradient_steps(num_envs * devices)
        for name in ("capacity", "batch_size"):
            if getattr(self, name) % devices:
                raise ValueError(f"DQN: {name}={getattr(self, name)} must be divisible by devices={devices}")
        least = max(2 * self.num_steps, self.num_steps + self.n_step) * num_envs * devices
        if self.capacity < least:
            raise ValueError(
                f"DQN: capacity={self.capacity} must be at least {least} for num_envs={num_envs * devices}, "
                f"num_steps={self.num_steps} and n_step={self.n_step}"
            )

    def has_small_products(self, num_envs: int, devices: int) -> bool:
        """Whether layers are at most 256 wide, and batches of at most 256 transitions."""
        return is_narrow(self._network, self.spec) and self.batch_size <= 256

    def partition(self, axis_name: str) -> PyTree:
        """The rows of the replay are split by environment; all else is replicated."""
        whole: Any = PartitionSpec()
        rows: Any = PartitionSpec(axis_name)
        return DQNState(whole, ReplayState(rows, whole, whole, whole, whole), whole, whole)

    def policy(self, state: DQNState) -> Greedy:
        """The action of the largest value."""
        check_state("DQN.policy", state, DQNState)
        return Greedy(self._network_policy(state))

    def collect_policy(self, state: DQNState) -> EpsilonGreedy:
        """The action of the largest value or, with probability ε, a random one; until `learning_starts` always a random one."""
        return EpsilonGreedy(self._network_policy(state), self._exploration_rate(state))

    def update(
        self, state: DQNState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
    ) -> tuple[DQNState, Metrics]:
        """Add a rollout to the replay, then take gradient steps on transitions drawn from it.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions.
            key: decides the transitions.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: the rollout does not fit the spec (while tracing).
        """
        _, num_envs = check_rollout(rollout, self.spec)
        rollout = as_arrays(rollout)
        # Added first: a program that samples before it adds would copy the replay.
        replay = self._replay.add(state.replay, rollout)
        valid = sum_over_devices(rollout.valid.sum(dtype=jnp.uint32), axis_name)
        env_steps = saturating_add(state.env_steps, valid)
        devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        keys = jax.random.split(key, self._num_gradient_steps(num_envs * devices))
        if axis_name is not None:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, jax.lax.axis_index(axis_name)))(keys)

        def step(copies: NetworkCopies, key: PRNGKeyArray) -> tuple[NetworkCopies, StepLog]:
            batch = self._replay.sample(
                replay, key, self.batch_size // devices, num_envs=num_envs, n_step=self.n_step, gamma=self.gamma
            )
            return self._train(copies, batch, state.env_steps, axis_name)

        def learn(copies: NetworkCopies) -> tuple[NetworkCopies, StepLog]:
            return jax.lax.scan(step, copies, keys)

        def wait(copies: NetworkCopies) -> tuple[NetworkCopies, StepLog]:
            _, log = jax.eval_shape(learn, copies)
            return copies, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), log)

        # The branches read the replay and do not return it, which would copy it.
        has_started = (env_steps >= self.learning_starts) & (replay.size > 0)
        # The agent's setting decides how the target follows, also where it was changed after `init`.
        copies = dataclasses.replace(state.copies, target_follow=self._follow)
        copies, log = jax.lax.cond(has_started, learn, wait, copies)
        skipped, applied = (flags.sum(dtype=jnp.uint32) for flags in (log.skipped, log.applied))
        dropped = sum_over_devices(replay.dropped - state.replay.dropped, axis_name)
        # A rollout of which nothing could be stored counts as a skipped step: its environment is broken.
        is_lost = (dropped == valid) & (valid > 0)
        bad = log.bad.any(0) | (_bad_data(rollout, axis_name) & is_lost)
        skipped += is_lost.astype(jnp.uint32)
        guard = copies.guard.after_update(skipped, skipped + jnp.where(is_lost, jnp.uint32(0), applied), bad)
        new_state = DQNState(
            copies=dataclasses.replace(copies, guard=guard),
            replay=dataclasses.replace(replay, dropped=state.replay.dropped + dropped),
            env_steps=env_steps,
            updates=saturating_add(state.updates, applied),
        )
        return new_state, self._metrics(state, new_state, log, num_envs * devices)

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables
    ) -> tuple[Float[Array, ""], Terms]:
        """The loss of a batch whose weights sum to 1, and its terms.

        Args:
            params: θ.
            online: the online network's variables; of their parameters nothing is used.
            target: the target network's.
        """
        q = self._values(dataclasses.replace(online, params=params), batch.obs)
        q = jnp.take_along_axis(q, batch.action[:, None], axis=1)[:, 0]
        td_error = self.td_target(params, batch, online=online, target=target) - q
        terms = {
            "td_error": weighted_sum(jnp.abs(jax.lax.stop_gradient(td_error)), batch.weight),
            "q": weighted_sum(jax.lax.stop_gradient(q), batch.weight),
        }
        return weighted_sum(huber(td_error, self.huber_delta), batch.weight), terms

    def td_target(self, params: PyTree, batch: Transition, *, online: Variables, target: Variables) -> Float[Array, " N"]:
        """The target r + γ^m Q_target(s', a'), without a gradient."""
        target_q = self._values(target, batch.next_obs)
        q = self._values(dataclasses.replace(online, params=params), batch.next_obs) if self.double else target_q
        if batch.next_action_mask is not None:
            q = jnp.where(batch.next_action_mask, q, -jnp.inf)
        next_action = jnp.argmax(q, axis=1)[:, None]
        next_q = jnp.take_along_axis(target_q, next_action, axis=1)[:, 0]
        return jax.lax.stop_gradient(batch.reward + batch.discount * next_q)

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """The first non-finite quantity, once `max_bad_steps` consecutive updates had no finite gradient step; else None."""
        in_a_row, first_bad = metrics["train/skipped_in_a_row"], metrics["train/first_bad"]
        skips = describe_skips(in_a_row, first_bad, self.max_bad_steps, "updates")
        return None if skips is None else f"DQN: {skips}"

    def _train(
        self, copies: NetworkCopies, batch: Transition, env_steps: UInt32[Array, ""], axis_name: str | None
    ) -> tuple[NetworkCopies, StepLog]:
        """One gradient step, after which the target follows."""
        total = sum_over_devices(batch.weight.sum(), axis_name)
        batch = dataclasses.replace(batch, weight=batch.weight / jnp.maximum(total, 1.0))
        online = copies.online
        params, optimizer_state, log = gradient_step(
            partial(self.loss, online=online, target=copies.variables("target")),
            self._optimizer(env_steps),
            online.params,
            copies.optimizer_state,
            batch,
            due=total > 0,
            axis_name=axis_name,
        )
        copies = dataclasses.replace(copies, online=dataclasses.replace(online, params=params), optimizer_state=optimizer_state)
        return copies.follow(updates=log.applied.astype(jnp.uint32)), log

    def _metrics(self, state: DQNState, new_state: DQNState, log: StepLog, num_envs: int) -> Metrics:
        """Terms averaged over the applied gradient steps, and quantities of the whole update."""
        applied = jnp.maximum(log.applied.sum(), 1).astype(jnp.float32)
        metrics: Metrics = {
            f"train/{name}": jnp.sum(jnp.where(log.applied, term, 0.0)) / applied for name, term in log.terms.items()
        }
        guard = new_state.copies.guard
        metrics |= {
            "train/learning_rate": value_at(self.learning_rate, state.env_steps),
            "train/n_updates": new_state.updates,
            "train/skipped_steps": guard.skipped,
            "train/skipped_in_a_row": guard.in_a_row,
            "train/first_bad": guard.first_bad,
            "rollout/exploration_rate": self._exploration_rate(state),
            "replay/size": new_state.replay.size * jnp.uint32(num_envs),
            "replay/dropped": new_state.replay.dropped,
        }
        return metrics

    def _values(self, variables: Variables, obs: PyTree) -> Float[Array, "N n"]:
        (q, _), _, _ = self._network.apply(variables, obs)
        return q

    def _network_policy(self, state: DQNState) -> NetworkPolicy:
        return NetworkPolicy(state.copies.online, None, self._network, self.spec)

    def _exploration_rate(self, state: DQNState) -> Float[Array, ""]:
        is_random = state.env_steps < jnp.uint32(self.learning_starts)
        epsilon = EPSILON if self.epsilon is None else self.epsilon
        return jnp.where(is_random, 1.0, value_at(epsilon, state.env_steps))

    def _num_gradient_steps(self, num_envs: int) -> int:
        count = self.updates_per_step * self.num_steps * num_envs
        if count < 1 or abs(count - round(count)) > 1e-6:
            raise ValueError(
                f"DQN: updates_per_step * num_steps * num_envs = {self.updates_per_step} * {self.num_steps} * {num_envs} must "
                f"be a whole number of gradient steps, got {count:g}"
            )
        return round(count)

    def _optimizer(self, env_steps: Array | int) -> optax.GradientTransformation:
        learning_rate = value_at(self.learning_rate, env_steps)
        return adam(learning_rate, eps=self.adam_eps, max_grad_norm=self.max_grad_norm)

    @property
    def _follow(self) -> Follow:
        return Follow(tau=jnp.asarray(self.tau, jnp.float32), period=self.period)

    @property
    def _replay(self) -> Replay:
        return Replay(self.capacity, self.num_steps)

    @property
    def _num_actions(self) -> int:
        assert isinstance(self.spec.action, Discrete), "checked when the agent was built"
        return self.spec.action.n

    @property
    def _network(self) -> Network:
        assert self.network is not None, "__post_init__ sets the default"
        return self.network


def _bad_data(rollout: Rollout, axis_name: str | None) -> Bool[Array, " quantities"]:
    """Which quantities of the rollout have NaN or infinity."""
    steps = rollout.time_steps
    flags = jnp.stack([~all_finite(steps.obs), ~jnp.isfinite(steps.reward).all()])
    obs, reward = sum_over_devices(flags.astype(jnp.int32), axis_name) > 0
    return flag_quantities({"obs": obs, "reward": reward})
