"""C51: deep Q-learning of distributions (Bellemare et al. 2017, arXiv:1707.06887), with what Rainbow adds to it."""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_state
from polyak.core.spaces import EnvSpec
from polyak.core.struct import check_settings, choice, integer, number, setting, static, struct
from polyak.core.types import Metrics, Network, PyTree, Rollout, Scalar, Variables
from polyak.learning.drawn_batches import draw_batches, return_errors
from polyak.learning.normalizers import check_normalizers
from polyak.learning.off_policy import REPLAY_FIELD, OffPolicyState, check_off_policy, diagnose_off_policy, partition_by_env
from polyak.learning.prefill import add_rollout
from polyak.learning.q_learning import (
    create_q_state,
    exploration_rate,
    exploration_temperature,
    fold,
    has_small_products,
    update_q,
)
from polyak.networks.q_network import ExpectedValues, check_q_network, q_network_or_default
from polyak.ops.gradient_step import Aux, check_optimizer
from polyak.ops.losses import best_action, of_action, weighted_sum
from polyak.ops.schedules import Schedule, check_schedule
from polyak.ops.value_distributions import entropy, project_categorical
from polyak.policies.exploration import Boltzmann, EpsilonGreedy
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.q_policy import FreshNoise, explore
from polyak.replay.replay import Replay, Transition, check_replay
from polyak.replay.uniform import UniformReplay


@struct
class C51:
    """C51 for Discrete and MultiDiscrete actions: the distribution of returns on fixed atoms z_1 ... z_K.

        L(θ) = E[ -Σ_i m_i log p_i(s, a; θ) ],    m = Φ(r + γ^m z, p(s', a'; target)),    a' = argmax_a Σ_i z_i p_i(s', a)

    with Φ the projection onto the atoms. With `double` the online network chooses a', else the target network. With a dueling
    and noisy network, three steps and a prioritized replay it is Rainbow (Hessel et al. 2018, arXiv:1710.02298).

    Attributes:
        spec: the environment's spaces (`env.spec`). A MultiDiscrete action counts as one choice of at most 4096 combinations.
        network: a network that returns the logits `[B, n, num_atoms]`; None takes `q_network_for(spec)`. A built-in one gets
            that number of outputs. In its loss it is in training mode (dropout, batch normalization).
        num_steps: steps of each environment between updates.
        updates_per_step: gradient steps per transition, so that it means the same with any number of environments; times
            `num_steps * num_envs` it must be a whole number.
        batch_size: transitions of a gradient step.
        replay: a `UniformReplay`, `PrioritizedReplay`, or a `polyak.replay.Replay` of your own; the error of priorities is the
            KL divergence of the loss.
        learning_starts: transitions that are collected with random actions before the first gradient step.
        learning_rate: Adam's, a number or a schedule such as `Linear`.
        gamma: discount per step.
        n_step: steps that rewards are summed over before bootstrapping.
        reward_scale: factor of all rewards.
        normalize_obs: normalize observations by their running mean and standard deviation (all Boxes but uint8): those of now,
            when acting and when transitions are drawn.
        clip_obs: clip normalized observations to ± this value; None disables clipping.
        normalize_reward: divide rewards by the running standard deviation of the discounted `"return"` or of the `"reward"`;
            None leaves rewards unchanged.
        double: the online network chooses a' (van Hasselt et al. 2016, arXiv:1509.06461).
        num_atoms: K.
        v_min: z_1, the smallest return that is told apart.
        v_max: z_K, the largest one.
        tau: fraction by which the target moves towards the online network at each target update; 1 copies it.
        target_period: gradient steps between target updates.
        epsilon: probability of a random action, a number or a schedule, drawn for each environment; None decreases it from 1 to
            0.05 over the first 10,000 transitions.
        temperature: explore by P(a) ∝ exp(Q(s, a) / temperature), a number or a schedule, instead of by `epsilon`; None
            disables it.
        max_grad_norm: clip gradients to this global norm; None disables clipping.
        adam_eps: Adam's ε.
        optimizer: any `optax.GradientTransformation`, in place of Adam with `learning_rate`, `adam_eps` and `max_grad_norm`.
        max_skipped_updates: stop training after this many consecutive updates without a finite gradient step of a network.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete
    >>> agent = C51(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static()
    network: Network | None = static(default=None)
    num_steps: int = integer(default=4)
    updates_per_step: float = number(default=0.25, above=0, static=True)
    batch_size: int = integer(default=64)
    replay: Replay = setting(default=UniformReplay(100_000), check=check_replay)
    learning_starts: int = integer(default=1_000, at_least=0)
    learning_rate: Schedule = setting(default=5e-4, check=check_schedule)
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    n_step: int = integer(default=1, at_most=1_000)
    reward_scale: Scalar = number(default=1.0, above=0)
    normalize_obs: bool = choice(default=False, choices=(True, False))
    clip_obs: float | None = number(default=10.0, above=0, optional=True, static=True, used_if=("normalize_obs", True))
    normalize_reward: Literal["return", "reward"] | None = choice(default=None, choices=("return", "reward", None))
    double: bool = choice(default=True, choices=(True, False))
    num_atoms: int = integer(default=51, at_least=2)
    v_min: float = number(default=-10.0, static=True)
    v_max: float = number(default=10.0, static=True)
    tau: Scalar = number(default=1.0, above=0, at_most=1)
    target_period: int = integer(default=250)
    epsilon: Schedule | None = setting(
        default=None,
        check=partial(check_schedule, optional=True, above=-1.0, at_least=0, at_most=1),
        used_if=("temperature", None),
    )
    temperature: Schedule | None = setting(default=None, check=partial(check_schedule, optional=True))
    max_grad_norm: Scalar | None = number(default=10.0, above=0, optional=True)
    adam_eps: Scalar = number(default=1e-8, above=0)
    optimizer: optax.GradientTransformation | None = static(default=None)
    max_skipped_updates: int = integer(default=10)

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "network", q_network_or_default("C51", self.network, self.spec, self.num_atoms))
        check_optimizer(self)
        check_normalizers(self)
        if self.v_min >= self.v_max:
            raise ValueError(f"C51: v_min={self.v_min} must be below v_max={self.v_max}")

    add = add_rollout
    check = check_off_policy
    has_small_products = has_small_products
    partition = partition_by_env
    diagnose = diagnose_off_policy
    replay_field = REPLAY_FIELD
    draw_batches = draw_batches
    return_errors = return_errors
    max_lag = None

    def init(self, key: PRNGKeyArray) -> OffPolicyState:
        """A new state."""
        state = create_q_state(self, self._network, key)
        check_q_network(self._network, state.copies.online, self.spec, self.num_atoms)
        return state

    def policy(self, state: OffPolicyState) -> Greedy:
        """The action of the largest value."""
        check_state("C51.policy", state, OffPolicyState)
        return Greedy(self._network_policy(state))

    def collect_policy(self, state: OffPolicyState) -> EpsilonGreedy | Boltzmann | FreshNoise | DiscountedReturn:
        """The exploring policy; until `learning_starts` all actions are random."""
        check_state("C51.collect_policy", state, OffPolicyState)
        policy, env_steps = self._network_policy(state), state.env_steps
        explorer = explore(policy, exploration_rate(self, env_steps), exploration_temperature(self, env_steps))
        return DiscountedReturn(explorer, self.gamma) if self.normalize_reward == "return" else explorer

    def update(
        self, state: OffPolicyState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
    ) -> tuple[OffPolicyState, Metrics]:
        """Add a rollout to the replay, then take gradient steps on transitions drawn from it.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions.
            key: decides the transitions.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: the rollout does not fit the spec (while tracing).
        """
        return update_q(self, state, rollout, key, axis_name=axis_name)

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a batch whose weights sum to 1, and its terms; `priority` is KL(m ‖ p) of each sample.

        Args:
            params: θ.
            online: the online network's variables; of their parameters nothing is used.
            target: the target network's.
            key: for noise and dropout.
        """
        online = dataclasses.replace(online, params=params)
        of_all, stats = self._logits(online, batch.obs, fold(key, 0), train=True)
        logits = of_action(of_all, batch.action)
        target_probs = self.td_target(batch, online=online, target=target, key=key)
        cross_entropy = -jnp.sum(target_probs * jax.nn.log_softmax(logits), axis=1)
        q, target_q = (probs @ self._atoms for probs in (jax.nn.softmax(jax.lax.stop_gradient(logits)), target_probs))
        terms = {
            "td_error": weighted_sum(jnp.abs(target_q - q), batch.weight),
            "q": weighted_sum(q, batch.weight),
            "priority": jnp.maximum(jax.lax.stop_gradient(cross_entropy) - entropy(target_probs), 0.0),
        }
        return weighted_sum(cross_entropy, batch.weight), Aux(terms, stats)

    def td_target(
        self, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> Float[Array, "N K"]:
        """The target distribution Φ(r + γ^m z, p(s', a')), without a gradient; arguments as for `loss`."""
        target_logits, _ = self._logits(target, batch.next_obs, fold(key, 1))
        logits = self._logits(online, batch.next_obs, fold(key, 2))[0] if self.double else target_logits
        next_action = best_action(self._expected.q(logits), batch.next_action_mask)
        next_probs = jax.nn.softmax(of_action(target_logits, next_action))
        values = self.reward_scale * batch.reward[:, None] + batch.discount[:, None] * self._atoms[None]
        return jax.lax.stop_gradient(project_categorical(next_probs, values, self._atoms))

    def _logits(
        self, variables: Variables, obs: PyTree, key: PRNGKeyArray | None, *, train: bool = False
    ) -> tuple[Float[Array, "N n K"], PyTree]:
        """The logits of all actions, and the network's statistics."""
        logits, _, stats = self._network.apply(variables, obs, train=train, key=key)
        return logits, stats

    @property
    def _atoms(self) -> Float[Array, " K"]:
        return jnp.linspace(self.v_min, self.v_max, self.num_atoms, dtype=jnp.float32)

    @property
    def _expected(self) -> ExpectedValues:
        return ExpectedValues(self._network, (self.v_min, self.v_max))

    def _network_policy(self, state: OffPolicyState) -> NetworkPolicy:
        return NetworkPolicy(state.copies.online, state.normalizers.obs, self._expected, self.spec, combined=True)

    @property
    def _network(self) -> Network:
        assert self.network is not None, "__post_init__ sets the default"
        return self.network
