"""Behavioral cloning: maximum likelihood of recorded actions, or a flow (Pomerleau 1991, doi:10.1162/neco.1991.3.1.88)."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.off_policy import OffPolicyAgent, OffPolicyState
from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import EnvSpec, check_env_spec
from polyak.core.struct import integer, static, struct
from polyak.core.types import Network, PyTree, Variables
from polyak.learning.actor_critic_updates import check_actor
from polyak.learning.flow_matching import flow_error
from polyak.learning.recurrent_replay import apply_to_batch, carry_of_one, check_sequences
from polyak.networks.action_units import to_unit
from polyak.networks.actor_critic import check_blocks
from polyak.networks.feedforward import MLP, complete
from polyak.networks.flow import MAX_FLOW_STEPS, check_flow, noise_spec
from polyak.networks.heads import PolicyOnly
from polyak.networks.layers import has_images, is_narrow
from polyak.ops.distributions import for_space
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import weighted_sum
from polyak.ops.schedules import StepCount
from polyak.policies.flow_policy import FlowPolicy
from polyak.policies.network_policy import Greedy, NetworkPolicy
from polyak.policies.sde import check_no_sde
from polyak.replay.replay import Transition


@struct(kw_only=True)
class BC(OffPolicyAgent):
    """Behavioral cloning for all action spaces.

        L(θ) = E[ -log π_θ(a|s) ]

    over the transitions of a data set; see `polyak.train.offline`. Box actions are Gaussian, of actions in [-1, 1] with
    `envs.make(..., action_scaling="rescale")`; the greedy policy acts by their mean. Rewards, and `gamma` and `n_step`, are not
    used.

    With the network `Actor(std="fixed", squash_mean=True)` the loss is half the squared error of means in the bounds of Boxes,
    plus a constant, and actions of `collect_policy` have a standard deviation of 1 in [-1, 1], whatever the data's:

        L(θ) = E[ ½ |μ_θ(s) - a|² ]

    With `flow_steps` = K the policy is a flow, for Box actions with finite bounds whose distribution is multimodal, so that a
    mean lies between the modes. A velocity v is matched to the straight ways from noise to the actions:

        L(θ) = E[ |v_θ(s, x_t, t) - (a - x_0)|² / dim A ],    x_t = (1 - t) x_0 + t a,    x_0 ~ N(0, I),    t ~ U(0, 1)

    and an action is the end of the flow from noise x_0, x_{k+1} = x_k + v(s, x_k, k / K) / K, clipped to the bounds. The greedy
    policy takes, of 31 actions of fixed noise, the one with most others near it.

    Attributes:
        network: a network that returns `(action_params, value)`, the value unused, such as `polyak.LSTM()`; None takes
            `NatureCNN` for images, else `MLP` with two layers of 256, and a standard deviation that is a parameter. The loss
            applies it in training mode (dropout, batch normalization), except for recurrent networks. With `flow_steps` its
            observation is a Tuple of the observation, x_t and t `[B, 1]`, and the `loc` of its output the velocity; a head that
            is set must have `std="fixed"`.
        flow_steps: K, number of steps of a flow policy; None takes the distribution of the action space, a Gaussian for a Box.
        replay: a `UniformReplay`, or a `SequenceReplay` for recurrent networks.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    Source of the flow: Lipman et al. 2023, arXiv:2210.02747; as a policy, Park, Li and Levine 2025, arXiv:2502.02538.

    >>> from polyak.core.spaces import Box, Discrete, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = BC(EnvSpec(Box([-1.0], [1.0]), Discrete(2)), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    action_scaling: ClassVar[Literal["clip", "rescale"]] = "rescale"
    takes_sequences: ClassVar[bool] = True
    # In an environment the network would clone its own actions.
    env_error: ClassVar[str] = (
        "BC: learns from recorded actions alone; use polyak.train.offline, or polyak train bc --data DATA --gradient-steps N"
    )

    network: Network | None = static(default=None, kw_only=False)
    flow_steps: int | None = integer(default=None, at_most=MAX_FLOW_STEPS, optional=True)

    def set_defaults(self) -> None:
        """Complete the network."""
        check_env_spec("BC", self.spec)
        is_default = self.network is None and not has_images(self.spec.obs)
        network = MLP((256, 256), activation="relu") if is_default else self.network
        head = PolicyOnly() if self.flow_steps is None else PolicyOnly(std="fixed")
        object.__setattr__(self, "network", complete("BC", network, self.spec, head))

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        check_blocks("BC", "network", self.network)
        check_no_sde("BC", self._network)
        if self.replay.has_priorities:
            raise ValueError(f"BC: replay must draw uniformly, as there is no TD error, got {self.replay!r:.80}")
        check_sequences("BC", self.network, self.replay, self.num_steps)
        if self.flow_steps is not None:
            check_flow("BC", "network", self._network, self.spec)
        super().check_together()

    def create_copies(self, key: PRNGKeyArray) -> NetworkCopies:
        """The network."""
        spec = self._network_spec
        copies = NetworkCopies.create(self._network, key, spec, optimizer=None)
        check_actor(self._network, copies.online, spec)
        return copies.with_optimizer_state(self.optimizer_at())

    def initial_carry(self) -> PyTree:
        """The recurrent state of one environment; `()` of a network without one."""
        return carry_of_one(self.network)

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
        """One gradient step of `loss`."""
        loss = partial(self.loss, online=copies.online, key=key)
        return copies.train(loss, self.optimizer_at(env_steps), batch, enabled=enabled, axis_name=axis_name)

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """L(θ) of a batch whose weights sum to 1, and its terms.

        Args:
            params: θ.
            online: the network's variables; their parameters are not used.
            key: for dropout, and for the noise and times of a flow.

        Raises:
            ValueError: `key` is None with `flow_steps`.
        """
        if self.flow_steps is not None:
            if key is None:
                raise ValueError("BC: key must be given with flow_steps")
            velocity, action = dataclasses.replace(online, params=params), to_unit(self.spec, batch.action)
            error, stats = flow_error(self._network, velocity, self.spec, batch.obs, action, key)
            return weighted_sum(error, batch.weight), Aux({}, stats)
        online = dataclasses.replace(online, params=params)
        (action_params, _), stats = apply_to_batch(self._network, online, batch.obs, train=True, key=key)
        distribution = for_space(self.spec.action, action_params, batch.action_mask)
        loss = -weighted_sum(distribution.log_prob(batch.action), batch.weight)
        entropy = jax.lax.stop_gradient(weighted_sum(distribution.entropy(), batch.weight))
        return loss, Aux({"entropy": entropy}, stats)

    def policy(self, state: OffPolicyState) -> Greedy:
        """The most probable action; of a flow, see `polyak.policies.flow_policy.FlowDistribution.mode`."""
        return Greedy(self.network_policy(state, state.copies.evaluated()))

    def collect_policy(self, state: OffPolicyState) -> NetworkPolicy | FlowPolicy:
        """Actions drawn from the cloned distribution."""
        return self.network_policy(state, state.copies.online)

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True for narrow layers and, on one device, small batches, of sequences all together; see `is_narrow`."""
        return is_narrow(self._network, self._network_spec, self.batch_size * self.replay.draw_length if devices == 1 else 1)

    def network_policy(self, state: OffPolicyState, variables: Variables) -> NetworkPolicy | FlowPolicy:
        """The policy of a network with these variables, with `flow_steps` the end of its flow."""
        normalizer = state.normalizers.obs
        if self.flow_steps is not None:
            return FlowPolicy(variables, normalizer, self._network, self.spec, self.flow_steps)
        return NetworkPolicy(variables, normalizer, self._network, self.spec)

    @property
    def _network_spec(self) -> EnvSpec:
        """The spec as the network sees it: with noise and time in the observation of a flow."""
        return self.spec if self.flow_steps is None else noise_spec(self.spec, has_time=True)

    @property
    def _network(self) -> Any:
        assert self.network is not None, "set_defaults sets it"
        return self.network
