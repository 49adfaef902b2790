"""Random network distillation (Burda et al. 2018, arXiv:1810.12894): an agent around an agent that explores what is new."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.agent import BaseAgent
from polyak.agents.on_policy import OnPolicyAgent, OnPolicyState
from polyak.agents.settings import AdamSettings
from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import EnvSpec
from polyak.core.struct import integer, number, static, struct
from polyak.core.types import Mean, Metrics, Network, PyTree, Rollout, Scalar, Variables
from polyak.learning.check_rollout import as_arrays, check_returns, check_rollout
from polyak.learning.epochs import check_divides, epoch_seeds, shuffled_minibatches
from polyak.learning.rollout_batch import Weights, any_over_devices, map_steps, sample_weights
from polyak.networks.feedforward import BuiltInNetwork, FeedForward, complete
from polyak.networks.heads import ValueOnly
from polyak.networks.layers import has_images
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import flatten_steps, mask_invalid, masked_mean_and_variance, sum_over_devices, weighted_sum
from polyak.ops.normalize import RunningStats
from polyak.ops.returns import gae, running_return
from polyak.ops.schedules import Schedule
from polyak.policies.distillation import (
    Distillation,
    IntrinsicReturn,
    create_obs_stats,
    diagnose_stats,
    feature_networks,
    feature_spec,
    random_network_or_default,
)


@struct
class RNDState:
    """Everything that training changes.

    Attributes:
        agent: the state of the inner agent.
        predictor: f̂.
        value: V_I, the value of intrinsic rewards.
        random: f, which does not change.
        obs_stats: statistics of observations; see `Distillation`.
        return_stats: statistics of the discounted intrinsic return.
    """

    agent: OnPolicyState
    predictor: NetworkCopies
    value: NetworkCopies
    random: Variables
    obs_stats: PyTree
    return_stats: RunningStats


@struct(kw_only=True)
class RND(AdamSettings, BaseAgent):
    """An agent that learns from rollouts, with the intrinsic reward and the second value of random network distillation.

        i_t = mean_k (f̂_k(s_{t+1}) - f_k(s_{t+1}))² / std(R)         R: discounted sums of i before the division
        A = A_E + c A_I                                              A_E: of the inner agent, with its γ and its episodes
        A_I = GAE(i; V_I, γ_I), over all episodes
        L = E[ mean_k (f̂_k - f_k)² ] + c_v E[ (V_I(s) - V̂_I)² ]

    f is a random network, and f̂ learns to predict it, which it does well where it has been often. The intrinsic return does not
    end with an episode: a reset is a step of it like others, from the last observation of an episode to the first of the next.
    So the last observation counts also of an episode that terminated. The first rollout has no intrinsic rewards: it sets the
    statistics of observations, in place of the paper's steps of a random agent. V_I is a network of its own, not a second head,
    so that the inner agent is the same as without intrinsic rewards.

    Attributes:
        agent: `PPO`, `PPOKL`, `A2C`, or another agent that learns from rollouts.
        network: f, with at least one layer and without a head; f̂ has two more layers of its last width. None takes `NatureCNN`
            for images, else `MLP`.
        value: the network of V_I, not recurrent and without a head; it sees the whole observation, normalized where the inner
            agent has `normalize_obs`. None takes `NatureCNN` for images, else `MLP`.
        num_features: number of outputs of f.
        coefficient: c, the weight of intrinsic advantages beside the extrinsic ones; the paper's 1 to 2 is 0.5.
        intrinsic_gamma: γ_I, the discount of intrinsic rewards; γ_E is the agent's `gamma`.
        gae_lambda: trace decay λ of A_I.
        vf_coef: c_v, the coefficient of the loss of V_I.
        clip_obs: clip the normalized observations of f and f̂ to ± this value.
        predictor_fraction: the fraction of each minibatch that trains f̂; with many environments it would learn too fast.
        num_epochs: passes of f̂ and V_I over each rollout.
        num_minibatches: minibatches per epoch; must divide `num_steps * num_envs`.

    Raises:
        TypeError, ValueError: a setting is out of range, or needs another one; the message names it.

    >>> from polyak.agents.ppo import PPO
    >>> from polyak.core.spaces import Box, Discrete
    >>> agent = RND(PPO(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.999))
    >>> state = agent.init(jax.random.key(0))
    """

    agent: Any = dataclasses.field(kw_only=False)
    network: Network | None = static(default=None)
    value: Network | None = static(default=None)
    num_features: int = integer(default=64)
    coefficient: Scalar = number(default=0.5, at_least=0)
    intrinsic_gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    gae_lambda: Scalar = number(default=0.95, at_least=0, at_most=1)
    vf_coef: Scalar = number(default=0.5, at_least=0)
    clip_obs: float = number(default=5.0, above=0, static=True)
    predictor_fraction: Scalar = number(default=0.25, above=0, at_most=1)
    num_epochs: int = integer(default=4)
    num_minibatches: int = integer(default=4)
    learning_rate: Schedule = 1e-4

    def set_defaults(self) -> None:
        """Check the agent, and complete the networks."""
        inner: Any = self.agent
        if isinstance(inner, BaseAgent) and not isinstance(inner, OnPolicyAgent):
            got = f"got {type(inner).__name__}; RNDDQN has intrinsic rewards and a replay"
            raise TypeError(f"RND: agent must learn from rollouts, such as PPO or A2C, {got}")
        if not isinstance(inner, OnPolicyAgent):
            raise TypeError(f"RND: agent must be an agent such as PPO(env.spec), got {inner!r:.80}")
        value = complete("RND", self.value, self.spec, ValueOnly(), name="value")
        if isinstance(value, BuiltInNetwork) and not isinstance(value, FeedForward):
            raise TypeError(f"RND: value must not be recurrent, got {value!r:.80}")
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "network", random_network_or_default("RND", self.network, self.spec))

    def check_together(self) -> None:
        """Check the optimizer."""
        self.check_optimizer()

    @property
    def spec(self) -> EnvSpec:  # type: ignore[override]
        """The inner agent's."""
        return self.agent.spec

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        """The inner agent's."""
        return self.agent.num_steps

    @property
    def gamma(self) -> Scalar:
        """The inner agent's, the discount of the environment's rewards."""
        return self.agent.gamma

    @property
    def max_lag(self) -> int | None:
        """The inner agent's."""
        return self.agent.max_lag

    @property
    def lag_advice(self) -> str:
        """`lag_advice` of the inner agent."""
        return self.agent.lag_advice

    def check(self, num_envs: int, devices: int = 1) -> None:
        """Check that rollouts of this number of environments (on each device) can be split into minibatches, and the agent's.

        Raises:
            ValueError: a number of minibatches does not divide the samples.
        """
        self.agent.check(num_envs, devices)
        check_divides("RND", self.num_steps, num_envs, self.num_minibatches)

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """Return why the inner agent cannot continue, whose advantages have NaN if RND's do, or why nothing is new; or None."""
        reason: str | None = self.agent.diagnose(metrics)
        return reason or diagnose_stats("RND", metrics, self.agent.max_skipped_updates)

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """As the inner agent does."""
        return self.agent.prefers_single_thread(num_envs, devices)

    def init(self, key: PRNGKeyArray) -> RNDState:
        """Create a new state; the inner agent's is the same as without RND."""
        keys, optimizer = jax.random.split(jax.random.fold_in(key, 1), 3), self.optimizer_at()
        features = feature_spec(self.spec, self.num_features)
        predictor = NetworkCopies.create(feature_networks(self.network)[1], keys[0], features, optimizer=None, name="predictor")
        value = NetworkCopies.create(self._value, keys[1], self.spec, optimizer=None, name="value")
        return RNDState(
            agent=self.agent.init(key),
            predictor=predictor.with_optimizer_state(optimizer),
            value=value.with_optimizer_state(optimizer),
            random=feature_networks(self.network)[0].init(keys[2], features),
            obs_stats=create_obs_stats(self.spec),
            return_stats=RunningStats.init(()),
        )

    def policy(self, state: RNDState) -> Any:
        """The greedy policy of the inner agent."""
        return self.agent.policy(state.agent)

    def collect_policy(self, state: RNDState) -> IntrinsicReturn:
        """The inner agent's exploring policy, which also sums intrinsic rewards."""
        return IntrinsicReturn(self.agent.collect_policy(state.agent), self.intrinsic_gamma, self.distillation(state))

    def distillation(self, state: RNDState) -> Distillation:
        """The networks and statistics of the intrinsic reward."""
        options = (feature_networks(self.network), self.spec, self.clip_obs)
        return Distillation(state.random, state.predictor.online, state.obs_stats, *options)

    def update(
        self,
        state: RNDState,
        rollout: Rollout,
        key: PRNGKeyArray,
        *,
        weights: Weights = None,
        axis_name: str | None = None,
    ) -> tuple[RNDState, Metrics]:
        """Update the inner agent with both advantages, then the predictor and V_I.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions collected with `collect_policy(state)`; episodes may begin before and end after it.
            key: decides the minibatches; the inner agent gets the same key.
            weights: see the inner agent.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: rollout or weights do not fit the spec, state or minibatches the settings (while tracing).
        """
        num_steps, num_envs = check_rollout(rollout, self.spec)
        check_divides("RND", num_steps, num_envs, self.num_minibatches)
        check_returns(rollout, "RND")
        carry, return_before = rollout.carry
        obs, normalizer = as_arrays(rollout).time_steps.obs, state.agent.obs_normalizer
        value_obs = obs if normalizer is None else normalizer.normalize(obs)
        # Resets are steps too; a time step that both begins and ends an episode stands for a worker that was lost.
        is_lost = rollout.time_steps.first & rollout.time_steps.last
        weight = sample_weights(~(is_lost[:-1] | is_lost[1:]), weights)

        distillation = self.distillation(state)
        images = has_images(self.spec.obs)
        error = map_steps(distillation.error, obs, has_images=images)
        value = map_steps(partial(self._values, state.value.online), value_obs, has_images=images)
        bad = (weight > 0) & ~(jnp.isfinite(error[1:]) & jnp.isfinite(value[:-1]))
        is_finite = ~any_over_devices(bad.any(), axis_name)

        # Intrinsic rewards, divided by the standard deviation of their discounted sums.
        never = jnp.zeros(error.shape, bool)
        returns = running_return(error, never, return_before, gamma=self.intrinsic_gamma)[1:]
        return_stats = state.return_stats.update(returns, (weight > 0) & distillation.has_stats & is_finite, axis_name)
        reward = error[1:] / return_stats.stddev()

        # Intrinsic advantages, non-episodic.
        ends = never[1:]
        advantage = gae(reward, value[:-1], value[1:], ends, ends, gamma=self.intrinsic_gamma, gae_lambda=self.gae_lambda)
        more = jnp.where(distillation.has_stats, self.coefficient * advantage, 0.0)

        inner, metrics = self.agent.update(
            state.agent,
            dataclasses.replace(rollout, carry=carry),
            key,
            weights=weights,
            intrinsic_advantage=more,
            axis_name=axis_name,
        )

        # Statistics of observations, then epochs of the predictor and of V_I.
        next_obs = jax.tree.map(lambda x: x[1:], obs)
        distillation = distillation.update_stats(next_obs, weight, axis_name)
        value_obs = jax.tree.map(lambda x: x[:-1], value_obs)
        samples = {"value_obs": value_obs, "next_obs": next_obs, "value_target": advantage + value[:-1]}
        # The gradient of a sample without weight would be 0 times NaN.
        batch = jax.tree.map(flatten_steps, mask_invalid(samples, weight > 0) | {"weight": weight})
        (predictor, value_copies), terms = self._train(
            state, distillation, batch, key, (num_steps, num_envs), is_finite, axis_name
        )
        mean_reward, _ = masked_mean_and_variance(reward, weight, axis_name)
        metrics |= {f"train/{name}": mean for name, mean in terms.items()}
        metrics |= {
            "train/intrinsic_reward": mean_reward,
            "train/intrinsic_return_std": return_stats.stddev(),
            "train/intrinsic_stats": distillation.has_stats.astype(jnp.float32),
            "train/intrinsic_skipped_steps": predictor.skipped + value_copies.skipped,
        }
        return RNDState(inner, predictor, value_copies, state.random, distillation.obs_stats, return_stats), metrics

    def predictor_loss(
        self, params: PyTree, batch: Mapping[str, PyTree], predictor: Variables, distillation: Distillation
    ) -> tuple[Float[Array, ""], Aux]:
        """Compute E[ mean_k (f̂_k - f_k)² ] of the next observations; weights sum to 1."""
        distillation = dataclasses.replace(distillation, predictor=predictor)
        return distillation.loss(params, batch["next_obs"], batch["weight"])

    def value_loss(self, params: PyTree, batch: Mapping[str, PyTree], value: Variables) -> tuple[Float[Array, ""], Aux]:
        """Compute c_v E[ (V_I(s) - V̂_I)² ]; weights sum to 1."""
        error = self._values(dataclasses.replace(value, params=params), batch["value_obs"]) - batch["value_target"]
        return self.vf_coef * weighted_sum(jnp.square(error), batch["weight"]), Aux({})

    def _train(
        self,
        state: RNDState,
        distillation: Distillation,
        batch: Mapping[str, PyTree],
        key: PRNGKeyArray,
        shape: tuple[int, int],
        is_finite: Bool[Array, ""],
        axis_name: str | None,
    ) -> tuple[tuple[NetworkCopies, NetworkCopies], dict[str, Mean]]:
        """The predictor and V_I after all epochs, and the means of their losses."""
        key = jax.random.fold_in(key, 1)
        seeds = epoch_seeds(key, self.num_epochs, *shape, self.num_minibatches, axis_name)
        index = jax.vmap(lambda seeds: shuffled_minibatches(seeds, *shape, self.num_minibatches))(seeds)
        index = index.reshape(-1, index.shape[-1])
        keys = jax.random.split(key, len(index))
        devices, device = (1, 0) if axis_name is None else (jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name))
        optimizer = self.optimizer_at(state.agent.env_steps)

        def step(carry: PyTree, row: tuple[Array, PRNGKeyArray]) -> tuple[PyTree, Any]:
            (predictor, value), (rows, key) = carry, row
            part = jax.tree.map(lambda x: x[rows], batch)
            weight = part["weight"]
            # Drawn for the parts of all devices, so that their number changes nothing.
            numbers = jax.random.uniform(key, (devices, *weight.shape))[device]
            drawn = jnp.where(numbers < self.predictor_fraction, weight, 0.0)
            totals = [sum_over_devices(w.sum(), axis_name) for w in (drawn, weight)]
            parts = [part | {"weight": w / jnp.maximum(total, 1e-8)} for w, total in zip((drawn, weight), totals, strict=True)]
            loss = partial(self.predictor_loss, predictor=predictor.online, distillation=distillation)
            options: Any = {"data_is_finite": is_finite, "axis_name": axis_name}
            predictor, first = predictor.train(loss, optimizer, parts[0], enabled=totals[0] > 0, **options)
            loss = partial(self.value_loss, value=value.online)
            value, second = value.train(loss, optimizer, parts[1], enabled=totals[1] > 0, **options)
            return (predictor, value), [(log.terms["loss"], log.applied) for log in (first, second)]

        copies, logs = jax.lax.scan(step, (state.predictor, state.value), (index, keys))
        names = ("predictor_loss", "intrinsic_value_loss")
        return copies, {name: Mean.of(*log) for name, log in zip(names, logs, strict=True)}

    def _values(self, variables: Variables, obs: PyTree) -> Float[Array, " N"]:
        (_, value), _, _ = self._value.apply(variables, obs)
        return value

    @property
    def _value(self) -> Any:
        assert self.value is not None, "set_defaults sets it"
        return self.value
