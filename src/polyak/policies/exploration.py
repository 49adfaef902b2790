"""Exploration: epsilon-greedy and Boltzmann for discrete actions, and random actions before learning starts.

Rates may be schedules of the field `env_steps`, which the agent sets from its state when it makes the policy:
`EpsilonGreedy(policy, Linear(1.0, 0.05), state.env_steps)`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import Discrete, MultiBinary, MultiDiscrete
from polyak.core.struct import struct
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.ops.distributions import Distribution, Joint
from polyak.ops.distributions.combinations import Combinations
from polyak.ops.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from polyak.ops.distributions.exploration import EpsilonMixture, Select, uniform_over
from polyak.ops.schedules import Schedule, StepCount, check_schedule, value_at
from polyak.policies.predict import PolicyWithSpec
from polyak.policies.scripted import Uniform
from polyak.policies.wrapper import (
    PolicyWrapper,
    check_env_steps,
    check_policy,
    check_wrapped,
    draw_for_new_episodes,
    sample_action,
)

INFINITE = float("inf")
# A temperature of 0, at the end of a schedule, counts as this value.
SMALLEST_TEMPERATURE = 1e-6


@struct
class EpsilonGreedy(PolicyWrapper):
    """The inner policy's mode, or with probability ε a uniform draw among the allowed actions.

        P(a) = (1 - ε) [a = mode] + ε / n,    n the number of allowed actions

    The parts of an action are drawn together. `info["log_prob"]` is log P of the action taken.

    Attributes:
        policy: the inner policy; its actions are Discrete, MultiDiscrete, MultiBinary or trees of them.
        epsilon: ε in [0, 1], a number or a schedule of `env_steps`.
        env_steps: the argument of the schedule.

    Raises:
        TypeError, ValueError: `policy` is not a policy or has Box actions, `epsilon` leaves [0, 1].
    """

    policy: PolicyWithSpec
    epsilon: Schedule
    env_steps: Any = 0

    def __post_init__(self) -> None:
        _check_choices("EpsilonGreedy", self.policy)
        check_schedule("EpsilonGreedy", "epsilon", self.epsilon, above=-INFINITE, at_least=0, at_most=1)
        check_env_steps(self)

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[EpsilonMixture, PyTree]:
        """P, and the inner carry."""
        inner, carry = self.policy.distribution(time_step, carry)
        uniform = uniform_over(self.spec, time_step.first.shape[0], time_step.action_mask)
        return EpsilonMixture(inner.mode(), uniform, value_at(self.epsilon, self.env_steps)), carry

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """A draw from P, with its logarithm."""
        carry, key = draw_for_new_episodes(carry, time_step, key)
        distribution, carry = self.distribution(time_step, carry)
        action, log_prob = distribution.sample_and_log_prob(seed=key)
        return PolicyStep(action, carry, {"log_prob": log_prob})


@struct
class Boltzmann(PolicyWrapper):
    """A draw by P(a) ∝ exp(logits_a / temperature) of the inner policy's logits.

    For a policy over q-values whose distribution is `Categorical(q)`, P(a) ∝ exp(q_a / temperature). For an actor, temperature
    1 is its own distribution. The rule holds for each part of MultiDiscrete and MultiBinary actions and of trees.

    Attributes:
        policy: the inner policy.
        temperature: above 0, a number or a schedule of `env_steps`, which may end at 0: greedy.
        env_steps: the argument of the schedule.

    Raises:
        TypeError, ValueError: `policy` is not a policy or has Box actions, or `temperature` is not above 0; when acting,
            TypeError for a distribution that has no logits.
    """

    policy: PolicyWithSpec
    temperature: Schedule = 1.0
    env_steps: Any = 0

    def __post_init__(self) -> None:
        _check_choices("Boltzmann", self.policy)
        check_schedule("Boltzmann", "temperature", self.temperature)
        check_env_steps(self)

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The softened distribution, and the inner carry."""
        inner, carry = self.policy.distribution(time_step, carry)
        return _soften(inner, jnp.maximum(value_at(self.temperature, self.env_steps), SMALLEST_TEMPERATURE)), carry

    action = sample_action


@struct
class RandomWarmStart(PolicyWrapper):
    """Uniformly random actions until `steps` environment steps were made, then the actions of the inner policy.

    Attributes:
        policy: the inner policy.
        steps: transitions with random actions.
        env_steps: transitions so far.

    Raises:
        TypeError, ValueError: `policy` is not a policy, or has a Box action without finite bounds.
    """

    policy: PolicyWithSpec
    steps: Any
    env_steps: Any = 0

    def __post_init__(self) -> None:
        check_policy("RandomWarmStart", self.policy)
        Uniform(self.policy.spec)
        check_env_steps(self)

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Select, PyTree]:
        """The uniform distribution or the inner one, and the inner carry."""
        inner, carry = self.policy.distribution(time_step, carry)
        batch_size = time_step.first.shape[0]
        choice = jnp.full(batch_size, self._is_over, jnp.int32)
        return Select((uniform_over(self.spec, batch_size, time_step.action_mask), inner), choice), carry

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The inner policy's step, its action replaced until `steps` were made."""
        random_key, key = jax.random.split(key)
        step = self.policy.action(time_step, carry, key)
        random = uniform_over(self.spec, time_step.first.shape[0], time_step.action_mask).sample(seed=random_key)
        action = jax.tree.map(lambda x, y: jnp.where(self._is_over, x, y), step.action, random)
        return PolicyStep(action, step.carry, step.info)

    @property
    def _is_over(self) -> Any:
        return StepCount.of(self.env_steps) >= StepCount.of(self.steps)


def _check_choices(owner: str, policy: PolicyWithSpec) -> None:
    check_wrapped(owner, policy, (Discrete, MultiDiscrete, MultiBinary), every=True, instead="for a Box take GaussianNoise")


def _soften(distribution: Any, temperature: Float[Array, ""]) -> Any:
    match distribution:
        case Categorical():
            # From the largest down, so that a small temperature overflows towards probability 0 only.
            logits = distribution.log_probs()
            return Categorical((logits - logits.max(-1, keepdims=True)) / temperature, distribution.mask)
        case Combinations():
            softened = _soften(distribution.numbers, temperature)
            return Combinations(softened.logits, distribution.nvec, distribution.mask)
        case MultiCategorical():
            return MultiCategorical(distribution.logits / temperature, distribution.nvec, distribution.mask)
        case Bernoulli():
            return Bernoulli(distribution.logits / temperature, distribution.event_ndims)
        case Joint():
            is_part = lambda x: isinstance(x, Distribution)  # noqa: E731
            return Joint(jax.tree.map(lambda part: _soften(part, temperature), distribution.parts, is_leaf=is_part))
        case Select():
            return Select(tuple(_soften(part, temperature) for part in distribution.parts), distribution.choice)
    raise TypeError(
        f"Boltzmann: policy must have distributions with logits (Categorical, MultiCategorical, Bernoulli), got "
        f"{type(distribution).__name__}; a greedy policy has them inside: take agent.policy(state).policy"
    )
