"""Networks that make actions of noise: a flow, the integral of a velocity, and the functions of noise in general.

Such a network is any network that returns `(action_params, value)`, such as `Actor(std="fixed")`. Its observation is a Tuple of
an observation and noise, for a velocity also of a time; its output is `loc`. Noise and outputs have the tree of the action.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from polyak.core.spaces import Box, Dict, EnvSpec, Space, Tuple, in_action, leaf_spaces, map_space, needs_bounds
from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.networks.actor import Actor
from polyak.networks.feedforward import policy_settings

MAX_FLOW_STEPS = 100
"""Steps are unrolled in the program, so that it can be exported and convolutions of the observation are computed once."""


def check_flow(owner: str, name: str, network: Network, spec: EnvSpec) -> None:
    """Check that actions are Boxes of floats with finite bounds, and that a network can be the velocity of a flow.

    Args:
        name: the setting of the network, for errors.

    Raises:
        ValueError: a part of the action is something else; the network is recurrent, squashes or clips its output, or computes
            a standard deviation.
    """
    for path, leaf in leaf_spaces(spec.action):
        if not isinstance(leaf, Box) or leaf.dtype.kind != "f":
            raise ValueError(f"{owner}: actions of a flow must be Boxes of floats, got {leaf}{in_action(path)}")
        if not leaf.bounded:
            raise ValueError(f"{owner}: a flow of actions {needs_bounds(leaf, path)}")
    settings = policy_settings(network)
    if isinstance(network, RecurrentNetwork):
        raise ValueError(f"{owner}: {name} must not be recurrent for a flow, got {network!r}")
    if settings is not None and (settings.squash_mean or settings.std != "fixed"):
        raise ValueError(f"{owner}: {name} must have std='fixed' and squash_mean=False for a flow, got {settings!r}")
    if isinstance(settings, Actor) and settings.clip_mean is not None:
        raise ValueError(f"{owner}: {name} must have clip_mean=None for a flow, got {settings!r}")


def noise_spec(spec: EnvSpec, *, has_time: bool) -> EnvSpec:
    """The spec of a network of `(obs, noise)`, or of `(obs, noise, time)`."""
    time = (Box([0.0], [1.0]),) if has_time else ()
    return dataclasses.replace(spec, obs=Tuple((spec.obs, _noise_space(spec.action), *time)), has_action_mask=False)


def sample_noise(action: Space, batch_size: int, key: PRNGKeyArray) -> PyTree:
    """Standard normal numbers in the tree of the action, leaves `[B, ...]`."""
    keys = iter(jax.random.split(key, len(list(leaf_spaces(action)))))
    return map_space(lambda leaf: jax.random.normal(next(keys), (batch_size, *leaf.shape), jnp.float32), action)


def apply_to_noise(
    network: Network,
    variables: Variables,
    spec: EnvSpec,
    inputs: tuple[PyTree, ...],
    *,
    train: bool = False,
    key: PRNGKeyArray | None = None,
) -> tuple[PyTree, PyTree]:
    """The network's output in the tree of the action, leaves `[B, ...]`, and its statistics.

    Args:
        inputs: observation and noise, and for a velocity the time `[B, 1]`.
        train: apply the network in training mode.
        key: for dropout.
    """
    (params, _), _, stats = network.apply(variables, inputs, train=train, key=key)
    return map_space(lambda leaf, params: params["loc"], spec.action, params), stats


def integrate(network: Network, variables: Variables, spec: EnvSpec, obs: PyTree, noise: PyTree, num_steps: int) -> PyTree:
    """The end x_K of a flow that begins at the noise x_0, by Euler's method.

    x_{k+1} = x_k + v(s, x_k, k / K) / K,    K = num_steps
    """
    x, batch_size = noise, len(jax.tree.leaves(noise)[0])
    for k in range(num_steps):
        time = jnp.full((batch_size, 1), k / num_steps, jnp.float32)
        velocity, _ = apply_to_noise(network, variables, spec, (obs, x, time))
        x = jax.tree.map(lambda x, v: x + v / num_steps, x, velocity)
    return x


def _noise_space(action: Space) -> Space:
    match action:
        case Dict():
            return Dict({name: _noise_space(part) for name, part in action.spaces.items()})
        case Tuple():
            return Tuple(tuple(_noise_space(part) for part in action.spaces))
        case _:
            return Box(-np.inf, np.inf, action.shape)
