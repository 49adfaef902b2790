"""Applies a recurrent network to sequences of a replay."""

from typing import Any

import jax
from jaxtyping import Array

from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.networks.recurrent import unroll
from polyak.ops.losses import flatten_steps
from polyak.replay.sequences import SequenceObs


def unroll_sequences(network: Network, variables: Variables, obs: SequenceObs, burn_in: int) -> PyTree:
    """The network's outputs `[N, ...]` at the time steps `obs.index`, each computed after those before it.

    No gradient flows into the first `burn_in` steps: they only bring the recurrent state up to date.
    """
    assert isinstance(network, RecurrentNetwork), "check_sequences found it"
    carry = obs.carry
    if burn_in:
        before = jax.tree.map(lambda x: x[:burn_in], obs.obs)
        _, carry = jax.lax.stop_gradient(unroll(network, variables, before, obs.first[:burn_in], carry))
    after = jax.tree.map(lambda x: x[burn_in:], obs.obs)
    out, _ = unroll(network, variables, after, obs.first[burn_in:], carry)
    index = obs.index - burn_in * obs.first.shape[1]

    def at_index(x: Array) -> Array:
        return flatten_steps(x)[index]

    return jax.tree.map(at_index, out)


def check_sequences(owner: str, settings: Any) -> None:
    """Check that an agent has a recurrent network where it has a `sequence_length`, and settings that go with it.

    Raises:
        ValueError: it has one without the other, the burn-in is not shorter than the sequence, or the replay is prioritized or
            stores frame stacks, which sequences do not support.
    """
    length, burn_in, is_recurrent = settings.sequence_length, settings.burn_in, isinstance(settings.network, RecurrentNetwork)
    if is_recurrent != (length is not None):
        got = f"got sequence_length={length} and network={settings.network!r}"
        raise ValueError(f"{owner}: a recurrent network (q_lstm, q_gru) needs a sequence_length, and no other takes one; {got}")
    if burn_in and (length is None or burn_in >= length):
        raise ValueError(f"{owner}: burn_in={burn_in} must be less than sequence_length={length}")
    if length is not None and length - burn_in < settings.num_steps:
        raise ValueError(
            f"{owner}: sequence_length - burn_in must be at least num_steps={settings.num_steps}, or steps of each rollout are "
            f"never learned from; got {length} - {burn_in}"
        )
    if length is not None and (settings.prioritized or settings.frame_stack > 1):
        raise ValueError(f"{owner}: sequence_length must be None with prioritized=True or a frame_stack")
