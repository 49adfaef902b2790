"""A small actor-critic policy in NumPy, for acting one step at a time: a compiled call costs more than the work in it."""

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, PRNGKeyArray

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Network, PyTree, Variables
from polyak.networks.actor_critic import ActorCritic
from polyak.networks.layers import range_of_means
from polyak.ops.normalizer import ObsNormalizer

Numbers: TypeAlias = npt.NDArray[Any]

# Each writes over its argument.
ACTIVATIONS: dict[str, Callable[[Numbers], object]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, np.float32(0.0), out=x),
}

MOST_PRODUCTS = 2**17
"""Multiplications in one layer, up to which NumPy's library of matrix products stays on one thread."""


def suits_numpy(network: Network, spec: EnvSpec, num_envs: int) -> bool:
    """The network is a small `mlp`, from one vector to one Discrete or Box action without masks."""
    return not spec.has_action_mask and num_envs <= most_rows(network, spec)


def most_rows(network: Network, spec: EnvSpec) -> int:
    """How many observations at once an `mlp` from one vector to one Discrete or Box action is small for; 0 for all else."""
    if not isinstance(network, ActorCritic) or network.activation not in ACTIVATIONS:
        return 0
    if network.std != "free" or not network.hidden:
        return 0
    if not isinstance(spec.obs, Box) or spec.obs.dtype.kind != "f" or not isinstance(spec.action, Discrete | Box):
        return 0
    outputs = spec.action.n if isinstance(spec.action, Discrete) else int(np.prod(spec.action.shape))
    widths = (int(np.prod(spec.obs.shape)), *network.hidden, outputs)
    return MOST_PRODUCTS // max(a * b for a, b in itertools.pairwise(widths))


def action_noise(spec: EnvSpec, key: PRNGKeyArray, num_envs: int) -> Array:
    """What a sample of the action's distribution draws: uniform numbers for a Discrete action, normal ones for a Box."""
    if isinstance(spec.action, Discrete):
        return jax.random.uniform(key, (num_envs,))[:, None]
    assert isinstance(spec.action, Box), "as suits_numpy says"
    return jax.random.normal(key, (num_envs, *spec.action.shape))


def numpy_actor(
    variables: Variables, normalizer: ObsNormalizer | None, network: Network, spec: EnvSpec, *, squash: bool
) -> Callable[[Numbers, Numbers], Numbers]:
    """`act(obs, noise)`: the sample that the policy of these NumPy arrays draws from this noise, up to rounding.

    Args:
        variables: of an `ActorCritic` that `suits_numpy`.
        normalizer: likewise in NumPy, or None.
        squash: Box actions through tanh.
    """
    answer = _answer(variables, normalizer, network, spec)
    sample: Callable[[Numbers, Numbers], Numbers] = _categorical
    if isinstance(spec.action, Box):
        sample = _normal(variables.params["policy"], spec.action.shape, squash=squash)
    return lambda obs, noise: sample(answer(obs), noise)


def numpy_mode(
    variables: Variables, normalizer: ObsNormalizer | None, network: Network, spec: EnvSpec, *, squash: bool
) -> Callable[[Numbers], Numbers]:
    """`mode(obs)`: the greedy action of the policy of these NumPy arrays, up to rounding; the same bits for the same obs.

    Args:
        squash: Box actions through tanh.
    """
    answer = _answer(variables, normalizer, network, spec)
    if isinstance(spec.action, Discrete):
        return lambda obs: answer(obs).argmax(axis=1).astype(np.int32)
    assert isinstance(spec.action, Box), "as most_rows says"
    shape = (-1, *spec.action.shape)
    return lambda obs: np.tanh(answer(obs).reshape(shape)) if squash else answer(obs).reshape(shape)


def _answer(
    variables: Variables, normalizer: ObsNormalizer | None, network: Network, spec: EnvSpec
) -> Callable[[Numbers], Numbers]:
    """What the policy's last layer says of observations: logits, or the mean of a Box action."""
    assert isinstance(network, ActorCritic), "as suits_numpy says"
    activate = ACTIVATIONS[network.activation]
    layers = variables.params["actor"]["dense"]["layers"]
    dense = [(layers[i]["kernel"], layers[i]["bias"]) for i in range(len(network.hidden))]
    head, head_bias = (variables.params["policy"]["linear"][name] for name in ("kernel", "bias"))
    scaled, into_bounds = _scaling(normalizer), _squashing(network, spec)

    def answer(obs: Numbers) -> Numbers:
        x = scaled(obs.reshape(obs.shape[0], -1))
        for kernel, bias in dense:
            x = x @ kernel
            x += bias
            activate(x)
        out: Numbers = x @ head
        out += head_bias
        into_bounds(out)
        return out

    return answer


def _squashing(network: ActorCritic, spec: EnvSpec) -> Callable[[Numbers], None]:
    """What writes squashed means over flat ones."""
    if not (network.squash_mean and isinstance(spec.action, Box)):
        return lambda loc: None
    middle, half_range = (x.reshape(1, -1) for x in range_of_means(spec, spec.action))

    def into_bounds(loc: Numbers) -> None:
        np.tanh(loc, out=loc)
        loc *= half_range
        loc += middle

    return into_bounds


def _scaling(normalizer: ObsNormalizer | None) -> Callable[[Numbers], Numbers]:
    """The normalisation of flat observations by statistics that stay as they are."""
    if normalizer is None or normalizer.stats is None:
        return lambda x: x
    stats, clip = normalizer.stats, np.float32(np.inf if normalizer.clip is None else normalizer.clip)
    mean, rest, deviation = (np.asarray(x).reshape(1, -1) for x in (stats.mean, stats.mean_rest, stats.stddev()))
    return lambda x: np.clip((x - mean - rest) / deviation, -clip, clip)


def _categorical(logits: Numbers, uniform: Numbers) -> Numbers:
    """By the inverse of the cumulative probabilities, as `ops.discrete`; in a row with a NaN the first action."""
    logits -= np.maximum.reduce(logits, axis=1, keepdims=True)
    sums = np.add.accumulate(np.exp(logits, out=logits), axis=1)
    threshold = uniform * sums[:, -1:]
    return np.add.reduce(threshold >= sums[:, :-1], axis=1, dtype=np.int32)


def _normal(policy: PyTree, shape: tuple[int, ...], *, squash: bool) -> Callable[[Numbers, Numbers], Numbers]:
    scale = np.exp(policy["log_std"]["all"])

    def sample(loc: Numbers, noise: Numbers) -> Numbers:
        drawn: Numbers = loc.reshape(-1, *shape) + scale * noise
        return np.tanh(drawn, out=drawn) if squash else drawn

    return sample
