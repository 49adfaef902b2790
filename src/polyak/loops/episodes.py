"""Episode returns and lengths, computed from time steps equally in every loop, and means of values from `info`."""

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float, UInt32

from polyak.core.struct import struct
from polyak.core.tags import RETURN, SUCCESS
from polyak.core.types import EPISODE_WINDOW, EndedEpisodes, EpisodeRecord, Mean, TimeStep
from polyak.core.warn import warn

AGENT_RETURN, LENGTH = "rollout/ep_agent_rew_mean", "rollout/ep_len_mean"


@struct
class Episodes:
    """Running return and length of the current episode of each environment.

    Attributes:
        returns: sums of rewards.
        rounding: the part of each sum that float32 does not hold.
        lengths: steps.
    """

    returns: Float[Array, " B"]
    rounding: Float[Array, " B"]
    lengths: UInt32[Array, " B"]

    @classmethod
    def fresh(cls, num_envs: int) -> "Episodes":
        """Zeros: every environment is at the start of an episode."""
        return cls(jnp.zeros(num_envs, jnp.float32), jnp.zeros(num_envs, jnp.float32), jnp.zeros(num_envs, jnp.uint32))


@struct
class EpisodeTotals:
    """Number of completed episodes, and the sums of their returns and lengths, of one iteration or several.

    Attributes:
        successes: the mean of what an environment in JAX reports as success at the ends of episodes; None without reports.
    """

    count: UInt32[Array, "*S"]
    returns: Float[Array, "*S"]
    lengths: UInt32[Array, "*S"]
    successes: Mean | None = None

    @classmethod
    def none(cls) -> "EpisodeTotals":
        """Zero episodes."""
        return cls(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.uint32))

    def append(self, newest: "EpisodeTotals") -> "EpisodeTotals":
        """Replace the oldest iteration, along the last axis, by the newest iteration if episodes have ended in it."""
        has_ended = newest.count[..., None] > 0

        def shift(totals: Array, x: Array) -> Array:
            return jnp.where(has_ended, jnp.concatenate([totals[..., 1:], x[..., None]], axis=-1), totals)

        return jax.tree.map(shift, self, newest)


def measure(episodes: Episodes, time_steps: TimeStep) -> tuple[Episodes, EpisodeTotals]:
    """Update `episodes` with time steps `[T+1, B]`, skipping the first time step, which the previous call counted.

    If the first time step begins an episode, the running episode is dropped: its environment was restarted. A time step that
    both begins and ends an episode is not counted as an episode.
    """

    def step(episodes: Episodes, time_step: EpisodeRecord) -> tuple[Episodes, tuple[Array, Array, Array]]:
        sums = add_with_rounding(episodes.returns, episodes.rounding, time_step.reward)
        after = Episodes(*sums, episodes.lengths + jnp.uint32(1))
        episodes = _zero_where(time_step.first, after)
        returns, lengths, ended = episodes.returns, episodes.lengths, time_step.last & ~time_step.first
        return episodes, (ended, jnp.where(ended, returns, 0.0), jnp.where(ended, lengths, jnp.uint32(0)))

    before = time_steps.episode_record.first[0]
    counted = jax.tree.map(lambda x: x[1:], time_steps.episode_record)
    episodes, (ended, returns, lengths) = jax.lax.scan(step, _zero_where(before, episodes), counted)
    success = (time_steps.info or {}).get(SUCCESS)
    successes = None if success is None else Mean.of(success[1:], ended)
    return episodes, EpisodeTotals(ended.sum(dtype=jnp.uint32), returns.sum(), lengths.sum(dtype=jnp.uint32), successes)


def info_means(time_steps: TimeStep) -> dict[str, Mean]:
    """The mean of each value that an environment in JAX reports at the transitions of time steps `[T+1, B]`, by tag."""
    counts, info = ~time_steps.first[1:], time_steps.info or {}
    return {tag: Mean.of(values[1:], counts) for tag, values in info.items() if tag != SUCCESS}


def add_with_rounding(
    total: Float[Array, "*S"], rounding: Float[Array, "*S"], value: Float[Array, "*S"]
) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """Add a value to a sum of two float32 (Dekker 1971); returns the sum and the part that float32 does not hold."""
    total, lost = _two_sum(total, value)
    exact, rounding = _two_sum(total, rounding + lost)
    is_finite = jnp.isfinite(total)
    return jnp.where(is_finite, exact, total), jnp.where(is_finite, rounding, 0.0)


def _two_sum(a: Float[Array, "*S"], b: Float[Array, "*S"]) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """The float32 sum and its rounding error, exactly (Knuth's TwoSum)."""
    total = a + b
    rest = total - a
    return total, (a - (total - rest)) + (b - rest)


def _zero_where(first: Bool[Array, " B"], episodes: Episodes) -> Episodes:
    return jax.tree.map(lambda x: jnp.where(first, jnp.zeros_like(x), x), episodes)


class InfoSums:
    """Counts and sums, by tag, of the values that an environment reports in `info`; see `HostEnv`."""

    def __init__(self, sums: Mapping[str, tuple[int, float]] = MappingProxyType({})) -> None:
        self._sums = dict(sums)

    @property
    def sums(self) -> dict[str, tuple[int, float]]:
        """The number and the sum of each tag's values."""
        return dict(self._sums)

    def add(self, info: Mapping[str, npt.NDArray[np.float64]]) -> None:
        """Add the values of one time step; NaN means no value."""
        for tag, values in info.items():
            present = values[~np.isnan(values)]
            self._add(tag, present.size, float(present.sum()))

    def merge(self, other: "InfoSums") -> None:
        """Add the counts and sums of `other`."""
        for tag, (count, total) in other._sums.items():
            self._add(tag, count, total)

    def count(self, tag: str) -> int:
        """The number of values of a tag."""
        return self._sums.get(tag, (0, 0.0))[0]

    def means(self) -> dict[str, float]:
        """Return the mean of each tag's values; tags without a value are omitted."""
        return {tag: total / count for tag, (count, total) in self._sums.items() if count}

    def _add(self, tag: str, count: int, total: float) -> None:
        count_before, total_before = self._sums.get(tag, (0, 0.0))
        self._sums[tag] = count_before + count, total_before + total


def has_all_returns(recorded: int, episodes: int) -> bool:
    """Return True if the environment recorded the return of every episode; warns if only some returns were recorded."""
    if 0 < recorded < episodes:
        warn(
            # Without numbers, so that Python shows the warning of many reports once.
            "info['episode'] is missing at the end of some episodes, so returns are sums of the agent's rewards; put "
            "RecordEpisodeStatistics outside of the wrapper that ends episodes"
        )
    return recorded >= episodes


class EpisodeStatistics:
    """Metrics of a report about episodes and `info`, on the host.

    Returns, lengths and successes are means over about the last 100 episodes; other values of `info`, over the time since the
    last report. If environments record returns in `info["episode"]`, `rollout/ep_rew_mean` is the mean of the recorded returns,
    and `rollout/ep_agent_rew_mean` the mean return from the rewards that the agent sees, which a wrapper may have changed.
    """

    def __init__(self, episodes: Sequence[EndedEpisodes] = ()) -> None:
        self._ended = deque(episodes)
        self._count = sum(entry.count for entry in episodes)
        self._since_report = InfoSums()

    @property
    def episodes(self) -> tuple[EndedEpisodes, ...]:
        """The iterations with about the last 100 episodes."""
        return tuple(self._ended)

    def add(self, finished: EpisodeTotals, info: InfoSums | None = None) -> None:
        """Add the completed episodes of iterations and the sums of `info`; drop episodes older than the last 100."""
        info = InfoSums() if info is None else info
        self._since_report.merge(info)
        counts, returns, lengths = (np.ravel(x).tolist() for x in (finished.count, finished.returns, finished.lengths))
        reported = [info.sums] * len(counts)
        if (successes := finished.successes) is not None:
            pairs = zip(np.ravel(successes.count).astype(int).tolist(), np.ravel(successes.total).tolist(), strict=True)
            reported = [info.sums | {SUCCESS: pair} for pair in pairs]
        totals = zip(counts, returns, lengths, reported, strict=True)
        self._ended += [EndedEpisodes(*entry) for entry in totals if entry[0]]
        self._count += sum(counts)
        while self._ended and self._count - self._ended[0].count >= EPISODE_WINDOW:
            self._count -= self._ended.popleft().count

    def metrics(self) -> dict[str, float]:
        """Return the means by tag, without episode metrics before the first episode has ended; resets the means of `info`."""
        metrics = {tag: mean for tag, mean in self._since_report.means().items() if tag not in (RETURN, SUCCESS)}
        self._since_report = InfoSums()
        if not self._count:
            return metrics
        episodes = InfoSums()
        for entry in self._ended:
            episodes.merge(InfoSums(entry.info))
        reported = episodes.means()
        mean_return = sum(entry.returns for entry in self._ended) / self._count
        metrics |= {RETURN: mean_return, LENGTH: sum(entry.lengths for entry in self._ended) / self._count}
        if has_all_returns(episodes.count(RETURN), self._count):
            metrics |= {RETURN: reported[RETURN], AGENT_RETURN: mean_return}
        if SUCCESS in reported:
            metrics[SUCCESS] = reported[SUCCESS]
        return metrics
