"""Random rollouts that keep the contract of next-step autoreset, for tests of updates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from polyak.agents.ppo import PPO
from polyak.agents.ppo_kl import PPOKL
from polyak.core.spaces import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete, map_space
from polyak.core.types import Rollout, TimeStep


def sample(space, rng, batch):
    """Random values of a space, as an agent sees or makes them (integers from 0, Box actions unbounded)."""

    def leaf(space):
        shape = (*batch, *space.shape)
        match space:
            case Discrete():
                return rng.integers(0, space.n, shape).astype(np.int32)
            case MultiDiscrete():
                return rng.integers(0, space.nvec, shape).astype(np.int32)
            case MultiBinary():
                return rng.integers(0, 2, shape).astype(np.int8)
            case Box() if space.dtype == np.uint8:
                return rng.integers(0, 256, shape).astype(np.uint8)
            case Box():
                return rng.normal(size=shape).astype(np.float32)

    return map_space(leaf, space)


def flags(rng, num_steps, num_envs, ends):
    """`terminated, truncated, first` `[T+1, B]`, each step ending an episode one way or the other with probability `ends`."""
    terminated, truncated, first = (np.zeros((num_steps + 1, num_envs), bool) for _ in range(3))
    for t in range(num_steps + 1):
        if t:
            first[t] = terminated[t - 1] | truncated[t - 1]
        terminated[t] = ~first[t] & (rng.random(num_envs) < ends)
        truncated[t] = ~first[t] & (rng.random(num_envs) < ends)
    return terminated, truncated, first


def rollout(spec: EnvSpec, seed=0, *, num_steps=8, num_envs=4, ends=0.15, carry=()):
    """A rollout of noise; NumPy leaves, so that tests can change them before `on_device`."""
    rng = np.random.default_rng(seed)
    terminated, truncated, first = flags(rng, num_steps, num_envs, ends)
    reward = np.where(first, 0.0, rng.normal(size=first.shape)).astype(np.float32)
    obs = sample(spec.obs, rng, (num_steps + 1, num_envs))
    actions = sample(spec.action, rng, (num_steps, num_envs))
    return Rollout(TimeStep(obs, reward, terminated, truncated, first), actions, (), carry)


@jax.jit
def _without_weights(agent):
    """A fresh state whose parameters are zeros: what would draw them is not even compiled."""
    state = agent.init(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, state.copies.online.params)
    return with_online(state, dataclasses.replace(state.copies.online, params=zeros))


def fresh(agent, seed=0):
    """A state whose every weight matters, and whose policy is far from uniform."""
    state = _without_weights(agent)
    return with_online(state, random_variables(state.copies.online, seed))


@functools.cache
def shapes_of(network, spec):
    """Those of the network's variables."""
    return jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))


def random_variables(variables, seed, *, far=0.2):
    """Random weights; those of another seed are a little way off: ratios are far from 1 and yet finite. Shapes will do."""
    both = [np.random.default_rng(0), np.random.default_rng(seed)]
    share = far if seed else 0.0
    draw = lambda x: sum(c * rng.normal(size=x.shape) for c, rng in zip((0.7, share), both, strict=True))  # noqa: E731
    return dataclasses.replace(variables, params=jax.tree.map(lambda x: jnp.asarray(draw(x), x.dtype), variables.params))


def on_device(tree):
    return jax.tree.map(jnp.array, tree)


def same_bits(a, b):
    """Two trees of arrays are equal in structure and in every bit."""
    leaves_a, tree_a = jax.tree.flatten(a)
    leaves_b, tree_b = jax.tree.flatten(b)
    return tree_a == tree_b and all(_same_array(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


def _same_array(x, y):
    x, y = (np.asarray(jax.random.key_data(z) if jnp.issubdtype(z.dtype, jax.dtypes.prng_key) else z) for z in (x, y))
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def with_online(state, variables):
    """The state with these variables in the online copy."""
    return dataclasses.replace(state, copies=dataclasses.replace(state.copies, online=variables))


PENALTIES = {"kl_beta", "kl_cutoff_coef", "l2_policy", "l2_value", "l2_shared"}


def ppo(spec, **settings):
    """PPO with clipping, as PPOKL if it has a penalty."""
    if PENALTIES.isdisjoint(settings):
        return PPO(spec, **settings)
    return PPOKL(spec, **{"clip_range": 0.2, "kl_beta": None, **settings})
