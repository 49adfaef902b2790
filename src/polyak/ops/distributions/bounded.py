"""Distributions over bounded real vectors: uniform, and normal clipped to the bounds."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.struct import static, struct
from polyak.ops.distributions.events import check_same_kind, sum_event

# The standard deviation used in densities if scale is 0 (such as at the end of a schedule).
SMALLEST_SCALE = 1e-8


@struct
class Uniform:
    """Independent uniform variables between bounds; with equal bounds, a constant.

    Attributes:
        low: `[*B, *event]`, finite.
        high: as low, not below it.
        event_ndims: number of trailing dimensions of one event.
        slack: tolerance of the bounds in `log_prob`; None for 0.
    """

    low: Float[Array, "..."]
    high: Float[Array, "..."]
    event_ndims: int = static(default=0)
    slack: Float[Array, "..."] | None = None

    def sample(self, *, seed: PRNGKeyArray) -> Float[Array, "..."]:
        """A number in [low, high]."""
        fraction = jax.random.uniform(seed, self.low.shape, self.low.dtype)
        # Not low + fraction * (high - low): the range of a wide box overflows.
        return jnp.clip((1.0 - fraction) * self.low + fraction * self.high, self.low, self.high)

    def log_prob(self, value: Float[Array, "..."]) -> Float[Array, "*B"]:
        """-Σ log(high - low) between the bounds, -inf elsewhere."""
        slack = 0.0 if self.slack is None else self.slack
        is_inside = (value >= self.low - slack) & (value <= self.high + slack)
        return sum_event(jnp.where(is_inside, -self._log_range(), -jnp.inf), self.event_ndims)

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Float[Array, "..."], Float[Array, "*B"]]:
        """A sample and its log-density."""
        return self.sample(seed=seed), -self.entropy()

    def entropy(self) -> Float[Array, "*B"]:
        """Σ log(high - low)."""
        return sum_event(self._log_range(), self.event_ndims)

    def mode(self) -> Float[Array, "..."]:
        """The middle; the density is the same everywhere."""
        return 0.5 * self.low + 0.5 * self.high

    def kl_divergence(self, other: "Uniform") -> Float[Array, "*B"]:
        """The difference of the entropies where `other` covers self, else inf."""
        check_same_kind(self, other)
        covered = (other.low <= self.low) & (other.high >= self.high)
        return sum_event(jnp.where(covered, other._log_range() - self._log_range(), jnp.inf), self.event_ndims)

    def affine(self, shift: Float[Array, "..."], scale: Float[Array, "..."]) -> "Uniform":
        """The distribution of shift + scale · value, scale above 0."""
        slack = _slack(self, shift, scale)
        return Uniform(shift + scale * self.low, shift + scale * self.high, self.event_ndims, slack)

    def _log_range(self) -> Float[Array, "..."]:
        # Halved, so that the range of a wide box does not overflow.
        half = 0.5 * self.high - 0.5 * self.low
        return jnp.where(
            half > (0.0 if self.slack is None else self.slack), jnp.log(jnp.where(half > 0, half, 1.0)) + math.log(2.0), 0.0
        )


@struct
class ClippedNormal:
    """Independent clip(u, low, high) of normal variables u ~ N(loc, scale²): a bounded action with Gaussian noise.

    It has the density of the normal between the bounds, and on each bound the probability mass beyond it. `log_prob` is the
    logarithm of the density or of the mass; `entropy` and `kl_divergence` include both.

    Attributes:
        loc: `[*B, *event]`, the mean before clipping.
        scale: standard deviation before clipping, shaped as loc; 0 counts as 10⁻⁸ in densities.
        low: as loc; may be -inf.
        high: as loc, not below low; may be inf.
        event_ndims: number of trailing dimensions of one event.
        slack: tolerance of the bounds in `log_prob`; None for 0.
    """

    loc: Float[Array, "..."]
    scale: Float[Array, "..."]
    low: Float[Array, "..."]
    high: Float[Array, "..."]
    event_ndims: int = static(default=0)
    slack: Float[Array, "..."] | None = None

    def sample(self, *, seed: PRNGKeyArray) -> Float[Array, "..."]:
        """A sample, between the bounds."""
        return self._clip_sample(jax.random.normal(seed, self.loc.shape, self.loc.dtype))

    def log_prob(self, value: Float[Array, "..."]) -> Float[Array, "*B"]:
        """Σ log density between the bounds, log probability on them; values beyond count as on the bound."""
        return self._log_density(value, (value - self.loc) / self._scale())

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Float[Array, "..."], Float[Array, "*B"]]:
        """A sample clip(loc + scale · ε) and its log-density, exact where loc + scale · ε rounds to loc."""
        noise = jax.random.normal(seed, self.loc.shape, self.loc.dtype)
        value = self._clip_sample(noise)
        return value, self._log_density(value, noise * (self.scale / self._scale()))

    def _clip_sample(self, noise: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.clip(self.loc + self.scale * noise, self.low, self.high)

    def _log_density(self, value: Float[Array, "..."], z: Float[Array, "..."]) -> Float[Array, "*B"]:
        inside = -0.5 * jnp.square(z) - self._log_norm()
        below, above = self._log_masses()
        slack = 0.0 if self.slack is None else self.slack
        each = jnp.where(value <= self.low + slack, below, jnp.where(value >= self.high - slack, above, inside))
        return sum_event(jnp.where(self._is_constant(), 0.0, each), self.event_ndims)

    def entropy(self) -> Float[Array, "*B"]:
        """-Σ (∫ p log p between the bounds + Σ P log P on them)."""
        mass, _, second = self._inside()
        on_bounds = sum(jnp.exp(p) * jnp.where(p > -jnp.inf, p, 0.0) for p in self._log_masses())
        each = mass * self._log_norm() + 0.5 * second - on_bounds
        return sum_event(jnp.where(self._is_constant(), 0.0, each), self.event_ndims)

    def mode(self) -> Float[Array, "..."]:
        """`loc`, clipped: the action without its noise."""
        return jnp.clip(self.loc, self.low, self.high)

    def kl_divergence(self, other: "ClippedNormal") -> Float[Array, "*B"]:
        """KL divergence; both must have the same bounds."""
        check_same_kind(self, other)
        mass, first, second = self._inside()
        distance, scale = self.loc - other.loc, self._scale()
        squares = second * jnp.square(scale) + 2.0 * first * distance * scale + mass * jnp.square(distance)
        inside = mass * (other._log_norm() - self._log_norm()) - 0.5 * second + 0.5 * squares / jnp.square(other._scale())
        masses = zip(self._log_masses(), other._log_masses(), strict=True)
        on_bounds = sum(jnp.exp(p) * jnp.where(p > -jnp.inf, p - q, 0.0) for p, q in masses)
        return sum_event(jnp.where(self._is_constant(), 0.0, inside + on_bounds), self.event_ndims)

    def affine(self, shift: Float[Array, "..."], scale: Float[Array, "..."]) -> "ClippedNormal":
        """The distribution of shift + scale · value, scale above 0."""
        low, high = shift + scale * self.low, shift + scale * self.high
        slack = _slack(self, shift, scale)
        return ClippedNormal(shift + scale * self.loc, scale * self.scale, low, high, self.event_ndims, slack)

    def _is_constant(self) -> Bool[Array, "..."]:
        """True where the bounds are equal (within `slack`)."""
        return (self.low == self.high) if self.slack is None else (self.high - self.low <= self.slack)

    def _scale(self) -> Float[Array, "..."]:
        return jnp.maximum(self.scale, SMALLEST_SCALE)

    def _log_norm(self) -> Float[Array, "..."]:
        return jnp.log(self._scale()) + 0.5 * math.log(2 * math.pi)

    def _ends(self) -> tuple[Array, Array]:
        return (self.low - self.loc) / self._scale(), (self.high - self.loc) / self._scale()

    def _log_masses(self) -> tuple[Array, Array]:
        """The logarithms of the probabilities on the bounds."""
        low, high = self._ends()
        return log_ndtr(low), log_ndtr(-high)

    def _inside(self) -> tuple[Array, Array, Array]:
        """E[1], E[z], E[z²] restricted to u between the bounds, with z = (u - loc) / scale."""
        below, above = self._log_masses()
        mass = jnp.maximum(-jnp.expm1(jnp.logaddexp(below, above)), 0.0)
        (low, at_low), (high, at_high) = ((end, _density(end)) for end in self._ends())
        ends = jnp.where(at_low > 0, low * at_low, 0.0) - jnp.where(at_high > 0, high * at_high, 0.0)
        return mass, at_low - at_high, mass + ends


@struct
class Affine:
    """The distribution of shift + scale · x, for a continuous vector x.

    Attributes:
        inner: the distribution of x.
        shift: as x.
        scale: as x, above 0.
        event_ndims: number of trailing dimensions of one event.
    """

    inner: Any
    shift: Float[Array, "..."]
    scale: Float[Array, "..."]
    event_ndims: int = static(default=0)

    def sample(self, *, seed: PRNGKeyArray) -> Float[Array, "..."]:
        """Shift + scale · inner sample."""
        return self.shift + self.scale * self.inner.sample(seed=seed)

    def log_prob(self, value: Float[Array, "..."]) -> Float[Array, "*B"]:
        """The density log p((value - shift) / scale) - Σ log scale."""
        return self.inner.log_prob((value - self.shift) / self.scale) - self._log_scale()

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Float[Array, "..."], Float[Array, "*B"]]:
        """The transformed inner sample and its log-density, as exact as the inner ones."""
        value, log_prob = self.inner.sample_and_log_prob(seed=seed)
        return self.shift + self.scale * value, log_prob - self._log_scale()

    def entropy(self) -> Float[Array, "*B"]:
        """The inner entropy + Σ log scale."""
        return self.inner.entropy() + self._log_scale()

    def mode(self) -> Float[Array, "..."]:
        """Shift + scale · inner mode."""
        return self.shift + self.scale * self.inner.mode()

    def kl_divergence(self, other: "Affine") -> Float[Array, "*B"]:
        """The inner KL divergence; both must have the same shift and scale."""
        check_same_kind(self, other)
        return self.inner.kl_divergence(other.inner)

    def _log_scale(self) -> Float[Array, "*B"]:
        return sum_event(jnp.log(self.scale), self.event_ndims)


def _slack(distribution: Uniform | ClippedNormal, shift: Array, scale: Array) -> Array:
    """A few float32 roundings of shift + scale · bound: two compiled programs may differ in its last bit."""
    sizes = (jnp.where(jnp.isfinite(bound), jnp.abs(bound), 0.0) for bound in (distribution.low, distribution.high))
    rounding = 4.0 * float(np.finfo(np.float32).eps) * (jnp.abs(shift) + scale * jnp.maximum(*sizes))
    return rounding if distribution.slack is None else rounding + scale * distribution.slack


def _density(z: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.exp(-0.5 * jnp.square(z)) / math.sqrt(2 * math.pi)
