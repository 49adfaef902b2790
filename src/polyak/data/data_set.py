"""A data set: recorded episodes, one after another, in the environment's units."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.checks import check_integer, check_number
from polyak.core.printing import format_number, text_of
from polyak.core.spaces import Box, Dict, EnvSpec, Space, Tuple
from polyak.core.spec_difference import difference
from polyak.core.types import PyTree, Rollout, TimeStep

NUMBERS_AT_ONCE = 2**20


@dataclass(frozen=True, repr=False, eq=False)
class Episode:
    """One episode of L steps; it has L + 1 observations.

    Attributes:
        obs: the observations, leaves `[L + 1, ...]`; the last is the final observation.
        action: the actions, leaves `[L, ...]`.
        reward: the rewards `[L]`.
        terminated: the last step reached a terminal state.
        truncated: the episode was cut short, by the environment or by the end of the recording.
    """

    obs: PyTree
    action: PyTree
    reward: npt.NDArray[np.float32]
    terminated: bool
    truncated: bool

    def __len__(self) -> int:
        return len(self.reward)

    def __repr__(self) -> str:
        end = "terminated" if self.terminated else "truncated"
        return f"Episode({len(self)} steps, return {format_number(float(self.reward.sum(dtype=np.float64)))}, {end})"


@dataclass(frozen=True)
class Statistics:
    """Mean, standard deviation and range of numbers.

    Attributes:
        mean: the mean; of a vector, of each of its numbers.
        std: the population standard deviation.
        low: the smallest value.
        high: the largest value.
    """

    mean: Any
    std: Any
    low: Any
    high: Any

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> "Statistics":
        """The statistics along the first axis, computed in parts: a copy of images in float64 takes 8 times their memory."""
        mean = values.mean(axis=0, dtype=np.float64)
        rows = max(1, NUMBERS_AT_ONCE // np.size(mean))
        squares = sum(np.square(values[i : i + rows] - mean).sum(axis=0) for i in range(0, len(values), rows))
        low, high = (np.asarray(x, np.float64)[()] for x in (values.min(axis=0), values.max(axis=0)))
        return cls(mean, np.sqrt(squares / len(values)), low, high)

    def __str__(self) -> str:
        if np.ndim(self.mean):
            return f"from {format_number(np.min(self.low))} to {format_number(np.max(self.high))}"
        mean, std, low, high = (format_number(float(x)) for x in (self.mean, self.std, self.low, self.high))
        return f"{mean} ± {std}, from {low} to {high}"


@dataclass(frozen=True, repr=False, eq=False)
class DataSet:
    """Recorded episodes of one environment, with N transitions in E episodes; the arrays are read-only.

    An episode of L steps has L + 1 observations, so that the value of a truncated episode can be bootstrapped from its final
    observation. `polyak.data.load` and `polyak.data.collect` create data sets with checked content.

    Attributes:
        spec: the environment's spaces. Observations, actions and rewards are in the environment's units; `rollout` converts
            them to an agent's.
        obs: observations of all episodes, leaves `[N + E, ...]`.
        action: actions, leaves `[N, ...]`.
        reward: rewards `[N]`.
        lengths: L of each episode `[E]`.
        terminated: the episode reached a terminal state `[E]`.
        name: the source, for messages.
        has_spaces: the source or the caller states the environment's spaces; False where they were inferred from the arrays.
        log_prob: log-probabilities with which the actions were chosen `[N]`, see
            `polyak.off_policy_evaluation.action_log_probs`; None where the source has none.
        has_beginning: the first observation of the episode is recorded `[E]`; None where all are. The oldest episodes of a
            full replay lack theirs.

    >>> from polyak.data import load
    >>> data = load({"observations": np.eye(3), "actions": np.arange(3), "rewards": np.ones(3), "terminations": [0, 0, 1]})
    >>> data.num_episodes, data.num_transitions, data.returns
    (1, 3, array([3.]))
    """

    spec: EnvSpec
    obs: PyTree
    action: PyTree
    reward: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]
    terminated: npt.NDArray[np.bool_]
    name: str = "arrays"
    has_spaces: bool = True
    log_prob: npt.NDArray[np.float32] | None = None
    has_beginning: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        for array in jax.tree.leaves((self.obs, self.action, self.reward, self.lengths, self.terminated, self.log_prob)):
            if isinstance(array, np.ndarray):
                array.setflags(write=False)

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """The episode was cut short `[E]`: by the environment, or because the recording ended."""
        return ~self.terminated

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.lengths)

    @property
    def num_transitions(self) -> int:
        """N."""
        return len(self.reward)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """The first transition of each episode, and N: `[E + 1]`."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def returns(self) -> npt.NDArray[np.float64]:
        """The undiscounted return of each episode `[E]`; of an episode that was cut short, of the recorded part."""
        return np.add.reduceat(np.asarray(self.reward, np.float64), self.starts[:-1])

    @property
    def episodes(self) -> Sequence[Episode]:
        """The episodes, whose arrays are views."""
        return [self._episode(i) for i in range(self.num_episodes)]

    def _episode(self, i: int) -> Episode:
        begin, end = self.starts[i], self.starts[i + 1]
        obs = jax.tree.map(lambda x: x[begin + i : end + i + 1], self.obs)
        action = jax.tree.map(lambda x: x[begin:end], self.action)
        return Episode(obs, action, self.reward[begin:end], bool(self.terminated[i]), bool(self.truncated[i]))

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics of `"return"` and `"length"` of episodes, of `"reward"`, and of each array of obs and action, by path."""
        found: dict[str, Any] = {"return": self.returns, "length": self.lengths, "reward": self.reward}
        for name, tree in (("obs", self.obs), ("action", self.action)):
            found |= {name + jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        return {name: Statistics.of(values) for name, values in found.items()}

    def select(self, episodes: Sequence[int] | npt.NDArray[Any]) -> "DataSet":
        """The data set of some episodes, by their numbers or a bool for each, in the given order.

        Raises:
            TypeError: `episodes` is no sequence.
            IndexError: there is no such episode.
            ValueError: no episode is selected.
        """
        index = np.asarray(episodes)
        if index.ndim != 1:
            raise TypeError(f"DataSet.select: episodes must be a sequence of numbers or bools, got {episodes!r:.80}")
        numbers = np.arange(self.num_episodes)[index if len(index) else slice(0)]
        if not len(numbers):
            raise ValueError(f"DataSet.select: select at least one of the {self.num_episodes} episodes")
        lengths, starts = self.lengths[numbers], self.starts[:-1][numbers]
        transitions, rows = _ranges(starts, lengths), _ranges(starts + numbers, lengths + 1)
        return dataclasses.replace(
            self,
            obs=jax.tree.map(lambda x: x[rows], self.obs),
            action=jax.tree.map(lambda x: x[transitions], self.action),
            reward=self.reward[transitions],
            lengths=lengths,
            terminated=self.terminated[numbers],
            log_prob=None if self.log_prob is None else self.log_prob[transitions],
            has_beginning=None if self.has_beginning is None else self.has_beginning[numbers],
        )

    def split(self, fraction: float, *, seed: int = 0) -> tuple["DataSet", "DataSet"]:
        """Split by episode at random: no episode is in both parts, so the second part can test what the first has trained.

        Args:
            fraction: share of the episodes in the first part.
            seed: decides the split.

        Raises:
            ValueError: `fraction` is not between 0 and 1, or a part would be empty.
        """
        check_number("DataSet.split", "fraction", fraction, above=0, at_most=1)
        check_integer("DataSet.split", "seed", seed, at_least=0)
        count = round(fraction * self.num_episodes)
        if not 0 < count < self.num_episodes:
            raise ValueError(
                f"DataSet.split: fraction={fraction} of {self.num_episodes} episodes must leave at least one episode in each "
                f"part, got {count} and {self.num_episodes - count}"
            )
        order = np.random.default_rng(seed).permutation(self.num_episodes)
        return self.select(np.sort(order[:count])), self.select(np.sort(order[count:]))

    def rollout(self, spec: EnvSpec | None = None, *, num_envs: int = 1, num_steps: int = 1, pad: bool = False) -> Rollout:
        """The episodes as one rollout `[T, num_envs]` of NumPy arrays, in the units of an agent, for `agent.add`.

        Each episode is appended to the shortest of `num_envs` streams, as environments that reset on the next step return them.

        Args:
            spec: the agent's spec; None is the data set's.
            num_envs: number of streams.
            num_steps: T is a multiple of it, the agent's `num_steps`.
            pad: append rows without weight to all streams, so that no transition is lost; False cuts all streams to the
                shortest.

        Raises:
            ValueError: there are fewer episodes than streams, or streams shorter than `num_steps`; or `spec` is of another
                environment.
        """
        for name, value in (("num_envs", num_envs), ("num_steps", num_steps)):
            check_integer("DataSet.rollout", name, value)
        streams = _streams(self.lengths + 1, num_envs)
        total = max(map(len, streams)) - 1 if pad else min(map(len, streams)) - 1
        total = -(-total // num_steps) * num_steps if pad else total // num_steps * num_steps
        if total < 1 or not all(map(len, streams)):
            raise ValueError(
                f"DataSet.rollout: each of num_envs={num_envs} needs num_steps={num_steps} transitions, the shortest has "
                f"{max(0, min(map(len, streams)) - 1)}; use fewer environments"
            )
        if self.has_spaces:
            spec = same_spaces("DataSet.rollout", self.spec, spec, self.name)
        time_steps, actions = self._rows(self.spec if spec is None else spec)
        if num_envs == 1 and total < len(streams[0]):
            # A view: a copy of images would take as much memory as the data.
            time_steps, actions = jax.tree.map(lambda x: x[: total + 1, None], (time_steps, actions))
        else:
            # The last row of a stream, which only resets, is repeated.
            padded = [np.concatenate([x[: total + 1], np.full(max(0, total + 1 - len(x)), x[-1])]) for x in streams]
            rows = np.stack(padded, axis=1)
            time_steps, actions = jax.tree.map(lambda x: x[rows], (time_steps, actions))
        return Rollout(time_steps, jax.tree.map(lambda x: x[:-1], actions))

    def _rows(self, spec: EnvSpec) -> tuple[TimeStep, PyTree]:
        """All N + E time steps in an agent's units, and an action for each; the last of an episode, which resets, is any."""
        episode = np.repeat(np.arange(self.num_episodes), self.lengths)
        after = np.arange(self.num_transitions) + episode + 1  # the row that a transition leads to
        last = self.starts[1:] + np.arange(self.num_episodes)
        count = self.num_transitions + self.num_episodes

        def scatter(dtype: Any, index: Any, values: Any) -> npt.NDArray[Any]:
            rows = np.zeros(count, dtype)
            rows[index] = values
            return rows

        time_steps = TimeStep(
            obs=spec.agent_obs(self.obs),
            reward=scatter(np.float32, after, self.reward),
            terminated=scatter(bool, last, self.terminated),
            truncated=scatter(bool, last, self.truncated),
            first=scatter(bool, last - self.lengths, True),
        )
        source = np.arange(count) - np.repeat(np.arange(self.num_episodes), self.lengths + 1)
        source[last] -= 1
        return time_steps, jax.tree.map(lambda x: x[source], spec.agent_action(self.action))

    def __repr__(self) -> str:
        ends = f"{self.terminated.sum():,} terminated, {self.truncated.sum():,} truncated"
        lines = {
            "obs": text_of(self.spec.obs),
            "action": text_of(self.spec.action),
            "return": str(Statistics.of(self.returns)),
            "length": str(Statistics.of(self.lengths)),
            "reward": str(Statistics.of(self.reward)),
            "ends": ends,
        }
        title = f"DataSet {self.name}: {self.num_transitions:,} transitions in {self.num_episodes:,} episodes"
        return "\n".join([title, *(f"  {name:6}  {text}" for name, text in lines.items())])


def _ranges(starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The numbers `start, ..., start + length - 1` of each range, one after another."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(lengths.sum())


def _streams(lengths: npt.NDArray[np.int64], num_envs: int) -> list[npt.NDArray[np.int64]]:
    """The rows of each stream, where each range of rows goes to the shortest stream."""
    if num_envs == 1:
        return [np.arange(lengths.sum())]
    totals, members = np.zeros(num_envs, np.int64), [[] for _ in range(num_envs)]  # type: ignore[var-annotated]
    for i, length in enumerate(lengths):
        shortest = int(np.argmin(totals))
        members[shortest].append(i)
        totals[shortest] += length
    starts = np.cumsum(lengths) - lengths
    return [_ranges(starts[numbers], lengths[numbers]) if numbers else np.zeros(0, np.int64) for numbers in members]


def same_spaces(owner: str, stored: EnvSpec, spec: EnvSpec | None, name: str) -> EnvSpec:
    """The spec, after a check that data with a stored spec are of such an environment; None is the stored one.

    Bounds of observations may differ, as libraries state them differently.

    Raises:
        ValueError: the data are of another environment; the message has the first difference.
    """
    if spec is None:
        return stored
    wanted, got = (dataclasses.replace(x, obs=_without_bounds(x.obs), action_scaling="clip", id="") for x in (spec, stored))
    if mismatch := difference(wanted, got):
        raise ValueError(
            f"{owner}: the data set {name!r} is of another environment: {mismatch[0]} is {mismatch[2]}, of "
            f"{spec.id or 'the spec'} {mismatch[1]}"
        )
    return dataclasses.replace(spec, id=spec.id or stored.id)


def _without_bounds(space: Space) -> Space:
    match space:
        case Dict():
            return Dict({name: _without_bounds(part) for name, part in space.spaces.items()})
        case Tuple():
            return Tuple(tuple(map(_without_bounds, space.spaces)))
        case Box() if space.dtype.kind == "f":
            return Box(-np.inf, np.inf, space.shape, np.float32)
        case _:
            return space
