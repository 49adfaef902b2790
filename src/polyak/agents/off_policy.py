"""The base of agents that learn from a replay: an update adds a rollout, then takes gradient steps on drawn batches."""

import abc
import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from polyak.agents.agent import BaseAgent
from polyak.agents.resets import Resets, ResetSettings, create_resets, reset_if_due
from polyak.agents.settings import AdamSettings, NormalizationSettings
from polyak.copies.follow import Follow
from polyak.copies.network_copies import NetworkCopies, follow_by
from polyak.core.spaces import Discrete, EnvSpec, MultiDiscrete, zeros
from polyak.core.struct import choice, integer, number, setting, static, struct
from polyak.core.types import Mean, Metrics, PyTree, Rollout, Scalar
from polyak.learning.check_rollout import as_arrays, check_actions, check_rollout
from polyak.learning.normalizers import (
    Normalizers,
    check_created_normalizers,
    check_normalizers,
    create_normalizers,
    without_returns,
)
from polyak.learning.prefill import add_stream
from polyak.learning.replay_batch import check_created_bound, normalize, with_bound, without_hidden_rows
from polyak.learning.skip_counts import count_skips, nonfinite_data
from polyak.ops.distributions import parameter_shapes
from polyak.ops.gradient_step import Guard, StepLog, check_optimizer_state, diagnose_skips, in_float32
from polyak.ops.losses import sum_over_devices
from polyak.ops.schedules import StepCount, saturating_add, value_at
from polyak.replay.drawn import DrawnBatches, DrawnReplay, Errors
from polyak.replay.replay import Replay, ReplayState, Transition, check_draws_transitions, check_replay
from polyak.replay.uniform import UniformReplay


@struct
class OffPolicyState:
    """Everything that training changes.

    Attributes:
        copies: the networks: online and target, with their optimizers' states. One `NetworkCopies`, or the agent's own tree of
            several.
        replay: the transitions to learn from, split by environment over devices; or, in a loop that keeps the replay in another
            memory, the batches that were drawn from it.
        normalizers: statistics of observations and rewards.
        guard: counts of skipped gradient steps.
        env_steps: valid transitions seen; schedules are functions of it.
        updates: gradient steps.
        resets: resets of the networks, with `reset_period`; else None.
    """

    copies: PyTree
    replay: ReplayState | DrawnBatches
    normalizers: Normalizers
    guard: Guard
    env_steps: StepCount
    updates: UInt32[Array, ""]
    resets: Resets | None


@struct(kw_only=True)
class OffPolicyAgent(ResetSettings, AdamSettings, NormalizationSettings, BaseAgent):
    """An agent that learns from a replay.

    A leaf defines `create_copies`, `train_step`, `policy` and `collect_policy`, and has `TargetSettings` if it has targets.

    Attributes:
        spec: the environment's spaces (`env.spec`).
        num_steps: steps of each environment between updates.
        updates_per_step: gradient steps per environment step, including steps that only reset an environment, independent of
            the number of environments; times `num_steps * num_envs` it must be an integer.
        batch_size: transitions of a gradient step.
        replay: a `UniformReplay`, a `PrioritizedReplay`, a `HindsightReplay`, or a `polyak.replay.Replay` of your own.
        learning_starts: transitions that are collected with random actions before the first gradient step.
        gamma: discount per step.
        n_step: number of rewards that are summed before bootstrapping.
        reward_scale: factor of all rewards.
        normalize_obs: normalize observations by their running mean and standard deviation (all Boxes but uint8), with the
            current statistics both when acting and when transitions are drawn.
        normalize_reward: divide rewards by the running standard deviation of the discounted `"return"` or of the `"reward"`;
            None leaves rewards unchanged.
        max_return: with `normalize_reward="return"`, divide rewards also so that no discounted return so far is larger than
            this, before `reward_scale`; None does not.
        max_skipped_updates: stop training after this many consecutive updates without a finite gradient step of a network.
    """

    replay_field: ClassVar[str] = "replay"
    takes_sequences: ClassVar[bool] = False
    """True if networks may be recurrent, with a replay that draws sequences."""

    spec: EnvSpec = static(kw_only=False)
    num_steps: int = integer(default=1)
    updates_per_step: float = number(default=1.0, above=0, static=True)
    batch_size: int = integer(default=256)
    replay: Replay = setting(default=UniformReplay(1_000_000), check=check_replay)
    learning_starts: int = integer(default=1_000, at_least=0)
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    n_step: int = integer(default=1, at_most=1_000)
    reward_scale: Scalar = number(default=1.0, above=0)
    normalize_reward: Literal["return", "reward"] | None = choice(default=None, choices=("return", "reward", None))
    max_return: float | None = number(default=None, above=0, optional=True, static=True, used_if=("normalize_reward", "return"))
    max_skipped_updates: int = integer(default=10)

    @property
    def max_lag(self) -> None:
        """A rollout may be of any age: it goes through the replay."""

    @abc.abstractmethod
    def create_copies(self, key: PRNGKeyArray) -> PyTree:
        """New copies of the networks, with the states of their optimizers."""

    @abc.abstractmethod
    def train_step(
        self,
        copies: PyTree,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[PyTree, StepLog]:
        """The copies after one gradient step (of an actor-critic: one of each network) and the targets' update, and its log.

        A replay with priorities needs the term `priority` in the log, the error |δ| of each transition.

        Args:
            batch: its weights sum to 1 over all devices.
            enabled: False changes nothing.
            env_steps: for schedules.
            axis_name: inside `shard_map`, the mesh axis that the batch is split over.
        """

    def check_copies(self, copies: PyTree) -> None:
        """Check that copies were created with the agent's settings, which would silently not be used.

        Here every `NetworkCopies` must have the agent's optimizer.

        Raises:
            ValueError: the copies were created with other settings.
        """
        for network in jax.tree.leaves(copies, is_leaf=lambda node: isinstance(node, NetworkCopies)):
            if isinstance(network, NetworkCopies):
                check_optimizer_state(self.optimizer_at(), network.online.params, network.optimizer_state)

    def follow(self) -> Follow | None:
        """The rule by which the targets follow; None for an agent without targets."""
        return None

    def initial_carry(self) -> PyTree:
        """The recurrent state of one environment, for a replay of sequences; `()` without one."""
        return ()

    @property
    def env_error(self) -> str | None:
        """The reason why the agent cannot learn from the steps of an environment; None if it can."""
        return None

    def init(self, key: PRNGKeyArray) -> OffPolicyState:
        """A new state, with an empty replay."""
        env_steps, updates = StepCount.of(0), jnp.zeros((), jnp.uint32)
        copies, normalizers = self.create_copies(key), with_bound(create_normalizers(self), self.max_return)
        resets = create_resets(self, key, copies)
        return OffPolicyState(copies, self._create_replay(), normalizers, Guard.init(), env_steps, updates, resets)

    def check(self, num_envs: int, devices: int = 1) -> None:
        """Check that an update has an integer number of gradient steps, and that devices split replay and batches equally.

        Raises:
            ValueError: the number is no integer or not below `reset_period`, devices cannot split replay or batches, the replay
                is too small, or the agent cannot learn from an environment (`env_error`).
        """
        if self.env_error is not None:
            raise ValueError(self.env_error)
        steps = self._count_gradient_steps(num_envs * devices)
        if self.reset_period is not None and self.reset_period <= steps:
            raise ValueError(f"{type(self).__name__}: reset_period={self.reset_period} must exceed an update's {steps} steps")
        if self.batch_size % devices:
            raise ValueError(f"{type(self).__name__}: batch_size={self.batch_size} must be divisible by devices={devices}")
        self.replay.check(num_envs, self.num_steps, n_step=self.n_step, devices=devices)
        self.replay.divide(self.batch_size // devices)

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """The first non-finite quantity after `max_skipped_updates` consecutive updates without a step of a network."""
        return diagnose_skips(self, metrics, by=" by a network")

    def partition(self, axis_name: str) -> PyTree:
        """The rows of the replay are split by environment; everything else is replicated."""
        replicated: Any = PartitionSpec()
        return OffPolicyState(replicated, self.replay.partition(axis_name, self.num_steps), *(replicated,) * 5)

    def add(self, state: OffPolicyState, rollout: Rollout) -> OffPolicyState:
        """The state with a rollout of any policy in its replay (`polyak.train.collect`, `polyak.data.load(...).rollout`).

        Nothing is learned, and `env_steps` is unchanged: learning still waits for `learning_starts` transitions of the run. The
        rollout is a separate stream, even if rollout or run are within an episode; see `polyak.learning.prefill`.

        Args:
            rollout: `[T, B]`, T a multiple of `num_steps`, B the environments of the run, on one device: a run with other
                environments, or on several devices, starts with an empty replay. Copied to where the replay is.

        Raises:
            TypeError, ValueError: the rollout does not fit the agent, an action is outside of its space, or the replay has rows
                of another B, which would be lost.
        """
        owner = f"{type(self).__name__}.add"
        total, num_envs = check_rollout(rollout, self.spec)
        if total % self.num_steps:
            raise ValueError(f"{owner}: a rollout must have a multiple of num_steps={self.num_steps} steps, got {total}")
        self.replay.check(num_envs, self.num_steps, n_step=self.n_step)
        check_actions(owner, rollout, self.spec)
        replay: Any = state.replay
        if replay.num_steps != self.num_steps:
            raise ValueError(f"{owner}: state must have a replay of num_steps={self.num_steps}, got {replay.num_steps}")
        return dataclasses.replace(state, replay=add_stream(owner, self.replay, replay, rollout))

    def update(
        self, state: OffPolicyState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
    ) -> tuple[OffPolicyState, Metrics]:
        """Add a rollout to the replay, then, once learning has started, take gradient steps on transitions drawn from it.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions.
            key: decides the transitions, and the keys of `train_step`.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: the state is another agent's, or the rollout does not fit the spec (while tracing).
        """
        devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        self._check_created(state, devices)
        _, num_envs = check_rollout(rollout, self.spec)
        rollout = as_arrays(rollout)
        ring: Any = DrawnReplay() if isinstance(state.replay, DrawnBatches) else self.replay
        # Added first: a program that samples before it adds would copy the replay.
        replay = ring.add(state.replay, without_returns(self, rollout))
        normalizers = state.normalizers.update(rollout, self.gamma, axis_name)
        valid = sum_over_devices(rollout.valid.sum(dtype=jnp.uint32), axis_name)
        env_steps = state.env_steps + valid
        keys = self._keys_of_steps(key, num_envs * devices)
        if axis_name is not None:
            keys = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, jax.lax.axis_index(axis_name))))(keys)
        is_learning = self._is_learning(env_steps, replay.size, num_envs * devices)
        batch_size, options = self.batch_size // devices, self._draw_options(env_steps, num_envs)

        def learn(copies: PyTree, priorities: PyTree, keys: Array) -> tuple[PyTree, StepLog, Array]:
            sample_key, train_key = keys
            stored = dataclasses.replace(replay, priorities=priorities)
            batch = ring.sample(stored, sample_key, batch_size, axis_name=axis_name, **options)
            return self._train_on(normalize(batch, normalizers), copies, train_key, axis_name, state.env_steps)

        def wait(copies: PyTree, priorities: PyTree, keys: Array) -> tuple[PyTree, StepLog, Array]:
            _, *rest = jax.eval_shape(learn, copies, priorities, keys)
            return copies, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)

        def step(carry: tuple[PyTree, PyTree], keys: Array) -> tuple[tuple[PyTree, PyTree], StepLog]:
            copies, priorities = carry
            # The branches read the replay and do not return it, which would copy it.
            copies, log, index = jax.lax.cond(is_learning, learn, wait, copies, priorities, keys)
            if self.replay.has_priorities or isinstance(ring, DrawnReplay):
                current = dataclasses.replace(replay, priorities=priorities)
                error = log.terms["priority"] if self.replay.has_priorities else jnp.zeros(index.shape, jnp.float32)
                priorities = ring.set_priorities(current, index, error, enabled=is_learning, axis_name=axis_name).priorities
            return (copies, priorities), log

        copies = follow_by(state.copies, self.follow())
        copies, resets = reset_if_due(self, copies, state.resets, state.updates, is_learning)
        (copies, priorities), log = jax.lax.scan(step, (copies, replay.priorities), keys)
        # The period is part of the tree structure, and the structure of the state must not change.
        copies = jax.tree.unflatten(jax.tree.structure(state.copies), jax.tree.leaves(copies))
        dropped = sum_over_devices(replay.dropped - state.replay.dropped, axis_name)
        new_state = OffPolicyState(
            copies=copies,
            replay=dataclasses.replace(replay, dropped=state.replay.dropped + dropped, priorities=priorities),
            normalizers=normalizers,
            guard=count_skips(state.guard, log, dropped, valid, nonfinite_data(rollout, axis_name)),
            env_steps=env_steps,
            updates=saturating_add(state.updates, log.applied[:, 0].sum(dtype=jnp.uint32)),
            resets=resets,
        )
        metrics = _metrics(new_state, log, num_envs * devices) | self.metrics(state, new_state)
        return new_state, metrics | ring.metrics(new_state.replay, axis_name=axis_name)

    def _train_on(
        self, batch: Transition, copies: PyTree, key: PRNGKeyArray, axis_name: str | None, env_steps: StepCount
    ) -> tuple[PyTree, StepLog, Array]:
        """Take a gradient step on a normalized batch; also returns the batch's rows."""
        total = sum_over_devices(batch.weight.sum(), axis_name)
        batch = without_hidden_rows(batch, copies)
        batch = dataclasses.replace(batch, weight=batch.weight / jnp.where(total > 0, total, 1.0))
        copies, log = self.train_step(copies, batch, key, total > 0, env_steps=env_steps, axis_name=axis_name)
        log = dataclasses.replace(log, applied=jnp.atleast_1d(log.applied), skipped=jnp.atleast_1d(log.skipped))
        if self.replay.has_priorities:
            log = dataclasses.replace(log, terms=log.terms | {"importance_weight": total / self.batch_size})
        return copies, log, batch.index

    def add_data(self, state: OffPolicyState, rollout: Rollout) -> OffPolicyState:
        """The state with a data set in its replay, and with its statistics; see `add`, and `polyak.data.DataSet.rollout`."""
        normalizers = state.normalizers.update(as_arrays(rollout), self.gamma)
        return dataclasses.replace(self.add(state, rollout), normalizers=normalizers)

    def learn(self, state: OffPolicyState, key: PRNGKeyArray) -> tuple[OffPolicyState, Metrics]:
        """Take one gradient step on transitions of `add_data`, of one environment; `env_steps` counts these steps."""
        replay: Any = state.replay
        sample_key, train_key = jax.random.split(key)
        copies = follow_by(state.copies, self.follow())
        copies, resets = reset_if_due(self, copies, state.resets, state.updates, jnp.array(True))
        batch = self.replay.sample(replay, sample_key, self.batch_size, **self._draw_options(state.env_steps, 1))
        batch = dataclasses.replace(batch, from_data=jnp.ones(batch.weight.shape, bool))
        batch = normalize(batch, state.normalizers)
        copies, log, index = self._train_on(batch, copies, train_key, None, state.env_steps)
        if self.replay.has_priorities:
            replay = self.replay.set_priorities(replay, index, log.terms["priority"])
        log, no_rows = jax.tree.map(lambda x: x[None], log), jnp.zeros((), jnp.uint32)
        new_state = OffPolicyState(
            copies=jax.tree.unflatten(jax.tree.structure(state.copies), jax.tree.leaves(copies)),
            replay=replay,
            normalizers=state.normalizers,
            guard=count_skips(state.guard, log, no_rows, no_rows, jnp.zeros_like(log.bad[0])),
            env_steps=state.env_steps + jnp.uint32(1),
            updates=saturating_add(state.updates, log.applied[:, 0].sum(dtype=jnp.uint32)),
            resets=resets,
        )
        metrics = _metrics(new_state, log, 1) | self.metrics(state, new_state) | self.replay.metrics(replay)
        return new_state, {name: value for name, value in metrics.items() if not name.startswith("rollout/")}

    def metrics(self, before: OffPolicyState, after: OffPolicyState) -> Metrics:
        """Metrics of an update, in addition to the terms of the losses and the counts."""
        return {} if self.optimizer is not None else {"train/learning_rate": value_at(self.learning_rate, before.env_steps)}

    def draw_batches(
        self, replay: ReplayState, rollout: Rollout, key: PRNGKeyArray, env_steps: StepCount
    ) -> tuple[ReplayState, DrawnBatches]:
        """The replay with a rollout, and the batches of `update`, which takes the batches instead of the replay.

        If the update takes no gradient steps, nothing is drawn: the batches are zeros.

        Args:
            replay: donate it; it is updated in place.
            rollout: `[T, B]` transitions, as for `update`.
            key: see `update`.
            env_steps: the `env_steps` of the agent's state before the update.
        """
        rollout = as_arrays(rollout)
        before, replay = replay.dropped, self.replay.add(replay, without_returns(self, rollout))
        num_envs = rollout.reward.shape[1]
        env_steps = env_steps + rollout.valid.sum(dtype=jnp.uint32)
        options, is_learning = self._draw_options(env_steps, num_envs), self._is_learning(env_steps, replay.size, num_envs)

        def draw(keys: Array) -> Transition:
            # One after another: together they would need the memory of all while they are drawn.
            return jax.lax.map(lambda key: self.replay.sample(replay, key, self.batch_size, **options), keys)

        def wait(keys: Array) -> Transition:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, keys))

        batches = jax.lax.cond(is_learning, draw, wait, self._keys_of_steps(key, num_envs)[:, 0])
        sizes, count = jnp.zeros(batches.weight.shape, jnp.float32), jnp.zeros((), jnp.int32)
        errors, metrics = Errors(batches.index, sizes, count, is_learning), self.replay.metrics(replay)
        return replay, DrawnBatches(batches, replay.size, before, replay.dropped - before, env_steps, metrics, errors)

    def return_errors(self, replay: ReplayState, errors: Errors) -> ReplayState:
        """The replay with the priorities of the batches that were drawn from it, after the update that learned from them.

        All batches were drawn before the first gradient step; with a replay in the agent's state, a step sees new priorities.

        Args:
            replay: donate it.
            errors: `DrawnBatches.priorities` of the state after the update.
        """
        if not self.replay.has_priorities:
            return replay

        def set_priorities(replay: ReplayState, batch: tuple[Array, Array]) -> tuple[ReplayState, None]:
            return self.replay.set_priorities(replay, *batch, enabled=errors.is_learning), None

        return jax.lax.scan(set_priorities, replay, (errors.index, errors.sizes))[0]

    def has_started(self, env_steps: StepCount) -> Bool[Array, ""]:
        """Return True once `learning_starts` transitions were collected; until then actions are random."""
        return StepCount.of(env_steps) >= StepCount.of(self.learning_starts)

    def check_together(self) -> None:
        """Check settings that depend on each other, and complete the replay for the environment."""
        self.check_optimizer()
        check_normalizers(self)
        if not self.takes_sequences:
            check_draws_transitions(type(self).__name__, self.replay)
        object.__setattr__(self, "replay", self.replay.for_env(type(self).__name__, self.spec))

    def _create_replay(self) -> ReplayState:
        action = self.spec.action
        has_mask = self.spec.has_action_mask and isinstance(action, Discrete | MultiDiscrete)
        mask = jnp.zeros(parameter_shapes(action), bool) if has_mask else None
        example = zeros(self.spec.obs), in_float32(zeros(action)), mask
        return self.replay.init(*example, num_steps=self.num_steps, carry=self.initial_carry())

    def _check_created(self, state: OffPolicyState, devices: int) -> None:
        """Check that a state given to `update` belongs to this agent and was created with its settings.

        Raises:
            ValueError: the state was created with other settings; the message names the setting.
        """
        check_created_normalizers(self, state.normalizers)
        check_created_bound(self, state.normalizers)
        self.check_copies(state.copies)
        stored = state.replay
        if isinstance(stored, DrawnBatches):
            return
        created, parts = jax.eval_shape(self._create_replay), ("priorities", "carries", "episodes", "returns")
        for name, value, wanted in (
            ("capacity", stored.capacity * devices, created.capacity),
            ("replay.num_steps", stored.num_steps, created.num_steps),
            *((f"replay.{part}", getattr(stored, part) is not None, getattr(created, part) is not None) for part in parts),
            ("the replay", jax.tree.structure(stored), jax.tree.structure(created)),
        ):
            if value != wanted:
                raise ValueError(
                    f"{type(self).__name__}.update: this state was created with {name}={value!s:.300} but the agent has "
                    f"{wanted!s:.300}; create it with agent.init(key)"
                )

    def _count_gradient_steps(self, num_envs: int) -> int:
        """Gradient steps of an update, with this number of environments on all devices.

        Raises:
            ValueError: the number is not an integer of at least 1.
        """
        ratio, num_steps = self.updates_per_step, self.num_steps
        count = ratio * num_steps * num_envs
        if round(count) < 1 or abs(count - round(count)) > 1e-6:
            a_step = Fraction(ratio * num_envs).limit_denominator(10_000)
            hint = f"; num_steps={a_step.denominator} makes it {a_step.numerator}" if a_step else ""
            raise ValueError(
                f"{type(self).__name__}: updates_per_step * num_steps * num_envs = {ratio} * {num_steps} * {num_envs} must "
                f"be a whole number of gradient steps, got {count:g}{hint}"
            )
        return round(count)

    def _keys_of_steps(self, key: PRNGKeyArray, num_envs: int) -> Array:
        """Two keys for each gradient step of an update, `[U, 2]`: to draw its batch, and to train."""
        return jax.random.split(key, (self._count_gradient_steps(num_envs), 2))

    def _draw_options(self, env_steps: StepCount, num_envs: int) -> dict[str, Any]:
        """The arguments of the replay's `sample`."""
        return {"num_envs": num_envs, "n_step": self.n_step, "gamma": self.gamma, "env_steps": env_steps}

    def _is_learning(self, env_steps: StepCount, size: UInt32[Array, ""], num_envs: int) -> Array:
        """Return True if an update takes gradient steps: after `learning_starts`, and with enough transitions in the replay.

        A resumed run may start with an empty replay. `learning_starts` transitions are enough, or as many as the replay holds.
        """
        slots = self.replay.capacity // (num_envs * self.num_steps) * self.num_steps
        least = min(self.learning_starts, (slots - 1) * num_envs)
        return self.has_started(env_steps) & (size > 0) & (size * jnp.uint32(num_envs) >= jnp.uint32(least))


def _metrics(state: OffPolicyState, log: StepLog, num_envs: int) -> Metrics:
    """Means of the terms over the applied gradient steps of the first network, and counts."""
    # NaN in a term: a network that this step did not train. Terms with one value per sample are no metrics.
    metrics: Metrics = {f"train/{name}": Mean.of(term, log.applied[:, 0]) for name, term in log.terms.items() if term.ndim == 1}
    return metrics | {
        "train/n_updates": state.updates,
        **({} if state.resets is None else {"train/resets": state.resets.count}),
        **state.guard.metrics(),
        "replay/size": state.replay.size * jnp.uint32(num_envs),
        "replay/dropped": state.replay.dropped,
    }
