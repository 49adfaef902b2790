"""PQN: Q-learning from parallel environments without replay and target (Gallici et al. 2024, arXiv:2407.04811)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from polyak.agents.agent import BaseAgent
from polyak.agents.settings import AdamSettings, NormalizationSettings
from polyak.copies.network_copies import NetworkCopies
from polyak.core.checks import check_created_with
from polyak.core.spaces import EnvSpec, MultiDiscrete
from polyak.core.struct import integer, number, setting, static, struct
from polyak.core.types import Metrics, Network, PyTree, Rollout, Scalar, Variables
from polyak.learning.check_rollout import as_arrays, check_rollout
from polyak.learning.epochs import check_divides, mean_terms, train_epochs
from polyak.learning.normalizers import check_normalizers, settings_of
from polyak.learning.rollout_batch import Batch, any_over_devices, map_steps
from polyak.networks.adapters import has_batch_statistics
from polyak.networks.heads import QValues
from polyak.networks.layers import has_images, is_narrow
from polyak.networks.q_network import check_q_network, is_noisy, q_network_or_default
from polyak.ops.distributions.combinations import as_discrete, combine_mask, for_values, ravel_action
from polyak.ops.distributions.discrete import where_allowed
from polyak.ops.gradient_step import (
    Aux,
    Guard,
    StepLog,
    check_optimizer_state,
    count_microbatches,
    diagnose_skips,
    flag_quantities,
)
from polyak.ops.losses import fill_rows, finite_rows, flatten_steps, mask_invalid, of_action, sum_over_devices, weighted_sum
from polyak.ops.normalize import ObsNormalizer
from polyak.ops.returns import gae
from polyak.ops.schedules import Linear, Schedule, StepCount, check_schedule, saturating_add, value_at
from polyak.policies.exploration import Boltzmann, EpsilonGreedy
from polyak.policies.network_policy import Greedy, NetworkPolicy
from polyak.policies.q_policy import FreshNoise, add_q_exploration

EPSILON = Linear(1.0, 0.05, 100_000)


@struct
class PQNState:
    """Everything that training changes.

    Attributes:
        copies: the network: online, with the optimizer's state.
        obs_normalizer: running statistics of the observations, or None.
        env_steps: valid transitions learned from; schedules are functions of it.
        updates: rollouts learned from.
        guard: counts of skipped gradient steps.
    """

    copies: NetworkCopies
    obs_normalizer: ObsNormalizer | None
    env_steps: StepCount
    updates: UInt32[Array, ""]
    guard: Guard


@struct(kw_only=True)
class PQN(AdamSettings, NormalizationSettings, BaseAgent):
    """PQN for Discrete and MultiDiscrete actions, with many environments.

        L(θ) = E[ (G_t - Q_θ(s_t, a_t))² ],    G_t = r_t + γ (λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a))

    The λ-returns G are computed once for each rollout, by the network before the update. Normalized layers, which the default
    network has, take the place of a target network.

    Attributes:
        spec: the environment's spaces (`env.spec`). A MultiDiscrete action counts as one choice of at most 4096 combinations.
        network: a network that returns `(q, value)`; None takes `NatureCNN` for images, else `MLP`, with `norm="layer"`. It is
            in training mode in its loss (dropout, batch normalization), and in evaluation mode for the returns.
        num_steps: rollout length T, in steps of each environment.
        num_epochs: passes over each rollout.
        num_minibatches: minibatches per epoch; must divide `num_steps * num_envs`.
        gamma: discount per step.
        q_lambda: λ; 0 is one-step Q-learning, 1 the return up to the end of the rollout.
        epsilon: probability of a random action, a number or a schedule, drawn for each environment; None decreases it from 1 to
            0.05 over the first 100,000 transitions.
        max_skipped_updates: stop training after this many consecutive updates without a finite gradient step of a network.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> agent = PQN(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static(kw_only=False)
    network: Network | None = static(default=None, kw_only=False)
    num_steps: int = integer(default=32)
    num_epochs: int = integer(default=2)
    num_minibatches: int = integer(default=16)
    learning_rate: Schedule = 5e-4
    max_grad_norm: Scalar | None = 10.0
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    q_lambda: Scalar = number(default=0.65, at_least=0, at_most=1)
    epsilon: Schedule | None = setting(
        default=None, check=partial(check_schedule, optional=True, above=-1.0, at_least=0, at_most=1)
    )
    max_skipped_updates: int = integer(default=10)

    def set_defaults(self) -> None:
        """Complete the network."""
        object.__setattr__(self, "network", q_network_or_default("PQN", self.network, self.spec, QValues(), norm="layer"))

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        self.check_optimizer()
        check_normalizers(self)
        if is_noisy(self._network):
            raise ValueError("PQN: network must not be noisy, its noise would not be trained; got noisy=True")

    diagnose = diagnose_skips

    def init(self, key: PRNGKeyArray) -> PQNState:
        """A new state."""
        copies = NetworkCopies.create(self._network, key, as_discrete("PQN", self.spec), optimizer=None)
        check_q_network(self._network, copies.online, self.spec)
        env_steps, updates = StepCount.of(0), jnp.zeros((), jnp.uint32)
        normalizer = ObsNormalizer.init(self.spec.obs, self.clip_obs) if self.normalize_obs else None
        return PQNState(copies.with_optimizer_state(self.optimizer_at()), normalizer, env_steps, updates, Guard.init())

    def check(self, num_envs: int, devices: int = 1) -> None:
        """Check that rollouts of this number of environments (on each device) can be split into minibatches.

        Raises:
            ValueError: `num_minibatches` does not divide the samples.
        """
        check_divides("PQN", self.num_steps, num_envs, self.num_minibatches)

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True for narrow layers and, on one device, small minibatches; see `is_narrow`."""
        samples = self.num_steps * num_envs // self.num_minibatches
        return is_narrow(self._network, self.spec, samples if devices == 1 else 1)

    def policy(self, state: PQNState) -> Greedy:
        """The action of the largest value."""
        return Greedy(self.network_policy(state, state.copies.evaluated()))

    def collect_policy(self, state: PQNState) -> EpsilonGreedy | Boltzmann | FreshNoise:
        """The action of the largest value or, with probability ε, a random one."""
        return add_q_exploration(self.network_policy(state, state.copies.online), self._exploration_rate(state))

    def update(
        self, state: PQNState, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None
    ) -> tuple[PQNState, Metrics]:
        """Several epochs of gradient steps on one rollout.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions collected with `collect_policy(state)`.
            key: decides the minibatches.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: the rollout does not fit the spec or the minibatches the settings (while tracing).
        """
        check_created_with(self, equal=settings_of(self, state.obs_normalizer), present={})
        num_steps, num_envs = check_rollout(rollout, self.spec)
        check_divides("PQN", num_steps, num_envs, self.num_minibatches)
        rollout, copies, optimizer = self._combine(as_arrays(rollout)), state.copies, self.optimizer_at(state.env_steps)
        check_optimizer_state(optimizer, copies.online.params, copies.optimizer_state)
        batch, bad = self._make_batch(state, rollout, axis_name)
        copies, log = train_epochs(
            copies,
            self.loss,
            optimizer,
            lambda params: batch,
            key,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            num_microbatches=count_microbatches(
                len(batch.weight) // self.num_minibatches, None, axis_name, has_images=has_images(self.spec.obs)
            ),
            rollout_shape=(num_steps, num_envs),
            normalize_advantage=None,
            early_stop=None,
            data_is_finite=~jnp.any(bad),
            axis_name=axis_name,
        )
        skipped, applied = (flags.sum(dtype=jnp.uint32) for flags in (log.skipped, log.applied))
        valid = sum_over_devices(rollout.valid.sum(dtype=jnp.uint32), axis_name)
        counts = rollout.valid & finite_rows(rollout.obs, 2)
        new_state = PQNState(
            copies=copies,
            obs_normalizer=state.obs_normalizer and state.obs_normalizer.update(rollout.obs, counts, axis_name),
            env_steps=state.env_steps + valid,
            updates=saturating_add(state.updates, jnp.uint32(1)),
            guard=state.guard.after_update(skipped, applied, bad | log.bad.any((0, 1))),
        )
        return new_state, self._metrics(state, new_state, log)

    def loss(
        self, params: PyTree, batch: Batch, *, variables: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss of a minibatch whose weights sum to 1, and its terms.

        Args:
            params: θ.
            variables: the network's; their parameters are not used.
            key: for dropout.
        """
        variables = dataclasses.replace(variables, params=params)
        (q, _), _, stats = self._network.apply(variables, batch.obs, train=True, key=key)
        q = of_action(q, batch.action)
        td_error = batch.value_target - q
        terms = {"td_error": weighted_sum(jnp.abs(td_error), batch.weight), "q": weighted_sum(q, batch.weight)}
        return weighted_sum(jnp.square(td_error), batch.weight), Aux(terms, stats)

    def lambda_returns(self, variables: Variables, rollout: Rollout) -> Float[Array, "T B"]:
        """G of each row: Peng's Q(λ), which is TD(λ) with the value max_a Q(s, a) over the allowed actions."""

        def best_value(inputs: tuple[PyTree, PyTree]) -> Float[Array, " N"]:
            obs, mask = inputs
            (q, _), _, _ = self._network.apply(variables, obs)
            return jnp.max(where_allowed(q, mask), axis=1)

        inputs = (rollout.time_steps.obs, rollout.time_steps.action_mask)
        value = map_steps(best_value, inputs, has_images=has_images(self.spec.obs))
        ends = {"terminated": rollout.terminated, "truncated": rollout.truncated}
        advantage = gae(rollout.reward, value[:-1], value[1:], **ends, gamma=self.gamma, gae_lambda=self.q_lambda)
        return advantage + value[:-1]

    def _combine(self, rollout: Rollout) -> Rollout:
        """The rollout, with MultiDiscrete actions and their masks replaced by combinations."""
        if not isinstance(self.spec.action, MultiDiscrete):
            return rollout
        nvec, steps = self.spec.action.nvec, rollout.time_steps
        if steps.action_mask is not None:
            steps = dataclasses.replace(steps, action_mask=combine_mask(nvec, steps.action_mask))
        return dataclasses.replace(rollout, time_steps=steps, actions=ravel_action(nvec, rollout.actions))

    def _make_batch(self, state: PQNState, rollout: Rollout, axis_name: str | None) -> tuple[Batch, Bool[Array, " quantities"]]:
        """The rollout's samples with their λ-returns, and which quantities are not finite in rows that count.

        Observations are normalized with the statistics from before the rollout, which acting used too.
        """
        # Of the observations as they came: clipping makes infinity finite.
        is_finite, valid = finite_rows(rollout.obs, 2), rollout.valid
        if state.obs_normalizer is not None:
            obs = state.obs_normalizer.normalize(rollout.time_steps.obs)
            rollout = dataclasses.replace(rollout, time_steps=dataclasses.replace(rollout.time_steps, obs=obs))
        returns = self.lambda_returns(state.copies.online, rollout)
        bad = {
            "obs": valid & ~is_finite,
            "reward": valid & ~jnp.isfinite(rollout.reward),
            "value": valid & ~jnp.isfinite(returns),
        }
        found = any_over_devices(jnp.stack([rows.any() for rows in bad.values()]), axis_name)
        obs, action, returns = mask_invalid((rollout.obs, rollout.actions, returns), valid)
        zeros = jnp.zeros_like(returns)
        batch = Batch(obs, action, None, (), zeros, zeros, zeros, returns, valid.astype(jnp.float32), None, ())
        batch = jax.tree.map(flatten_steps, batch)
        if has_batch_statistics(state.copies.online):
            batch = dataclasses.replace(batch, obs=fill_rows(batch.obs, batch.weight))
        return batch, flag_quantities(dict(zip(bad, found, strict=True)))

    def _metrics(self, state: PQNState, new_state: PQNState, log: StepLog) -> Metrics:
        of_all, _ = mean_terms(log)
        metrics: Metrics = {f"train/{name}": mean for name, mean in of_all.items()}
        metrics |= {
            "train/n_updates": new_state.updates,
            **new_state.guard.metrics(),
            "rollout/exploration_rate": self._exploration_rate(state),
        }
        if self.optimizer is None:
            metrics["train/learning_rate"] = value_at(self.learning_rate, state.env_steps)
        return metrics

    def _exploration_rate(self, state: PQNState) -> Float[Array, ""]:
        return value_at(EPSILON if self.epsilon is None else self.epsilon, state.env_steps)

    def network_policy(self, state: PQNState, variables: Variables) -> NetworkPolicy:
        """The policy of a network with these variables, with the state's statistics."""
        return NetworkPolicy(variables, state.obs_normalizer, self._network, self.spec, for_action=for_values)

    @property
    def _network(self) -> Network:
        assert self.network is not None, "set_defaults sets it"
        return self.network
