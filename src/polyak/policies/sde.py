"""Generalised state-dependent exploration: noise that is a function of the state for some steps."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.spaces import Box
from polyak.core.struct import static, struct
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.networks.actor import SDE, Actor
from polyak.ops.distributions import Distribution
from polyak.policies.network_policy import NetworkPolicy
from polyak.policies.predict import as_python, predict
from polyak.policies.wrapper import inner_spec


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
class StateDependentExploration:
    """Actions of an actor whose noise is linear in the features z(s) of the state.

        a = μ(s) + z(s)ᵀ (σ ∘ ε),    ε_fa ~ N(0, 1), drawn anew every `sample_freq` steps and where an episode begins

    so the same state gets the same action in between, and trajectories are smooth. Over the draws of ε the action is normal
    with variance z² · σ², which is the `distribution`; with `squash` all passes through tanh.

    Attributes:
        policy: of an `Actor(std="sde")`.
        sample_freq: steps with one ε; None draws it once an episode.

    Raises:
        TypeError, ValueError: the policy's network is another one, or `sample_freq` is below 1.

    Source: Raffin et al. 2020, arXiv:2005.05719, eq. 6 to 8.
    """

    policy: NetworkPolicy
    sample_freq: int | None = static(default=None)

    def __post_init__(self) -> None:
        network = self.policy.network
        if not (isinstance(network, Actor) and network.std == "sde"):
            raise ValueError(f"StateDependentExploration: the network must be an Actor(std='sde'), got {network!r}")
        check_integer("StateDependentExploration", "sample_freq", self.sample_freq, optional=True)

    spec = inner_spec

    def initial_state(self, batch_size: int) -> SDECarry:
        """No noise yet."""
        features = self.policy.variables.params["log_std"].shape
        return SDECarry(jnp.zeros((batch_size, *features)), jnp.full(batch_size, -1, jnp.int32))

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """That of the action over all draws of ε."""
        distribution, _ = self.policy.distribution(time_step)
        return distribution, carry

    def action(self, time_step: TimeStep, carry: SDECarry, key: PRNGKeyArray) -> PolicyStep:
        """The mean with the noise of the state."""
        steps = carry.steps + 1
        is_due = (steps == 0) | jnp.asarray(time_step.first)
        if self.sample_freq is not None:
            is_due |= steps >= self.sample_freq
        fresh = jax.random.normal(key, carry.noise.shape)
        noise = jnp.where(is_due[:, None, None], fresh, carry.noise)
        params, sde = self.policy.action_params(time_step)
        assert isinstance(sde, SDE) and isinstance(self.spec.action, Box), "as the network of the policy says"
        shift = jnp.einsum("bf,bfa->ba", sde.features, sde.std[None] * noise)
        action: Any = params["loc"] + shift.reshape(params["loc"].shape)
        action = jnp.tanh(action) if self.policy.squash else action
        return PolicyStep(action, SDECarry(noise, jnp.where(is_due, 0, steps)))

    predict = predict
    as_python = as_python
