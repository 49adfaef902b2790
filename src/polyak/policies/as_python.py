"""A policy as a plain Python one: NumPy in, NumPy out."""

from typing import Any

import jax
import numpy as np

from polyak.core.carries import check_carry
from polyak.core.spaces import Box, EnvSpec, Leaf, map_space, only_value
from polyak.core.types import Policy, PolicyStep, PyTree, TimeStep
from polyak.policies.predict import PolicyWithSpec, rows_of, watching


@jax.jit
def _mode(policy: Policy, time_step: TimeStep, carry: PyTree) -> tuple[PyTree, PyTree]:
    distribution, carry = policy.distribution(time_step, carry)
    return distribution.mode(), carry


@jax.jit
def _sample(policy: Policy, time_step: TimeStep, carry: PyTree, seed: Any) -> tuple[PyTree, PyTree]:
    step = policy.action(time_step, carry, jax.random.key(seed))
    return step.action, step.carry


class AsPython:
    """A policy as an object with `initial_state` and `action`, and, where it has no memory, as a function of the observation.

    Actions are the policy's own, bit for bit, as agents choose them (counted from 0, before `spec.native_action`); a Box
    action beyond its bounds lies on them, where the environment would put it. So `PythonPolicy(policy.as_python(), spec)` acts
    as the policy does, one with a memory with `carry_spec=` that of this object. For the environment's own actions there
    is `predict`.
    """

    def __init__(self, policy: PolicyWithSpec, *, deterministic: bool) -> None:
        self._policy, self._deterministic = policy, deterministic

    @property
    def spec(self) -> EnvSpec:
        """The policy's."""
        return self._policy.spec

    @property
    def carry_spec(self) -> PyTree:
        """The carry of one fresh episode, without a batch dimension."""
        return jax.tree.map(lambda x: x[0], self.initial_state(1))

    def initial_state(self, batch_size: int) -> PyTree:
        """The carry of so many fresh episodes."""
        return jax.tree.map(np.array, self._policy.initial_state(batch_size))

    def action(self, time_step: TimeStep, carry: PyTree, seed: int = 0) -> PolicyStep:
        """One step of a batch; the seed, 32 bits, decides what is drawn."""
        with watching(self._policy):
            if self._deterministic:
                acted = _mode(self._policy, time_step, carry)
            else:
                acted = _sample(self._policy, time_step, carry, np.uint32(seed))
            action, carry = jax.tree.map(np.array, acted)
        check_carry(carry)
        return PolicyStep(map_space(self._within, self.spec.action, action), carry)

    def __call__(self, obs: PyTree, action_mask: PyTree = None, *, seed: int = 0) -> PyTree:
        """The action for one observation, or for a batch along a first axis.

        Args:
            obs: as the environment gives it, and as for `predict`: also lists of numbers.
            action_mask: which actions are allowed, as the observation single or batched, and in the tree of the action space.

        Raises:
            TypeError: the policy has a memory, which a function of the observation cannot keep; the wrong kind of number.
            ValueError: the observation does not fit the space, or holds what is not finite.
        """
        if jax.tree.leaves(self._policy.initial_state(1)):
            raise TypeError("as_python: the policy has a memory; call initial_state(batch_size) and action(time_step, carry)")
        rows, batch = self._rows_of(obs)
        size = batch or 1

        def mask_rows(space: Leaf, mask: Any) -> Any:
            return None if mask is None else np.atleast_2d(np.asarray(mask, bool))

        masks = None if action_mask is None else map_space(mask_rows, self.spec.action, action_mask)
        no = np.zeros(size, bool)
        time_step = TimeStep(rows, np.zeros(size, np.float32), no, no, ~no, masks)
        action = self.action(time_step, self._policy.initial_state(size), seed).action
        return action if batch else only_value(self.spec.action, action)

    def _within(self, leaf: Leaf, action: Any) -> Any:
        return np.clip(action, *self.spec.action_bounds(leaf)) if isinstance(leaf, Box) else action

    def _rows_of(self, obs: PyTree) -> tuple[PyTree, int | None]:
        try:
            return rows_of(self.spec.obs, obs)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("predict:", "as_python:", 1)) from None


def as_python(policy: PolicyWithSpec, *, deterministic: bool = True) -> AsPython:
    """The policy as a plain NumPy callable, for one observation or a batch: see `AsPython`.

    Args:
        deterministic: the mode of its distribution; else a draw, by the seed.
    """
    return AsPython(policy, deterministic=deterministic)
