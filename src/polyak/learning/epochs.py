"""Epochs of gradient steps over shuffled minibatches of a rollout, each refused where something in it is not finite."""

from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from polyak.core.struct import static, struct
from polyak.core.types import PyTree, Scalar, Terms
from polyak.learning.batch import Rows, advantage_scaling
from polyak.learning.minibatches import accumulate, epoch_words, shuffled_minibatches
from polyak.ops.optimizer import Adam, global_norm

# What can be not finite in a gradient step, in the order in which one causes the next.
QUANTITIES = ("loss", "gradient")


@runtime_checkable
class Objective(Protocol):
    """What is minimised, as a function of the raveled parameters."""

    @property
    def microbatch_size(self) -> int | None:
        """Rows whose gradient is computed at a time; None: as many as fit the cache."""
        ...

    def rows(self, params: Float[Array, " n"]) -> Rows:
        """What an epoch that begins with these parameters learns from."""
        ...

    def known(self, params: Float[Array, " n"], rows: Rows, index: Int32[Array, " M"], total: Scalar) -> PyTree:
        """What every share of the minibatch must know of the whole of it."""
        ...

    def share(
        self, params: Float[Array, " n"], part: Rows, total: Scalar, known: PyTree
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """The share that some rows have in the minibatch's loss and its terms; shares add up."""
        ...

    def whole(
        self, params: Float[Array, " n"], gradient: Float[Array, " n"], terms: Terms, known: PyTree
    ) -> tuple[Float[Array, " n"], Terms]:
        """Gradient and terms with what does not come in shares."""
        ...

    def stops(self, terms: Terms) -> Bool[Array, ""]:
        """The update is over before the step of this minibatch."""
        ...


@struct
class Taken:
    """What the epochs were, `[E, K]`.

    Attributes:
        table: for each minibatch the terms of its loss, then 1 or 0 for each of the flags bad (two), kept and refused, in one
            array: an array each costs kernels.
        names: what the terms are called.
    """

    table: Float[Array, "E K columns"]
    names: tuple[str, ...] = static()

    @classmethod
    def of(cls, terms: Terms, bad: Bool[Array, "2"], kept: Bool[Array, ""], refused: Bool[Array, ""]) -> "Taken":
        """One minibatch."""
        values = jnp.stack(list(terms.values()))
        return cls(jnp.concatenate([values, jnp.stack([*bad, kept, refused]).astype(values.dtype)]), tuple(terms))

    @property
    def values(self) -> Float[Array, "E K terms"]:
        """Of the terms."""
        return self.table[..., : len(self.names)]

    @property
    def bad(self) -> Bool[Array, "E K 2"]:
        """Which of the `QUANTITIES` were not finite."""
        return self.table[..., len(self.names) : -2] > 0

    @property
    def kept(self) -> Bool[Array, "E K"]:
        """The step was taken."""
        return self.table[..., -2] > 0

    @property
    def refused(self) -> Bool[Array, "E K"]:
        """It was not, because of numbers that were not finite: the update was not over, and something in it had weight."""
        return self.table[..., -1] > 0

    def means(self) -> tuple[Terms, Terms]:
        """The mean of each term over the steps taken, of all epochs and of the last that has one; 0 where none was taken."""
        sums = jnp.where(self.kept[..., None], self.values, 0.0).sum(1)
        numbers = self.kept.sum(1).astype(jnp.float32)
        epochs = jnp.arange(len(numbers))
        last = epochs == jnp.max(jnp.where(numbers > 0, epochs, 0))

        def by_name(among: Bool[Array, " E"]) -> Terms:
            share = 1.0 / jnp.maximum(jnp.sum(numbers, where=among), 1.0)
            return dict(zip(self.names, _column_sums(jnp.where(among[:, None], sums, 0.0) * share), strict=True))

        return by_name(jnp.full(len(numbers), True)), by_name(last)


def _column_sums(x: Float[Array, "rows columns"]) -> list[Float[Array, ""]]:
    """The sum of each column as a number of its own, all by one kernel; taken out of a vector, each would be one."""
    columns = [x[:, i] for i in range(x.shape[1])]
    sums: list[Array] = jax.lax.reduce(
        columns, [jnp.zeros((), x.dtype)] * len(columns), lambda a, b: jax.tree.map(jnp.add, a, b), (0,)
    )
    return sums


def gradient_of(
    objective: Objective,
    params: Float[Array, " n"],
    rows: Rows,
    index: Int32[Array, " M"],
    scaling: tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]],
    axis_name: str | None,
) -> tuple[Float[Array, " n"], Terms]:
    """The gradient of a minibatch's loss, and its terms.

    Args:
        scaling: one minibatch's of `advantage_scaling`.
    """
    centre, scale, total = scaling
    known = objective.known(params, rows, index, total)

    def share(index: Int32[Array, " m"]) -> Any:
        part = rows.at(index).scaled(centre, scale)
        return jax.grad(objective.share, has_aux=True)(params, part, total, known)

    gradient, terms = accumulate(share, index, axis_name, objective.microbatch_size)
    return objective.whole(params, gradient, terms, known)


def gradient_epochs(
    objective: Objective,
    params: Float[Array, " n"],
    optimizer: PyTree,
    key: PRNGKeyArray,
    *,
    num_epochs: int,
    adam: Adam,
    learning_rate: Scalar,
    usable: Bool[Array, ""],
    shape: tuple[int, int],
    num_minibatches: int,
    normalize_advantage: Literal["minibatch", "batch"] | None,
    axis_name: str | None,
) -> tuple[Float[Array, " n"], PyTree, Taken]:
    """The parameters and Adam's state after the epochs, and what those were.

    Args:
        key: decides the minibatches.
        usable: the data is finite; otherwise no step is taken.
        shape: rows are shuffled as `(steps, environments)` on this device; sequences are one step long.
        normalize_advantage: see `advantage_scaling`.
    """

    def step(rows: Rows, carry: PyTree, minibatch: PyTree) -> tuple[PyTree, Taken]:
        index, centre, scale, total = minibatch
        params, optimizer, stopped = carry
        gradient, terms = gradient_of(objective, params, rows, index, (centre, scale, total), axis_name)
        terms["grad_norm"] = global_norm(gradient)
        terms["grad_norm_clipped"] = adam.clipped_norm(terms["grad_norm"])
        bad = ~jnp.stack([jnp.isfinite(terms["loss"]), adam.accepts(terms["grad_norm"])])
        stopped = stopped | objective.stops(terms)
        # Adam moves on its momentum even without a gradient, so a minibatch without a transition is no step.
        keep = ~jnp.any(bad) & ~stopped & usable & (total > 0)
        params, optimizer = adam.step(params, optimizer, gradient, terms["grad_norm"], learning_rate, keep)
        refused = ~keep & ~stopped & (total > 0)
        return (params, optimizer, stopped), Taken.of(terms, bad, keep, refused)

    def epoch(carry: PyTree, words: Array) -> tuple[PyTree, Taken]:
        rows = objective.rows(carry[0])
        index = shuffled_minibatches(words, *shape, num_minibatches)
        scaling = advantage_scaling(rows, index, normalize_advantage, axis_name)
        taken: tuple[PyTree, Taken] = jax.lax.scan(partial(step, rows), carry, (index, *scaling))
        return taken

    words = epoch_words(key, num_epochs, *shape, num_minibatches, axis_name)
    (params, optimizer, _), taken = jax.lax.scan(epoch, (params, optimizer, jnp.array(False)), words)
    return params, optimizer, taken
