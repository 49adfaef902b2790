"""Policies, pytrees that act: the policy of a network, and wrappers around any policy."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import EnvSpec, select
from polyak.core.struct import static, struct
from polyak.core.types import Network, PolicyStep, PyTree, RecurrentNetwork, Scalar, TimeStep, Variables
from polyak.networks.unroll import reset_carry
from polyak.ops.distributions import Deterministic, Distribution, broadcast_params, for_space
from polyak.ops.normalize import ObsNormalizer
from polyak.ops.returns import running_return_step
from polyak.policies.predict import Mode, NumPyMethods, PolicyWithSpec
from polyak.policies.wrapper import PolicyWrapper, check_policy, draw_for_new_episodes, inner_predict

P = TypeVar("P", bound=PolicyWithSpec)


@struct
class BaseNetworkPolicy(NumPyMethods):
    """The base of policies of a network.

    Attributes:
        variables: the network's arrays.
        normalizer: statistics that observations are normalized with, or None.
        network: the network.
        spec: the spaces.
    """

    variables: Variables
    normalizer: ObsNormalizer | None
    network: Network = static()
    spec: EnvSpec = static()

    def network_obs(self, time_step: TimeStep) -> PyTree:
        """The observations as the network sees them: entries that are not in the spec are left out."""
        obs = select(self.spec.obs, time_step.obs)
        return obs if self.normalizer is None else self.normalizer.normalize(obs)


@struct
class NetworkPolicy(BaseNetworkPolicy):
    """Acts by sampling from the distribution of a network: of an actor, an actor-critic, or softmax of action values.

    Attributes:
        network: computes `(action_params, value)` of variables and an observation.
        return_info: `info` of a step is `{"value": [B], "params": the action's parameters}`, for a learner that uses the
            network's outputs of the time of acting.
        squash: Box actions are drawn from a TanhNormal; see `for_space`.
        noise_key: the key of the network's noise; None applies the network without noise.
        for_action: the function of `(space, params, mask, squash=)` that makes the distribution.
        is_deterministic: the network is an actor without a distribution, as in TD3 and DDPG: samples are its mode.
    """

    return_info: bool = static(default=False)
    squash: bool = static(default=False)
    noise_key: PRNGKeyArray | None = None
    for_action: Callable[..., Distribution] = static(default=for_space)
    is_deterministic: bool = static(default=False)

    def initial_state(self, batch_size: int) -> PyTree:
        """The network's initial carry; `()` where it is not recurrent."""
        return self.network.initial_carry(batch_size) if isinstance(self.network, RecurrentNetwork) else ()

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The distribution over actions, and the carry."""
        return self._step(time_step, carry)[:2]

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """A sample for each row."""
        distribution, carry, info = self._step(time_step, carry)
        return PolicyStep(distribution.sample(seed=key), carry, info)

    def value(self, time_step: TimeStep, carry: PyTree = ()) -> Float[Array, " B"]:
        """V(s) of each row, by the network's value head."""
        carry = reset_carry(self.network, carry, time_step.first)
        (_, value), _, _ = self.network.apply(self.variables, self.network_obs(time_step), carry)
        return value

    def info(self, params: PyTree, value: PyTree) -> PyTree:
        """The `info` of a step with these outputs of the network."""
        return {"value": value, "params": broadcast_params(self.spec.action, params)} if self.return_info else ()

    def _step(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree, PyTree]:
        carry = reset_carry(self.network, carry, time_step.first)
        (params, value), carry, _ = self.network.apply(self.variables, self.network_obs(time_step), carry, key=self.noise_key)
        distribution = self.for_action(self.spec.action, params, time_step.action_mask, squash=self.squash)
        distribution = Deterministic(distribution.mode()) if self.is_deterministic else distribution
        return distribution, carry, self.info(params, value)

    def mode_in_numpy(self) -> tuple[int, Mode] | None:
        """Return the largest batch size that NumPy computes faster than a call of JAX, and `mode(obs)`; None if it never does.

        A derived class may act otherwise.
        """
        # Lazy, as training in compiled programs does not act in NumPy.
        from polyak.policies.numpy_network import MAX_PREDICT_PRODUCTS, max_batch_size, numpy_mode

        most = max_batch_size(self.network, self.spec, MAX_PREDICT_PRODUCTS) if type(self) is NetworkPolicy else 0
        if not most:
            return None
        # Copies, because donated buffers are overwritten.
        variables, normalizer = jax.tree.map(np.array, (self.variables, self.normalizer))
        return most, numpy_mode(variables, normalizer, self.network, self.spec, squash=self.squash)


@struct
class Greedy(PolicyWrapper):
    """The most probable action of another policy: the mode of its distribution.

    Attributes:
        policy: the inner policy.

    Raises:
        TypeError: `policy` is not a policy, or has no spec.
    """

    policy: PolicyWithSpec

    def __post_init__(self) -> None:
        check_policy("Greedy", self.policy)

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """All probability on the mode."""
        distribution, carry = self.policy.distribution(time_step, carry)
        return Deterministic(distribution.mode()), carry

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The mode for each row; the key is used only where something within is chosen once an episode."""
        carry, _ = draw_for_new_episodes(carry, time_step, key)
        distribution, carry = self.policy.distribution(time_step, carry)
        return PolicyStep(distribution.mode(), carry)

    predict = inner_predict


@struct
class DiscountedReturn(PolicyWrapper):
    """The inner policy, with the discounted return so far of each environment in its carry.

        R_t = r_t + γ R_{t-1},    R = 0 where an episode begins

    Agents that scale rewards by the standard deviation of R need it at the first step of a rollout. In the carry it is sharded,
    saved and reset with its environment.
    """

    policy: PolicyWithSpec
    gamma: Scalar

    def initial_state(self, batch_size: int) -> PyTree:
        """The inner carry, and zeros."""
        return self.policy.initial_state(batch_size), jnp.zeros(batch_size, jnp.float32)

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree]:
        """The inner distribution; the return includes the time step's reward."""
        distribution, inner = self.policy.distribution(time_step, carry[0])
        return distribution, (inner, self.next_return(time_step, carry[1]))

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The inner policy's step, and the new return."""
        step = self.policy.action(time_step, carry[0], key)
        return PolicyStep(step.action, (step.carry, self.next_return(time_step, carry[1])), step.info)

    def next_return(self, time_step: TimeStep, discounted: Float[Array, " B"]) -> Float[Array, " B"]:
        """R_t of a time step, from R_{t-1}."""
        return running_return_step(time_step.reward, time_step.first, discounted, gamma=self.gamma)

    predict = inner_predict


def add_return(policy: P, settings: Any) -> P | DiscountedReturn:
    """Add the return so far if the agent divides rewards by its standard deviation; else return the policy itself."""
    return DiscountedReturn(policy, settings.gamma) if settings.normalize_reward == "return" else policy
