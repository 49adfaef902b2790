"""Collects a data set with any policy."""

from itertools import accumulate

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Env, HostEnv, Policy, PyTree, Rollout
from polyak.data.arrays import insert_final
from polyak.data.content import create_data_set
from polyak.data.data_set import DataSet
from polyak.loops.collect import collect_rollouts
from polyak.loops.loop import check_made

MAX_ROLLOUT = 1_024


@suggest_arguments("data.collect")
def collect(policy: Policy, env: Env | HostEnv, env_steps: int, *, key: PRNGKeyArray | None = None) -> DataSet:
    """Run a policy in fresh episodes and return what it has seen as a data set.

    >>> import polyak
    >>> env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    >>> data = polyak.data.collect(polyak.policies.Uniform(env.spec), env, 100)
    >>> data.num_transitions
    100

    Args:
        policy: the policy to run: of an agent (`agent.policy(state)`, `agent.collect_policy(state)`), scripted or in Python.
        env: the environment; reset first.
        env_steps: number of transitions, over all environments; up to `env.num_envs - 1` more are kept. The last episode of
            each environment is cut short.
        key: source of all randomness; None is `jax.random.key(0)`.

    Raises:
        TypeError, ValueError: an argument is invalid, or the environment has action masks; see `polyak.train.collect`.
    """
    check_made("data.collect", env)
    check_integer("data.collect", "env_steps", env_steps)
    num_steps = min(-(-env_steps // env.num_envs), MAX_ROLLOUT)
    rollouts, done = [], 0
    for rollout in collect_rollouts(policy, env, num_steps, key=jax.random.key(0) if key is None else key):
        rollout = jax.device_get(Rollout(rollout.time_steps, rollout.actions))
        rollouts.append(rollout)
        done += int((~rollout.time_steps.last[:-1]).sum())
        if done >= env_steps:
            break
    joined = _join(rollouts)
    valid = ~joined.time_steps.last[:-1]
    steps = 1 + next(t for t, total in enumerate(accumulate(valid.sum(axis=1))) if total >= env_steps)
    return from_rollout("data.collect", _first_steps(joined, steps), env)


def _join(rollouts: list[Rollout]) -> Rollout:
    """Consecutive rollouts as one; the last time step of one is the first of the next."""
    times = [rollout.time_steps for rollout in rollouts]
    time_steps = jax.tree.map(lambda *x: np.concatenate([x[0][:1], *(part[1:] for part in x)]), *times)
    return Rollout(time_steps, jax.tree.map(lambda *x: np.concatenate(x), *(rollout.actions for rollout in rollouts)))


def join_episodes(episodes: list[Rollout]) -> Rollout:
    """Complete episodes `[L, B]` as one rollout, with a row between them that only resets."""
    time_steps = jax.tree.map(lambda *x: np.concatenate(x), *(rollout.time_steps for rollout in episodes))
    actions = jax.tree.map(lambda *x: np.concatenate([y for z in x for y in (z, z[-1:])])[:-1], *(x.actions for x in episodes))
    return Rollout(time_steps, actions)


def _first_steps(rollout: Rollout, steps: int) -> Rollout:
    time_steps = jax.tree.map(lambda x: x[: steps + 1], rollout.time_steps)
    return Rollout(time_steps, jax.tree.map(lambda x: x[:steps], rollout.actions))


def from_rollout(owner: str, rollout: Rollout, env: Env | HostEnv) -> DataSet:
    """The data set of the transitions of a rollout, environment by environment."""
    steps, spec = rollout.time_steps, env.spec

    def by_env(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: np.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)

    valid = by_env(~steps.last[:-1])
    last_step = np.arange(len(steps.reward) - 1) == len(steps.reward) - 2
    ends = by_env(steps.last[1:] | last_step[:, None])[valid]
    before, after, action = (
        jax.tree.map(lambda x: x[valid], by_env(tree))
        for tree in (jax.tree.map(lambda x: x[:-1], steps.obs), jax.tree.map(lambda x: x[1:], steps.obs), rollout.actions)
    )
    reward, terminated = by_env(steps.reward[1:])[valid], by_env(steps.terminated[1:])[valid]
    last = np.flatnonzero(ends)
    lengths = np.diff(last, prepend=-1)
    obs = insert_final(spec.obs, before, jax.tree.map(lambda x: x[last], after), lengths)
    return create_data_set(
        owner,
        spec,
        obs=spec.native_obs(obs),
        action=spec.native_action(action),
        reward=reward,
        lengths=lengths,
        terminated=terminated[last],
        name=spec.id,
    )
