"""The actor that explores in BRO: the actor's distribution with means that a second network shifts."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import EnvSpec, map_space
from polyak.core.types import Network, PyTree, Scalar, Variables
from polyak.networks.flow import apply_to_noise, noise_spec

MIN_LOG, MAX_LOG = -10.0, 7.5
"""Bounds of the logarithms of `bounded_exp`, the authors'."""


@dataclass(frozen=True)
class OptimisticActor:
    """Returns `(action_params, None)` of π_o = N(μ(s) + f(s, μ(s)), (c σ(s))²), before tanh, with variables of `join_actors`.

    Attributes:
        actor: the network of μ and σ, which returns `(action_params, value)`.
        shift: the network of f, which returns `(action_params, value)` with f as `loc`; its observation is a Tuple of the
            actor's observation and μ, which takes the place of the noise in `polyak.networks.flow`.
        spec: the spaces as the actor sees them; actions are Boxes, or trees of them.
    """

    actor: Network
    shift: Network
    spec: EnvSpec

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create the variables of both networks, with c = 1."""
        keys = jax.random.split(key)
        shift = self.shift.init(keys[1], noise_spec(spec, has_time=False))
        return join_actors(self.actor.init(keys[0], spec), shift, 1.0)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((action_params, None), carry, stats)` for obs leaves `[B, ...]`, in evaluation mode."""
        actor, shift, std_scale = variables.params
        (params, _), _, _ = self.actor.apply(actor, obs)
        step, _ = apply_to_noise(self.shift, shift, self.spec, (obs, means(self.spec, params)))
        return (shift_params(self.spec, params, step, std_scale), None), carry, variables.stats


def join_actors(actor: Variables, shift: Variables, std_scale: Scalar) -> Variables:
    """The variables of an `OptimisticActor`; `std_scale` is c."""
    weights: Any = (actor, shift, jnp.asarray(std_scale, jnp.float32))
    return Variables(weights)


def means(spec: EnvSpec, params: PyTree) -> PyTree:
    """μ in the tree of the action."""
    return map_space(lambda leaf, params: params["loc"], spec.action, params)


def shift_params(spec: EnvSpec, params: PyTree, shift: PyTree, std_scale: Scalar) -> PyTree:
    """The parameters of π_o, of the actor's parameters, f and c."""
    log_scale = jnp.log(jnp.asarray(std_scale, jnp.float32))
    return map_space(
        lambda leaf, params, shift: {"loc": params["loc"] + shift, "log_scale": params["log_scale"] + log_scale},
        spec.action,
        params,
        shift,
    )


def kl_of_shift(spec: EnvSpec, params: PyTree, shift: PyTree) -> Float[Array, " B"]:
    """Σ_d ½ (f_d / σ_d)², the KL divergence of N(μ + f, σ²) and N(μ, σ²), in either order."""

    def of_leaf(leaf: Any, params: PyTree, shift: Array) -> Float[Array, " B"]:
        ratio = shift * jnp.exp(-params["log_scale"])
        return jnp.sum(0.5 * jnp.square(ratio).reshape(len(ratio), -1), axis=1)

    return jax.tree.reduce(jnp.add, map_space(of_leaf, spec.action, params, shift))


def bounded_exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """A positive number of any real one, exp(-10 + 8.75 (1 + tanh x)), between e⁻¹⁰ and e^7.5."""
    return jnp.exp(MIN_LOG + (MAX_LOG - MIN_LOG) / 2 * (1 + jnp.tanh(x)))


def inverse_bounded_exp(y: Scalar) -> Float[Array, ""]:
    """The inverse of `bounded_exp`.

    >>> bounded_exp(inverse_bounded_exp(0.25)).round(5)
    Array(0.25, dtype=float32)
    """
    return jnp.arctanh((jnp.log(jnp.asarray(y, jnp.float32)) - MIN_LOG) * 2 / (MAX_LOG - MIN_LOG) - 1)
