"""What policies around policies share: checks, and what is drawn once an episode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.checks import check_number
from polyak.core.spaces import Box, Leaf, leaf_spaces
from polyak.core.struct import struct
from polyak.core.types import Policy, PolicyStep, PyTree, TimeStep
from polyak.policies.predict import PolicyWithSpec


@struct
class EpisodeDraw:
    """A part of a carry: one random number an episode, by which a policy is chosen.

    `Policy.distribution` gets no key, so it cannot draw: a wrapper that acts by another policy's distribution calls
    `draw_for_new_episodes` first.

    Attributes:
        number: uniform in [0, 1).
        drawn: it was drawn for the time step at hand.
    """

    number: Float[Array, " B"]
    drawn: Bool[Array, " B"]

    @classmethod
    def none(cls, batch_size: int) -> "EpisodeDraw":
        """Nothing drawn."""
        return cls(jnp.zeros(batch_size), jnp.zeros(batch_size, bool))


def draw_for_new_episodes(carry: PyTree, time_step: TimeStep, key: PRNGKeyArray) -> tuple[PyTree, PRNGKeyArray]:
    """The carry with its lots drawn for the episodes that begin, and the key for the rest; both as they are without lots."""
    parts, tree = jax.tree.flatten(carry, is_leaf=_is_lots)
    count = sum(map(_is_lots, parts))
    if count == 0:
        return carry, key
    key, *keys = jax.random.split(key, count + 1)
    of_lots = iter(keys)
    drawn = [_drawn(part, time_step, next(of_lots)) if _is_lots(part) else part for part in parts]
    return jax.tree.unflatten(tree, drawn), key


def sampled(policy: PolicyWithSpec, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
    """The `action` of a policy that draws from its own distribution."""
    carry, key = draw_for_new_episodes(carry, time_step, key)
    distribution, carry = policy.distribution(time_step, carry)
    return PolicyStep(distribution.sample(seed=key), carry)


def _drawn(lots: EpisodeDraw, time_step: TimeStep, key: PRNGKeyArray) -> EpisodeDraw:
    anew = jnp.asarray(time_step.first) & ~lots.drawn
    return EpisodeDraw(jnp.where(anew, jax.random.uniform(key, lots.number.shape), lots.number), lots.drawn | anew)


def _is_lots(node: Any) -> bool:
    return isinstance(node, EpisodeDraw)


def check_wrapped(owner: str, policy: PolicyWithSpec, kinds: tuple[type, ...], *, every: bool, instead: str) -> None:
    """A policy whose actions are of these kinds: all of them, or one at least.

    Raises:
        TypeError: it is no policy, or has no spec.
        ValueError: its action space does not suit, with what to take `instead`.
    """
    check_policy(owner, policy)
    suits = [isinstance(leaf, kinds) for _, leaf in leaf_spaces(policy.spec.action)]
    if not (all(suits) if every else any(suits)):
        names = ", ".join(kind.__name__ for kind in kinds)
        wanted = f"actions must be {names}" if every else f"some action must be a {names}"
        raise ValueError(f"{owner}: {wanted}, got {policy.spec.action}; {instead}")


def check_policy(owner: str, policy: Any) -> None:
    """A policy that knows its spaces.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(policy, Policy) or getattr(policy, "spec", None) is None:
        raise TypeError(f"{owner}: policy must have initial_state, distribution, action and spec, got {policy!r}")


def as_count(owner: str, env_steps: Any) -> Any:
    """A count of env_steps as a leaf: what schedules follow.

    Raises:
        TypeError, ValueError: it is no number, negative, or more than 2³² - 1.
    """
    check_number(owner, "env_steps", env_steps, at_least=0, at_most=2**32 - 1)
    # As a leaf, a Python int of more than 31 bits is refused by `jit`.
    return np.uint32(env_steps) if isinstance(env_steps, int) else env_steps


def is_box(leaf: Leaf) -> bool:
    """The space is a Box."""
    return isinstance(leaf, Box)
