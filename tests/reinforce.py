"""REINFORCE with a running baseline (Williams 1992): an agent from outside of the package."""

from typing import Any

import jax
import jax.numpy as jnp

from polyak import MLP, PolicyAndValue
from polyak.core.spaces import EnvSpec
from polyak.core.struct import check_settings, integer, number, static, struct
from polyak.core.types import Network, Scalar, Variables
from polyak.ops.distributions import for_space
from polyak.ops.returns import discounted_returns
from polyak.policies.network_policy import Greedy, NetworkPolicy


@struct
class ReinforceState:
    """The network, the mean return so far, and the number of updates."""

    variables: Variables
    baseline: Any
    updates: Any


@struct
class Reinforce:
    """REINFORCE with a running baseline.

    Attributes:
        num_steps: rollout length.
        step_size: step size of gradient ascent.
        gamma: discount per step.
        decay: share of the old baseline that is kept.
    """

    spec: EnvSpec = static()
    network: Network | None = static(default=None)
    num_steps: int = integer(default=16)
    step_size: Scalar = number(default=0.05, above=0)
    gamma: Scalar = number(default=0.95, at_least=0, at_most=1)
    decay: Scalar = number(default=0.9, at_least=0, at_most=1)

    def __post_init__(self):
        check_settings(self)
        object.__setattr__(self, "network", self.network or MLP((5,), activation="relu", head=PolicyAndValue()))

    def init(self, key):
        return ReinforceState(self.network.init(key, self.spec), jnp.zeros(()), jnp.zeros((), jnp.uint32))

    def check(self, num_envs, devices=1):
        if num_envs > 64:
            raise ValueError(f"Reinforce: num_envs={num_envs} must be at most 64 on each device")

    def prefers_single_thread(self, num_envs, devices):
        return True

    def partition(self, axis_name):
        return jax.sharding.PartitionSpec()

    def collect_policy(self, state):
        return NetworkPolicy(state.variables, None, self.network, self.spec)

    def policy(self, state):
        return Greedy(self.collect_policy(state))

    def update(self, state, rollout, key, *, axis_name=None):
        zeros = jnp.zeros_like(rollout.reward)
        returns = discounted_returns(rollout.reward, zeros, rollout.terminated, rollout.truncated, gamma=self.gamma)
        weight = rollout.valid.astype(jnp.float32) / jnp.maximum(rollout.valid.sum(dtype=jnp.float32), 1)

        def loss(params):
            obs = rollout.obs.reshape(-1, *rollout.obs.shape[2:])
            (action_params, _), _, _ = self.network.apply(Variables(params, state.variables.stats, state.variables.graph), obs)
            log_prob = for_space(self.spec.action, action_params).log_prob(rollout.actions.reshape(-1))
            return -jnp.sum(weight * (returns - state.baseline) * log_prob.reshape(weight.shape))

        value, gradient = jax.value_and_grad(loss)(state.variables.params)
        params = jax.tree.map(lambda p, g: p - self.step_size * g, state.variables.params, gradient)
        mean_return = jnp.sum(weight * returns)
        state = ReinforceState(
            Variables(params, state.variables.stats, state.variables.graph),
            self.decay * state.baseline + (1 - self.decay) * mean_return,
            state.updates + jnp.uint32(1),
        )
        return state, {"train/loss": value, "train/n_updates": state.updates}

    def diagnose(self, metrics):
        return None
