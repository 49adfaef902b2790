"""Evaluation of a policy over complete episodes, without bias towards short ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, PRNGKeyArray

from polyak.core.checks import check_integer, check_key
from polyak.core.policy_faults import CallsPython, ExceptionRelay, check_error_flags, count_failures_in
from polyak.core.printing import format_number
from polyak.core.suggestions import suggest_arguments
from polyak.core.tags import RETURN, SUCCESS
from polyak.core.types import Env, EpisodeRecord, HostEnv, Policy, PyTree, TimeStep
from polyak.loops.agent_check import check_policy_methods, check_should_stop
from polyak.loops.episodes import has_all_returns
from polyak.loops.host_actor import make_actor
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import (
    check_made,
    check_spec,
    env_reset_key,
    env_step_key,
    host_seed,
)
from polyak.loops.program_cache import cached_per_env, jitted_init

# Number of steps after which the compiled program returns to the host.
CHUNK = 256

# A policy in Python steps a JAX environment from the host first: compiling a program takes as long as this many steps.
STEPS_BEFORE_COMPILING = 4096


class UnendedEpisodes(TimeoutError):
    """Episodes of an evaluation did not end within `max_steps`, or before it was stopped."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Returns and lengths of the evaluated episodes, ordered by environment.

    Attributes:
        returns: undiscounted returns, in the environment's units: the returns recorded in `info["episode"]` if there are any,
            else the sums of rewards.
        lengths: episode lengths, in steps.
        successes: `is_success` of the environment's `info` at the end of each episode, NaN where it is missing; None if it is
            always missing.
    """

    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    successes: npt.NDArray[np.float64] | None = None

    def __repr__(self) -> str:
        success = "" if self.success_rate is None else f", success rate {self.success_rate:.2f}"
        mean, std = format_number(self.mean_return), format_number(self.std_return)
        return f"Evaluation({mean} ± {std}, {self.episodes} episodes{success})"

    @property
    def episodes(self) -> int:
        """The number of episodes."""
        return len(self.returns)

    @property
    def mean_return(self) -> float:
        """Mean return over the episodes."""
        return float(self.returns.mean())

    @property
    def std_return(self) -> float:
        """Population standard deviation of the returns."""
        return float(self.returns.std())

    @property
    def mean_length(self) -> float:
        """Mean length in steps."""
        return float(self.lengths.mean())

    @property
    def success_rate(self) -> float | None:
        """Share of successful episodes, or None if the environment does not report `info["is_success"]`."""
        return None if self.successes is None else float(np.nanmean(self.successes))


@suggest_arguments("evaluate")
def evaluate(
    policy: Policy,
    env: Env | HostEnv,
    *,
    episodes: int,
    key: PRNGKeyArray,
    max_steps: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Run a policy for exactly `episodes` episodes.

    The episodes are divided equally among the environments (the first few environments run one more), and the first episodes
    of each environment count: counting the episodes that end first would favour short episodes.

    Args:
        policy: the policy to evaluate; `agent.policy(state)` is an agent's greedy policy.
        env: the environment; reset first, so not a Gymnasium environment in the midst of a training.
        episodes: number of episodes.
        key: source of all randomness, in the environment and in the policy's actions.
        max_steps: maximum number of steps of each environment; None sets no limit for a host environment and ten million
            for a JAX environment.
        should_stop: called at every step of a host environment, and every 256 steps of a JAX environment; True stops the
            evaluation, without a result.

    Raises:
        TypeError: `policy` is a function or an exported policy.
        TypeError, ValueError: `episodes` or `max_steps` is not a positive integer.
        ValueError: the policy was built for other spaces, action scaling or masks than the environment has.
        TimeoutError: `max_steps` passed, or `should_stop` returned True, before all episodes had ended.
        RuntimeError: the policy reports a failure (a script that has ended).
    """
    check_policy_methods("evaluate", policy)
    check_made("evaluate", env)
    check_key("evaluate", key)
    check_integer("evaluate", "episodes", episodes)
    check_integer("evaluate", "max_steps", max_steps, optional=True)
    check_should_stop("evaluate", should_stop)
    check_spec("evaluate", getattr(policy, "spec", env.spec), env.spec, "policy")
    quota = np.full(env.num_envs, episodes // env.num_envs)
    quota[: episodes % env.num_envs] += 1
    env_key, act_key = jax.random.split(key)
    if isinstance(env, HostEnv):
        with ExceptionRelay(policy):
            log, *_ = _evaluate_on_host(policy, env, host_seed(env_key), quota, act_key, max_steps, should_stop)
            return log.result()
    return _evaluate_compiled(policy, env, quota, env_key, act_key, max_steps or 10_000_000, should_stop)


class _EpisodeLog:
    """The first `quota[i]` episodes of environment i."""

    def __init__(self, quota: npt.NDArray[np.int64]) -> None:
        self._quota = quota
        self._returns: list[list[float]] = [[] for _ in quota]
        self._recorded: list[list[float]] = [[] for _ in quota]
        self._lengths: list[list[int]] = [[] for _ in quota]
        self._successes: list[list[float]] = [[] for _ in quota]
        self._running_return = np.zeros(len(quota))
        self._running_length = np.zeros(len(quota), np.int64)

    def add(self, counted: EpisodeRecord, info: Mapping[str, npt.NDArray[np.float64]] = MappingProxyType({})) -> None:
        """Add one time step of all environments, and the values that the environments report in `info`."""
        self._running_return = np.where(counted.first, 0.0, self._running_return + counted.reward)
        self._running_length = np.where(counted.first, 0, self._running_length + 1)
        none = np.full(len(self._quota), np.nan)
        recorded, successes = (info.get(tag, none) for tag in (RETURN, SUCCESS))
        for i in np.flatnonzero(counted.last):
            if len(self._returns[i]) < self._quota[i]:
                self._returns[i].append(float(self._running_return[i]))
                self._recorded[i].append(float(recorded[i]))
                self._lengths[i].append(int(self._running_length[i]))
                self._successes[i].append(float(successes[i]))

    @property
    def is_complete(self) -> bool:
        """True if every environment has completed its quota."""
        return not self.is_running.any()

    @property
    def is_running(self) -> npt.NDArray[np.bool_]:
        """True for each environment that has episodes left to complete."""
        return self.num_left > 0

    @property
    def num_left(self) -> npt.NDArray[np.int32]:
        """Number of episodes that each environment has left to complete."""
        return np.array([quota - len(r) for quota, r in zip(self._quota, self._returns, strict=True)], np.int32)

    def result(self) -> Evaluation:
        """The complete episodes."""
        parts = (self._returns, self._recorded, self._lengths, self._successes)
        returns, recorded, lengths, successes = (np.array(list(chain.from_iterable(part))) for part in parts)
        if has_all_returns(int(np.count_nonzero(~np.isnan(recorded))), len(recorded)):
            returns = recorded
        return Evaluation(returns, lengths.astype(np.int64), None if np.isnan(successes).all() else successes)


def _evaluate_on_host(
    policy: Policy,
    env: HostEnv,
    seed: int,
    quota: Any,
    act_key: PRNGKeyArray,
    max_steps: int | None,
    should_stop: Callable[[], bool],
    stop_at: int | None = None,
) -> tuple[_EpisodeLog, int, TimeStep, PyTree]:
    """Return the episodes, the number of steps, and the last time step and carry; `stop_at` ends an incomplete evaluation."""
    time_step, carry = env.reset(seed), policy.initial_state(env.num_envs)
    actor = make_actor(policy, act_key, env.num_envs, exact=True, block=CHUNK)
    log, t = _EpisodeLog(quota), 0
    while not log.is_complete and t != stop_at:
        _check_continues(env, t, max_steps, should_stop)
        step = actor(t, time_step, carry)
        carry = step.carry
        check_error_flags(carry, log.is_running)
        time_step = env.step(jax.tree.map(np.asarray, step.action))
        log.add(time_step.episode_record, time_step.info or getattr(env, "info", {}))
        t += 1
    return log, t, time_step, carry


def _evaluate_compiled(
    policy: Policy,
    env: Env,
    quota: Any,
    env_key: PRNGKeyArray,
    act_key: PRNGKeyArray,
    max_steps: int,
    should_stop: Callable[[], bool],
) -> Evaluation:
    relay = ExceptionRelay(policy)
    if isinstance(policy, CallsPython):
        hosted = JaxEnvOnHost(env, env_key)
        with relay:
            log, t, *last = _evaluate_on_host(policy, hosted, 0, quota, act_key, max_steps, should_stop, STEPS_BEFORE_COMPILING)
        loop = (hosted.state, *last)
    else:
        env_state, time_step = jitted_init(env)(env_reset_key(env_key))
        log, t, loop = _EpisodeLog(quota), 0, (env_state, time_step, policy.initial_state(env.num_envs))
    chunk = _program(env)
    while not log.is_complete:
        _check_continues(env, t, max_steps, should_stop)
        limits = np.uint32(t), np.uint32(min(t + CHUNK, max_steps)), log.num_left
        loop, end, scores = relay.run(chunk, policy, loop, env_key, act_key, *limits)
        scores = jax.tree.map(np.asarray, scores)
        for i in range(int(end) - t):
            log.add(*jax.tree.map(itemgetter(i), scores))
        t = int(end)
    return log.result()


@cached_per_env
def _program(env: Env) -> Callable[..., tuple[PyTree, Array, tuple[EpisodeRecord, dict[str, Array]]]]:
    """The jitted function that runs up to `CHUNK` steps; policy failures count only in episodes within the quota."""

    def chunk(
        policy: Policy, loop: PyTree, env_key: PRNGKeyArray, act_key: PRNGKeyArray, start: Array, end: Array, num_left: Array
    ) -> tuple[PyTree, Array, tuple[EpisodeRecord, dict[str, Array]]]:
        def step(values: PyTree) -> PyTree:
            t, num_left, (env_state, time_step, carry), scores = values
            policy_step = policy.action(time_step, carry, jax.random.fold_in(act_key, t))
            carry = count_failures_in(num_left > 0, carry, policy_step.carry)
            env_state, time_step = env.step(env_state, policy_step.action, env_step_key(env_key, t))
            put = partial(jax.lax.dynamic_update_index_in_dim, index=t - start, axis=0)
            scores = jax.tree.map(put, scores, _scores(time_step))
            num_left = num_left - time_step.episode_record.last.astype(jnp.int32)
            return t + jnp.uint32(1), num_left, (env_state, time_step, carry), scores

        def has_next(values: PyTree) -> Array:
            # Stop with the last counted step, so that a policy in Python is not called for steps that do not count.
            t, num_left, *_ = values
            return (t < end) & jnp.any(num_left > 0)

        scores = jax.tree.map(lambda x: jnp.zeros((CHUNK, *x.shape), x.dtype), _scores(loop[1]))
        t, _, loop, scores = jax.lax.while_loop(has_next, step, (start, num_left, loop, scores))
        return loop, t, scores

    return jax.jit(chunk)


def _scores(time_step: TimeStep) -> tuple[EpisodeRecord, dict[str, Array]]:
    """The arrays of a time step that `_EpisodeLog` counts."""
    return time_step.episode_record, {tag: x for tag, x in (time_step.info or {}).items() if tag == SUCCESS}


def _check_continues(env: Env | HostEnv, steps: int, max_steps: int | None, should_stop: Callable[[], bool]) -> None:
    """Check that an evaluation may take another step.

    Raises:
        UnendedEpisodes: `max_steps` are done, or `should_stop` returns True.
    """
    if steps == max_steps:
        raise UnendedEpisodes(
            f"evaluate: not all episodes of {env.spec.id} ended within max_steps={steps} steps of each environment"
        )
    if should_stop():
        raise UnendedEpisodes(f"evaluate: the evaluation was stopped before all episodes of {env.spec.id} had ended")
