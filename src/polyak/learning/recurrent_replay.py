"""Applies networks to batches of a replay: to transitions, or to sequences for recurrent networks."""

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables
from polyak.networks.recurrent_critics import RecurrentCritics
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
    return jax.tree.map(lambda x: flatten_steps(x)[index], out)


def apply_to_batch(
    network: Network, variables: Variables, obs: PyTree, *, train: bool = False, key: PRNGKeyArray | None = None
) -> tuple[PyTree, PyTree]:
    """The network's outputs of the transitions of a batch, and its statistics.

    A recurrent network is unrolled along sequences, in evaluation mode; another sees the observation of each transition.

    Args:
        obs: `[N, ...]` of a replay of transitions, or `SequenceObs`.
    """
    if isinstance(obs, SequenceObs) and isinstance(network, RecurrentNetwork):
        return unroll_sequences(network, variables, obs), None
    out, _, stats = network.apply(variables, _of_transitions(obs), train=train, key=key)
    return out, stats


def apply_critics(
    network: Network, variables: Variables, obs: PyTree, action: PyTree, *, train: bool = False, key: PRNGKeyArray | None = None
) -> tuple[Float[Array, "B N *M"], PyTree]:
    """The values of critics for the transitions of a batch, and the critics' statistics; `obs` as for `apply_to_batch`.

    The cell of recurrent critics sees the observations, and the actions join its output, so that any action can be valued at
    each time step of a sequence.
    """
    if isinstance(obs, SequenceObs) and isinstance(network, RecurrentCritics):
        features = unroll_sequences(network.core, variables, obs)
        return network.critic_values(variables, features, action), None
    (q, _), _, stats = network.apply(variables, (_of_transitions(obs), action), train=train, key=key)
    return q, stats


def _of_transitions(obs: PyTree) -> PyTree:
    """The observations of the transitions alone, without the sequences around them."""
    return jax.tree.map(lambda x: flatten_steps(x)[obs.index], obs.obs) if isinstance(obs, SequenceObs) else obs


def carry_of_one(network: Network | None) -> PyTree:
    """The initial recurrent state of one environment, without the axis of environments; `()` of a network without one."""
    return jax.tree.map(lambda x: x[0], network.initial_carry(1)) if isinstance(network, RecurrentNetwork) else ()


def check_sequences(owner: str, network: Network | None, replay: Replay, num_steps: int, *, name: str = "network") -> None:
    """Check that recurrent networks, and no others, have a replay that draws sequences.

    Args:
        name: the setting of the network.

    Raises:
        ValueError: only one of network and replay is for sequences, or some steps of each rollout would never be learned from.
    """
    if isinstance(network, RecurrentNetwork) != replay.draws_sequences:
        raise ValueError(
            f"{owner}: replay must be a SequenceReplay with a recurrent {name} (LSTM, GRU), and only with one, got "
            f"replay={replay!r} and {name}={network!r}"
        )
    if isinstance(replay, SequenceReplay):
        replay.check_num_steps(num_steps)
