"""The base of agents that learn from each rollout once it is collected, by a network of a policy and its value."""

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from polyak.agents.agent import BaseAgent
from polyak.agents.settings import AdamSettings, NormalizationSettings, ViewSettings
from polyak.copies.follow import Follow
from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import EnvSpec
from polyak.core.struct import choice, integer, number, static, struct
from polyak.core.types import Metrics, Network, Rollout, Scalar, Variables
from polyak.learning.normalizers import Normalizers, check_created_normalizers, check_normalizers, create_normalizers
from polyak.learning.rollout_batch import ActorCriticModel
from polyak.networks.actor_critic import check_actor_critic, check_squashing, network_or_default
from polyak.networks.adapters import warn_of_training_layers
from polyak.networks.layers import has_images
from polyak.networks.pair import ActorAndCritic
from polyak.ops.gradient_step import Guard, check_optimizer_state, diagnose_skips
from polyak.ops.normalize import ObsNormalizer, RewardScaler
from polyak.ops.schedules import StepCount, value_at
from polyak.policies.network_policy import Greedy, NetworkPolicy


@struct
class OnPolicyState:
    """Everything that training changes.

    Attributes:
        copies: the network: online, with `ema_tau` a target, and shared where workers send gradients; with the optimizer's
            state.
        obs_normalizer: running statistics of the observations, or None.
        reward_scaler: running statistics that rewards are divided by, or None.
        env_steps: valid transitions learned from; schedules are functions of it.
        updates: rollouts learned from.
        guard: counts of skipped gradient steps.
    """

    copies: NetworkCopies
    obs_normalizer: ObsNormalizer | None
    reward_scaler: RewardScaler | None
    env_steps: StepCount
    updates: UInt32[Array, ""]
    guard: Guard


@struct(kw_only=True)
class OnPolicyAgent(AdamSettings, NormalizationSettings, ViewSettings, BaseAgent):
    """An actor-critic that learns from rollouts, for Discrete, MultiDiscrete, MultiBinary and Box actions, and trees of them.

    Attributes:
        spec: the environment's spaces (`env.spec`).
        network: an actor-critic network that returns `(action_params, value)`, such as `polyak.MLP((256, 256))`; None takes
            `NatureCNN` for images, else `MLP`. It is applied in evaluation mode. With `actor_obs` or `critic_obs` a built-in
            network becomes an `ActorAndCritic`, whose halves share no layer; a network of your own must be one.
        num_steps: rollout length T, in steps of each environment.
        gamma: discount per step.
        ent_coef: coefficient of the entropy bonus.
        vf_coef: coefficient of the value loss.
        normalize_reward: divide rewards by the running standard deviation of the discounted `"return"` or of the `"reward"`;
            None leaves rewards unchanged.
        clip_reward: clip normalized rewards to ± this value; None disables clipping.
        squash: sample Box actions from a tanh-transformed normal distribution; the spec must rescale actions to their bounds.
        max_skipped_updates: stop training after this many consecutive updates without a finite gradient step of a network.
    """

    spec: EnvSpec = static(kw_only=False)
    network: Network | None = static(default=None, kw_only=False)
    num_steps: int = integer(default=256)
    gamma: Scalar = number(default=0.99, at_least=0, at_most=1)
    ent_coef: Scalar = number(default=0.0, at_least=0)
    vf_coef: Scalar = number(default=0.5, at_least=0)
    normalize_reward: Literal["return", "reward"] | None = choice(default=None, choices=("return", "reward", None))
    clip_reward: Scalar | None = number(default=10.0, above=0, optional=True, used_if=("normalize_reward", ...))
    squash: bool = choice(default=False, choices=(True, False))
    max_skipped_updates: int = integer(default=10)
    max_grad_norm: Scalar | None = 0.5
    adam_eps: Scalar = 1e-5

    state_type: ClassVar[type[OnPolicyState]] = OnPolicyState
    lag_advice: ClassVar[str] = ""
    """The setting that allows a lag where `max_lag` is 0, for errors; empty if there is none."""
    diagnose = diagnose_skips

    def follow(self) -> Follow | None:
        """Return the rule by which a target copy follows the online copy: by default there is no target."""
        return None

    def init(self, key: PRNGKeyArray) -> OnPolicyState:
        """Create a new state."""
        copies = NetworkCopies.create(self._network, key, self.spec, optimizer=None, target=self.follow())
        check_actor_critic(self._network, copies.online, self.spec)
        warn_of_training_layers(type(self).__name__, self._network, copies.online)
        normalizers = create_normalizers(self)
        return OnPolicyState(
            copies=copies.with_optimizer_state(self.optimizer_at(0)),
            obs_normalizer=normalizers.obs,
            reward_scaler=normalizers.reward,
            env_steps=StepCount.of(0),
            updates=jnp.zeros((), jnp.uint32),
            guard=Guard.init(),
        )

    def policy(self, state: OnPolicyState) -> Greedy:
        """Return the policy of the most probable action, by the target copy or the shared copy if there is one."""
        return Greedy(self._actor_policy(state, state.copies.evaluated(state.copies.names[-1])))

    def metrics(self, before: OnPolicyState, after: OnPolicyState) -> Metrics:
        """Return the counts of an update, and the learning rate it was made with."""
        metrics: Metrics = {"train/n_updates": after.updates, **after.guard.metrics()}
        if self.optimizer is None:
            metrics["train/learning_rate"] = value_at(self.learning_rate, before.env_steps)
        return metrics

    def set_network(self, *, std: Literal["free", "sde"] = "free") -> None:
        """Complete the network, after the views that it sees; called first by `set_defaults`.

        Args:
            std: `std` of the head that a built-in network without a head gets.
        """
        self.set_views()
        network = network_or_default(type(self).__name__, self.network, self.spec, std=std, views=self.views)
        object.__setattr__(self, "network", network)

    def set_defaults(self) -> None:
        """Complete the network."""
        self.set_network()

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        self.check_optimizer()
        check_normalizers(self)
        check_squashing(type(self).__name__, self._network, self.spec, squash=self.squash)

    def _check_created(self, state: OnPolicyState, optimizer_state: Any) -> None:
        """Check that a state was created with the agent's settings; the state's would silently replace them.

        Args:
            optimizer_state: None if workers have their own optimizers.

        Raises:
            TypeError: the state is the state of another agent.
            ValueError: the state was created with other settings; the message names the setting.
        """
        if type(state) is not self.state_type:
            raise TypeError(
                f"{type(self).__name__}: state must be of type {self.state_type.__name__}, got {type(state).__name__}; "
                "agent.init(key) returns one"
            )
        check_created_normalizers(self, Normalizers(state.obs_normalizer, state.reward_scaler))
        if optimizer_state is not None:
            check_optimizer_state(self.optimizer_at(0), state.copies.online.params, optimizer_state)

    def scaled_reward(self, state: OnPolicyState, rollout: Rollout) -> Float[Array, "T B"]:
        """The rewards that the agent learns from."""
        scaler = state.reward_scaler
        return rollout.reward if scaler is None else scaler.scale(rollout.reward, self.clip_reward)

    def network_policy(self, state: OnPolicyState, variables: Variables, *, return_info: bool = False) -> NetworkPolicy:
        """The policy for collecting, which has the critic too where its values or its recurrent state are kept."""
        if return_info or self._model.is_recurrent:
            return NetworkPolicy(variables, state.obs_normalizer, self._network, self.spec, return_info, self.squash)
        return self._actor_policy(state, variables)

    def _actor_policy(self, state: OnPolicyState, variables: Variables) -> NetworkPolicy:
        """The policy of the actor; where it is a network of its own, without the critic."""
        network, normalizer, spec = self._network, state.obs_normalizer, self.spec_of("actor")
        if isinstance(network, ActorAndCritic):
            variables, network = network.variables_of("actor", variables), network.actor
        return NetworkPolicy(variables, normalizer and normalizer.select_space(spec.obs), network, spec, squash=self.squash)

    @property
    def _network(self) -> Any:
        assert self.network is not None, "set_defaults sets it"
        return self.network

    @property
    def _model(self) -> ActorCriticModel:
        return ActorCriticModel(self._network, self.spec.action, self.squash, has_images(self.spec.obs))
