"""A condition of all seeds together, which `vmap` leaves a scalar: a `cond` or a loop by it stays one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


@jax.custom_batching.custom_vmap
def is_any(flags: Bool[Array, "*B"]) -> Bool[Array, ""]:
    """Any of the flags, and under `vmap` any of all seeds'.

    With a condition for each seed, `vmap` makes of a `cond` a choice between both results, and a loop copies what it carries.
    """
    return jnp.any(flags)


@is_any.def_vmap
def _is_any_of_all(_: int, __: list[bool], flags: Bool[Array, "*B"]) -> tuple[Bool[Array, ""], bool]:
    return is_any(flags), False
