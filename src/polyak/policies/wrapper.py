"""The base of wrappers, policies around another policy: common methods, checks, and draws made once an episode."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.checks import check_number
from polyak.core.spaces import EnvSpec, leaf_spaces
from polyak.core.struct import struct
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Policy, PolicyStep, PyTree, TimeStep
from polyak.ops.schedules import MAX_STEPS, StepCount
from polyak.policies.predict import NumPyMethods, PolicyWithSpec, predict


class PolicyWrapper(NumPyMethods):
    """A policy around an inner `policy`, with its spec, and with its recurrent state unless it has one of its own."""

    policy: Any

    @property
    def spec(self) -> EnvSpec:
        """The inner policy's."""
        return self.policy.spec

    def initial_state(self, batch_size: int) -> PyTree:
        """The inner policy's."""
        return self.policy.initial_state(batch_size)


@suggest_arguments("predict")
def inner_predict(
    self: Any,
    obs: Any,
    carry: PyTree = None,
    *,
    deterministic: bool = True,
    first: Any = None,
    action_mask: Any = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Any, PyTree]:
    """`predict` of the inner policy, with the inner carry."""
    return predict(self.policy, obs, carry, deterministic=deterministic, first=first, action_mask=action_mask, key=key)


def sample_action(policy: PolicyWithSpec, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
    """The `action` of a policy that draws from its own distribution."""
    carry, key = draw_for_new_episodes(carry, time_step, key)
    distribution, carry = policy.distribution(time_step, carry)
    return PolicyStep(distribution.sample(seed=key), carry)


@struct
class EpisodeDraw:
    """A part of a carry: one random number an episode, by which a policy is chosen.

    `Policy.distribution` gets no key, so it cannot draw: a wrapper that acts by another policy's distribution calls
    `draw_for_new_episodes` first.

    Attributes:
        number: uniform in [0, 1).
        is_drawn: `number` was drawn for the current time step.
    """

    number: Float[Array, " B"]
    is_drawn: Bool[Array, " B"]

    @classmethod
    def empty(cls, batch_size: int) -> "EpisodeDraw":
        """Nothing drawn."""
        return cls(jnp.zeros(batch_size, jnp.float32), jnp.zeros(batch_size, bool))


def draw_for_new_episodes(carry: PyTree, time_step: TimeStep, key: PRNGKeyArray) -> tuple[PyTree, PRNGKeyArray]:
    """The carry with its `EpisodeDraw`s made for the episodes that begin, and the key for the rest of the step.

    A carry without `EpisodeDraw`, and the key, are returned unchanged.
    """
    parts, tree = jax.tree.flatten(carry, is_leaf=_is_draw)
    count = sum(map(_is_draw, parts))
    if count == 0:
        return carry, key
    key, *keys = jax.random.split(key, count + 1)
    draw_keys = iter(keys)
    parts = [_draw(part, time_step, next(draw_keys)) if _is_draw(part) else part for part in parts]
    return jax.tree.unflatten(tree, parts), key


def _draw(draw: EpisodeDraw, time_step: TimeStep, key: PRNGKeyArray) -> EpisodeDraw:
    is_new = jnp.asarray(time_step.first) & ~draw.is_drawn
    return EpisodeDraw(
        jnp.where(is_new, jax.random.uniform(key, draw.number.shape, jnp.float32), draw.number), draw.is_drawn | is_new
    )


def _is_draw(node: Any) -> bool:
    return isinstance(node, EpisodeDraw)


def check_wrapped(owner: str, policy: PolicyWithSpec, kinds: tuple[type, ...], *, every: bool, instead: str) -> None:
    """Check that a policy's actions are of these kinds: all of them, or at least one.

    Args:
        instead: advice, for the error.

    Raises:
        TypeError: the value is no policy, or has no spec.
        ValueError: its action space has other kinds.
    """
    check_policy(owner, policy)
    suits = [isinstance(leaf, kinds) for _, leaf in leaf_spaces(policy.spec.action)]
    if not (all(suits) if every else any(suits)):
        names = ", ".join(kind.__name__ for kind in kinds)
        wanted = f"actions must be {names}" if every else f"some action must be a {names}"
        raise ValueError(f"{owner}: {wanted}, got {policy.spec.action}; {instead}")


def check_policy(owner: str, policy: Any) -> None:
    """Check that this is a policy that knows its spaces.

    Raises:
        TypeError: the value is something else.
    """
    if not isinstance(policy, Policy) or getattr(policy, "spec", None) is None:
        wanted = f"{owner}: policy must have initial_state, distribution, action and spec, got {policy!r}"
        raise TypeError(f"{wanted}; wrap a function f with PythonPolicy(f, env.spec)")


def check_env_steps(policy: Any) -> None:
    """Check the field `env_steps`, which the schedules of a policy follow, and make it a leaf that `jit` takes.

    Raises:
        TypeError, ValueError: the value is no number, negative, or more than 2⁶³.
    """
    env_steps = policy.env_steps
    if isinstance(env_steps, StepCount):
        return
    check_number(type(policy).__name__, "env_steps", env_steps, at_least=0, at_most=MAX_STEPS)
    # `jit` rejects a Python int of more than 31 bits.
    object.__setattr__(policy, "env_steps", StepCount.of(env_steps) if isinstance(env_steps, int) else env_steps)
