"""C51: deep Q-learning of distributions (Bellemare et al. 2017, arXiv:1707.06887), and its Rainbow settings."""

import dataclasses

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.agents.atom_settings import AtomSettings
from polyak.agents.q_learning import QAgent, fold
from polyak.core.struct import struct
from polyak.core.types import PyTree, Variables
from polyak.networks.heads import QValues
from polyak.networks.q_network import ExpectedValues
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import best_action, of_action, weighted_sum
from polyak.ops.value_distributions import project_categorical
from polyak.replay.replay import Transition


@struct(kw_only=True)
class C51(AtomSettings, QAgent):
    """C51 for Discrete and MultiDiscrete actions: the distribution of returns on fixed atoms z_1 ... z_K.

        L(θ) = E[ -Σ_i m_i log p_i(s, a; θ) ],    m = Φ(r + γ^m z, p(s', a'; target)),    a' = argmax_a Σ_i z_i p_i(s', a)

    with Φ the projection onto the atoms. With `double` the online network chooses a', else the target network. With a dueling
    and noisy network, three steps and a prioritized replay it is Rainbow (Hessel et al. 2018, arXiv:1710.02298).

    Attributes:
        network: a network that returns the logits `[B, n, num_atoms]`; None takes `NatureCNN` for images, else `MLP`. A
            built-in network gets `num_atoms` outputs. The loss applies it in training mode (dropout, batch normalization).
        replay: a `UniformReplay`, a `PrioritizedReplay`, or a `polyak.replay.Replay` of your own; the error of priorities is
            the KL divergence of the loss.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = C51(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    num_atoms: int = 51
    v_min: float = -10.0
    v_max: float = 10.0

    @property
    def head(self) -> QValues:
        """Logits of `num_atoms` atoms of each action."""
        return QValues(outputs=self.num_atoms)

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        super().check_together()
        self.check_atoms()

    def values_network(self) -> ExpectedValues:
        """The network with the means of its distributions as values."""
        return ExpectedValues(self._network, (self.v_min, self.v_max))

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` is KL(m ‖ p) of each sample.

        Args:
            params: θ.
            online: the online network's variables; their parameters are not used.
            target: the target network's.
            key: for noise and dropout.
        """
        online = dataclasses.replace(online, params=params)
        of_all, stats = self._outputs(online, batch.obs, fold(key, 0), train=True)
        logits = of_action(of_all, batch.action)
        target_probs = self.td_target(batch, online=online, target=target, key=key)
        cross_entropy, terms = self.cross_entropy(logits[:, None], target_probs, batch.weight)
        return weighted_sum(cross_entropy[:, 0], batch.weight), Aux(terms, stats)

    def td_target(
        self, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> Float[Array, "N K"]:
        """The target distribution Φ(r + γ^m z, p(s', a')), without a gradient; arguments as for `loss`."""
        target_logits, _ = self._outputs(target, batch.next_obs, fold(key, 1))
        logits = self._outputs(online, batch.next_obs, fold(key, 2))[0] if self.double else target_logits
        next_action = best_action(self.values_network().q(logits), batch.next_action_mask)
        next_probs = jax.nn.softmax(of_action(target_logits, next_action))
        values = self.reward_scale * batch.reward[:, None] + batch.discount[:, None] * self.atoms[None]
        return jax.lax.stop_gradient(project_categorical(next_probs, values, self.atoms))
