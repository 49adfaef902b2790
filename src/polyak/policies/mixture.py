"""A policy that is one of several, chosen for each episode."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, PRNGKeyArray

from polyak.core.policy_faults import count_failures_in
from polyak.core.spaces import EnvSpec
from polyak.core.spec_difference import difference
from polyak.core.struct import struct
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.ops.distributions.exploration import Select, select_rows
from polyak.policies.predict import NumPyMethods
from polyak.policies.wrapper import EpisodeDraw, check_policy, draw_for_new_episodes


@struct
class Mixture(NumPyMethods):
    """One of several policies, drawn by their weights for each environment when an episode begins.

    All policies act at every time step, so that their carries are complete; only the actions of the drawn policy are used, and
    a script may end while another policy is drawn. `distribution` gets no key: at the beginning of an episode, unless `action`
    or a wrapper's `action` has drawn, it follows the policy of the largest weight; `predict(deterministic=True)` does too.

    Attributes:
        policies: at least one, all of one spec; their `info` must have one tree.
        weights: probabilities up to a factor; None for equal probabilities.

    Raises:
        TypeError: `policies` is no tuple of policies.
        ValueError: no policy, specs that differ, or weights that are not one number of at least 0 per policy, some above 0.
    """

    policies: tuple[Any, ...]
    weights: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.policies, tuple) or not self.policies:
            raise TypeError(f"Mixture: policies must be a tuple of at least one policy, got {self.policies!r}")
        for number, policy in enumerate(self.policies):
            check_policy(f"Mixture: policies[{number}]", policy)
            if differs := difference(self.policies[0].spec, policy.spec):
                field, first, other = differs
                raise ValueError(f"Mixture: {field} of policies[0]'s spec is {first}, of policies[{number}]'s {other}")
        if not isinstance(self.weights, jax.core.Tracer):
            object.__setattr__(self, "weights", _normalize_weights(self.weights, len(self.policies)))

    @property
    def spec(self) -> EnvSpec:
        """The policies' spec."""
        return self.policies[0].spec

    def initial_state(self, batch_size: int) -> PyTree:
        """Nothing drawn, and the carry of each."""
        return EpisodeDraw.empty(batch_size), tuple(policy.initial_state(batch_size) for policy in self.policies)

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Select, PyTree]:
        """The drawn policy's."""
        draw, inner = carry
        choice, draw = self._choice(draw, time_step)
        pairs = [policy.distribution(time_step, own) for policy, own in zip(self.policies, inner, strict=True)]
        return Select(tuple(each for each, _ in pairs), choice), (draw, _after(choice, inner, [carry for _, carry in pairs]))

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The drawn policy's step, with the carries of all."""
        (draw, inner), key = draw_for_new_episodes(carry, time_step, key)
        choice, draw = self._choice(draw, time_step)
        each = zip(self.policies, inner, jax.random.split(key, len(self.policies)), strict=True)
        steps = [policy.action(time_step, own, own_key) for policy, own, own_key in each]
        action, info = (select_rows(choice, each) for each in zip(*((step.action, step.info) for step in steps), strict=True))
        return PolicyStep(action, (draw, _after(choice, inner, [step.carry for step in steps])), info)

    def _choice(self, draw: EpisodeDraw, time_step: TimeStep) -> tuple[Int32[Array, " B"], EpisodeDraw]:
        """The index of each environment's policy, and the draw that fixes it until the episode ends."""
        weights = jnp.asarray(self.weights)
        sums = jnp.cumsum(weights)
        heaviest = jnp.argmax(weights)
        middle = (sums[heaviest] - 0.5 * weights[heaviest]) / sums[-1]
        known = ~jnp.asarray(time_step.first) | draw.is_drawn
        number = jnp.where(known, draw.number, middle)
        choice = jnp.sum((number * sums[-1])[:, None] >= sums[None, :-1], axis=1, dtype=jnp.int32)
        return choice, EpisodeDraw(number, jnp.zeros_like(draw.is_drawn))


def _after(choice: Int32[Array, " B"], before: Sequence[PyTree], after: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """The carries after a step; a failure does not count where another policy was drawn."""
    numbered = enumerate(zip(before, after, strict=True))
    return tuple(count_failures_in(choice == number, old, new) for number, (old, new) in numbered)


def _normalize_weights(weights: Any, count: int) -> Any:
    array = np.ones(count, np.float32) if weights is None else np.asarray(weights)
    if array.shape != (count,) or array.dtype.kind not in "fiu":
        raise ValueError(f"Mixture: weights must be {count} numbers, one for each policy, got {weights!r}")
    if not np.all(np.isfinite(array) & (array >= 0)) or not array.sum() > 0:
        raise ValueError(f"Mixture: weights must be at least 0, and at least one above 0, got {weights!r}")
    return (array / array.sum()).astype(np.float32)
