"""What agents that learn from a replay share: their state, and an update that adds a rollout and takes gradient steps."""

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from polyak.copies.follow import Follow
from polyak.copies.network_copies import follow_by
from polyak.core.checks import check_state
from polyak.core.spaces import Discrete, EnvSpec, MultiDiscrete, zeros
from polyak.core.struct import struct
from polyak.core.types import Mean, Metrics, PyTree, Rollout, Scalar, Variables
from polyak.learning.check_rollout import as_arrays, check_rollout
from polyak.learning.normalizers import Normalizers, check_created_normalizers, create_normalizers, without_returns
from polyak.networks.adapters import has_batch_statistics
from polyak.ops.distributions import parameter_shapes
from polyak.ops.gradient_step import (
    Guard,
    OptimizerSettings,
    StepLog,
    all_finite,
    diagnose_skips,
    flag_quantities,
    in_float32,
)
from polyak.ops.losses import fill_rows, sum_over_devices
from polyak.ops.schedules import saturating_add, value_at
from polyak.replay.drawn import DrawnBatches, DrawnReplay
from polyak.replay.replay import Replay, ReplayState, Transition

REPLAY_FIELD = "replay"
"""The field of `OffPolicyState` that holds the replay, for `polyak.core.types.HasReplay`."""

TrainStep: TypeAlias = Callable[[PyTree, Transition, PRNGKeyArray, Bool[Array, ""]], tuple[PyTree, StepLog]]
"""`(copies, batch, key, enabled)` to the copies after one gradient step (an actor-critic: one of each network) and the targets'
update, and its log. The batch's weights sum to 1 over all devices. Where `enabled` is False, nothing may change."""


@runtime_checkable
class OffPolicySettings(OptimizerSettings, Protocol):
    """The settings of an agent that learns from a replay."""

    @property
    def spec(self) -> EnvSpec:
        """The environment's spaces."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of each environment between updates."""
        ...

    @property
    def updates_per_step(self) -> float:
        """Gradient steps per transition."""
        ...

    @property
    def batch_size(self) -> int:
        """Transitions of a gradient step, over all devices."""
        ...

    @property
    def replay(self) -> Replay:
        """The replay; one with priorities needs the term `priority`, |δ| `[N]`, in the log of the train step."""
        ...

    @property
    def learning_starts(self) -> int:
        """Transitions collected with random actions before the first gradient step."""
        ...

    @property
    def gamma(self) -> Scalar:
        """Discount per step."""
        ...

    @property
    def n_step(self) -> int:
        """Steps that rewards are summed over."""
        ...

    @property
    def tau(self) -> Scalar:
        """Fraction by which targets move."""
        ...

    @property
    def target_period(self) -> int:
        """Gradient steps between target updates."""
        ...

    @property
    def max_skipped_updates(self) -> int:
        """Training stops after this many consecutive updates without a finite gradient step of a network."""
        ...


@struct
class OffPolicyState:
    """Everything that training changes.

    Attributes:
        copies: the networks: online and target, with their optimizers' states. One `NetworkCopies`, or the agent's own tree of
            several.
        replay: the transitions to learn from; split by environment over devices. In a loop that keeps them in another memory,
            the batches that were drawn from them.
        normalizers: statistics of observations and rewards.
        guard: counts of skipped gradient steps.
        env_steps: valid transitions seen; schedules are functions of it.
        updates: gradient steps.
    """

    copies: PyTree
    replay: ReplayState | DrawnBatches
    normalizers: Normalizers
    guard: Guard
    env_steps: UInt32[Array, ""]
    updates: UInt32[Array, ""]


def create_state(settings: OffPolicySettings, copies: PyTree, carry: PyTree = ()) -> OffPolicyState:
    """A new state with these copies and an empty replay.

    Args:
        carry: the recurrent state of one environment, for a replay of sequences.
    """
    env_steps, updates = (jnp.zeros((), jnp.uint32) for _ in range(2))
    replay = _create_replay(settings, carry)
    return OffPolicyState(copies, replay, create_normalizers(settings), Guard.init(), env_steps, updates)


def _create_replay(settings: OffPolicySettings, carry: PyTree) -> ReplayState:
    spec = settings.spec
    shape = parameter_shapes(spec.action) if isinstance(spec.action, Discrete | MultiDiscrete) else None
    mask = None if shape is None or not spec.has_action_mask else jnp.zeros(shape, bool)
    example = zeros(spec.obs), in_float32(zeros(spec.action)), mask
    return settings.replay.init(*example, num_steps=settings.num_steps, carry=carry)


def check_off_policy(settings: OffPolicySettings, num_envs: int, devices: int = 1) -> None:
    """Check that updates have whole gradient steps, and that devices can share the replay and the batches equally.

    Raises:
        ValueError: they cannot, or the replay has no room for two rollouts, `n_step` steps and a stack of frames of each
            environment.
    """
    count_gradient_steps(settings, num_envs * devices)
    if settings.batch_size % devices:
        raise ValueError(f"{type(settings).__name__}: batch_size={settings.batch_size} must be divisible by devices={devices}")
    settings.replay.check(num_envs, settings.num_steps, n_step=settings.n_step, devices=devices)


def check_off_policy_state(settings: OffPolicySettings, state: OffPolicyState, devices: int = 1) -> None:
    """Check that a state given to `update` is one of this agent, with its settings of normalization and of the replay.

    Raises:
        TypeError, ValueError: it is not.
    """
    check_state(f"{type(settings).__name__}.update", state, OffPolicyState)
    check_created_normalizers(settings, state.normalizers)
    if isinstance(state.replay, DrawnBatches):
        return
    stored = state.replay
    carry = jax.tree.map(lambda x: x[0], stored.carries) if stored.carries is not None else ()
    created = jax.eval_shape(partial(_create_replay, settings, carry))
    structures: list[Any] = [jax.tree.structure(replay) for replay in (created, stored)]
    if structures[0] != structures[1] or created.capacity != stored.capacity * devices:
        raise ValueError(
            f"update: the state's replay, {stored!r}, is not one of {type(settings.replay).__name__}"
            f"(capacity={settings.replay.capacity}) and num_steps={settings.num_steps}; create the state with agent.init(key)"
        )


def count_gradient_steps(settings: OffPolicySettings, num_envs: int) -> int:
    """Gradient steps of an update, with this number of environments on all devices.

    Raises:
        ValueError: it is not whole.
    """
    ratio, num_steps = settings.updates_per_step, settings.num_steps
    count = ratio * num_steps * num_envs
    if round(count) < 1 or abs(count - round(count)) > 1e-6:
        a_step = Fraction(ratio * num_envs).limit_denominator(10_000)
        hint = f"; num_steps={a_step.denominator} makes it {a_step.numerator}" if a_step else ""
        raise ValueError(
            f"{type(settings).__name__}: updates_per_step * num_steps * num_envs = {ratio} * {num_steps} * {num_envs} must "
            f"be a whole number of gradient steps, got {count:g}{hint}"
        )
    return round(count)


def partition_by_env(settings: OffPolicySettings, axis_name: str) -> PyTree:
    """The rows of the replay are split by environment; all else is replicated."""
    whole: Any = PartitionSpec()
    replay = settings.replay.partition(axis_name, settings.num_steps)
    return OffPolicyState(whole, replay, whole, whole, whole, whole)


def target_follow(settings: OffPolicySettings) -> Follow:
    """How targets follow: by the agent's settings. The period in a state is only that of its `init`."""
    return Follow(tau=jnp.asarray(settings.tau, jnp.float32), period=settings.target_period, check_finite=False)


def has_started(settings: OffPolicySettings, env_steps: UInt32[Array, ""]) -> Bool[Array, ""]:
    """Whether enough transitions were collected; until then actions are random."""
    return env_steps >= jnp.uint32(settings.learning_starts)


def add_and_learn(
    settings: OffPolicySettings,
    state: OffPolicyState,
    rollout: Rollout,
    key: PRNGKeyArray,
    train_step: TrainStep,
    *,
    axis_name: str | None = None,
) -> tuple[OffPolicyState, Metrics]:
    """Add a rollout to the replay; then, once learning has started, take gradient steps on transitions drawn from it.

    Args:
        rollout: `[T, B]` transitions.
        key: decides the transitions, and the keys of `train_step`.
        axis_name: inside `shard_map`, the mesh axis that environments are split over.

    Raises:
        TypeError, ValueError: the state is another agent's, or the rollout does not fit the spec (while tracing).
    """
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    check_off_policy_state(settings, state, devices)
    _, num_envs = check_rollout(rollout, settings.spec)
    rollout = as_arrays(rollout)
    ring: Any = DrawnReplay() if isinstance(state.replay, DrawnBatches) else settings.replay
    # Added first: a program that samples before it adds would copy the replay.
    replay = ring.add(state.replay, without_returns(settings, rollout))
    normalizers = state.normalizers.update(rollout, settings.gamma, axis_name)
    valid = sum_over_devices(rollout.valid.sum(dtype=jnp.uint32), axis_name)
    env_steps = saturating_add(state.env_steps, valid)
    keys = keys_of_steps(settings, key, num_envs * devices)
    if axis_name is not None:
        keys = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, jax.lax.axis_index(axis_name))))(keys)
    is_learning = is_due(settings, env_steps, replay.size, num_envs * devices)
    options = draw_options(settings, env_steps, num_envs) | {"axis_name": axis_name}

    def learn(copies: PyTree, priorities: PyTree, keys: Array) -> tuple[PyTree, StepLog, Array]:
        sample_key, train_key = keys
        stored, batch_size = dataclasses.replace(replay, priorities=priorities), settings.batch_size // devices
        batch = normalizers.normalize(ring.sample(stored, sample_key, batch_size, **options))
        total = sum_over_devices(batch.weight.sum(), axis_name)
        batch = _without_hidden_rows(batch, copies)
        batch = dataclasses.replace(batch, weight=batch.weight / jnp.where(total > 0, total, 1.0))
        copies, log = train_step(copies, batch, train_key, total > 0)
        log = dataclasses.replace(log, applied=jnp.atleast_1d(log.applied), skipped=jnp.atleast_1d(log.skipped))
        if settings.replay.has_priorities:
            log = dataclasses.replace(log, terms=log.terms | {"importance_weight": total / settings.batch_size})
        return copies, log, batch.index

    def wait(copies: PyTree, priorities: PyTree, keys: Array) -> tuple[PyTree, StepLog, Array]:
        _, *rest = jax.eval_shape(learn, copies, priorities, keys)
        return copies, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)

    def step(carry: tuple[PyTree, PyTree], keys: Array) -> tuple[tuple[PyTree, PyTree], StepLog]:
        copies, priorities = carry
        # The branches read the replay and do not return it, which would copy it.
        copies, log, index = jax.lax.cond(is_learning, learn, wait, copies, priorities, keys)
        if replay.priorities is not None:
            current, error = dataclasses.replace(replay, priorities=priorities), log.terms["priority"]
            priorities = ring.set_priorities(current, index, error, due=is_learning, axis_name=axis_name).priorities
        return (copies, priorities), log

    (copies, priorities), log = jax.lax.scan(step, (follow_by(state.copies, target_follow(settings)), replay.priorities), keys)
    # The period is part of the structure, which stays that of the state.
    copies = jax.tree.unflatten(jax.tree.structure(state.copies), jax.tree.leaves(copies))
    dropped = sum_over_devices(replay.dropped - state.replay.dropped, axis_name)
    replay = dataclasses.replace(replay, dropped=state.replay.dropped + dropped, priorities=priorities)
    new_state = OffPolicyState(
        copies=copies,
        replay=replay,
        normalizers=normalizers,
        guard=_count_skips(state.guard, log, dropped, valid, _bad_data(rollout, axis_name)),
        env_steps=env_steps,
        updates=saturating_add(state.updates, log.applied[:, 0].sum(dtype=jnp.uint32)),
    )
    metrics = _metrics(new_state, log, num_envs * devices) | ring.metrics(replay, axis_name=axis_name)
    if settings.optimizer is None:
        metrics["train/learning_rate"] = value_at(settings.learning_rate, state.env_steps)
    return new_state, metrics


def keys_of_steps(settings: OffPolicySettings, key: PRNGKeyArray, num_envs: int) -> Array:
    """Two keys for each gradient step of an update, `[U, 2]`: to draw its batch, and to train."""
    return jax.random.split(key, (count_gradient_steps(settings, num_envs), 2))


def draw_options(settings: OffPolicySettings, env_steps: Array, num_envs: int) -> dict[str, Any]:
    """The arguments of the replay's `sample`."""
    return {"num_envs": num_envs, "n_step": settings.n_step, "gamma": settings.gamma, "env_steps": env_steps}


def is_due(settings: OffPolicySettings, env_steps: UInt32[Array, ""], size: UInt32[Array, ""], num_envs: int) -> Array:
    """Whether an update takes gradient steps: after `learning_starts`, and with enough in the replay to learn from.

    A resumed run may start with an empty one. Enough are `learning_starts` transitions, but no more than there can be.
    """
    slots = settings.replay.capacity // (num_envs * settings.num_steps) * settings.num_steps
    least = min(settings.learning_starts, (slots - 1) * num_envs)
    return has_started(settings, env_steps) & (size > 0) & (size * jnp.uint32(num_envs) >= jnp.uint32(least))


def diagnose_off_policy(settings: OffPolicySettings, metrics: Mapping[str, Any]) -> str | None:
    """The first non-finite quantity after `max_skipped_updates` consecutive updates without a step of a network; else None."""
    return diagnose_skips(settings, metrics, whose=" by a network")


def _without_hidden_rows(batch: Transition, copies: PyTree) -> Transition:
    """The batch with other rows in place of those without weight, where a network has batch normalization; see `fill_rows`."""
    nodes = jax.tree.leaves(copies, is_leaf=lambda node: isinstance(node, Variables))
    if not any(isinstance(node, Variables) and has_batch_statistics(node) for node in nodes):
        return batch
    obs, action, action_mask = fill_rows((batch.obs, batch.action, batch.action_mask), batch.weight)
    return dataclasses.replace(batch, obs=obs, action=action, action_mask=action_mask)


def _count_skips(guard: Guard, log: StepLog, dropped: Array, valid: Array, bad_data: Bool[Array, " quantities"]) -> Guard:
    """The guard after an update that dropped so many of the valid transitions of its rollout.

    A rollout of which nothing could be stored counts as a skipped step: its environment is broken. One that is stored before
    any step is due ends a row of these.
    """
    is_lost = (dropped == valid) & (valid > 0)
    is_waiting = (dropped < valid) & ~jnp.any(log.skipped | log.applied)
    skipped, applied = (flags.sum(0, dtype=jnp.uint32) for flags in (log.skipped, log.applied))  # of each network
    applied = jnp.where(is_lost, jnp.uint32(0), applied + is_waiting.astype(jnp.uint32))
    return guard.after_update(skipped.at[0].add(is_lost.astype(jnp.uint32)), applied, log.bad.any(0) | (bad_data & is_lost))


def _metrics(state: OffPolicyState, log: StepLog, num_envs: int) -> Metrics:
    """Means of the terms over the applied gradient steps of the first network, and counts."""
    # NaN in a term: a network that this step did not train. Terms with one value per sample are no metrics.
    metrics: Metrics = {f"train/{name}": Mean.of(term, log.applied[:, 0]) for name, term in log.terms.items() if term.ndim == 1}
    return metrics | {
        "train/n_updates": state.updates,
        **state.guard.metrics(),
        "replay/size": state.replay.size * jnp.uint32(num_envs),
        "replay/dropped": state.replay.dropped,
    }


def _bad_data(rollout: Rollout, axis_name: str | None) -> Bool[Array, " quantities"]:
    """Which quantities of the rollout have NaN or infinity."""
    steps, actions = rollout.time_steps, rollout.actions
    flags = {"obs": ~all_finite(steps.obs), "reward": ~jnp.isfinite(steps.reward).all(), "action": ~all_finite(actions)}
    return sum_over_devices(flag_quantities(flags).astype(jnp.int32), axis_name) > 0
