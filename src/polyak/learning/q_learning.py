"""What agents that learn action values from a replay share: one network with a target, and the gradient steps on it."""

from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from polyak.copies.network_copies import NetworkCopies
from polyak.core.types import Metrics, Network, PyTree, RecurrentNetwork, Rollout, Variables
from polyak.learning.off_policy import (
    OffPolicySettings,
    OffPolicyState,
    add_and_learn,
    create_state,
    has_started,
    target_follow,
)
from polyak.networks.layers import MAX_SMALL_BATCH, is_narrow
from polyak.ops.distributions.combinations import as_discrete, combine_actions
from polyak.ops.gradient_step import Aux, OptimizerSettings, StepLog, check_optimizer_state, optimizer_of
from polyak.ops.schedules import Linear, Schedule, value_at
from polyak.replay.replay import Transition

EPSILON = Linear(1.0, 0.05, 10_000)
RANDOM_TEMPERATURE = 1e30


@runtime_checkable
class QSettings(OffPolicySettings, OptimizerSettings, Protocol):
    """The settings of an agent of action values, and its loss."""

    @property
    def network(self) -> Network | None:
        """The network of action values."""
        ...

    @property
    def epsilon(self) -> Schedule | None:
        """Probability of a random action; None is `EPSILON`."""
        ...

    @property
    def temperature(self) -> Schedule | None:
        """Of Boltzmann exploration; None is epsilon-greedy."""
        ...

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` `[N]` is how much each sample surprised."""
        ...


def create_q_state(settings: QSettings, network: Network, key: PRNGKeyArray) -> OffPolicyState:
    """A new state: the network, its target, an optimizer and an empty replay."""
    spec = as_discrete(type(settings).__name__, settings.spec)
    copies = NetworkCopies.create(network, key, spec, optimizer=None, target=target_follow(settings))
    carry = jax.tree.map(lambda x: x[0], network.initial_carry(1)) if isinstance(network, RecurrentNetwork) else ()
    return create_state(settings, copies.with_optimizer_state(optimizer_of(settings)), carry)


def update_q(
    settings: QSettings, state: OffPolicyState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
) -> tuple[OffPolicyState, Metrics]:
    """Add a rollout to the replay, then take gradient steps of `settings.loss`; after each the target follows."""
    optimizer = optimizer_of(settings, state.env_steps)
    check_optimizer_state(optimizer, state.copies.online.params, state.copies.optimizer_state)
    train_step = partial(train_q, settings, optimizer, axis_name=axis_name)
    new_state, metrics = add_and_learn(settings, state, rollout, key, train_step, axis_name=axis_name)
    metrics["rollout/exploration_rate"] = exploration_rate(settings, state.env_steps)
    return new_state, metrics


def train_q(
    settings: QSettings,
    optimizer: optax.GradientTransformation,
    copies: NetworkCopies,
    batch: Transition,
    key: PRNGKeyArray,
    enabled: Bool[Array, ""],
    *,
    axis_name: str | None = None,
) -> tuple[NetworkCopies, StepLog]:
    """One gradient step of `settings.loss`, after which the target follows."""
    batch = combine_actions(settings.spec.action, batch)
    loss = partial(settings.loss, online=copies.online, target=copies.variables("target"), key=key)
    copies, log = copies.train(loss, optimizer, batch, enabled=enabled, axis_name=axis_name)
    return copies.follow(updates=log.applied.astype(jnp.uint32)), log


def exploration_rate(settings: QSettings, env_steps: UInt32[Array, ""]) -> Float[Array, ""]:
    """The probability of a random action: 1 until learning starts, then `epsilon`, or 0 with a temperature."""
    epsilon = EPSILON if settings.epsilon is None else settings.epsilon
    after = value_at(epsilon if settings.temperature is None else 0.0, env_steps)
    return jnp.where(has_started(settings, env_steps), after, 1.0)


def exploration_temperature(settings: QSettings, env_steps: UInt32[Array, ""]) -> Float[Array, ""] | None:
    """The temperature of Boltzmann exploration, so high that actions are random until learning starts; None without one."""
    if settings.temperature is None:
        return None
    # A schedule may end at 0, which `Boltzmann` takes of a schedule but not of a number.
    temperature = jnp.maximum(value_at(settings.temperature, env_steps), jnp.finfo(jnp.float32).tiny)
    return jnp.where(has_started(settings, env_steps), temperature, RANDOM_TEMPERATURE)


def fold(key: PRNGKeyArray | None, number: int) -> PRNGKeyArray | None:
    """The key of one of several applications of a network; None without a key: the network is applied without noise."""
    return None if key is None else jax.random.fold_in(key, number)


def has_small_products(settings: QSettings, num_envs: int, devices: int) -> bool:
    """Whether layers are at most 256 wide, and batches of at most 256 transitions."""
    assert settings.network is not None, "agents set the default"
    return is_narrow(settings.network, settings.spec) and settings.batch_size <= MAX_SMALL_BATCH
