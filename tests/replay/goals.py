"""Episodes with goals that are numbers, and the distribution of their transitions and goals in a slow model of the ring."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.goals import Goals, Outcomes
from polyak.core.types import Rollout, TimeStep

GAMMA = 0.9


@dataclasses.dataclass(frozen=True)
class NumberGoals(Goals):
    """Rewards that tell the achieved and the desired goal; with `ends`, an achieved goal terminates the episode."""

    is_python = False
    ends: bool = False

    def check(self):
        pass

    def outcomes(self, achieved, desired):
        reward = 0.01 * achieved[:, 0] - 0.003 * desired[:, 0]
        return Outcomes(reward, achieved[:, 0] == desired[:, 0] if self.ends else None, None)


@dataclasses.dataclass
class Stream:
    """The time steps of one environment: `goal[t]` is desired in row t, `achieved[t]` is unique."""

    achieved: list
    goal: list
    terminated: list
    truncated: list
    first: list
    valid: list  # the transition from row t is finite, and no reset

    @classmethod
    def of(cls, lengths, rows, env, nan_at=()):
        """Episodes of these lengths, repeated; every second one terminates, every fourth by its own goal."""
        stream = cls([], [], [], [], [], [])
        for episode, length in enumerate(itertools.cycle(lengths)):
            if len(stream.first) >= rows:
                break
            final = 1000 * env + len(stream.first) + length
            for t in range(length + 1):
                stream.achieved.append(1000 * env + len(stream.first))
                stream.goal.append(final if episode % 4 == 0 else -1 - episode - 100 * env)
                stream.terminated.append(t == length and episode % 2 == 0)
                stream.truncated.append(t == length and episode % 2 == 1)
                stream.first.append(t == 0)
                stream.valid.append(t < length)
        for column in (field.name for field in dataclasses.fields(cls)):
            setattr(stream, column, getattr(stream, column)[:rows])
        for t in nan_at:
            stream.valid[t] = stream.valid[t - 1] = False
        return stream

    def episode(self, t):
        """The rows of the episode of row t."""
        start = max(u for u in range(t + 1) if self.first[u])
        ends = [u for u in range(t + 1, len(self.first)) if self.first[u]]
        return range(start, ends[0] if ends else len(self.first))


def time_steps_of(streams, nan_at=()):
    """The time steps `[rows, B]` of streams, with rewards of their own goals."""
    column = lambda name, dtype: np.array([getattr(stream, name) for stream in streams]).T.astype(dtype)  # noqa: E731
    achieved, goal = column("achieved", np.float32), column("goal", np.float32)
    obs = {"observation": achieved.copy(), "achieved_goal": achieved, "desired_goal": goal}
    reward = np.where(column("first", bool), 0, 0.01 * achieved - 0.003 * goal).astype(np.float32)
    for t in nan_at:
        obs["achieved_goal"][t, 0] = np.nan
    flags = (column(name, bool) for name in ("terminated", "truncated", "first"))
    return jax.tree.map(jnp.asarray, TimeStep({name: x[..., None] for name, x in obs.items()}, reward, *flags))


def fill(replay, steps, num_steps, state=None):
    """The state of a replay after the rollouts of the time steps."""
    if state is None:
        obs = {name: jnp.zeros(1) for name in ("observation", "achieved_goal", "desired_goal")}
        state = replay.init(obs, jnp.zeros((), jnp.int32), num_steps=num_steps)
    total, envs = steps.reward.shape
    for t in range(0, total - num_steps, num_steps):
        part = jax.tree.map(lambda x, t=t: x[t : t + num_steps + 1], steps)
        state = _add(replay, state, Rollout(part, jnp.zeros((num_steps, envs), jnp.int32)))
    return state


@functools.partial(jax.jit, static_argnums=0)
def _add(replay, state, rollout):
    return replay.add(state, rollout)


def expected_pairs(streams, size, strategy, ratio):
    """The probability of each transition and goal: {(row of the stream, goal): P}, rows by their achieved goal."""
    rows = len(streams[0].first)
    oldest = rows - 1 - size
    pairs, transitions = {}, [(s, t) for s in streams for t in range(oldest, rows - 1) if s.valid[t]]
    for stream, t in transitions:
        episode = stream.episode(t)
        goals = {
            "future": [u for u in episode if u > t],
            "final": [episode[-1]],
            "episode": [u for u in episode if u > max(episode[0], oldest)],
        }[strategy]
        shares = [(stream.goal[t], 1 - ratio)]
        shares += [(stream.achieved[u] if stream.valid[u - 1] else stream.goal[t], ratio / len(goals)) for u in goals]
        for goal, share in shares:
            pair = (stream.achieved[t], goal)
            pairs[pair] = pairs.get(pair, 0.0) + share / len(transitions)
    return pairs


def expected_return(stream, row, goal, n_step, ends):
    """`(reward, discount, achieved goal of next_obs)` of the n-step transition from a row, under a goal."""
    t = stream.achieved.index(row)
    total, m, terminal = 0.0, 0, False
    while m < n_step and t + m + 1 < len(stream.first) and (m == 0 or stream.valid[t + m]):
        after = t + m + 1
        total += GAMMA**m * (0.01 * stream.achieved[after] - 0.003 * goal)
        m += 1
        by_own = ends and stream.achieved[after] == stream.goal[after]
        terminal = stream.terminated[after] and not by_own
        terminal |= ends and stream.achieved[after] == goal
        if not ends:
            terminal = stream.terminated[after]
        if terminal or stream.terminated[after] or stream.truncated[after]:
            break
    return total, 0.0 if terminal else GAMMA**m, stream.achieved[t + m]
