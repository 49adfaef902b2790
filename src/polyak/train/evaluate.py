"""Evaluation: whole episodes of a policy, none counted for having been short."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.policy_faults import ExceptionRelay, check_carry, count_failures_in
from polyak.core.types import Env, HostEnv, Policy, PyTree, Score
from polyak.train.actor import make_actor
from polyak.train.loop import HasSpec, cached_per_env, check_spec, env_reset_key, env_step_key, jitted_init

# Steps between looks at whether all episodes are done.
CHUNK = 256


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of the evaluated episodes, in the order of environments.

    Attributes:
        returns: undiscounted, in the environment's units.
        lengths: in steps.
    """

    returns: npt.NDArray[np.float64] = field(repr=False)
    lengths: npt.NDArray[np.int64] = field(repr=False)

    @property
    def mean_return(self) -> float:
        """Mean over the episodes."""
        return float(self.returns.mean())

    @property
    def std_return(self) -> float:
        """Population standard deviation over the episodes."""
        return float(self.returns.std())

    @property
    def mean_length(self) -> float:
        """Mean length in steps."""
        return float(self.lengths.mean())


def evaluate(
    policy: Policy, env: Env | HostEnv, *, episodes: int, key: PRNGKeyArray, max_steps: int | None = None
) -> Evaluation:
    """Run a policy for exactly so many episodes.

    Every environment contributes its own first episodes, in equal numbers (the first few one more): taking whichever ended
    first would favour short episodes.

    Args:
        policy: acts; give the greedy one, `agent.policy(state)`, to evaluate what was learned.
        env: is reset first.
        episodes: how many.
        key: decides the environment's starts and a sampling policy's actions.
        max_steps: steps of each environment after which to give up; None is no limit for a host environment and
            ten million for a JAX one.

    Raises:
        TypeError: `policy` is a function or an exported policy.
        TypeError, ValueError: `episodes` or `max_steps` is not a positive integer.
        ValueError: the policy was built for other spaces, action scaling or masks than the environment has.
        TimeoutError: `max_steps` passed before all episodes had ended.
        RuntimeError: the policy says that it could not go on (a script that has ended).
    """
    if not isinstance(policy, Policy):
        raise TypeError(
            f"evaluate: policy must have initial_state, distribution and action, got {policy!r:.80}; make a function f a "
            "policy by PythonPolicy(f, env.spec), an exported policy by PythonPolicy(policy.as_python(), env.spec)"
        )
    check_integer("evaluate", "episodes", episodes)
    if max_steps is not None:
        check_integer("evaluate", "max_steps", max_steps)
    if isinstance(policy, HasSpec):
        check_spec("evaluate", policy.spec, env.spec, "policy")
    quota = np.full(env.num_envs, episodes // env.num_envs)
    quota[: episodes % env.num_envs] += 1
    env_key, act_key = jax.random.split(key)
    if isinstance(env, HostEnv):
        with ExceptionRelay(policy):
            return _on_host(policy, env, quota, env_key, act_key, max_steps)
    return _compiled(policy, env, quota, env_key, act_key, max_steps or 10_000_000)


class _Tally:
    """Episodes of each environment until its quota is full."""

    def __init__(self, quota: npt.NDArray[np.int64]) -> None:
        self._quota = quota
        self._returns: list[list[float]] = [[] for _ in quota]
        self._lengths: list[list[int]] = [[] for _ in quota]
        self._now = np.zeros(len(quota))
        self._steps = np.zeros(len(quota), np.int64)

    def add(self, counted: Score) -> None:
        """One time step of all environments."""
        self._now = np.where(counted.first, 0.0, self._now + counted.reward)
        self._steps = np.where(counted.first, 0, self._steps + 1)
        for i in np.flatnonzero(counted.last):
            if len(self._returns[i]) < self._quota[i]:
                self._returns[i].append(float(self._now[i]))
                self._lengths[i].append(int(self._steps[i]))

    @property
    def full(self) -> bool:
        """Every environment has done its share."""
        return not self.open.any()

    @property
    def open(self) -> npt.NDArray[np.bool_]:
        """The environments that have not."""
        return self.left > 0

    @property
    def left(self) -> npt.NDArray[np.int32]:
        """How many episodes each has to do."""
        return np.array([quota - len(r) for quota, r in zip(self._quota, self._returns, strict=True)], np.int32)

    def result(self) -> Evaluation:
        """All of them."""
        returns, lengths = (list(chain.from_iterable(parts)) for parts in (self._returns, self._lengths))
        return Evaluation(np.array(returns), np.array(lengths, np.int64))


def _on_host(
    policy: Policy, env: HostEnv, quota: Any, env_key: PRNGKeyArray, act_key: PRNGKeyArray, max_steps: int | None
) -> Evaluation:
    time_step = env.reset(int(jax.random.bits(env_key, dtype=jnp.uint32) >> 1))
    carry = policy.initial_state(env.num_envs)
    actor = make_actor(policy, act_key, env.num_envs, exact=True, block=CHUNK)
    tally, t = _Tally(quota), 0
    while not tally.full:
        if t == max_steps:
            raise _too_long(env, t)
        step = actor(t, time_step, carry)
        carry = step.carry
        check_carry(carry, tally.open)
        time_step = env.step(jax.tree.map(np.asarray, step.action))
        tally.add(time_step.counted)
        t += 1
    return tally.result()


def _compiled(policy: Policy, env: Env, quota: Any, env_key: PRNGKeyArray, act_key: PRNGKeyArray, max_steps: int) -> Evaluation:
    chunk = _program(env)
    env_state, time_step = jitted_init(env)(env_reset_key(env_key))
    now = (env_state, time_step, policy.initial_state(env.num_envs))
    relay = ExceptionRelay(policy)
    tally, t = _Tally(quota), 0
    while not tally.full:
        if t == max_steps:
            raise _too_long(env, t)
        limits = np.uint32(t), np.uint32(min(t + CHUNK, max_steps)), tally.left
        now, done, seen = relay.run(chunk, policy, now, env_key, act_key, *limits)
        counted = jax.tree.map(np.asarray, seen)
        for i in range(int(done) - t):
            tally.add(Score(counted.reward[i], counted.last[i], counted.first[i]))
        t = int(done)
    return tally.result()


@cached_per_env
def _program(env: Env) -> Callable[..., tuple[PyTree, Array, Score]]:
    """Some steps, jitted. Only in episodes that count may the policy fail."""

    def chunk(
        policy: Policy, now: PyTree, env_key: PRNGKeyArray, act_key: PRNGKeyArray, start: Array, end: Array, left: Array
    ) -> tuple[PyTree, Array, Score]:
        def step(at: PyTree) -> PyTree:
            t, left, (env_state, time_step, carry), seen = at
            acted = policy.action(time_step, carry, jax.random.fold_in(act_key, t))
            carry = count_failures_in(left > 0, carry, acted.carry)
            env_state, time_step = env.step(env_state, acted.action, env_step_key(env_key, t))
            put = partial(jax.lax.dynamic_update_index_in_dim, index=t - start, axis=0)
            seen = jax.tree.map(put, seen, time_step.counted)
            return t + jnp.uint32(1), left - time_step.counted.last.astype(jnp.int32), (env_state, time_step, carry), seen

        def more(at: PyTree) -> Array:
            # A policy that calls Python is called for no step that nobody counts.
            t, left, *_ = at
            return (t < end) & jnp.any(left > 0)

        seen = jax.tree.map(lambda x: jnp.zeros((CHUNK, *x.shape), x.dtype), now[1].counted)
        t, _, now, seen = jax.lax.while_loop(more, step, (start, left, now, seen))
        return now, t, seen

    return jax.jit(chunk)


def _too_long(env: Env | HostEnv, steps: int) -> TimeoutError:
    return TimeoutError(f"evaluate: {steps} steps of each environment did not end all episodes of {env.spec.id}")
