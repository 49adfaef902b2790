"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): clipped, or penalised by the KL divergence."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from polyak.core.spaces import EnvSpec
from polyak.core.struct import check_needed, check_settings, choice, integer, number, setting, static, struct
from polyak.core.types import Metrics, Network, PyTree, Rollout, Scalar, Terms, Variables
from polyak.learning import batch as rows_of
from polyak.learning import epochs
from polyak.learning.batch import ActorCriticModel, Rows, collected, hidden, not_finite, row_weights
from polyak.learning.check_rollout import as_arrays, check_rollout
from polyak.learning.histograms import update_histograms
from polyak.learning.minibatches import check_divides
from polyak.learning.surrogate import Surrogate
from polyak.networks.actor_critic import check_actor_critic, check_squashing, checked_network
from polyak.networks.layers import is_narrow
from polyak.networks.roles import Role, check_kernels, l2_coefficients
from polyak.ops import losses
from polyak.ops.devices import sum_over_devices
from polyak.ops.guard import Guard
from polyak.ops.kl_penalty import adapted_beta
from polyak.ops.normalizer import ObsNormalizer, RewardScaler, can_normalize, check_statistics
from polyak.ops.optimizer import Adam
from polyak.ops.returns import advantages_and_targets
from polyak.ops.schedules import Schedule, check_schedule, counted_on, value_at
from polyak.ops.trees import float_vector
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy

# fmt: off
# One minibatch an epoch, and the Adam of TensorFlow 1.
TF_AGENTS: Mapping[str, Any] = {
    "num_epochs": 25, "num_minibatches": 1, "learning_rate": 1e-3, "adam_eps": 1e-8, "max_grad_norm": None,
    "advantages": "monte_carlo", "value_targets": "monte_carlo", "normalize_advantage": "batch",
    "normalize_obs": True, "clip_obs": 5.0, "normalize_reward": "reward",
}
TF_AGENTS_KL: Mapping[str, Any] = {
    "num_epochs": 10, "advantages": "gae", "value_targets": "td_lambda", "clip_range": None,
    "kl_beta": 1.0, "kl_target": 0.01, "kl_tolerance": 0.5, "normalize_obs": False, "clip_reward": None,
}
# fmt: on

# More samples at a time compute faster on several CPU threads.
MAX_SMALL_BATCH = 256

QUANTITIES = (*rows_of.QUANTITIES, *epochs.QUANTITIES)


@struct
class PPOState:
    """All that training changes.

    Attributes:
        variables: the network's.
        optimizer: Adam's moments.
        normalizer: statistics of the observations, or None.
        rewards: statistics by whose deviation rewards are divided, or None.
        kl_beta: β of the KL penalty, or None.
        env_steps: valid transitions learned from; what schedules follow.
        updates: rollouts learned from.
        guard: counts of refused steps.
    """

    variables: Variables
    optimizer: PyTree
    normalizer: ObsNormalizer | None
    rewards: RewardScaler | None
    kl_beta: Float[Array, ""] | None
    env_steps: UInt32[Array, ""]
    updates: UInt32[Array, ""]
    guard: Guard


@struct
class PPO:
    """PPO for Discrete, MultiDiscrete, MultiBinary, Box actions and trees of them, also with a memory.

        L(θ) = E[ -min(ρ A, clip(ρ, 1-ε, 1+ε) A) + c_v (V - V̂)² - c_e H ] + β KL + κ max(KL - f d, 0)² + Σ c_i ‖W_i‖²

    with ρ = π_θ(a|s) / π_old(a|s) and KL = E[KL(π_old ‖ π_θ)]. Expectations are over valid transitions. Old distributions and
    values come from one pass before the first epoch: the same network on the same numbers as in acting, and cheaper.

    Attributes:
        spec: the environment's spaces (`env.spec`).
        network: answers `(action_params, value)`; None takes `network_for(spec)`. It is never put into training mode: dropout
            stays off, and statistics stay as they were initialised. One with a memory (`lstm`, `gru`) learns from whole
            sequences: minibatches are made of environments then, not of single steps.
        num_steps: rollout length T, in steps of each environment.
        num_epochs: passes over a rollout.
        num_minibatches: parts of a rollout per epoch; must divide `num_steps * num_envs`, or with a memory `num_envs`.
        learning_rate: Adam's, a number or a schedule such as `Linear`.
        gamma: discount per step.
        gae_lambda: trace decay of GAE.
        advantages: `"gae"`, or `"monte_carlo"`: the discounted return minus the value.
        value_targets: what the value learns: `"td_lambda"` (GAE plus value), or `"monte_carlo"`, the discounted return.
        values_when: old values and distributions are computed in the `"update"`, or were kept since `"collect"`ing.
        recompute_values: advantages and value targets are computed anew before each epoch.
        clip_range: largest change of the probability ratio, a number or a schedule; None leaves it free.
        clip_range_vf: the value moves at most so far from its old one; None leaves it free.
        clip_log_prob: log-probabilities that learn (not the old ones) are kept within ± this in the policy's loss; where that
            bites, the ratio is another one. None leaves them.
        ent_coef: coefficient of the entropy bonus.
        vf_coef: coefficient of the value loss.
        kl_beta: first coefficient of the KL penalty, adapted after each update; None for no penalty.
        kl_target: the KL divergence that an update should have, in nats.
        kl_tolerance: the penalty's coefficient changes where the divergence is farther from the target than this share.
        kl_cutoff_coef: coefficient of the squared KL divergence beyond the cutoff; None for no such penalty.
        kl_cutoff_factor: the cutoff, in multiples of `kl_target`.
        target_kl: an update ends once the approximate KL divergence of a minibatch exceeds 1.5 times this; None never.
        l2_policy: coefficient of the squared kernels that only the policy is computed from; None for none.
        l2_value: likewise of the value.
        l2_shared: likewise of both.
        max_grad_norm: global norm that gradients are clipped to; None leaves them.
        normalize_advantage: advantages get mean 0 and deviation 1 over the valid entries of a `"minibatch"`, of the `"batch"`
            (the rollout), or not (None).
        normalize_obs: observations that are Boxes, but not of bytes, are normalised by their running mean and deviation.
        clip_obs: normalised observations are kept within ± this; None leaves them.
        normalize_reward: rewards are divided by the running deviation of the discounted `"return"`, of the `"reward"`, or not.
        clip_reward: normalised rewards are kept within ± this; None leaves them.
        squash: Box actions are drawn from a normal distribution through tanh; the spec must rescale actions to their bounds.
        adam_eps: added to the root of Adam's second moment.
        max_bad_steps: updates in a row without one good gradient step after which training stops with an error.
        histograms: metrics hold histograms of actions, advantages, values, weights and gradients too, for TensorBoard.
        microbatch_size: rows of a minibatch (with a memory: sequences) whose gradient is computed at a time, which takes less
            memory; must divide those on each device. None: as many as are fast.

    Raises:
        TypeError, ValueError: a setting out of its range, or without another that it needs, by name.

    >>> from polyak.core.spaces import Box, Discrete
    >>> agent = PPO(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), gamma=0.98)
    >>> state = agent.init(jax.random.key(0))
    """

    spec: EnvSpec = static()
    network: Network | None = static(default=None)
    num_steps: int = integer(default=256)
    num_epochs: int = integer(default=10)
    num_minibatches: int = integer(default=32)
    learning_rate: Schedule = setting(default=3e-4, check=check_schedule)
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    gae_lambda: Scalar = number(default=0.95, at_least=0, at_most=1)
    advantages: Literal["gae", "monte_carlo"] = choice(default="gae", choices=("gae", "monte_carlo"))
    value_targets: Literal["td_lambda", "monte_carlo"] = choice(default="td_lambda", choices=("td_lambda", "monte_carlo"))
    values_when: Literal["update", "collect"] = choice(default="update", choices=("update", "collect"))
    recompute_values: bool = choice(default=False, choices=(True, False))
    clip_range: Schedule | None = setting(default=0.2, check=partial(check_schedule, optional=True))
    clip_range_vf: Scalar | None = number(default=None, above=0, optional=True)
    clip_log_prob: Scalar | None = number(default=None, above=0, optional=True)
    ent_coef: Scalar = number(default=0.0, at_least=0)
    vf_coef: Scalar = number(default=0.5, at_least=0)
    kl_beta: Scalar | None = number(default=None, above=0, optional=True)
    kl_target: Scalar | None = number(default=None, above=0, optional=True)
    kl_tolerance: Scalar = number(default=0.5, at_least=0, at_most=1)
    kl_cutoff_coef: Scalar | None = number(default=None, above=0, optional=True)
    kl_cutoff_factor: Scalar | None = number(default=None, above=0, optional=True)
    target_kl: Scalar | None = number(default=None, above=0, optional=True)
    l2_policy: Scalar | None = number(default=None, at_least=0, optional=True)
    l2_value: Scalar | None = number(default=None, at_least=0, optional=True)
    l2_shared: Scalar | None = number(default=None, at_least=0, optional=True)
    max_grad_norm: Scalar | None = number(default=0.5, above=0, optional=True)
    normalize_advantage: Literal["minibatch", "batch"] | None = choice(
        default="minibatch", choices=("minibatch", "batch", None)
    )
    normalize_obs: bool = choice(default=False, choices=(True, False))
    clip_obs: float | None = number(default=10.0, above=0, optional=True, static=True)
    normalize_reward: Literal["return", "reward"] | None = choice(default=None, choices=("return", "reward", None))
    clip_reward: Scalar | None = number(default=10.0, above=0, optional=True)
    squash: bool = choice(default=False, choices=(True, False))
    adam_eps: Scalar = number(default=1e-5, above=0)
    max_bad_steps: int = integer(default=10)
    histograms: bool = choice(default=False, choices=(True, False))
    microbatch_size: int | None = integer(default=None, optional=True)

    @classmethod
    def tf_agents(cls, spec: EnvSpec, **changes: Any) -> "PPO":
        """With the defaults of TF-Agents' `PPOClipAgent`, but for its ratio clipping of 0, which clips nothing: 0.2."""
        return cls(spec, **{**TF_AGENTS, "normalize_obs": can_normalize(spec.obs), **changes})

    @classmethod
    def tf_agents_kl(cls, spec: EnvSpec, **changes: Any) -> "PPO":
        """With the defaults of TF-Agents' `PPOKLPenaltyAgent`; for those that it does not have, what its documentation says."""
        return cls(spec, **{**TF_AGENTS, **TF_AGENTS_KL, **changes})

    def __post_init__(self) -> None:
        if not isinstance(self.spec, EnvSpec):
            raise TypeError(f"PPO: spec must be an EnvSpec such as env.spec, got {self.spec!r}")
        object.__setattr__(self, "network", checked_network("PPO", self.network, self.spec))
        check_settings(self)
        check_needed(self, "kl_beta", "kl_target")
        check_needed(self, "kl_cutoff_coef", "kl_cutoff_factor")
        check_needed(self, "kl_cutoff_coef", "kl_target")
        check_needed(self, "kl_cutoff_factor", "kl_cutoff_coef")
        check_needed(self, "kl_target", "kl_beta", "kl_cutoff_coef")
        if self.normalize_obs and not can_normalize(self.spec.obs):
            raise ValueError(f"PPO: normalize_obs must be False where no Box holds more than bytes, got {self.spec.obs}")
        check_squashing("PPO", self._network, self.spec, squash=self.squash)
        check_kernels("PPO", self._network, self.spec, self._l2)

    def init(self, key: PRNGKeyArray) -> PPOState:
        """A fresh state."""
        variables = self._network.init(key, self.spec)
        check_actor_critic(self._network, variables, self.spec)
        params, _ = float_vector(variables.params)
        return PPOState(
            variables=variables,
            optimizer=self._adam.init(params),
            normalizer=ObsNormalizer.fresh(self.spec.obs, self.clip_obs) if self.normalize_obs else None,
            rewards=None if self.normalize_reward is None else RewardScaler.fresh(self.normalize_reward),
            kl_beta=None if self.kl_beta is None else jnp.asarray(self.kl_beta, jnp.float32),
            env_steps=jnp.zeros((), jnp.uint32),
            updates=jnp.zeros((), jnp.uint32),
            guard=Guard.fresh(),
        )

    def check(self, num_envs: int) -> None:
        """Refuse a number of environments (on each device) that rollouts cannot be split into minibatches with.

        Raises:
            ValueError: `num_minibatches` does not divide the rows (with a memory: environments), or `microbatch_size` a part.
        """
        check_divides(self.num_steps, num_envs, self.num_minibatches, self.microbatch_size, sequences=self._model.remembers)

    def has_small_products(self, num_envs: int, devices: int) -> bool:
        """Whether layers are at most 256 wide and, on one device, gradients are computed over at most 256 samples at a time."""
        samples = self.num_steps * num_envs // self.num_minibatches
        if self.microbatch_size is not None:
            samples = self.microbatch_size * (self.num_steps if self._model.remembers else 1)
        return is_narrow(self._network, self.spec) and (devices > 1 or samples <= MAX_SMALL_BATCH)

    def partition(self, axis_name: str) -> PartitionSpec:
        """The whole state is replicated on every device."""
        return PartitionSpec()

    def policy(self, state: PPOState) -> Greedy:
        """The most probable action."""
        return Greedy(self._network_policy(state))

    def collect_policy(self, state: PPOState) -> NetworkPolicy | DiscountedReturn:
        """A sample from the policy."""
        policy = self._network_policy(state, return_info=self.values_when == "collect")
        return DiscountedReturn(policy, self.gamma) if self.normalize_reward == "return" else policy

    def update(
        self,
        state: PPOState,
        rollout: Rollout,
        key: PRNGKeyArray,
        *,
        weights: Float[Array, "T B"] | Float[Array, " B"] | None = None,
        axis_name: str | None = None,
    ) -> tuple[PPOState, Metrics]:
        """Several epochs of gradient steps on one rollout; then the statistics and the penalty's coefficient move.

        Args:
            state: donate it; nothing of it is needed afterwards.
            rollout: `[T, B]` transitions collected with `collect_policy(state)`; episodes may begin before and end after it.
            key: decides the minibatches.
            weights: how much transitions, or environments, count; those of 0 or less, or not finite, are left out of the loss
                and the statistics. Their rewards and values still stand in the advantages of the steps before.
            axis_name: inside `shard_map`, the mesh axis that environments are split over.

        Raises:
            TypeError, ValueError: rollout or weights do not fit the spec, state or minibatches the settings (while tracing).
        """
        self._check_state(state)
        num_steps, num_envs = check_rollout(rollout, self.spec)
        rollout = as_arrays(rollout)
        check_divides(num_steps, num_envs, self.num_minibatches, self.microbatch_size, sequences=self._model.remembers)
        obs, carry = self._seen(state, rollout)
        rows, data_bad = self._rows(state, rollout, obs, carry, weights, axis_name)

        def rows_at(variables: Variables) -> Rows:
            if not self.recompute_values:
                return rows
            _, value = self._model.evaluate(variables, obs, rollout.time_steps.first, carry)
            return rows.with_advantages(*self._advantages(state, value, rollout))

        params, unravel = float_vector(state.variables.params)
        clip_range = None if self.clip_range is None else value_at(self.clip_range, state.env_steps)
        punished = l2_coefficients(self._network, state.variables, self.spec, self._l2)
        objective = Surrogate(
            self, self._model, state.variables, unravel, rows_at, clip_range, state.kl_beta, punished, axis_name
        )
        learning_rate = value_at(self.learning_rate, state.env_steps)
        moved, optimizer, taken = epochs.gradient_epochs(
            objective,
            params,
            state.optimizer,
            key,
            num_epochs=self.num_epochs,
            adam=self._adam,
            learning_rate=learning_rate,
            usable=~jnp.any(data_bad),
            shape=(1 if rows.sequences else num_steps, num_envs),
            num_minibatches=self.num_minibatches,
            normalize_advantage=self.normalize_advantage,
            axis_name=axis_name,
        )

        kl = objective.kl_of_all(moved, rows)
        refused, steps = (flags.sum(dtype=jnp.uint32) for flags in (taken.refused, taken.refused | taken.kept))
        usable = ((row_weights(rollout.valid, weights) > 0) & ~jnp.any(data_bad)).astype(jnp.float32)
        state = PPOState(
            variables=objective.variables(moved),
            optimizer=optimizer,
            # The statistics move last, so that all epochs saw the numbers that the policy acted on.
            normalizer=None if state.normalizer is None else state.normalizer.update(rollout.obs, usable, axis_name),
            rewards=None if state.rewards is None else state.rewards.update(rollout, usable, self.gamma, axis_name),
            kl_beta=None if state.kl_beta is None else self._adapted(state.kl_beta, kl, taken),
            env_steps=counted_on(state.env_steps, sum_over_devices(rollout.valid.sum(dtype=jnp.uint32), axis_name)),
            updates=counted_on(state.updates, jnp.uint32(1)),
            guard=state.guard.after_update(refused, steps, jnp.concatenate([data_bad, taken.bad.any((0, 1))])),
        )
        terms = self._metrics(state, rows, taken, axis_name) | {"train/kl": kl, "train/learning_rate": learning_rate}
        metrics: Metrics = {**terms, **({} if clip_range is None else {"train/clip_range": clip_range})}
        if self.histograms:
            metrics |= update_histograms(objective, params, moved, rows, self.normalize_advantage, axis_name)
        return state, metrics

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """Names the first bad quantity once `max_bad_steps` updates in a row learned nothing."""
        in_a_row = int(metrics["train/skipped_in_a_row"])
        if in_a_row < self.max_bad_steps:
            return None
        quantity = QUANTITIES[int(metrics["train/first_bad"]) - 1]
        return (
            f"PPO: {in_a_row} updates in a row had no finite gradient step (max_bad_steps={self.max_bad_steps}); the first "
            f"quantity that was not finite is {quantity!r}. The parameters are those from before."
        )

    def _check_state(self, state: PPOState) -> None:
        """Refuse one of other settings: what it has no place for would silently not be done."""
        if not isinstance(state, PPOState):
            raise TypeError(f"update: state must be a PPOState as init makes it, got {type(state).__name__}")
        check_statistics(state.normalizer, state.rewards, self.normalize_obs, self.clip_obs, self.normalize_reward)
        if (state.kl_beta is None) != (self.kl_beta is None):
            wanted, got = ("None", "a number") if self.kl_beta is None else ("a number", "None")
            raise ValueError(f"update: state must be one of init with {wanted} as kl_beta, got one of {got}")

    def _seen(self, state: PPOState, rollout: Rollout) -> tuple[PyTree, PyTree]:
        """All observations as the network sees them, and its memory at the first of them."""
        obs, carry = rollout.time_steps.obs, rollout.carry
        if self.normalize_reward == "return":
            if not (isinstance(carry, tuple) and len(carry) == 2 and jnp.shape(carry[1]) == rollout.reward.shape[1:]):
                raise ValueError(f"update: normalize_reward='return' needs steps by collect_policy(state), got carry {carry!r}")
            carry, _ = carry
        return obs if state.normalizer is None else state.normalizer.normalize(obs), carry

    def _rows(
        self, state: PPOState, rollout: Rollout, obs: PyTree, carry: PyTree, weights: Array | None, axis_name: str | None
    ) -> tuple[Rows, Bool[Array, " 4"]]:
        """The rollout's rows before the first epoch, and which of obs, reward, value and log_prob are not finite."""
        weight, kept = row_weights(rollout.valid, weights), self.values_when == "collect"
        rows, value = collected(self._model, state.variables, obs, rollout, weight, carry, kept=kept)
        shown = hidden(rows, rollout, at_once=self.num_minibatches > 1)
        return shown.with_advantages(*self._advantages(state, value, rollout)), not_finite(rows, value, rollout, axis_name)

    def _advantages(
        self, state: PPOState, value: Float[Array, "times B"], rollout: Rollout
    ) -> tuple[Float[Array, "T B"], Float[Array, "T B"]]:
        """Advantages and value targets by the values of all observations."""
        return advantages_and_targets(
            rollout.reward if state.rewards is None else state.rewards.scale(rollout.reward, self.clip_reward),
            value[:-1],
            value[1:],
            rollout.terminated,
            rollout.truncated,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            advantages=self.advantages,
            value_targets=self.value_targets,
        )

    def _metrics(self, state: PPOState, rows: Rows, taken: epochs.Taken, axis_name: str | None) -> Terms:
        """Terms averaged over the gradient steps taken, of all epochs and of the last, and what describes the update."""
        of_all, of_last = taken.means()
        metrics = {f"train/{name}": mean for name, mean in of_all.items()}
        metrics["train/explained_variance"] = losses.explained_variance(rows.value, rows.value_target, rows.weight, axis_name)
        metrics |= {"train/n_updates": state.updates, "train/skipped_steps": state.guard.skipped}
        metrics |= {"train/skipped_in_a_row": state.guard.in_a_row, "train/first_bad": state.guard.first_bad}
        if state.kl_beta is not None:
            metrics["train/kl_beta"] = state.kl_beta
        return metrics | {f"train/last_epoch/{name}": mean for name, mean in of_last.items()}

    def _adapted(self, beta: Float[Array, ""], kl: Float[Array, ""], taken: epochs.Taken) -> Float[Array, ""]:
        assert self.kl_target is not None, "checked when the agent was built"
        adapted = adapted_beta(beta, kl, target=self.kl_target, tolerance=self.kl_tolerance)
        return jnp.where(taken.kept.any(), adapted, beta)  # without a step the divergence says nothing about it

    def _network_policy(self, state: PPOState, *, return_info: bool = False) -> NetworkPolicy:
        return NetworkPolicy(state.variables, state.normalizer, self._network, self.spec, return_info, self.squash)

    @property
    def _adam(self) -> Adam:
        return Adam(max_grad_norm=self.max_grad_norm, eps=self.adam_eps)

    @property
    def _model(self) -> ActorCriticModel:
        return ActorCriticModel(self._network, self.spec.action, self.squash, self.microbatch_size)

    @property
    def _network(self) -> Network:
        assert self.network is not None, "__post_init__ puts the default in"
        return self.network

    @property
    def _l2(self) -> dict[Role, Scalar]:
        named: dict[Role, Scalar | None] = {"policy": self.l2_policy, "value": self.l2_value, "shared": self.l2_shared}
        return {role: coefficient for role, coefficient in named.items() if coefficient is not None}
