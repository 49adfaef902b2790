"""Distributions over actions, as pytrees with distrax's method names, and `for_space`, the distribution over an action space.

`log_prob`, `entropy` and `kl_divergence` have the shape of the batch: each distribution sums over the dimensions of one event.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import Box, Dict, Discrete, Leaf, MultiBinary, MultiDiscrete, Space, Tuple, leaf_spaces, map_space
from polyak.core.struct import static, struct
from polyak.core.types import PyTree
from polyak.ops.distributions.continuous import Normal, TanhNormal
from polyak.ops.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from polyak.ops.distributions.events import add, check_same_kind


@runtime_checkable
class Distribution(Protocol):
    """Interface of distributions. Continuous ones also have `mean()` and `stddev()`, and their samples are differentiable."""

    def sample(self, *, seed: PRNGKeyArray) -> PyTree:
        """One event for each row of the batch."""
        ...

    def log_prob(self, value: PyTree) -> Float[Array, "*B"]:
        """The logarithm of the probability (or density) of an event, in nats."""
        ...

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[PyTree, Float[Array, "*B"]]:
        """A sample and its log-probability, cheaper or more exact than two calls."""
        ...

    def entropy(self) -> Float[Array, "*B"]:
        """-E[log p], in nats."""
        ...

    def mode(self) -> PyTree:
        """The deterministic event: the most probable one, or the median where documented."""
        ...

    def kl_divergence(self, other: Any) -> Float[Array, "*B"]:
        """KL(self ‖ other) = E_self[log self - log other], in nats."""
        ...


@struct
class Deterministic:
    """A point mass on one event, which may be a tree (the action of a Dict space).

    Attributes:
        value: leaves `[*B, ...]`.
        batch_ndims: number of leading batch dimensions.
    """

    value: PyTree
    batch_ndims: int = static(default=1)

    def sample(self, *, seed: PRNGKeyArray) -> PyTree:
        """The value; the seed is not used."""
        return self.value

    def log_prob(self, value: PyTree) -> Float[Array, "*B"]:
        """0 for the value, -inf for any other."""
        return jnp.where(self._equals(value), 0.0, -jnp.inf)

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[PyTree, Float[Array, "*B"]]:
        """The value, and 0."""
        return self.value, self.entropy()

    def entropy(self) -> Float[Array, "*B"]:
        """0."""
        return jnp.zeros(jax.tree.leaves(self.value)[0].shape[: self.batch_ndims])

    def mode(self) -> PyTree:
        """The value."""
        return self.value

    def kl_divergence(self, other: "Deterministic") -> Float[Array, "*B"]:
        """0 where the values agree, else inf."""
        check_same_kind(self, other)
        return jnp.where(self._equals(other.value), 0.0, jnp.inf)

    def _equals(self, value: PyTree) -> Array:
        def rows_equal(x: Array, y: Array) -> Array:
            return jnp.all(x == y, axis=tuple(range(self.batch_ndims, x.ndim)))

        rows = jax.tree.leaves(jax.tree.map(rows_equal, self.value, value))
        return jnp.all(jnp.stack(rows), axis=0)


@struct
class Joint:
    """Independent distributions in the tree structure of the space; an event has the same tree.

    Attributes:
        parts: a tree of distributions with equal batch shapes.
    """

    parts: PyTree

    def sample(self, *, seed: PRNGKeyArray) -> PyTree:
        """A sample of each part, with independent keys."""
        return jax.tree.map(lambda part, key: part.sample(seed=key), self.parts, self._keys(seed), is_leaf=_is_distribution)

    def log_prob(self, value: PyTree) -> Float[Array, "*B"]:
        """The sum over the parts."""
        each = jax.tree.map(lambda part, x: part.log_prob(x), self.parts, value, is_leaf=_is_distribution)
        return add(jax.tree.leaves(each))

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[PyTree, Float[Array, "*B"]]:
        """A sample and its log-probability, from `sample_and_log_prob` of each part."""
        keys, tree = jax.tree.leaves(self._keys(seed)), jax.tree.structure(self.parts, is_leaf=_is_distribution)
        samples = [part.sample_and_log_prob(seed=key) for part, key in zip(self._leaves(), keys, strict=True)]
        return jax.tree.unflatten(tree, [value for value, _ in samples]), add([log_prob for _, log_prob in samples])

    def entropy(self) -> Float[Array, "*B"]:
        """The sum over the parts."""
        return add([part.entropy() for part in self._leaves()])

    def mode(self) -> PyTree:
        """The mode of each part."""
        return jax.tree.map(lambda part: part.mode(), self.parts, is_leaf=_is_distribution)

    def kl_divergence(self, other: "Joint") -> Float[Array, "*B"]:
        """The sum over the parts."""
        check_same_kind(self, other)
        each = jax.tree.map(lambda p, q: p.kl_divergence(q), self.parts, other.parts, is_leaf=_is_distribution)
        return add(jax.tree.leaves(each))

    def _leaves(self) -> list[Distribution]:
        return jax.tree.leaves(self.parts, is_leaf=_is_distribution)

    def _keys(self, seed: PRNGKeyArray) -> PyTree:
        tree = jax.tree.structure(self.parts, is_leaf=_is_distribution)
        return jax.tree.unflatten(tree, list(jax.random.split(seed, len(self._leaves()))))


def _is_distribution(node: Any) -> bool:
    return isinstance(node, Distribution)


def parameter_shapes(space: Space) -> PyTree:
    """Shapes of the network outputs for an action space, without batch dimensions, in the tree structure of the space.

    Discrete: `(n,)`, logits. MultiDiscrete: `(Σ nvec,)`, logits. MultiBinary: its shape, logits. Box: a dict of `loc` and
    `log_scale`, each of its shape.

    >>> parameter_shapes(Dict({"gear": Discrete(3), "steer": Box([-1.0], [1.0])}))
    {'gear': (3,), 'steer': {'loc': (1,), 'log_scale': (1,)}}
    """

    def of_leaf(leaf: Leaf) -> PyTree:
        match leaf:
            case Discrete():
                return (leaf.n,)
            case MultiDiscrete():
                return (sum(leaf.nvec),)
            case MultiBinary():
                return leaf.shape
            case Box():
                return {"loc": leaf.shape, "log_scale": leaf.shape}

    return map_space(of_leaf, space)


def for_space(space: Space, params: PyTree, mask: PyTree = None, *, squash: bool = False) -> Distribution:
    """The distribution over an action space, parameterized by the output of a network.

    Discrete: Categorical, actions int32 from 0 whatever the space's `start`. MultiDiscrete: MultiCategorical. MultiBinary:
    Bernoulli, int8. Box: Normal, float32, unbounded; with `squash` TanhNormal, between -1 and 1, to be rescaled to the bounds.
    Dict and Tuple: Joint.

    Args:
        params: as `parameter_shapes`, with any batch dimensions in front. A `log_scale` may leave out the batch.
        mask: None, or in the tree of the space: for Discrete and MultiDiscrete bool arrays as their logits (True: allowed)
            or None, for the others None.
        squash: Box actions through tanh.

    Raises:
        ValueError: parameters or mask do not match the space; the message names the part. A mask allows no action (outside
            `jit`).
    """
    parts: list[tuple[Leaf, Any, Any]] = []
    masks = map_space(lambda leaf: None, space) if mask is None else mask
    try:
        map_space(lambda *part: parts.append(part), space, params, masks)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"for_space: params and mask must have the tree of {space}; {error!r}") from error
    named = zip(leaf_spaces(space), parts, strict=True)
    distributions = iter([_for_leaf(path, *part, squash=squash) for (path, _), part in named])
    tree = map_space(lambda leaf: next(distributions), space)
    return Joint(tree) if isinstance(space, Dict | Tuple) else tree


def _for_leaf(path: str, space: Leaf, params: PyTree, mask: Any, *, squash: bool) -> Distribution:
    where = f"for_space: action {path!r}" if path else "for_space: action"
    if mask is not None and isinstance(space, Box | MultiBinary):
        raise ValueError(f"{where}: a {type(space).__name__} has no mask, got one of shape {mask.shape}")
    expected = parameter_shapes(space)
    expected_tree: Any  # jaxlib's stubs give it no comparison
    shapes, expected_tree = jax.tree.flatten(expected, is_leaf=lambda x: isinstance(x, tuple))
    arrays, tree = jax.tree.flatten(params)
    if expected_tree != tree:
        raise ValueError(f"{where}: {space} needs parameters {expected}, got the tree {tree}")
    for shape, x in zip(shapes, arrays, strict=True):
        if x.ndim < len(shape) or x.shape[x.ndim - len(shape) :] != shape:
            raise ValueError(f"{where}: parameters must end in shape {shape}, got {x.shape}")
    match space:
        case Discrete():
            return Categorical(params, mask)
        case MultiDiscrete():
            return MultiCategorical(params, space.nvec, mask)
        case MultiBinary():
            return Bernoulli(params, len(space.shape))
        case Box():
            loc, log_scale = params["loc"], params["log_scale"]
            scale = jnp.exp(jnp.broadcast_to(log_scale, loc.shape))
            return (TanhNormal if squash else Normal)(loc, scale, len(space.shape))


def broadcast_params(space: Space, params: PyTree, *, sequences: bool = False) -> PyTree:
    """Action parameters `[N, ...]`, where a network may return a Box's `log_scale` once for the batch.

    Args:
        sequences: parameters are `[T, B, ...]`, and `log_scale` may be given once for each time step.
    """

    def leaf(space: Leaf, params: PyTree) -> PyTree:
        if not isinstance(space, Box):
            return params
        loc, log_scale = params["loc"], params["log_scale"]
        if sequences and log_scale.ndim < loc.ndim:
            log_scale = log_scale[:, None]
        return params | {"log_scale": jnp.broadcast_to(log_scale, loc.shape)}

    return map_space(leaf, space, params)
