"""The first difference between the spaces of two environments, for errors."""

from typing import Any

import numpy as np

from polyak.core.spaces import Box, EnvSpec, Space, leaf_spaces


def difference(one: EnvSpec, other: EnvSpec) -> tuple[str, Any, Any] | None:
    """The first field in which two environments differ for a policy, with both values; None where it can act in either.

    Of spaces with the same leaves it is the first leaf that differs, and of Boxes of one shape and dtype the first bound.
    """
    for field in ("obs", "action", "action_scaling", "has_action_mask"):
        of_one, of_other = getattr(one, field), getattr(other, field)
        if of_one != of_other:
            return (field, of_one, of_other) if isinstance(of_one, str | bool) else _space_difference(field, of_one, of_other)
    return None


def _space_difference(field: str, one: Space, other: Space) -> tuple[str, Any, Any]:
    leaves, others = dict(leaf_spaces(one)), dict(leaf_spaces(other))
    if list(leaves) != list(others):
        return field, one, other
    path = next((path for path in leaves if leaves[path] != others[path]), None)
    if path is None:  # a Tuple and a Dict of the same leaves
        return field, one, other
    field, leaf, other_leaf = f"{field}[{path!r}]" if path else field, leaves[path], others[path]
    if (
        isinstance(leaf, Box)
        and isinstance(other_leaf, Box)
        and (leaf.shape, leaf.dtype) == (other_leaf.shape, other_leaf.dtype)
    ):
        for bound in ("low", "high"):
            values, other_values = getattr(leaf, bound), getattr(other_leaf, bound)
            for index in np.argwhere(values != other_values):
                place = f"[{', '.join(map(str, index))}]" if len(index) else ""
                return f"{field}.{bound}{place}", values[tuple(index)].item(), other_values[tuple(index)].item()
    return field, leaf, other_leaf
