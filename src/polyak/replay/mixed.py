"""Mixed replay: a fixed share of each batch is drawn from a data set that stays beside the steps of the environment."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from polyak.core.spaces import EnvSpec
from polyak.core.struct import check_settings, integer, number, setting, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.ops.schedules import Count
from polyak.replay.hindsight import HindsightReplay
from polyak.replay.prioritized import PrioritizedReplay
from polyak.replay.replay import Replay, ReplayState, Transition
from polyak.replay.uniform import UniformReplay


def _check_inner(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, UniformReplay | PrioritizedReplay | HindsightReplay):
        raise TypeError(f"{owner}: {name} must be a UniformReplay, a PrioritizedReplay or a HindsightReplay, got {value!r:.80}")


@struct
class MixedReplay(Replay):
    """A replay that draws `share` of each batch from a data set, and the rest from the steps of the environment.

    Nothing overwrites the data, and their episodes end where the data end them. Both parts are drawn in the way of `replay`,
    with priorities and goals of their own; importance weights of the data are scaled to the mean of the steps' weights, so that
    `share` is also the share of the loss. `polyak.train.run(..., data=...)` creates this replay and puts the data into its
    state, which checkpoints contain.

    Attributes:
        replay: the replay of the environment's steps.
        data_capacity: rows of the data, with the rows between episodes.
        share: share of the data in each batch, 0.5 as in the paper.

    Raises:
        TypeError, ValueError: a setting is out of its range.

    Source: Ball et al. 2023, "Efficient Online Reinforcement Learning with Offline Data" (RLPD), arXiv:2302.02948, section 4.1.
    """

    replay: Replay = setting(default=UniformReplay(1_000_000), check=_check_inner)
    data_capacity: int = integer(default=100_000)
    share: float = number(default=0.5, above=0, at_most=1, static=True)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def capacity(self) -> int:
        """Rows of the environment's steps, over all environments and devices."""
        return self.replay.capacity

    @property
    def has_priorities(self) -> bool:
        """The inner replay has priorities."""
        return self.replay.has_priorities

    @property
    def has_data(self) -> bool:
        """`Transition.from_data` is set."""
        return True

    def with_capacity(self, capacity: int) -> "MixedReplay":
        """The replay with another capacity of the environment's steps."""
        return dataclasses.replace(self, replay=self.replay.with_capacity(capacity))

    def for_env(self, owner: str, spec: EnvSpec) -> "MixedReplay":
        """The replay with the inner replay for an environment; see `Replay.for_env`."""
        replay = self.replay.for_env(owner, spec)
        return self if replay is self.replay else dataclasses.replace(self, replay=replay)

    def check(self, num_envs: int, num_steps: int, *, n_step: int = 1, devices: int = 1) -> None:
        """Check the capacity; see `Replay.check`.

        Raises:
            ValueError: the data have priorities, which several devices would change apart.
        """
        self.replay.check(num_envs, num_steps, n_step=n_step, devices=devices)
        if self.has_priorities and devices > 1:
            raise ValueError(f"MixedReplay: a PrioritizedReplay needs devices=1, got devices={devices}")

    def divide(self, batch_size: int) -> tuple[int, int]:
        """The transitions of a batch of one device that are the environment's, and that are of data.

        Raises:
            ValueError: one of them is 0.
        """
        count = round(self.share * batch_size)
        if not 0 < count < batch_size:
            raise ValueError(f"MixedReplay: share={self.share} of batch_size={batch_size} must leave transitions in both parts")
        return batch_size - count, count

    def init(
        self, obs: PyTree, action: PyTree, action_mask: PyTree = None, *, num_steps: int, carry: PyTree = ()
    ) -> ReplayState:
        """An empty replay, also without data; see `Replay.init` and `with_data`."""
        own, data = (part.init(obs, action, action_mask, num_steps=num_steps) for part in (self.replay, self._of_data))
        return self._join(own, data)

    def with_data(self, state: ReplayState, data: ReplayState) -> ReplayState:
        """The replay with data, where the empty ones were.

        Args:
            data: the state of a replay of `data_capacity` rows, of one environment.
        """
        own, empty = self._parts(state)
        return self._join(own, jax.tree.map(lambda x, old: jax.device_put(jnp.array(x), old.sharding), data, empty))

    def partition(self, axis_name: str, num_steps: int) -> PyTree:
        """The environment's steps are split by environment, and every device has all data; see `Replay.partition`."""
        replicated: Any = PartitionSpec()
        own = self.replay.partition(axis_name, num_steps)
        priorities: Any = (own.priorities, replicated) if self.has_priorities else None
        return dataclasses.replace(own, priorities=priorities, data=replicated)

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """The replay with a rollout among the environment's steps; see `Replay.add`."""
        own, data = self._parts(state)
        return self._join(self.replay.add(own, rollout), data)

    def sample(
        self,
        state: ReplayState,
        key: PRNGKeyArray,
        batch_size: int,
        *,
        num_envs: int,
        gamma: Scalar,
        n_step: int = 1,
        env_steps: Count = 0,
        axis_name: str | None = None,
    ) -> Transition:
        """Transitions of the environment, followed by transitions of the data; see `Replay.sample`."""
        own, data = self._parts(state)
        own_size, data_size = self.divide(batch_size)
        options: dict[str, Any] = {"gamma": gamma, "n_step": n_step, "env_steps": env_steps, "axis_name": axis_name}
        own_key, data_key = jax.random.split(key)
        drawn = self.replay.sample(own, own_key, own_size, num_envs=num_envs, **options)
        recorded = self._of_data.sample(data, data_key, data_size, num_envs=1, **options)
        if self.has_priorities:
            scale = jnp.mean(drawn.weight) / jnp.maximum(jnp.mean(recorded.weight), jnp.finfo(jnp.float32).tiny)
            recorded = dataclasses.replace(recorded, weight=scale * recorded.weight)
        batch: Transition = jax.tree.map(lambda *x: jnp.concatenate(x), drawn, recorded)
        return dataclasses.replace(batch, from_data=jnp.arange(batch_size) >= own_size)

    def set_priorities(
        self,
        state: ReplayState,
        index: Int32[Array, " N"],
        td_error: Float[Array, " N"],
        *,
        enabled: Bool[Array, ""] | bool = True,
        axis_name: str | None = None,
    ) -> ReplayState:
        """The priorities of both parts of a batch; see `Replay.set_priorities`."""
        own, data = self._parts(state)
        size, _ = self.divide(len(index))
        options: dict[str, Any] = {"enabled": enabled, "axis_name": axis_name}
        own = self.replay.set_priorities(own, index[:size], td_error[:size], **options)
        return self._join(own, self._of_data.set_priorities(data, index[size:], td_error[size:], **options))

    def metrics(self, state: ReplayState, *, axis_name: str | None = None) -> dict[str, Array]:
        """The metrics of the inner replay, of the environment's steps; and `replay/data_...`, of the data, by tag."""
        own, data = self._parts(state)
        of_data = self._of_data.metrics(data, axis_name=axis_name)
        renamed = {name.replace("replay/", "replay/data_"): value for name, value in of_data.items()}
        return self.replay.metrics(own, axis_name=axis_name) | renamed

    def change_own(self, state: ReplayState, change: Callable[[ReplayState], ReplayState]) -> ReplayState:
        """The replay after a change of the environment's steps; see `Replay.change_own`."""
        own, data = self._parts(state)
        return self._join(change(own), data)

    @property
    def _of_data(self) -> Replay:
        return self.replay.with_capacity(self.data_capacity)

    def _parts(self, state: ReplayState) -> tuple[ReplayState, ReplayState]:
        """The replay of the environment's steps, and of the data. The priorities of both are one field of the state."""
        own, of_data = state.priorities if self.has_priorities else (None, None)
        data = dataclasses.replace(state.data, priorities=of_data)
        return dataclasses.replace(state, priorities=own, data=None), data

    def _join(self, own: ReplayState, data: ReplayState) -> ReplayState:
        priorities = (own.priorities, data.priorities) if self.has_priorities else None
        return dataclasses.replace(own, priorities=priorities, data=dataclasses.replace(data, priorities=None))
