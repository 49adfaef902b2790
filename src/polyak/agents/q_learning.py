"""The base of agents that learn action values from a replay: one network with a target."""

import abc
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.off_policy import OffPolicyAgent, OffPolicyState
from polyak.agents.settings import TargetSettings
from polyak.copies.network_copies import NetworkCopies
from polyak.core.struct import choice, setting, static, struct
from polyak.core.types import Metrics, Network, PyTree, Scalar, Terms, Variables
from polyak.learning.recurrent_replay import carry_of_one
from polyak.networks.heads import Quantiles, QValues
from polyak.networks.layers import is_narrow
from polyak.networks.q_network import check_q_network, q_network_or_default
from polyak.ops.distributions.combinations import as_discrete, combine_actions, for_values
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import Linear, Schedule, StepCount, check_schedule, value_at
from polyak.policies.episode_head import EpisodeHead
from polyak.policies.exploration import Boltzmann, EpsilonGreedy
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy, add_return
from polyak.policies.q_policy import FreshNoise, add_q_exploration
from polyak.replay.replay import Replay, Transition
from polyak.replay.uniform import UniformReplay

EPSILON = Linear(1.0, 0.05, 10_000)
RANDOM_TEMPERATURE = 1e30


@struct(kw_only=True)
class QAgent(TargetSettings, OffPolicyAgent):
    """An agent of action values for Discrete and MultiDiscrete actions.

    A leaf defines `loss`, and `head` where its network returns something else than values of actions.

    Attributes:
        spec: the environment's spaces (`env.spec`). A MultiDiscrete action counts as one choice of at most 4096 combinations.
        network: the network of action values.
        double: double Q-learning: the online network chooses a', else the target network (van Hasselt et al. 2016,
            arXiv:1509.06461).
        tau: fraction by which the target moves towards the online network at each target update; 1 copies it.
        epsilon: probability of a random action, a number or a schedule, drawn for each environment; None decreases it from 1 to
            0.05 over the first 10,000 transitions.
        temperature: explore by P(a) ∝ exp(Q(s, a) / temperature), a number or a schedule, instead of by `epsilon`; None
            disables it.
    """

    network: Network | None = static(default=None, kw_only=False)
    double: bool = choice(default=True, choices=(True, False))
    epsilon: Schedule | None = setting(
        default=None,
        check=partial(check_schedule, optional=True, above=-1.0, at_least=0, at_most=1),
        used_if=("temperature", None),
    )
    temperature: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    num_steps: int = 4
    updates_per_step: float = 0.25
    batch_size: int = 64
    replay: Replay = UniformReplay(100_000)
    learning_rate: Schedule = 5e-4
    max_grad_norm: Scalar | None = 10.0
    tau: Scalar = 1.0
    target_period: int = 250

    @property
    def head(self) -> QValues | Quantiles:
        """The head of the network: by default the values of all actions."""
        return QValues()

    @abc.abstractmethod
    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` `[N]` is the error of each sample.

        Args:
            params: θ.
            online: the online network's variables; their parameters are not used.
            target: the target network's variables.
            key: for noise, dropout and other random numbers.
        """

    def set_defaults(self) -> None:
        """Complete the network; a built-in one has the agent's head."""
        owner, allowed = type(self).__name__, self.takes_sequences
        network = q_network_or_default(owner, self.network, self.spec, self.head, recurrent=allowed)
        object.__setattr__(self, "network", network)

    def values_network(self) -> Any:
        """The network that policies act by, which returns `(q, value)`."""
        return self.network

    def create_copies(self, key: PRNGKeyArray) -> NetworkCopies:
        """The network and its target."""
        spec = as_discrete(type(self).__name__, self.spec)
        copies = NetworkCopies.create(self._network, key, spec, optimizer=None, target=self.follow())
        self.check_network(copies.online)
        return copies.with_optimizer_state(self.optimizer_at())

    def check_network(self, variables: Variables) -> None:
        """Check that the network returns `(q, value)`, or `head.outputs` of each action.

        Raises:
            TypeError, ValueError: the loss cannot use the outputs.
        """
        outputs = self.head.outputs if isinstance(self.head, QValues) else None
        check_q_network(self._network, variables, self.spec, outputs)

    def train_step(
        self,
        copies: NetworkCopies,
        batch: Transition,
        key: PRNGKeyArray,
        enabled: Bool[Array, ""],
        *,
        env_steps: StepCount,
        axis_name: str | None,
    ) -> tuple[NetworkCopies, StepLog]:
        """One gradient step of `loss`, after which the target follows."""
        batch = combine_actions(self.spec.action, batch)
        loss = partial(self.loss, online=copies.online, target=copies.variables("target"), key=key)
        copies, log = copies.train(loss, self.optimizer_at(env_steps), batch, enabled=enabled, axis_name=axis_name)
        return copies.follow(updates=log.applied.astype(jnp.uint32)), log

    def metrics(self, before: OffPolicyState, after: OffPolicyState) -> Metrics:
        """The learning rate, and the probability of a random action while the rollout was collected."""
        return super().metrics(before, after) | {"rollout/exploration_rate": self._exploration_rate(before.env_steps)}

    def initial_carry(self) -> PyTree:
        """The recurrent state of one environment; `()` of a network without one."""
        return carry_of_one(self.network)

    def policy(self, state: OffPolicyState) -> Greedy:
        """The action of the largest value."""
        return Greedy(self.network_policy(state, state.copies.evaluated()))

    def collect_policy(self, state: OffPolicyState) -> EpsilonGreedy | Boltzmann | FreshNoise | DiscountedReturn:
        """The exploring policy; until `learning_starts` all actions are random."""
        policy, env_steps = self.learner_policy(state), state.env_steps
        explorer = add_q_exploration(policy, self._exploration_rate(env_steps), self._exploration_temperature(env_steps))
        return add_return(explorer, self)

    def learner_policy(self, state: OffPolicyState) -> NetworkPolicy | EpisodeHead:
        """The policy of the online network, to which `collect_policy` adds random actions."""
        return self.network_policy(state, state.copies.online)

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True for narrow layers and, on one device, small batches, of sequences all together; see `is_narrow`."""
        return is_narrow(self._network, self.spec, self.batch_size * self.replay.draw_length if devices == 1 else 1)

    def _outputs(
        self, variables: Variables, obs: PyTree, key: PRNGKeyArray | None, *, train: bool = False
    ) -> tuple[Float[Array, "N n K"], PyTree]:
        """The outputs for all actions, and the network's statistics."""
        outputs, _, stats = self._network.apply(variables, obs, train=train, key=key)
        return outputs, stats

    def _exploration_rate(self, env_steps: StepCount) -> Float[Array, ""]:
        """The probability of a random action: 1 until learning starts, then `epsilon`, or 0 with a temperature."""
        epsilon = EPSILON if self.epsilon is None else self.epsilon
        after = value_at(epsilon if self.temperature is None else 0.0, env_steps)
        return jnp.where(self.has_started(env_steps), after, 1.0)

    def _exploration_temperature(self, env_steps: StepCount) -> Float[Array, ""] | None:
        """The temperature of Boltzmann exploration, so high that actions are random until learning starts; None without one."""
        if self.temperature is None:
            return None
        # `Boltzmann` accepts 0 at the end of a schedule, but not as a number.
        temperature = jnp.maximum(value_at(self.temperature, env_steps), jnp.finfo(jnp.float32).tiny)
        return jnp.where(self.has_started(env_steps), temperature, RANDOM_TEMPERATURE)

    def network_policy(self, state: OffPolicyState, variables: Variables) -> NetworkPolicy:
        """The policy of a network with these variables, such as the online network, with the state's statistics."""
        return NetworkPolicy(variables, state.normalizers.obs, self.values_network(), self.spec, for_action=for_values)

    @property
    def _network(self) -> Any:
        assert self.network is not None, "set_defaults sets it"
        return self.network


def value_terms(
    q: Float[Array, " N"], td_error: Float[Array, " N"], priority: Float[Array, " N"], weight: Float[Array, " N"]
) -> Terms:
    """The terms of a loss of action values, without a gradient: sums over a batch, and the new priorities of the samples."""
    terms: Terms = {
        "td_error": weighted_sum(jnp.abs(td_error), weight),
        "q": weighted_sum(q, weight),
        "priority": priority,
    }
    return jax.lax.stop_gradient(terms)


def fold(key: PRNGKeyArray | None, number: int) -> PRNGKeyArray | None:
    """Fold a number into the key, for one of several applications of a network; None, for no noise, stays None."""
    return None if key is None else jax.random.fold_in(key, number)
