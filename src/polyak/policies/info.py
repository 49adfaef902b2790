"""A policy whose steps have more info: log-probabilities, values, and a policy's id."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.checks import check_choice, check_integer
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.networks.actor import Actor
from polyak.ops.distributions import Deterministic, Distribution
from polyak.policies.exploration import Boltzmann, EpsilonGreedy, RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.noise import ActionSmoothing, GaussianNoise, MixedNoise, OUNoise
from polyak.policies.parameter_noise import ParameterNoise
from polyak.policies.predict import PolicyWithSpec
from polyak.policies.python.policy import PythonPolicy
from polyak.policies.q_policy import FreshNoise
from polyak.policies.repeated_noise import RepeatedNoise
from polyak.policies.sde import StateDependentExploration
from polyak.policies.wrapper import PolicyWrapper, check_policy, draw_for_new_episodes


@runtime_checkable
class ValuedPolicy(Protocol):
    """A policy with a value function."""

    def value(self, time_step: TimeStep, carry: PyTree) -> Float[Array, " B"]:
        """V(s) of each row."""
        ...


@struct
class WithInfo(PolicyWrapper):
    """The inner policy, with entries added to the dict `info` of each step; `with_info` makes it.

    Attributes:
        policy: the inner policy.
        log_prob: add `"log_prob"` `[B]`, the logarithm of the probability (or density) of the action, given the carry; for a
            `Mixture`, the chosen policy's. A Python policy is called once: unless it has a distribution of its own, all
            probability is on its action.
        value: add `"value"` `[B]`, V(s) of the inner policy with a value; None adds it if an inner policy has a value.
        policy_id: add `"policy_id"` `[B]` int32, always this number; None adds none.

    Raises:
        TypeError, ValueError: `policy` is not a policy, a setting is out of its range, or `value` is True and no inner policy
            has one; at the first step, if a user-defined network has none.
    """

    policy: PolicyWithSpec
    log_prob: bool = static(default=True)
    value: bool | None = static(default=False)
    policy_id: int | None = static(default=None)

    def __post_init__(self) -> None:
        check_policy("with_info", self.policy)
        check_choice("with_info", "log_prob", self.log_prob, (True, False))
        check_choice("with_info", "value", self.value, (True, False, None))
        if self.policy_id is not None:
            check_integer("with_info", "policy_id", self.policy_id, at_least=0)
        if self.value and _find_valued(self.policy) is None:
            raise ValueError(f"with_info: value must be False, no inner policy has a value, got {self.policy!r}")

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Any, PyTree]:
        """The inner policy's."""
        return self.policy.distribution(time_step, carry)

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The inner policy's step, with more info."""
        carry, key = draw_for_new_episodes(carry, time_step, key)
        policy = _calling_once(self.policy) if self.log_prob else self.policy
        step = policy.action(time_step, carry, key)
        if not isinstance(step.info, dict) and step.info != ():
            raise TypeError(f"with_info: info of the inner policy must be a dict or (), got {type(step.info).__name__}")
        info = dict(step.info)
        if self.log_prob:
            distribution, _ = policy.distribution(time_step, carry)
            info["log_prob"] = distribution.log_prob(step.action)
        if self.value is not False and (found := _find_valued(self.policy, carry)) is not None:
            valued, valued_carry = found
            value = valued.value(time_step, valued_carry)
            if value is not None:
                info["value"] = value
            elif self.value:
                raise ValueError(f"with_info: value must be False, the network has no value, got {valued!r:.200}")
        if self.policy_id is not None:
            info["policy_id"] = jnp.full(time_step.first.shape, self.policy_id, jnp.int32)
        return PolicyStep(step.action, step.carry, info)


def with_info(
    policy: PolicyWithSpec, *, log_prob: bool = True, value: bool | None = None, policy_id: int | None = None
) -> WithInfo:
    """A policy whose steps have more info: see `WithInfo`.

    Args:
        value: None adds the value if an inner policy has one.
    """
    return WithInfo(policy, log_prob, value, policy_id)


class _CalledOnce:
    """A Python policy within one step: it is called once, and its output is used for the rest of the step."""

    def __init__(self, policy: PythonPolicy) -> None:
        self._policy = policy
        self._output: tuple[Distribution, PyTree] | None = None

    @property
    def spec(self) -> EnvSpec:
        """The policy's."""
        return self._policy.spec

    def initial_state(self, batch_size: int) -> PyTree:
        """The policy's."""
        return self._policy.initial_state(batch_size)

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree]:
        """All probability on the action if it has acted; else the policy's, from the first call."""
        if self._output is None:
            self._output = self._policy.distribution(time_step, carry)
        return self._output

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The policy's step."""
        step = self._policy.action(time_step, carry, key)
        if not self._policy.callee.has_distribution:
            self._output = Deterministic(step.action), step.carry
        return step


def _calling_once(policy: PolicyWithSpec) -> PolicyWithSpec:
    """The policy for one step, in which `action` and then `distribution` call each inner Python policy once."""
    is_python = lambda node: isinstance(node, PythonPolicy)  # noqa: E731
    called: PolicyWithSpec = jax.tree.map(
        lambda node: _CalledOnce(node) if is_python(node) else node, policy, is_leaf=is_python
    )
    return called


def _find_valued(policy: Any, carry: PyTree = None) -> tuple[ValuedPolicy, PyTree] | None:
    """The policy within that has a value, and its part of the carry."""
    match policy:
        case OUNoise() | MixedNoise() | ActionSmoothing() | DiscountedReturn():
            return _find_valued(policy.policy, None if carry is None else carry[0])
        case Greedy() | EpsilonGreedy() | Boltzmann() | FreshNoise() | GaussianNoise() | RandomWarmStart() | WithInfo():
            return _find_valued(policy.policy, carry)
        case StateDependentExploration() | ParameterNoise() | RepeatedNoise():
            return _find_valued(policy.policy, ())
        case NetworkPolicy() if isinstance(policy.network, Actor):
            return None  # An actor has no value; the critics are separate.
        case ValuedPolicy():
            return policy, carry
    return None
