"""Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236), with double Q-learning and n-step targets."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.q_learning import QAgent, fold, value_terms
from polyak.core.struct import check_settings, number, setting, struct
from polyak.core.types import PyTree, Scalar, Variables
from polyak.learning.recurrent_replay import check_sequences, unroll_sequences
from polyak.networks.heads import QValues
from polyak.networks.q_network import check_q_network, q_network_or_default
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import best_action, huber, of_action, weighted_sum
from polyak.replay.replay import Replay, Transition, check_replay
from polyak.replay.sequences import SequenceObs
from polyak.replay.uniform import UniformReplay


@struct(kw_only=True)
class DQN(QAgent):
    """DQN for Discrete and MultiDiscrete actions.

        L(θ) = E[ huber_κ(r + γ^m Q_target(s', a') - Q_θ(s, a)) ],    a' = argmax_a Q_θ(s', a)

    over n-step transitions drawn from a replay; without `double`, a' is the best action by Q_target itself. Where the
    environment has an action mask, a' is an allowed action.

    Attributes:
        network: a network that returns `(q, value)`, such as `polyak.MLP(head=polyak.QValues(dueling=True))`; None takes
            `NatureCNN` for images, else `MLP`. The loss applies the network in training mode (dropout, batch normalization),
            except for recurrent networks.
        replay: a `UniformReplay`, a `PrioritizedReplay`, or a `polyak.replay.Replay` of your own; a `SequenceReplay` for
            recurrent networks.
        huber_delta: κ, the error above which the loss is linear; None takes the squared error δ².

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = DQN(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    replay: Replay = setting(default=UniformReplay(100_000), check=partial(check_replay, sequences=True))
    huber_delta: Scalar | None = number(default=1.0, above=0, optional=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", q_network_or_default("DQN", self.network, self.spec, QValues(), recurrent=True))
        check_settings(self)
        check_sequences("DQN", self.network, self.replay, self.num_steps)
        self._check_together()

    def check_network(self, variables: Variables) -> None:
        """Check that the network returns `(q, value)`."""
        check_q_network(self._network, variables, self.spec)

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` is |δ| of each sample.

        Args:
            params: θ.
            online: the online network's variables; their parameters are not used.
            target: the target network's.
            key: for noise and dropout.
        """
        online = dataclasses.replace(online, params=params)
        values, stats = self._values(online, batch.obs, fold(key, 0), train=True)
        q = of_action(values, batch.action)
        td_error = self.td_target(batch, online=online, target=target, key=key) - q
        terms = value_terms(q, td_error, jnp.abs(td_error), batch.weight)
        return weighted_sum(huber(td_error, self.huber_delta), batch.weight), Aux(terms, stats)

    def td_target(
        self, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> Float[Array, " N"]:
        """The target r + γ^m Q_target(s', a'), without a gradient; arguments as for `loss`."""
        target_q, _ = self._values(target, batch.next_obs, fold(key, 1))
        q = self._values(online, batch.next_obs, fold(key, 2))[0] if self.double else target_q
        next_q = of_action(target_q, best_action(q, batch.next_action_mask))
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_q)

    def _values(
        self, variables: Variables, obs: PyTree, key: PRNGKeyArray | None, *, train: bool = False
    ) -> tuple[Float[Array, "N n"], PyTree]:
        """The values of all actions, and the network's statistics; a recurrent network stays in evaluation mode."""
        if isinstance(obs, SequenceObs):
            (q, _) = unroll_sequences(self._network, variables, obs)
            return q, None
        (q, _), _, stats = self._network.apply(variables, obs, train=train, key=key)
        return q, stats
