"""Distributions of exploration policies: uniform over a space, ε-greedy, selection per row, and affine transforms."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from polyak.core.spaces import Box, Dict, EnvSpec, Leaf, Tuple, map_space
from polyak.core.struct import struct
from polyak.core.types import PyTree
from polyak.ops.distributions.bounded import Affine, ClippedNormal, Uniform
from polyak.ops.distributions.continuous import Normal
from polyak.ops.distributions.events import check_same_kind, sample_and_log_prob
from polyak.ops.distributions.joint import Deterministic, Distribution, Joint, for_space, parameter_shapes


def uniform_over(spec: EnvSpec, batch_size: int, mask: PyTree = None) -> Distribution:
    """The uniform distribution over the allowed actions of a spec, in the units of the agent.

    Box actions lie between `spec.action_bounds`; for integers the bounds are half a unit wider, so that after rounding all
    are equally probable.

    Args:
        mask: see `for_space`.

    Raises:
        ValueError: as `for_space`, and for a Box without finite bounds.
    """

    def of_leaf(leaf: Leaf, mask: Any) -> Distribution:
        if not isinstance(leaf, Box):
            (shape,) = jax.tree.leaves(parameter_shapes(leaf), is_leaf=lambda x: isinstance(x, tuple))
            return for_space(leaf, jnp.zeros((batch_size, *shape)), mask)
        if not leaf.bounded:
            raise ValueError(f"uniform_over: a Box must have finite bounds, got {leaf}")
        low, high = (jnp.broadcast_to(x, (batch_size, *leaf.shape)) for x in spec.action_bounds(leaf))
        if leaf.dtype.kind != "f":
            span = jnp.broadcast_to(leaf.high.astype("float32") - leaf.low.astype("float32"), low.shape)
            half = 1.0 / jnp.maximum(span, 1.0) if spec.action_scaling == "rescale" else jnp.full_like(low, 0.5)
            low, high = low - half, high + half
        return Uniform(low, high, len(leaf.shape))

    masks = map_space(lambda leaf: None, spec.action) if mask is None else mask
    tree = map_space(of_leaf, spec.action, masks)
    return Joint(tree) if isinstance(spec.action, Dict | Tuple) else tree


@struct
class EpsilonMixture:
    """ε-greedy: one action, or with probability ε a uniformly random one, P(a) = (1 - ε) [a = value] + ε / n.

    Attributes:
        value: the greedy action, which must be allowed; leaves `[B, ...]`.
        uniform: the uniform distribution over the n allowed actions, jointly over the tree.
        epsilon: ε in [0, 1].
    """

    value: PyTree
    uniform: Any
    epsilon: Float[Array, ""]

    def sample(self, *, seed: PRNGKeyArray) -> PyTree:
        """One action for each row."""
        explore_key, action_key = jax.random.split(seed)
        is_random = jax.random.uniform(explore_key, self.uniform.entropy().shape, jnp.float32) < self.epsilon
        return select_rows(is_random.astype(jnp.int32), [self.value, self.uniform.sample(seed=action_key)])

    def log_prob(self, value: PyTree) -> Float[Array, "*B"]:
        """The logarithm of P."""
        # In log space, since ε / n underflows for many parts.
        greedy = jnp.where(Deterministic(self.value).log_prob(value) == 0.0, _log_complement(self.epsilon), -jnp.inf)
        return _log_sum(greedy, _log(self.epsilon) + self.uniform.log_prob(value))

    sample_and_log_prob = sample_and_log_prob

    def entropy(self) -> Float[Array, "*B"]:
        """-Σ P log P over the greedy action and the n - 1 others."""
        greedy, other, others = self._log_probs()
        return _expected(jnp.exp(greedy), -greedy) + _expected(others, -other)

    def mode(self) -> PyTree:
        """The greedy action."""
        return self.value

    def kl_divergence(self, other: "EpsilonMixture") -> Float[Array, "*B"]:
        """KL divergence; both must be over the same n actions."""
        check_same_kind(self, other)
        p, p_other, others = self._log_probs()
        q, q_other, _ = other._log_probs()
        same = _expected(jnp.exp(p), p - q) + _expected(others, p_other - q_other)
        one = jnp.exp(p_other)
        swapped = _expected(jnp.exp(p), p - q_other) + _expected(one, p_other - q)
        differ = swapped + _expected(others - one, p_other - q_other)
        return jnp.where(Deterministic(self.value).log_prob(other.value) == 0.0, same, differ)

    def _log_probs(self) -> tuple[Array, Array, Array]:
        """Log P of the greedy action, log P of each other action, and the total P of the others, ε (n - 1) / n."""
        log_n = self.uniform.entropy()
        each = _log(self.epsilon) - log_n
        return (
            _log_sum(jnp.broadcast_to(_log_complement(self.epsilon), log_n.shape), each),
            each,
            -self.epsilon * jnp.expm1(-log_n),
        )


@struct
class Select:
    """Selects one of several distributions for each row.

    Attributes:
        parts: distributions over the same events.
        choice: `[B]`, the index into `parts`.
    """

    parts: tuple[Any, ...]
    choice: Int32[Array, " B"]

    def sample(self, *, seed: PRNGKeyArray) -> PyTree:
        """A sample of the selected distribution."""
        keys = jax.random.split(seed, len(self.parts))
        return select_rows(self.choice, [part.sample(seed=key) for part, key in zip(self.parts, keys, strict=True)])

    def log_prob(self, value: PyTree) -> Float[Array, "*B"]:
        """The log-probability under the selected distribution."""
        return select_rows(self.choice, [part.log_prob(value) for part in self.parts])

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[PyTree, Float[Array, "*B"]]:
        """A sample of the selected distribution and its log-probability."""
        keys = jax.random.split(seed, len(self.parts))
        drawn = [part.sample_and_log_prob(seed=key) for part, key in zip(self.parts, keys, strict=True)]
        return select_rows(self.choice, drawn)

    def entropy(self) -> Float[Array, "*B"]:
        """The entropy of the selected distribution."""
        return select_rows(self.choice, [part.entropy() for part in self.parts])

    def mode(self) -> PyTree:
        """The mode of the selected distribution."""
        return select_rows(self.choice, [part.mode() for part in self.parts])

    def kl_divergence(self, other: "Select") -> Float[Array, "*B"]:
        """KL divergence of the selected parts; NaN in rows where `choice` differs."""
        check_same_kind(self, other)
        each = select_rows(self.choice, [p.kl_divergence(q) for p, q in zip(self.parts, other.parts, strict=True)])
        return jnp.where(self.choice == other.choice, each, jnp.nan)


def select_rows(choice: Int32[Array, " B"], trees: Sequence[PyTree]) -> PyTree:
    """Select for each row the tree with index `choice`; leaves `[B, ...]`."""

    def leaf(*leaves: Array) -> Array:
        rows = choice.reshape(choice.shape + (1,) * (leaves[0].ndim - 1))
        return functools.reduce(lambda x, i: jnp.where(rows == i, leaves[i], x), range(1, len(leaves)), leaves[0])

    return jax.tree.map(leaf, *trees)


def affine_transform(distribution: Any, shift: Float[Array, "..."], scale: Float[Array, "..."]) -> Distribution:
    """The distribution of shift + scale · x, elementwise, scale above 0, for a vector x."""
    match distribution:
        case Deterministic():
            return Deterministic(shift + scale * distribution.value)
        case Normal():
            return Normal(shift + scale * distribution.loc, scale * distribution.scale, distribution.event_ndims)
        case ClippedNormal() | Uniform():
            return distribution.affine(shift, scale)
        case Select():
            return Select(tuple(affine_transform(part, shift, scale) for part in distribution.parts), distribution.choice)
        case _:
            return Affine(distribution, shift, scale, shift.ndim - 1)


def _log(x: Array) -> Array:
    """Log x for x in [0, 1]; -inf with gradient 0 at x = 0."""
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), -jnp.inf)


def _log_complement(x: Array) -> Array:
    """log(1 - x) for x in [0, 1]; -inf with gradient 0 at x = 1."""
    return jnp.where(x < 1, jnp.log1p(-jnp.where(x < 1, x, 0.0)), -jnp.inf)


def _log_sum(x: Array, y: Array) -> Array:
    """log(exp x + exp y); no NaN in the gradient where both are -inf."""
    none = jnp.maximum(x, y) == -jnp.inf
    return jnp.where(none, -jnp.inf, jnp.logaddexp(jnp.where(none, 0.0, x), jnp.where(none, 0.0, y)))


def _expected(probability: Array, amount: Array) -> Array:
    """The product of both; 0 where the probability is 0."""
    return jnp.where(probability > 0, probability * jnp.where(probability > 0, amount, 0.0), 0.0)
