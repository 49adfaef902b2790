"""Generalized state-dependent exploration: noise that is a function of the state for some steps."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.spaces import Box
from polyak.core.struct import static, struct
from polyak.core.types import Network, PolicyStep, PyTree, TimeStep
from polyak.networks.feedforward import policy_settings
from polyak.networks.policy_head import sde_of
from polyak.ops.distributions import Distribution
from polyak.policies.network_policy import NetworkPolicy
from polyak.policies.wrapper import PolicyWrapper


@struct
class SDECarry:
    """The noise of each environment.

    Attributes:
        noise: ε ~ N(0, 1), for each feature and number of the action.
        steps: steps since it was drawn; -1 before the first.
    """

    noise: Float[Array, "B F A"]
    steps: Int32[Array, " B"]


@struct
class StateDependentExploration(PolicyWrapper):
    """Actions of a network whose noise is linear in the features z(s) of the state.

        a = μ(s) + z(s)ᵀ (σ ∘ ε),    ε_fa ~ N(0, 1), drawn anew every `sample_freq` steps and where an episode begins

    so the same state gets the same action in between, and trajectories are smooth. Over the draws of ε the action is normal
    with variance z² · σ², which is the `distribution`; with `squash` all passes through tanh.

    Attributes:
        policy: policy of an `Actor(std="sde")`, or of a network such as `MLP(head=PolicyAndValue(std="sde"))`.
        sample_freq: steps with one ε; None draws it once an episode.

    Raises:
        TypeError, ValueError: the policy's network is another one, or `sample_freq` is below 1.

    Source: Raffin et al. 2020, arXiv:2005.05719, eq. 6 to 8.
    """

    policy: NetworkPolicy
    sample_freq: int | None = static(default=None)

    def __post_init__(self) -> None:
        if not has_sde(self.policy.network):
            raise ValueError(
                f"StateDependentExploration: the network must have std='sde', as Actor(std='sde') has, got "
                f"{self.policy.network!r}"
            )
        check_integer("StateDependentExploration", "sample_freq", self.sample_freq, optional=True)

    def initial_state(self, batch_size: int) -> SDECarry:
        """No noise yet."""
        features = self.policy.variables.params["policy"]["log_std"]["all"].shape
        return SDECarry(jnp.zeros((batch_size, *features), jnp.float32), jnp.full(batch_size, -1, jnp.int32))

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The distribution of the action over all draws of ε."""
        distribution, _ = self.policy.distribution(time_step)
        return distribution, carry

    def action(self, time_step: TimeStep, carry: SDECarry, key: PRNGKeyArray) -> PolicyStep:
        """The mean with the noise of the state."""
        steps = carry.steps + 1
        is_drawn = (steps == 0) | jnp.asarray(time_step.first)
        if self.sample_freq is not None:
            is_drawn |= steps >= self.sample_freq
        fresh = jax.random.normal(key, carry.noise.shape, carry.noise.dtype)
        noise = jnp.where(is_drawn[:, None, None], fresh, carry.noise)
        variables, obs = self.policy.variables, self.policy.network_obs(time_step)
        (params, value), _, _ = self.policy.network.apply(variables, obs)
        sde = sde_of(variables, obs)
        shift = jnp.einsum("bf,bfa->ba", sde.features, sde.std[None] * noise)
        action: Any = params["loc"] + shift.reshape(params["loc"].shape)
        action = jnp.tanh(action) if self.policy.squash else action
        return PolicyStep(action, SDECarry(noise, jnp.where(is_drawn, 0, steps)), self.policy.info(params, value))


def has_sde(network: Network) -> bool:
    """Return True for a built-in network for state-dependent exploration."""
    settings = policy_settings(network)
    return settings is not None and settings.std == "sde"


def check_sde(settings: Any, network: Network) -> None:
    """Check that an agent's `sde_sample_freq` is set if and only if its network has `std="sde"`.

    Raises:
        ValueError: only one of the two is set, or the action is not one Box.
    """
    owner, sample_freq, action = type(settings).__name__, settings.sde_sample_freq, settings.spec.action
    if sample_freq is not None and not isinstance(action, Box):
        raise ValueError(f"{owner}: sde_sample_freq must be None unless the action is one Box, got {sample_freq} with {action}")
    if has_sde(network) != (sample_freq is not None):
        raise ValueError(
            f"{owner}: sde_sample_freq must be set with a network that has std='sde' and only then, got {sample_freq} with "
            f"{network!r}"
        )


def check_no_sde(owner: str, network: Network) -> None:
    """Check that a network is not for state-dependent exploration, which the agent does not support.

    Raises:
        ValueError: the network has `std="sde"`.
    """
    if has_sde(network):
        raise ValueError(f"{owner}: has no state-dependent exploration, so its network must have another std than 'sde'")


def add_sde(policy: NetworkPolicy, sample_freq: int | None) -> NetworkPolicy | StateDependentExploration:
    """Add state-dependent exploration to a policy; None for `sample_freq` returns the policy itself."""
    return policy if sample_freq is None else StateDependentExploration(policy, sample_freq)
