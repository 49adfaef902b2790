"""Exploration with continuous actions: Gaussian, mixed and Ornstein-Uhlenbeck noise, and smoothing.

Standard deviations may be schedules of the field `env_steps`, as in `policies.exploration`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import Box, Dict, EnvSpec, Leaf, Tuple, leaf_spaces, map_space
from polyak.core.struct import check_settings, number, struct
from polyak.core.types import PolicyStep, PyTree, Scalar, TimeStep
from polyak.ops.distributions import Deterministic, Distribution, Joint
from polyak.ops.distributions.bounded import ClippedNormal
from polyak.ops.distributions.exploration import Select, affine_transform
from polyak.ops.schedules import Schedule, check_schedule, value_at
from polyak.policies.predict import PolicyWithSpec
from polyak.policies.wrapper import (
    EpisodeDraw,
    PolicyWrapper,
    check_env_steps,
    check_wrapped,
    draw_for_new_episodes,
    sample_action,
)


@struct
class GaussianNoise(PolicyWrapper):
    """Independent normal noise on the Box actions of the inner policy's mode, within the space's bounds.

        a = clip(clip(mode) + scale · ε),    ε ~ N(0, 1)

    Its distribution is the distribution of the clipped action, a `ClippedNormal`. Parts that are no Box are the mode's.

    Attributes:
        policy: the inner policy.
        scale: the standard deviation, in the units of agents' actions (`EnvSpec.action_bounds`); a number or a schedule.
        env_steps: the argument of the schedule.

    Raises:
        TypeError, ValueError: `policy` is not a policy or has no Box action, or `scale` is below 0 or several numbers.
    """

    policy: PolicyWithSpec
    scale: Schedule = 0.1
    env_steps: Any = 0

    def __post_init__(self) -> None:
        check_wrapped("GaussianNoise", self.policy, (Box,), every=False, instead="take EpsilonGreedy or Boltzmann")
        _check_scale("GaussianNoise", self.scale)
        check_env_steps(self)

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The distribution of the clipped action, and the inner carry."""
        inner, carry = self.policy.distribution(time_step, carry)
        mode = inner.mode()
        shift = jax.tree.map(jnp.zeros_like, mode)
        return _noise_distribution(self.spec, mode, shift, value_at(self.scale, self.env_steps)), carry

    action = sample_action


@struct
class MixedNoise(PolicyWrapper):
    """Independent normal noise as of `GaussianNoise`, with a scale of each environment's own.

        a = clip(clip(mode) + scale · ε),    ε ~ N(0, 1),    scale ~ U(low, high) where an episode begins

    `distribution` gets no key: at the beginning of an episode, unless `action` or a wrapper's `action` has drawn, its scale is
    the middle of the range.

    Attributes:
        policy: the inner policy.
        low: the smallest scale, in the units of agents' actions.
        high: the largest scale, at least `low`.

    Raises:
        TypeError, ValueError: `policy` is not a policy or has no Box action, or a scale is below 0.

    Source: Seo et al. 2025, arXiv:2505.22642, section 3.
    """

    policy: PolicyWithSpec
    low: Scalar = number(default=0.001, at_least=0)
    high: Scalar = number(default=0.4, at_least=0)

    def __post_init__(self) -> None:
        check_wrapped("MixedNoise", self.policy, (Box,), every=False, instead="take EpsilonGreedy or Boltzmann")
        check_settings(self)

    def initial_state(self, batch_size: int) -> PyTree:
        """The inner carry, and no scale drawn."""
        return self.policy.initial_state(batch_size), EpisodeDraw.empty(batch_size)

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree]:
        """The distribution of the clipped action with the scale of each environment, and the carry."""
        inner, draw = carry
        distribution, inner = self.policy.distribution(time_step, inner)
        is_known = ~jnp.asarray(time_step.first) | draw.is_drawn
        number = jnp.where(is_known, draw.number, 0.5)
        mode = distribution.mode()
        shift = jax.tree.map(jnp.zeros_like, mode)
        noisy = _noise_distribution(self.spec, mode, shift, self.low + (self.high - self.low) * number)
        return noisy, (inner, EpisodeDraw(number, jnp.zeros_like(draw.is_drawn)))

    action = sample_action


@struct
class OUNoise(PolicyWrapper):
    """Correlated noise on the Box actions of the inner policy's mode: an Ornstein-Uhlenbeck process for each environment.

        x' = (1 - θ) x + scale · ε,    a = clip(clip(mode) + x'),    ε ~ N(0, 1),    x = 0 where an episode begins

    For a time step dt use θ·dt and scale·√dt. `distribution` is the distribution of the action given the noise so far; the
    carries that `distribution` and `predict(deterministic=True)` return have no new ε.

    Attributes:
        policy: the inner policy.
        scale: the standard deviation of one step, in the units of agents' actions; a number or a schedule.
        theta: rate at which the noise returns to 0, in (0, 1]; 1 is `GaussianNoise`.
        env_steps: the argument of the schedule.

    Raises:
        TypeError, ValueError: `policy` is not a policy or has no Box action, `scale` is below 0 or several numbers, or `theta`
            not in (0, 1].

    Source: Lillicrap et al. 2016, arXiv:1509.02971, section 7, whose θ and scale are the defaults.
    """

    policy: PolicyWithSpec
    scale: Schedule = 0.2
    theta: Scalar = number(default=0.15, above=0, at_most=1)
    env_steps: Any = 0

    def __post_init__(self) -> None:
        check_wrapped("OUNoise", self.policy, (Box,), every=False, instead="take EpsilonGreedy or Boltzmann")
        _check_scale("OUNoise", self.scale)
        check_settings(self)
        check_env_steps(self)

    def initial_state(self, batch_size: int) -> PyTree:
        """The inner carry, and no noise."""
        return self.policy.initial_state(batch_size), _box_zeros(self.spec, batch_size)

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree]:
        """The distribution of the clipped action, given the noise so far."""
        inner, noise = carry
        distribution, inner = self.policy.distribution(time_step, inner)
        mean = self._decay(time_step, noise)
        return _noise_distribution(self.spec, distribution.mode(), mean, value_at(self.scale, self.env_steps)), (inner, mean)

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The mode with new noise."""
        (inner, noise), key = draw_for_new_episodes(carry, time_step, key)
        distribution, inner = self.policy.distribution(time_step, inner)
        scale = value_at(self.scale, self.env_steps)
        keys = iter(jax.random.split(key, len(list(leaf_spaces(self.spec.action)))))

        def add_noise(leaf: Leaf, x: Any) -> Any:
            key = next(keys)
            return x + scale * jax.random.normal(key, x.shape, x.dtype) if isinstance(leaf, Box) else x

        noise = map_space(add_noise, self.spec.action, self._decay(time_step, noise))
        # The mode of the distribution around the noisy action.
        action = _noise_distribution(self.spec, distribution.mode(), noise, scale).mode()
        return PolicyStep(action, (inner, noise))

    def _decay(self, time_step: TimeStep, noise: PyTree) -> PyTree:
        def leaf(leaf: Leaf, x: Any) -> Any:
            return (1.0 - self.theta) * jnp.where(_broadcast_flag(time_step.first, x), 0.0, x) if isinstance(leaf, Box) else x

        return map_space(leaf, self.spec.action, noise)


@struct
class ActionSmoothing(PolicyWrapper):
    """Box actions that follow the inner policy's with inertia, for each environment.

        ā' = ā + share · (a - ā),    ā' = a where an episode begins

    `distribution` is the distribution of ā' given ā. Parts that are no Box are the inner policy's.

    Attributes:
        policy: the inner policy.
        share: weight of the new action, in (0, 1]; 1 disables smoothing.

    Raises:
        TypeError, ValueError: `policy` is not a policy or has no Box action, or `share` is not in (0, 1].
    """

    policy: PolicyWithSpec
    share: Scalar = number(default=0.5, above=0, at_most=1)

    def __post_init__(self) -> None:
        check_wrapped("ActionSmoothing", self.policy, (Box,), every=False, instead="there is nothing to smooth")
        check_settings(self)

    def initial_state(self, batch_size: int) -> PyTree:
        """The inner carry, and zeros for the last action, which the first action of an episode does not use."""
        return self.policy.initial_state(batch_size), _box_zeros(self.spec, batch_size)

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree]:
        """The distribution of the smoothed action; the carry continues from its mode."""
        inner, last = carry
        distribution, inner = self.policy.distribution(time_step, inner)
        smoothed = self._smooth(distribution, time_step, last)
        return smoothed, (inner, self._boxes(smoothed.mode()))

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The inner policy's step, its action smoothed."""
        (inner, last), key = draw_for_new_episodes(carry, time_step, key)
        step = self.policy.action(time_step, inner, key)
        action = self._smooth(Deterministic(step.action), time_step, last).mode()
        return PolicyStep(action, (step.carry, self._boxes(action)), step.info)

    def _smooth(self, distribution: Any, time_step: TimeStep, last: PyTree) -> Distribution:
        def leaf(space: Any, part: Any, last: Any) -> Any:
            if not isinstance(space, Box):
                return part
            first = _broadcast_flag(time_step.first, last)
            scale = jnp.where(first, jnp.ones_like(last), self.share)
            return affine_transform(part, jnp.where(first, 0.0, (1.0 - self.share) * last), scale)

        space = self.spec.action
        match distribution:
            case Select():
                parts = tuple(self._smooth(part, time_step, last) for part in distribution.parts)
                return Select(parts, distribution.choice)
            case Deterministic():
                each = map_space(lambda _, x: Deterministic(x), space, distribution.value)
                return Deterministic(map_space(lambda s, x, y: leaf(s, x, y).value, space, each, last))
            case Joint():
                return Joint(map_space(leaf, space, distribution.parts, last))
            case _:
                return leaf(space, distribution, last)

    def _boxes(self, action: PyTree) -> PyTree:
        return map_space(lambda leaf, x: x if isinstance(leaf, Box) else (), self.spec.action, action)


def _check_scale(owner: str, scale: Any) -> None:
    check_schedule(owner, "scale", scale, above=-1.0, at_least=0)
    if np.ndim(scale) > 0:
        raise ValueError(
            f"{owner}: scale must be one number or a schedule, of all actions and environments, got shape {np.shape(scale)}; "
            'with action_scaling="rescale" every action is in [-1, 1]'
        )


def _noise_distribution(spec: EnvSpec, centre: PyTree, shift: PyTree, scale: Float[Array, "*B"]) -> Distribution:
    """Normal around the clipped centre plus a shift, clipped again; a part that is no Box is unchanged.

    Args:
        scale: the standard deviation, of all rows or of each.
    """

    def leaf(leaf: Leaf, x: Any, shift: Any) -> Distribution:
        if not isinstance(leaf, Box):
            return Deterministic(x)
        low, high = (jnp.broadcast_to(bound, x.shape) for bound in spec.action_bounds(leaf))
        rows = scale.reshape(-1, *(1 for _ in leaf.shape))
        return ClippedNormal(jnp.clip(x, low, high) + shift, jnp.broadcast_to(rows, x.shape), low, high, len(leaf.shape))

    tree = map_space(leaf, spec.action, centre, shift)
    return Joint(tree) if isinstance(spec.action, Dict | Tuple) else tree


def _box_zeros(spec: EnvSpec, batch_size: int) -> PyTree:
    return map_space(
        lambda leaf: jnp.zeros((batch_size, *leaf.shape), jnp.float32) if isinstance(leaf, Box) else (), spec.action
    )


def _broadcast_flag(flag: Any, like: Any) -> Array:
    """A flag `[B]` in the shape of an array `[B, ...]`."""
    wide = jnp.asarray(flag).reshape((-1,) + (1,) * (like.ndim - 1))
    return jnp.broadcast_to(wide, like.shape)
