"""Functions that apply a recurrent network to a sequence of time steps, and reset its state where an episode begins."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables


def step_by_step(
    network: RecurrentNetwork, variables: Variables, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """The network along T time steps of B environments, `(out, carry)`; gradients flow back through time.

        carry_t = initial where first_t else carry_{t-1};    out_t, carry_t = apply(variables, obs_t, carry_t)

    Args:
        network: applied once for each step.
        variables: the network's arrays.
        obs: leaves `[T, B, ...]`.
        first: an episode begins: its carry is reset before the step.
        carry: leaves `[B, ...]`, before the first step; `()` is the initial one.

    Returns:
        out leaves `[T, B, ...]`, and the carry after the last step.
    """
    carry = network.initial_carry(first.shape[1]) if is_empty(carry) else carry

    def step(carry: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
        obs, first = row
        out, carry, _ = network.apply(variables, obs, reset_carry(network, carry, first))
        return carry, out

    carry, out = jax.lax.scan(step, carry, (obs, first))
    return out, carry


unroll = functools.singledispatch(step_by_step)
"""`step_by_step`, or what the class of a network registers: the same up to rounding, but faster."""


def reset_carry(network: Network, carry: PyTree, first: Bool[Array, " B"]) -> PyTree:
    """The carry, reset to the initial carry for environments whose episode begins; unchanged without recurrent state.

    Earlier values, NaN included, leave no trace. A carry of `()` is the initial one.
    """
    if not isinstance(network, RecurrentNetwork):
        return carry
    initial = network.initial_carry(len(first))
    return reset(initial, initial if is_empty(carry) else carry, first)


def reset(initial: PyTree, carry: PyTree, first: Bool[Array, " B"]) -> PyTree:
    """The carry, with the values of `initial` where an episode begins."""
    return jax.tree.map(lambda new, old: jnp.where(first.reshape(-1, *[1] * (old.ndim - 1)), new, old), initial, carry)


def is_empty(carry: PyTree) -> bool:
    """Return True for `()`, which stands for the initial carry."""
    return isinstance(carry, tuple) and not carry
