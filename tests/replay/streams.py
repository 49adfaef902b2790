"""Streams of time steps whose observations are their numbers, and rollouts of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.types import Rollout, TimeStep


def stream(rewards, terminated=(), truncated=(), envs=1, start=0):
    """Time steps whose observation is their number, plus 1000 for each further environment."""
    total = len(rewards)
    flags = {name: np.isin(np.arange(total), at) for name, at in (("terminated", terminated), ("truncated", truncated))}
    last = flags["terminated"] | flags["truncated"]
    first = np.concatenate([[start == 0], last[:-1]])

    def batched(x, dtype):
        return jnp.asarray(np.repeat(np.asarray(x)[:, None], envs, axis=1).astype(dtype))

    obs = np.arange(start, start + total)[:, None] + 1000 * np.arange(envs)
    return TimeStep(
        obs=jnp.asarray(obs, jnp.float32)[..., None],
        reward=batched(rewards, np.float32),
        terminated=batched(flags["terminated"], bool),
        truncated=batched(flags["truncated"], bool),
        first=batched(first, bool),
    )


def rollouts_of(steps, num_steps):
    """Consecutive rollouts; an action is the number of its time step."""
    total, envs = steps.reward.shape
    for t in range(0, total - num_steps, num_steps):
        part = jax.tree.map(lambda x, t=t: x[t : t + num_steps + 1], steps)
        actions = jnp.broadcast_to(jnp.arange(t, t + num_steps, dtype=jnp.int32)[:, None], (num_steps, envs))
        yield Rollout(part, actions)


def filled_with(replay, steps, state=None, num_steps=1):
    """The state of a replay after all rollouts of the steps."""
    state = replay.init(jnp.zeros(1), jnp.zeros((), jnp.int32), num_steps=num_steps) if state is None else state
    for rollout in rollouts_of(steps, num_steps):
        state = add(replay, state, rollout)
    return state


def slow_lines(program, *sizes):
    """Lines of a compiled program that copy or sort arrays of so many rows."""

    def is_slow(line):
        is_large = any(f"[{size}" in line for size in sizes)
        # The shape of what it takes the largest of is not in the line.
        return "TopK" in line or (is_large and (" copy(" in line or " sort(" in line))

    return [line for line in program.splitlines() if is_slow(line)]


@functools.partial(jax.jit, static_argnums=0)
def add(replay, state, rollout):
    """`replay.add`, compiled once."""
    return replay.add(state, rollout)
