"""Applies a recurrent network to sequences of a replay."""

import jax
from jaxtyping import Array

from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.networks.unroll import unroll
from polyak.ops.losses import flatten_steps
from polyak.replay.replay import Replay
from polyak.replay.sequences import SequenceObs, SequenceReplay


def unroll_sequences(network: Network, variables: Variables, obs: SequenceObs) -> PyTree:
    """The network's outputs `[N, ...]` at the time steps `obs.index`, each computed after those before it.

    No gradient flows into the first `obs.burn_in` steps: they only bring the recurrent state up to date.
    """
    assert isinstance(network, RecurrentNetwork), "check_sequences found it"
    carry, burn_in = obs.carry, obs.burn_in
    if burn_in:
        before = jax.tree.map(lambda x: x[:burn_in], obs.obs)
        _, carry = jax.lax.stop_gradient(unroll(network, variables, before, obs.first[:burn_in], carry))
    after = jax.tree.map(lambda x: x[burn_in:], obs.obs)
    out, _ = unroll(network, variables, after, obs.first[burn_in:], carry)
    index = obs.index - burn_in * obs.first.shape[1]

    def at_index(x: Array) -> Array:
        return flatten_steps(x)[index]

    return jax.tree.map(at_index, out)


def check_sequences(owner: str, network: Network | None, replay: Replay, num_steps: int) -> None:
    """Check that recurrent networks, and no others, have a replay that draws sequences.

    Raises:
        ValueError: only one of network and replay is for sequences, or some steps of each rollout would never be learned from.
    """
    if isinstance(network, RecurrentNetwork) != replay.draws_sequences:
        raise ValueError(
            f"{owner}: replay must be a SequenceReplay with a recurrent network (LSTM, GRU), and only with one, got "
            f"replay={replay!r} and network={network!r}"
        )
    if isinstance(replay, SequenceReplay):
        replay.check_num_steps(num_steps)
