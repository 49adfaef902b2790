"""Distributions over choices: Categorical and MultiCategorical, with action masks, and Bernoulli."""

import itertools
from collections.abc import Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8, Int32, PRNGKeyArray

from polyak.core.struct import static, struct
from polyak.ops.distributions.events import add, check_same_kind, sample_and_log_prob, sum_event

Mask: TypeAlias = Bool[Array, "..."] | Bool[np.ndarray, "..."]

UNROLLED_ACTIONS = 32
"""Up to this number of actions, the cumulative probabilities are a chain of additions in one fused kernel."""


def where_allowed(x: Float[Array, "*B n"], mask: Mask | None) -> Float[Array, "*B n"]:
    """Numbers of n actions, -inf for forbidden actions; unchanged if all are forbidden, as at the end of an episode.

    >>> where_allowed(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[True, False], [False, False]])).tolist()
    [[1.0, -inf], [3.0, 4.0]]
    """
    if mask is None:
        return x
    mask = jnp.asarray(mask)
    return jnp.where(mask | ~mask.any(-1, keepdims=True), x, -jnp.inf)


@struct
class Categorical:
    """One of n actions, P(i) = exp(logits_i) / Σ_j exp(logits_j) over the allowed actions j.

    A forbidden action has probability exactly 0 and `log_prob` -inf; so has a value outside 0, ..., n-1. Entropy and
    divergence are finite and their gradient with respect to a forbidden logit is 0. (KL is inf where `other` forbids an
    action that self allows.) A mask that forbids all actions raises; traced under `jit`, it is ignored.

    Attributes:
        logits: `[*B, n]`, up to a constant; -inf forbids an action.
        mask: `[*B, n]`, True where an action is allowed; None allows all.

    Raises:
        ValueError: the mask and logits differ in shape, or a row of the mask allows no action.
    """

    logits: Float[Array, "*B n"]
    mask: Mask | None = None

    def __post_init__(self) -> None:
        _check_mask("Categorical", self.logits, self.mask)

    def sample(self, *, seed: PRNGKeyArray) -> Int32[Array, "*B"]:
        """Sample an allowed action. Probabilities below 2⁻²³ are rounded to 0 or 2⁻²³."""
        logits = self._allowed_logits()
        return _inverse_cdf(logits, jax.random.uniform(seed, logits.shape[:-1], logits.dtype))

    def log_prob(self, value: Int[Array, "*B"]) -> Float[Array, "*B"]:
        """The logarithm of P(value)."""
        # A masked sum instead of a gather, whose gradient is a scatter, which XLA does not fuse.
        log_probs = self.log_probs()
        actions = jax.lax.broadcasted_iota(jnp.int32, log_probs.shape, log_probs.ndim - 1)
        is_value = actions == value[..., None].astype(jnp.int32)
        return jnp.where(is_value.any(-1), jnp.sum(jnp.where(is_value, log_probs, 0.0), -1), -jnp.inf)

    sample_and_log_prob = sample_and_log_prob

    def log_probs(self) -> Float[Array, "*B n"]:
        """Log P of every action; -inf for forbidden ones."""
        return jax.nn.log_softmax(self._allowed_logits(), axis=-1)

    def probs(self) -> Float[Array, "*B n"]:
        """P of every action."""
        return jnp.exp(self.log_probs())

    def entropy(self) -> Float[Array, "*B"]:
        """-Σ_i P(i) log P(i), where 0 log 0 = 0."""
        log_probs = self.log_probs()
        # `where` inside the product, so that the derivative has no 0 · inf = NaN.
        return -jnp.sum(jnp.exp(log_probs) * jnp.where(jnp.exp(log_probs) > 0, log_probs, 0.0), -1)

    def mode(self) -> Int32[Array, "*B"]:
        """The most probable action; the first one of ties."""
        return jnp.argmax(self._allowed_logits(), axis=-1).astype(jnp.int32)

    def kl_divergence(self, other: "Categorical") -> Float[Array, "*B"]:
        """Σ_i P(i) (log P(i) - log Q(i))."""
        check_same_kind(self, other)
        log_p, log_q = self.log_probs(), other.log_probs()
        return jnp.sum(jnp.exp(log_p) * jnp.where(jnp.exp(log_p) > 0, log_p - log_q, 0.0), -1)

    def _allowed_logits(self) -> Float[Array, "*B n"]:
        return where_allowed(self.logits, self.mask)


@struct
class MultiCategorical:
    """A vector of independent categorical choices, the i-th of `nvec[i]` actions.

    Attributes:
        logits: `[*B, Σ nvec]`, concatenated over the choices.
        nvec: number of actions of each choice.
        mask: as the logits, True where allowed; None allows all.

    Raises:
        ValueError: the logits are not Σ nvec wide, the mask differs in shape, or it allows no action of a choice.
    """

    logits: Float[Array, "*B sum"]
    nvec: tuple[int, ...] = static()
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if self.logits.shape[-1:] != (sum(self.nvec),):
            raise ValueError(
                f"MultiCategorical: logits must be {sum(self.nvec)} wide for nvec {self.nvec}, got {self.logits.shape}"
            )
        if self.mask is not None:
            for a, b in self._bounds():
                _check_mask("MultiCategorical", self.logits[..., a:b], self.mask[..., a:b])

    def sample(self, *, seed: PRNGKeyArray) -> Int32[Array, "*B choices"]:
        """Sample allowed actions."""
        uniform = jax.random.uniform(seed, (*self.logits.shape[:-1], len(self.nvec)), self.logits.dtype)
        actions = [_inverse_cdf(c._allowed_logits(), uniform[..., i]) for i, c in enumerate(self._choices())]
        return jnp.stack(actions, axis=-1)

    def log_prob(self, value: Int[Array, "*B choices"]) -> Float[Array, "*B"]:
        """Σ_i log P(value_i)."""
        return add(c.log_prob(value[..., i]) for i, c in enumerate(self._choices()))

    sample_and_log_prob = sample_and_log_prob

    def entropy(self) -> Float[Array, "*B"]:
        """The sum of the choices' entropies."""
        return add(c.entropy() for c in self._choices())

    def mode(self) -> Int32[Array, "*B choices"]:
        """The most probable action of each choice."""
        return jnp.stack([c.mode() for c in self._choices()], axis=-1)

    def kl_divergence(self, other: "MultiCategorical") -> Float[Array, "*B"]:
        """The sum of the choices' divergences."""
        check_same_kind(self, other)
        return add(p.kl_divergence(q) for p, q in zip(self._choices(), other._choices(), strict=True))

    def _choices(self) -> list[Categorical]:
        mask = self.mask
        return [Categorical(self.logits[..., a:b], None if mask is None else mask[..., a:b]) for a, b in self._bounds()]

    def _bounds(self) -> Iterable[tuple[int, int]]:
        return itertools.pairwise(itertools.accumulate(self.nvec, initial=0))


@struct
class Bernoulli:
    """Independent zeros and ones, P(1) = sigmoid(logits).

    Attributes:
        logits: `[*B, *event]`, finite.
        event_ndims: number of trailing dimensions of one event.
    """

    logits: Float[Array, "..."]
    event_ndims: int = static(default=0)

    def sample(self, *, seed: PRNGKeyArray) -> Int8[Array, "..."]:
        """Zeros and ones."""
        uniform = jax.random.uniform(seed, self.logits.shape, self.logits.dtype)
        return (uniform < self.mean()).astype(jnp.int8)

    def log_prob(self, value: Int[Array, "..."] | Bool[Array, "..."]) -> Float[Array, "*B"]:
        """Σ log P(value); anything but 0 counts as 1."""
        return sum_event(jax.nn.log_sigmoid(jnp.where(value.astype(bool), self.logits, -self.logits)), self.event_ndims)

    sample_and_log_prob = sample_and_log_prob

    def entropy(self) -> Float[Array, "*B"]:
        """Σ -P(1) log P(1) - P(0) log P(0)."""
        return sum_event(jax.nn.softplus(self.logits) - self.logits * self.mean(), self.event_ndims)

    def mode(self) -> Int8[Array, "..."]:
        """1 where it is more probable than 0."""
        return (self.logits > 0).astype(jnp.int8)

    def mean(self) -> Float[Array, "..."]:
        """P(1)."""
        return jax.nn.sigmoid(self.logits)

    def kl_divergence(self, other: "Bernoulli") -> Float[Array, "*B"]:
        """Σ P(1) log(P(1)/Q(1)) + P(0) log(P(0)/Q(0))."""
        check_same_kind(self, other)
        one = self.mean() * (jax.nn.log_sigmoid(self.logits) - jax.nn.log_sigmoid(other.logits))
        zero = jax.nn.sigmoid(-self.logits) * (jax.nn.log_sigmoid(-self.logits) - jax.nn.log_sigmoid(-other.logits))
        return sum_event(one + zero, self.event_ndims)


def _inverse_cdf(logits: Float[Array, "*B n"], uniform: Float[Array, "*B"]) -> Int32[Array, "*B"]:
    """The first i with Σ_{j<=i} P(j) > u: one random number per sample, where the Gumbel trick takes n.

    2,048 rows on two CPU cores: 46 us for 6 actions against 101, 160 us for 18 against 880; 64 rows: 13 us either way.

    An action of probability 0 is never sampled. The sums never fall and a forbidden action adds 0 to them, so its interval
    is empty; and for every float32 u below 1, `u * total` is below `total` after rounding too. A row with a NaN samples
    uniformly from the allowed actions: its loss is skipped elsewhere, but the environment must not get a forbidden action.
    """
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(jnp.isnan(weights), jnp.where(logits == -jnp.inf, 0.0, 1.0), weights)
    n = logits.shape[-1]
    if n <= UNROLLED_ACTIONS:
        sums = list(itertools.accumulate(weights[..., i] for i in range(n)))
        threshold = uniform * sums[-1]
        return add([jnp.zeros(uniform.shape, jnp.int32), *((threshold >= s).astype(jnp.int32) for s in sums[:-1])])
    # jnp.cumsum adds in tree order, so its sums may decrease by a rounding error: mask actions of probability 0.
    cdf = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
    return jnp.argmax(cdf > uniform[..., None] * jnp.max(cdf, axis=-1, keepdims=True), axis=-1).astype(jnp.int32)


def _check_mask(owner: str, logits: Array, mask: Mask | None) -> None:
    if mask is None:
        return
    if mask.shape != logits.shape:
        raise ValueError(f"{owner}: mask must have the shape of logits, got mask {mask.shape}, logits {logits.shape}")
    if not isinstance(mask, jax.core.Tracer) and not np.all(np.any(np.asarray(mask), axis=-1)):
        rows = np.argwhere(~np.any(np.asarray(mask), axis=-1)).tolist()
        raise ValueError(f"{owner}: mask must allow at least one action in every row, got none in row {rows[0]}")
