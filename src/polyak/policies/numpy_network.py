"""Small networks in NumPy: the sample, or the mode, of a policy for a batch of observations.

The forward pass is in `numpy_reader`, the file that is exported with the weights.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, PRNGKeyArray

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Network, PyTree, Variables
from polyak.networks.actor import Actor
from polyak.networks.feedforward import FeedForward, policy_settings
from polyak.networks.heads import PolicySettings, QValues
from polyak.networks.policy_head import LOG_STD_RANGE, range_of_means
from polyak.ops.normalize import ROUNDING, ObsNormalizer, RunningStats
from polyak.policies.numpy_reader import make_network

Numbers: TypeAlias = npt.NDArray[Any]

# Activations that NumPy computes in one pass.
FAST_ACTIVATIONS = ("tanh", "relu")

MAX_ACT_PRODUCTS = 2**17
"""Largest number of multiplications in a layer for which NumPy uses one thread, which leaves the others to environments."""

MAX_PREDICT_PRODUCTS = 2**19
"""Largest number of multiplications in a layer for which `predict` in NumPy is faster than a call of JAX."""

PRODUCT_ROWS = 4
"""Observations of one matrix product. One of more rows may be computed, and rounded, in another way: workers, which have parts
of a batch, would differ from one process."""


def suits_numpy(network: Network, spec: EnvSpec, num_envs: int, *, with_value: bool = False) -> bool:
    """Return True for a small `MLP` from one vector to one Discrete or Box action without masks.

    Args:
        with_value: the value is needed too, so the critic's layers must be small.
    """
    settings = policy_settings(network)
    if isinstance(network, Actor):
        is_plain = network.std != "sde" and not network.squash_mean and not with_value
    else:
        is_plain = settings.std == "free" if settings is not None else not with_value
    largest = max_batch_size(network, spec, MAX_ACT_PRODUCTS, with_value=with_value)
    return is_plain and not spec.has_action_mask and num_envs <= largest


def max_batch_size(network: Network, spec: EnvSpec, products: int, *, with_value: bool = False) -> int:
    """The batch size up to which an `MLP` from one vector to one Discrete or Box action is small; 0 for others.

    Args:
        products: multiplications in one layer.
        with_value: count the critic's layers too.
    """
    if not isinstance(network, FeedForward | Actor) or not has_plain_layers(network):
        return 0
    critic = network.critic if with_value and isinstance(network, FeedForward) else None
    layers = [dense for dense in (network.dense, critic) if dense is not None]
    if not all(dense.hidden and dense.activation in FAST_ACTIVATIONS for dense in layers):
        return 0
    if not isinstance(spec.obs, Box) or spec.obs.dtype.kind != "f" or not isinstance(spec.action, Discrete | Box):
        return 0
    outputs = spec.action.n if isinstance(spec.action, Discrete) else int(np.prod(spec.action.shape))
    if isinstance(network, Actor) and network.std == "state" and isinstance(spec.action, Box):
        # A sample takes the means and the standard deviations from one product.
        outputs *= 2
    widths = [(int(np.prod(spec.obs.shape)), *dense.hidden, outputs) for dense in layers]
    return products // max(a * b for row in widths for a, b in itertools.pairwise(row))


def has_plain_layers(network: FeedForward | Actor) -> bool:
    """Return True if each layer is a matrix product and an activation, and the outputs are action parameters or values."""
    dense, has_own_layers = network.dense, isinstance(network, Actor) and (network.residual or network.squash_log_std)
    if dense.noisy or dense.norm or has_own_layers:
        return False
    head = network if isinstance(network, Actor) else network.head
    return isinstance(head, PolicySettings) or (isinstance(head, QValues) and head.outputs is None)


def action_noise(spec: EnvSpec, key: PRNGKeyArray, num_envs: int) -> Array:
    """The noise of a sample of the action's distribution: uniform numbers for a Discrete action, normal ones for a Box."""
    if isinstance(spec.action, Discrete):
        return jax.random.uniform(key, (num_envs,), np.float32)[:, None]
    assert isinstance(spec.action, Box), "as suits_numpy says"
    return jax.random.normal(key, (num_envs, *spec.action.shape), np.float32)


def numpy_sampler(
    variables: Variables,
    normalizer: ObsNormalizer | None,
    network: Network,
    spec: EnvSpec,
    *,
    squash: bool,
    return_info: bool = False,
) -> Callable[[Numbers, Numbers], tuple[Numbers, PyTree]]:
    """`act(obs, noise)`: the sample that the policy of these NumPy arrays draws with this noise, up to rounding, and its info.

    Args:
        variables: NumPy arrays of a network that `suits_numpy`.
        normalizer: a normalizer of NumPy arrays, or None.
        squash: Box actions through tanh.
        return_info: info is the value and the action's parameters, as of `NetworkPolicy`; else `()`.
    """
    if isinstance(network, Actor) and isinstance(spec.action, Box):
        return _actor_sampler(variables, normalizer, network, spec.action.shape, squash=squash)
    output = _output(variables, normalizer, network, spec)
    sample: Callable[[Numbers, Numbers], Numbers] = _sample_categorical
    if isinstance(spec.action, Box):
        sample = _normal_sampler(variables.params["policy"], spec.action.shape, squash=squash)
    if not return_info:
        return lambda obs, noise: (sample(output(obs), noise), ())
    value, params_of = _value(variables, normalizer, network), _params_of(variables.params["policy"], spec)

    def act(obs: Numbers, noise: Numbers) -> tuple[Numbers, PyTree]:
        out = output(obs)
        info = {"params": params_of(out), "value": value(obs)}
        return sample(out, noise), info

    return act


def numpy_mode(
    variables: Variables, normalizer: ObsNormalizer | None, network: Network, spec: EnvSpec, *, squash: bool
) -> Callable[[Numbers], Numbers]:
    """`mode(obs)`: the greedy action of the policy of these NumPy arrays, up to rounding; the same bits for the same obs.

    Args:
        squash: Box actions through tanh.
    """
    output = _output(variables, normalizer, network, spec)
    if isinstance(spec.action, Discrete):
        return lambda obs: output(obs).argmax(axis=1).astype(np.int32)
    assert isinstance(spec.action, Box), "as max_batch_size says"
    shape = (-1, *spec.action.shape)
    return lambda obs: np.tanh(output(obs).reshape(shape)) if squash else output(obs).reshape(shape)


def network_arrays(
    network: FeedForward | Actor, params: PyTree, normalizer: ObsNormalizer | None, spec: EnvSpec
) -> dict[str, Numbers]:
    """The arrays of `numpy_reader.make_network` for the actor of an `MLP`, or for action values up to a constant of each row.

    The value of a dueling network is such a constant: neither the best action nor a softmax depends on it.
    """
    if policy_settings(network) is None:
        return _arrays(params, params["head"]["advantage"], normalizer)
    arrays = _arrays(params["actor"], params["policy"]["linear"], normalizer)
    # Logits are not clipped.
    limit = network.clip_mean if isinstance(network, Actor) and isinstance(spec.action, Box) else None
    return arrays if limit is None else {**arrays, "clip_mean": np.array([limit], np.float32)}


def _arrays(torso: PyTree, head: PyTree, normalizer: ObsNormalizer | None) -> dict[str, Numbers]:
    arrays: dict[str, Numbers] = {}
    for i, layer in torso["dense"]["layers"].items():
        arrays |= {f"kernel{i}": np.asarray(layer["kernel"]), f"bias{i}": np.asarray(layer["bias"])}
    arrays |= {"head_kernel": np.asarray(head["kernel"]), "head_bias": np.asarray(head["bias"])}
    # Of one Box, or of the only entry of a Dict.
    all_stats = jax.tree.leaves(normalizer and normalizer.stats, is_leaf=lambda x: isinstance(x, RunningStats))
    if normalizer is None or not all_stats:
        return arrays
    stats, clip = all_stats[0], normalizer.clip
    parts = {"mean": stats.mean, "mean_rest": stats.mean_rest, "deviation": _stddev(stats)}
    arrays |= {name: np.asarray(x).reshape(1, -1) for name, x in parts.items()}
    return {**arrays, "clip": np.array([np.inf if clip is None else clip], np.float32)}


def _stddev(stats: RunningStats) -> Numbers:
    """`stats.stddev()` without JAX, whose call takes longer than the actions of a short rollout in NumPy."""
    variance: Numbers = np.asarray(stats.variance)
    has_variance = variance > np.float32(ROUNDING) * np.square(np.asarray(stats.mean))
    return np.sqrt(np.where(has_variance, variance, np.float32(1.0)) + np.float32(1e-8))


def _output(
    variables: Variables, normalizer: ObsNormalizer | None, network: Network, spec: EnvSpec
) -> Callable[[Numbers], Numbers]:
    """The output of the policy's last layer for observations: logits, action values, or the mean of a Box action."""
    assert isinstance(network, FeedForward | Actor), "as suits_numpy says"
    arrays = network_arrays(network, variables.params, normalizer, spec)
    forward = make_network(arrays, len(network.hidden), network.dense.activation, PRODUCT_ROWS)
    settings = policy_settings(network)
    if settings is None or not (settings.squash_mean and isinstance(spec.action, Box)):
        return forward
    middle, half_range = (x.reshape(1, -1) for x in range_of_means(spec, spec.action))

    def squashed(obs: Numbers) -> Numbers:
        loc: Numbers = forward(obs)
        np.tanh(loc, out=loc)
        loc *= half_range
        loc += middle
        return loc

    return squashed


def _value(variables: Variables, normalizer: ObsNormalizer | None, network: Network) -> Callable[[Numbers], Numbers]:
    """The value of observations."""
    assert isinstance(network, FeedForward), "as suits_numpy says"
    critic, params = network.critic or network.dense, variables.params
    torso = params["critic"] if network.critic else params["actor"]
    forward = make_network(_arrays(torso, params["value"], normalizer), len(critic.hidden), critic.activation, PRODUCT_ROWS)
    return lambda obs: forward(obs)[:, 0]


def _params_of(policy: PyTree, spec: EnvSpec) -> Callable[[Numbers], PyTree]:
    """The parameters of the action's distribution, from the result of `_output`."""
    if isinstance(spec.action, Discrete):
        # A copy, because the sample is computed in the logits' place.
        return lambda logits: logits.copy()
    assert isinstance(spec.action, Box), "as suits_numpy says"
    shape, log_scale = (-1, *spec.action.shape), np.asarray(policy["log_std"]["all"])

    def params_of(loc: Numbers) -> PyTree:
        loc = loc.reshape(shape)
        return {"loc": loc, "log_scale": np.broadcast_to(log_scale, loc.shape)}

    return params_of


def _actor_sampler(
    variables: Variables, normalizer: ObsNormalizer | None, network: Actor, shape: tuple[int, ...], *, squash: bool
) -> Callable[[Numbers, Numbers], tuple[Numbers, PyTree]]:
    """`numpy_sampler` of an actor, whose log standard deviations may be outputs of the last layer, after the means."""
    policy, count = variables.params["policy"], math.prod(shape)
    head, log_std = policy["linear"], np.float32(network.log_std)
    if network.std == "state":
        scales = policy["scales"]["all"]
        head = {name: np.concatenate([head[name], scales[name]], axis=-1) for name in ("kernel", "bias")}
    elif network.std == "free":
        log_std = policy["log_std"]["all"].reshape(-1)
    arrays = _arrays(variables.params["actor"], head, normalizer)
    forward = make_network(arrays, len(network.hidden), network.activation, PRODUCT_ROWS)
    limit = np.float32(np.inf if network.clip_mean is None else network.clip_mean)

    def act(obs: Numbers, noise: Numbers) -> tuple[Numbers, PyTree]:
        out = forward(obs)
        scale = np.exp(np.clip(out[:, count:] if network.std == "state" else log_std, *LOG_STD_RANGE))
        drawn = np.clip(out[:, :count], -limit, limit) + scale * noise.reshape(-1, count)
        drawn = drawn.reshape(-1, *shape)
        return (np.tanh(drawn, out=drawn) if squash else drawn), ()

    return act


def _sample_categorical(logits: Numbers, uniform: Numbers) -> Numbers:
    """By the inverse of the cumulative probabilities, as `ops.distributions.discrete`; the first action for logits with NaN."""
    logits -= np.maximum.reduce(logits, axis=1, keepdims=True)
    sums = np.add.accumulate(np.exp(logits, out=logits), axis=1)
    threshold = uniform * sums[:, -1:]
    return np.add.reduce(threshold >= sums[:, :-1], axis=1, dtype=np.int32)


def _normal_sampler(policy: PyTree, shape: tuple[int, ...], *, squash: bool) -> Callable[[Numbers, Numbers], Numbers]:
    scale = np.exp(policy["log_std"]["all"])

    def sample(loc: Numbers, noise: Numbers) -> Numbers:
        drawn: Numbers = loc.reshape(-1, *shape) + scale * noise
        return np.tanh(drawn, out=drawn) if squash else drawn

    return sample
