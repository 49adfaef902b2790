"""Hindsight experience replay: transitions are drawn with goals that their own episode achieved later."""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from polyak.core.goals import ACHIEVED, DESIRED, Goals, check_goals
from polyak.core.spaces import EnvSpec
from polyak.core.struct import check_settings, choice, number, setting, static, struct
from polyak.core.types import PyTree, Rollout, Scalar
from polyak.kernels.random_below import random_below
from polyak.ops.schedules import Count
from polyak.replay.episodes import Episodes
from polyak.replay.frames import is_between_streams
from polyak.replay.prioritized import PrioritizedReplay
from polyak.replay.replay import Replay, ReplayState, Transition
from polyak.replay.uniform import Steps, UniformReplay


def _check_inner(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, UniformReplay | PrioritizedReplay):
        raise TypeError(
            f"{owner}: {name} must be a capacity, a UniformReplay or a PrioritizedReplay, got {value!r:.80}; goals are "
            "drawn for single transitions"
        )
    if value.frame_stack != 1:
        raise ValueError(f"{owner}: {name} must have frame_stack=1, as rewards are of single goals, got {value.frame_stack}")


@struct
class HindsightReplay(Replay):
    """A replay that replaces the goals of transitions when they are drawn, by goals that were achieved in the same episode.

    With probability `ratio` a transition at t of an episode with the achieved goals g_1, ..., g_T gets the goal

        g_k,    k uniform in {t + 1, ..., T} ("future"),    k = T ("final"),    k uniform in {1, ..., T} ("episode"),

    in `obs` and `next_obs`, and the rewards of all its n steps under that goal. Where the environment computes terminations
    and truncations from goals, the n-step return ends at the first of them. The newest episode, which still runs, has the goals
    up to the newest row; an episode whose first rows were overwritten has the goals of the rows that are left.

    Observations are Dicts with the entries `observation`, `achieved_goal` and `desired_goal`, and the environment computes its
    reward from goals (`compute_reward`).

    Attributes:
        replay: the replay that stores and draws transitions: a number of rows, for a `UniformReplay`, or a `PrioritizedReplay`.
        strategy: the goals of a transition: `"future"`, `"final"` or `"episode"`.
        ratio: probability of another goal; 0.8 are 4 to 1, the k = 4 of the paper.
        goals: the rewards as a function of goals, used where `env.spec` has none.

    Raises:
        TypeError, ValueError: a setting is out of its range.

    Source: Andrychowicz et al. 2017, arXiv:1707.01495, section 4.5 (strategies); goals are drawn when transitions are, as in
    Stable-Baselines3.

    >>> HindsightReplay(100_000, strategy="final")
    HindsightReplay(replay=UniformReplay(capacity=100000), strategy='final')
    """

    replay: Replay | int = setting(default=UniformReplay(1_000_000), check=_check_inner)
    strategy: Literal["future", "final", "episode"] = choice(default="future", choices=("future", "final", "episode"))
    ratio: Scalar = number(default=0.8, at_least=0, at_most=1)
    goals: Goals | None = static(default=None, repr=False, metadata={"stored": False})

    def __post_init__(self) -> None:
        if isinstance(self.replay, int) and not isinstance(self.replay, bool):
            object.__setattr__(self, "replay", UniformReplay(self.replay))
        check_settings(self)
        if not isinstance(self.goals, Goals | None):
            raise TypeError(f"HindsightReplay: goals must be polyak.core.goals.Goals or None, got {self.goals!r:.80}")

    @property
    def capacity(self) -> int:
        """Rows, over all environments and devices."""
        return self._inner.capacity

    @property
    def has_priorities(self) -> bool:
        """The inner replay has priorities."""
        return self._inner.has_priorities

    def with_capacity(self, capacity: int) -> "HindsightReplay":
        """The replay with another capacity of the inner replay."""
        return dataclasses.replace(self, replay=self._inner.with_capacity(capacity))

    def for_env(self, owner: str, spec: EnvSpec) -> "HindsightReplay":
        """The replay with the goals of an environment, if it has them.

        Raises:
            ValueError: observations have no goals.
        """
        check_goals(f"{owner}: HindsightReplay", spec)
        goals: Goals | None = spec.goals or self.goals
        return self if goals is self.goals else dataclasses.replace(self, goals=goals)

    def check(self, num_envs: int, num_steps: int, *, n_step: int = 1, devices: int = 1) -> None:
        """Check the capacity and the functions of goals; see `Replay.check`.

        Raises:
            ValueError: there are no functions of goals, or they are Python, which several devices cannot call.
        """
        self._inner.check(num_envs, num_steps, n_step=n_step, devices=devices)
        if self.goals is None:
            raise ValueError(
                "HindsightReplay: the environment must have compute_reward(achieved_goal, desired_goal, info), which gives the "
                "reward of another goal; the agent must be created with env.spec, and training on data needs it as env"
            )
        if self.goals.is_python and devices > 1:
            raise ValueError(f"HindsightReplay: compute_reward is Python, which runs on devices=1, got devices={devices}")
        self.goals.check()

    def init(
        self, obs: PyTree, action: PyTree, action_mask: PyTree = None, *, num_steps: int, carry: PyTree = ()
    ) -> ReplayState:
        """An empty replay; see `Replay.init`."""
        state = self._inner.init(obs, action, action_mask, num_steps=num_steps)
        return dataclasses.replace(state, episodes=Episodes.init(self.capacity))

    def partition(self, axis_name: str, num_steps: int) -> PyTree:
        """Rows and their episodes are split by environment; see `Replay.partition`."""
        return dataclasses.replace(self._inner.partition(axis_name, num_steps), episodes=Episodes.partition(axis_name))

    def add(self, state: ReplayState, rollout: Rollout) -> ReplayState:
        """The replay with a rollout's transitions and their episodes; see `UniformReplay.add`."""
        assert state.episodes is not None, "init creates them"
        stored = self._inner.add(state, rollout)
        num_steps, num_envs = rollout.reward.shape
        slots, position = stored.num_slots(num_envs), stored.position.astype(jnp.int32)
        before = (position - num_steps - 1) % slots * num_envs + jnp.arange(num_envs, dtype=jnp.int32)
        begins_stream = is_between_streams(stored.rows, before) | (stored.size == num_steps)
        first = jnp.asarray(rollout.time_steps.first)
        first = first.at[0].set(first[0] | begins_stream)
        return dataclasses.replace(stored, episodes=state.episodes.add(first, position, slots))

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
        """The transitions that the inner replay draws with this key, some with other goals; see `Replay.sample`."""
        options: dict[str, Any] = {"num_envs": num_envs, "gamma": gamma, "n_step": n_step}
        drawn = self._inner.sample(state, key, batch_size, **options, env_steps=env_steps, axis_name=axis_name)
        goal_row, is_changed = self._draw_goals(state, jax.random.fold_in(key, 1), drawn.index, num_envs)
        goal = jax.tree.map(lambda x: x[goal_row], state.rows.obs[ACHIEVED])
        steps = partial(self._steps_with_goals, state, goal, is_changed)
        rows = UniformReplay(self.capacity)
        batch = rows.transitions(state, drawn.index, **options, change_steps=steps)
        obs, next_obs = (_with_goals(obs, goal, is_changed) for obs in (batch.obs, batch.next_obs))
        return dataclasses.replace(batch, obs=obs, next_obs=next_obs, weight=drawn.weight)

    def set_priorities(
        self,
        state: ReplayState,
        index: Int32[Array, " N"],
        td_error: Float[Array, " N"],
        *,
        enabled: Bool[Array, ""] | bool = True,
        axis_name: str | None = None,
    ) -> ReplayState:
        """The inner replay's priorities, of the errors under the drawn goals; see `Replay.set_priorities`."""
        return self._inner.set_priorities(state, index, td_error, enabled=enabled, axis_name=axis_name)

    def metrics(self, state: ReplayState, *, axis_name: str | None = None) -> dict[str, Array]:
        """The metrics of the inner replay, by tag."""
        return self._inner.metrics(state, axis_name=axis_name)

    def _draw_goals(
        self, state: ReplayState, key: PRNGKeyArray, index: Int32[Array, " N"], num_envs: int
    ) -> tuple[Int32[Array, " N"], Bool[Array, " N"]]:
        """The row with the goal of each transition, and True where it replaces the transition's own goal."""
        assert state.episodes is not None, "init creates them"
        slots, position = state.num_slots(num_envs), state.position.astype(jnp.int32)
        slot, env = index // num_envs, index % num_envs
        before, after = state.episodes.bounds(slot, env, position=position, size=state.size, slots=slots, num_envs=num_envs)
        uniform_key, goal_key = jax.random.split(key)
        # Rows to the first goal that the strategy allows, and the number of these goals.
        nearest, count = {
            "future": (jnp.ones_like(after), after),
            "final": (after, jnp.ones_like(after)),
            "episode": (1 - before, before + after),
        }[self.strategy]
        steps = nearest + random_below(goal_key, index.shape, jnp.maximum(count, 1).astype(jnp.uint32))
        reached_by = (slot + steps - 1) % slots * num_envs + env
        # A goal that was reached by no transition is not finite, and was stored as zeros.
        has_goal = state.rows.valid[reached_by] & (after > 0)
        is_changed = jax.random.uniform(uniform_key, index.shape) < jnp.asarray(self.ratio, jnp.float32)
        return (slot + steps) % slots * num_envs + env, is_changed & has_goal

    def _steps_with_goals(
        self, state: ReplayState, goal: PyTree, is_changed: Bool[Array, " N"], steps: Steps, rows: Int32[Array, "n N"]
    ) -> Steps:
        """The steps under these goals, for transitions whose goal is changed.

        Args:
            goal: leaves `[N, ...]`.
            rows: the rows after the steps.
        """
        assert self.goals is not None, "check has found them"
        shape = rows.shape
        achieved, own = (jax.tree.map(lambda x: x[rows.reshape(-1)], state.rows.obs[name]) for name in (ACHIEVED, DESIRED))
        goal = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (shape[0], *x.shape)).reshape(-1, *x.shape[1:]), goal)
        new = self.goals.outcomes(achieved, goal)
        reward = jnp.where(is_changed[None], new.reward.reshape(shape), steps.reward)
        terminated, last = steps.terminated, steps.last
        if new.terminated is not None:
            by_goal = new.terminated.reshape(shape)
            # An episode may also have terminated for another reason than its goal.
            by_own_goal = self.goals.outcomes(achieved, own).terminated.reshape(shape)
            terminated = jnp.where(is_changed[None], by_goal | (terminated & ~by_own_goal), terminated)
            last = last | terminated
        if new.truncated is not None:
            last = last | (new.truncated.reshape(shape) & is_changed[None])
        return Steps(reward, terminated, last)

    @property
    def _inner(self) -> Any:
        return self.replay


def _with_goals(obs: PyTree, goal: PyTree, is_changed: Bool[Array, " N"]) -> PyTree:
    def change(new: Array, old: Array) -> Array:
        return jnp.where(is_changed.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return {**obs, DESIRED: jax.tree.map(change, goal, obs[DESIRED])}
