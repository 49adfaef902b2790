"""NAF: Q-learning with normalized advantage functions (Gu et al. 2016, arXiv:1603.00748)."""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.agents.action_noise import ActionNoiseSettings
from polyak.agents.off_policy import OffPolicyAgent, OffPolicyState
from polyak.agents.q_learning import value_terms
from polyak.agents.settings import TargetSettings
from polyak.copies.network_copies import NetworkCopies
from polyak.core.spaces import check_env_spec
from polyak.core.struct import number, static, struct
from polyak.core.types import Network, PyTree, Scalar, Variables
from polyak.learning.actor_critic_updates import check_actor, check_unit_actions, feedforward_or_default
from polyak.networks.feedforward import MLP, complete, policy_settings
from polyak.networks.heads import PolicyAndValue
from polyak.networks.layers import has_images, is_narrow
from polyak.networks.quadratic import BestAction, check_value, quadratic_q, quadratic_spec
from polyak.ops.gradient_step import Aux, StepLog
from polyak.ops.losses import huber, weighted_sum
from polyak.ops.schedules import StepCount
from polyak.policies.exploration import RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy, add_return
from polyak.replay.replay import Transition

HEAD = PolicyAndValue(std="state", shared_torso=True)


@struct(kw_only=True)
class NAF(ActionNoiseSettings, TargetSettings, OffPolicyAgent):
    """NAF for Box actions: Q-learning with values that are quadratic in the action, so that the best one is an output.

        Q(s, a) = V(s) - ½ (a - μ(s))ᵀ P(s) (a - μ(s)),    P = L Lᵀ,    L lower triangular, its diagonal e^l
        L(θ) = E[ huber_κ(y - Q_θ(s, a)) ],    y = r + γ^m V_target(s')

    over n-step transitions drawn from a replay. Actions lie in [-1, 1], `envs.make(..., action_scaling="rescale")`, and μ is
    tanh of an output. The model of the dynamics of the paper's section 5 is left out.

    Attributes:
        spec: the environment's spaces (`env.spec`); actions are Boxes, or trees of them.
        network: a network that returns `(action_params, value)` for a Tuple of two actions, see `polyak.networks.quadratic`;
            None takes `NatureCNN` for images, else `MLP` with two layers of 256 and relu. A built-in network gets the head
            `PolicyAndValue(std="state", shared_torso=True)`. The loss applies it in training mode (dropout, batch
            normalization).
        huber_delta: κ, the error above which the loss is linear; below it is δ²/2. None takes δ² everywhere.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    >>> from polyak.core.spaces import Box, EnvSpec
    >>> from polyak.replay.uniform import UniformReplay
    >>> agent = NAF(EnvSpec(Box([-9.0], [9.0]), Box([-1.0], [1.0])), replay=UniformReplay(10_000))
    >>> state = agent.init(jax.random.key(0))
    """

    action_scaling: ClassVar[Literal["clip", "rescale"]] = "rescale"

    network: Network | None = static(default=None, kw_only=False)
    huber_delta: Scalar | None = number(default=None, above=0, optional=True)

    def set_defaults(self) -> None:
        """Check the spec, and complete the network."""
        check_env_spec("NAF", self.spec)
        check_unit_actions("NAF", self.spec)
        has_default = self.network is None and not has_images(self.spec.obs)
        given = MLP((256, 256), activation="relu", orthogonal=False) if has_default else self.network
        network = complete("NAF", given, self.spec, HEAD)
        object.__setattr__(self, "network", feedforward_or_default("NAF", "network", network, network))

    def check_together(self) -> None:
        """Check settings that depend on each other."""
        settings = policy_settings(self._network)
        is_other_head = isinstance(settings, PolicyAndValue) and settings != HEAD
        if settings is not None and (is_other_head or settings.std != "state"):
            raise ValueError(f"NAF: network must have the head {HEAD!r}, got {settings!r}")
        super().check_together()
        self.check_noise()

    def create_copies(self, key: PRNGKeyArray) -> NetworkCopies:
        """The network and its target."""
        spec = quadratic_spec(self.spec)
        copies = NetworkCopies.create(self._network, key, spec, optimizer=None, target=self.follow())
        check_actor(self._network, copies.online, spec)
        check_value(self._network, copies.online, spec)
        return copies.with_optimizer_state(self.optimizer_at())

    def policy(self, state: OffPolicyState) -> Greedy:
        """The best action, μ(s)."""
        return Greedy(self.network_policy(state, state.copies.evaluated()))

    def collect_policy(self, state: OffPolicyState) -> RandomWarmStart | DiscountedReturn:
        """The best action with noise; until `learning_starts` uniformly random actions."""
        noisy = self.add_noise(self.network_policy(state, state.copies.online), state.env_steps)
        return add_return(RandomWarmStart(noisy, self.learning_starts, state.env_steps), self)

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True for narrow layers and, on one device, small batches; see `is_narrow`."""
        return is_narrow(self._network, self.spec, self.batch_size if devices == 1 else 1)

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
        loss = partial(self.loss, online=copies.online, target=copies.variables("target"), key=key)
        copies, log = copies.train(loss, self.optimizer_at(env_steps), batch, enabled=enabled, axis_name=axis_name)
        return copies.follow(updates=log.applied.astype(jnp.uint32)), log

    def loss(
        self, params: PyTree, batch: Transition, *, online: Variables, target: Variables, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, ""], Aux]:
        """L(θ) of a batch whose weights sum to 1, and its terms; `priority` is |δ| of each sample.

        Args:
            params: θ.
            online: the online network's variables; their parameters are not used.
            target: the target network's.
            key: for dropout.
        """
        online = dataclasses.replace(online, params=params)
        (outputs, value), _, stats = self._network.apply(online, batch.obs, train=True, key=key)
        q, advantage = quadratic_q(self.spec, outputs, value, batch.action)
        td_error = self.td_target(batch, target=target) - q
        terms = value_terms(q, td_error, jnp.abs(td_error), batch.weight)
        terms["advantage"] = jax.lax.stop_gradient(weighted_sum(advantage, batch.weight))
        return weighted_sum(huber(td_error, self.huber_delta), batch.weight), Aux(terms, stats)

    def td_target(self, batch: Transition, *, target: Variables) -> Float[Array, " N"]:
        """The target y, without a gradient; arguments as for `loss`."""
        (_, next_value), _, _ = self._network.apply(target, batch.next_obs)
        return jax.lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_value)

    def network_policy(self, state: OffPolicyState, variables: Variables) -> NetworkPolicy:
        """The policy of the action μ(s) of the largest value."""
        network, normalizer = BestAction(self._network), state.normalizers.obs
        return NetworkPolicy(variables, normalizer, network, self.spec, squash=True, is_deterministic=True)

    @property
    def _network(self) -> Network:
        assert self.network is not None, "set_defaults sets it"
        return self.network
