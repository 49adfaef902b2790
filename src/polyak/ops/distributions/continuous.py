"""Distributions over real vectors: Normal, and TanhNormal for bounded actions."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.struct import static, struct
from polyak.ops.distributions.events import check_same_kind, sum_event


@struct
class Normal:
    """Independent normal variables, N(loc, scale²).

    Attributes:
        loc: `[*B, *event]`, the mean.
        scale: standard deviation, positive, shaped as loc.
        event_ndims: number of trailing dimensions of one event.

    Raises:
        ValueError: loc and scale differ in shape.
    """

    loc: Float[Array, "..."]
    scale: Float[Array, "..."]
    event_ndims: int = static(default=0)

    def __post_init__(self) -> None:
        _check_scale("Normal", self.loc, self.scale)

    def sample(self, *, seed: PRNGKeyArray) -> Float[Array, "..."]:
        """A sample, loc + scale · ε, ε ~ N(0, 1)."""
        return self.loc + self.scale * self._noise(seed)

    def log_prob(self, value: Float[Array, "..."]) -> Float[Array, "*B"]:
        """Σ -((value - loc) / scale)² / 2 - log scale - log √(2π)."""
        return self._log_density((value - self.loc) / self.scale)

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Float[Array, "..."], Float[Array, "*B"]]:
        """A sample loc + scale · ε and Σ -ε² / 2 - log scale - log √(2π), exact where the sample rounds to loc."""
        noise = self._noise(seed)
        return self.loc + self.scale * noise, self._log_density(noise)

    def entropy(self) -> Float[Array, "*B"]:
        """Σ log scale + log √(2πe)."""
        return sum_event(jnp.log(self.scale) + 0.5 * math.log(2 * math.pi * math.e), self.event_ndims)

    def mode(self) -> Float[Array, "..."]:
        """`loc`."""
        return self.loc

    def _noise(self, seed: PRNGKeyArray) -> Float[Array, "..."]:
        return jax.random.normal(seed, self.loc.shape, self.loc.dtype)

    def _log_density(self, z: Float[Array, "..."]) -> Float[Array, "*B"]:
        return sum_event(-0.5 * jnp.square(z) - jnp.log(self.scale) - 0.5 * math.log(2 * math.pi), self.event_ndims)

    def kl_divergence(self, other: "Normal") -> Float[Array, "*B"]:
        """Σ ((loc - loc')/scale')² / 2 + (r² - 1) / 2 - log r with r = scale / scale'."""
        check_same_kind(self, other)
        log_r = jnp.log(self.scale) - jnp.log(other.scale)
        distance = jnp.square((self.loc - other.loc) / other.scale)
        return sum_event(0.5 * distance + 0.5 * jnp.expm1(2 * log_r) - log_r, self.event_ndims)


# Evenly spaced nodes for E[f(ε)], ε ~ N(0, 1). On analytic functions with this weight the trapezoid rule converges
# exponentially, and better than Gauss-Hermite when f saturates: for E[log tanh'(loc + scale ε)] its error is 6e-5 at scale 2
# and 0.02 at 5, that of 24 Gauss-Hermite nodes 6e-4 and 0.05.
_NODES = np.linspace(-5.0, 5.0, 21, dtype=np.float32)
_NODE_WEIGHTS = (np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()).astype(np.float32)


@struct
class TanhNormal:
    """tanh(u) of independent normal variables u ~ N(loc, scale²); actions between -1 and 1.

        log p(a) = log N(u; loc, scale²) - Σ log(1 - a²),    log(1 - tanh² u) = 2 (log 2 - |u| - log(1 + e^(-2|u|)))

    The second form does not cancel where tanh saturates. `log_prob` replaces an action on the boundary by the nearest float
    inside, so it is finite; `sample_and_log_prob` uses u and is exact.

    Attributes:
        loc: `[*B, *event]`, the mean before tanh.
        scale: standard deviation before tanh, positive, shaped as loc.
        event_ndims: number of trailing dimensions of one event.

    Source: Haarnoja et al. 2018, arXiv:1812.05905, appendix C.
    """

    loc: Float[Array, "..."]
    scale: Float[Array, "..."]
    event_ndims: int = static(default=0)

    def __post_init__(self) -> None:
        _check_scale("TanhNormal", self.loc, self.scale)

    def sample(self, *, seed: PRNGKeyArray) -> Float[Array, "..."]:
        """tanh(loc + scale · ε), ε ~ N(0, 1)."""
        return jnp.tanh(self._normal().sample(seed=seed))

    def log_prob(self, value: Float[Array, "..."]) -> Float[Array, "*B"]:
        """The log-density of an action in [-1, 1]; an action outside counts as on the boundary."""
        below_one = 1.0 - float(np.finfo(np.float32).epsneg)
        # Not jnp.clip, which halves the gradient of a value that equals its bound.
        u = jnp.arctanh(jnp.where(jnp.abs(value) <= below_one, value, jnp.sign(value) * below_one))
        return self._normal().log_prob(u) - sum_event(_log_tanh_slope(u), self.event_ndims)

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Float[Array, "..."], Float[Array, "*B"]]:
        """An action and its log-density, exact where tanh saturates."""
        u, log_prob = self._normal().sample_and_log_prob(seed=seed)
        return jnp.tanh(u), log_prob - sum_event(_log_tanh_slope(u), self.event_ndims)

    def entropy(self) -> Float[Array, "*B"]:
        """The normal's entropy + E[log(1 - tanh² u)], the expectation by quadrature: deterministic, with gradients.

        Within 1e-5 per dimension up to scale 1, 1e-4 at 2, 0.02 at 5. There is no closed form.
        """
        return self._normal().entropy() + sum_event(self._expectation(_log_tanh_slope), self.event_ndims)

    def mode(self) -> Float[Array, "..."]:
        """The median tanh(loc), the action without noise; the density may be highest at the boundary."""
        return jnp.tanh(self.loc)

    def kl_divergence(self, other: "TanhNormal") -> Float[Array, "*B"]:
        """KL divergence of the normals; it is invariant under the bijection tanh."""
        check_same_kind(self, other)
        return self._normal().kl_divergence(other._normal())

    def _normal(self) -> Normal:
        return Normal(self.loc, self.scale, self.event_ndims)

    def _expectation(self, f: Callable[[Array], Array]) -> Float[Array, "..."]:
        """E[f(u)], elementwise; f gets all nodes along a new first axis."""
        along_first = (-1,) + (1,) * self.loc.ndim
        values = f(self.loc[None] + self.scale[None] * _NODES.reshape(along_first))
        return jnp.sum(_NODE_WEIGHTS.reshape(along_first) * values, axis=0)


def _log_tanh_slope(u: Array) -> Array:
    """The logarithm of tanh'(u), log(1 - tanh² u), without cancellation."""
    distance = jnp.abs(u)
    return 2.0 * (math.log(2.0) - distance - jnp.log1p(jnp.exp(-2.0 * distance)))


def _check_scale(owner: str, loc: Array, scale: Array) -> None:
    if loc.shape != scale.shape:
        raise ValueError(f"{owner}: loc and scale must have one shape, got loc {loc.shape}, scale {scale.shape}")
