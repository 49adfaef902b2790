"""What an update looked like beyond its means: histograms of what it learned from and of what it moved."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from polyak.core.types import Histogram
from polyak.learning.batch import Rows, advantage_scaling
from polyak.learning.epochs import Objective, gradient_of
from polyak.learning.histogram import histogram


def update_histograms(
    objective: Objective,
    before: Float[Array, " n"],
    after: Float[Array, " n"],
    rows: Rows,
    normalize_advantage: Literal["minibatch", "batch"] | None,
    axis_name: str | None,
) -> dict[str, Histogram]:
    """Of actions, advantages, values and value targets, where rows count, of the weights, and of the gradient.

    Actions have one for each leaf of their tree. The gradient is that of the loss of the whole rollout, where the first epoch
    begins.

    Args:
        before: the parameters before the update.
        after: those after it.
        normalize_advantage: how the gradient's advantages are normalised; those of the histogram are not.
    """
    shown = rows.weight > 0
    columns = {"advantages": rows.advantage, "values": rows.value, "value_targets": rows.value_target}
    for path, action in jax.tree_util.tree_leaves_with_path(rows.action):
        columns["/".join(["actions", *jax.tree_util.keystr(path, simple=True, separator="/").split()])] = action
    found = {name: histogram(column, shown, axis_name) for name, column in columns.items()}
    number = rows.weight.shape[1 if rows.sequences else 0]
    whole = jnp.arange(number, dtype=jnp.int32)
    centre, scale, total = advantage_scaling(rows, whole[None], normalize_advantage, axis_name)
    gradient, _ = gradient_of(objective, before, rows, whole, (centre[0], scale[0], total[0]), axis_name)
    # Weights are the same on every device: nothing to add up.
    found |= {"weights": histogram(after), "gradients": histogram(gradient)}
    return {f"histogram/{name}": it for name, it in found.items()}
