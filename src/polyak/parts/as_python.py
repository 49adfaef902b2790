"""A policy as a plain Python one: NumPy in, NumPy out."""

from typing import Any

import jax
import numpy as np

from polyak.core.carries import check_carry
from polyak.core.spaces import Box, EnvSpec, Leaf, leaf_spaces, map_space
from polyak.core.types import Policy, PolicyStep, PyTree, TimeStep
from polyak.parts.predict import SpecifiedPolicy


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

    def __init__(self, policy: SpecifiedPolicy, *, deterministic: bool) -> None:
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
        if self._deterministic:
            action, carry = _mode(self._policy, time_step, carry)
        else:
            action, carry = _sample(self._policy, time_step, carry, np.uint32(seed))
        action, carry = jax.tree.map(np.array, (action, carry))
        check_carry(carry)
        return PolicyStep(map_space(self._within, self.spec.action, action), carry)

    def __call__(self, obs: PyTree, action_mask: PyTree = None, *, seed: int = 0) -> PyTree:
        """The action for one observation, or for a batch along a first axis.

        Raises:
            TypeError: the policy has a memory, which a function of the observation cannot keep.
            ValueError: the observation does not fit the space.
        """
        if jax.tree.leaves(self._policy.initial_state(1)):
            raise TypeError("as_python: the policy has a memory; call initial_state(batch_size) and action(time_step, carry)")
        single, size = self._batch_of(obs)
        rows = jax.tree.map(lambda x: np.asarray(x)[None] if single else np.asarray(x), (obs, action_mask))
        no = np.zeros(size, bool)
        time_step = TimeStep(rows[0], np.zeros(size, np.float32), no, no, ~no, rows[1])
        action = self.action(time_step, self._policy.initial_state(size), seed).action
        return jax.tree.map(lambda x: x[0], action) if single else action

    def _within(self, leaf: Leaf, action: Any) -> Any:
        return np.clip(action, *self.spec.action_bounds(leaf)) if isinstance(leaf, Box) else action

    def _batch_of(self, obs: PyTree) -> tuple[bool, int]:
        shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

        def leaf(space: Leaf, x: Any) -> None:
            shapes.append((np.shape(x), space.shape))

        map_space(leaf, self.spec.obs, obs)
        if all(got == wanted for got, wanted in shapes):
            return True, 1
        sizes = {got[:1] for got, wanted in shapes if got[1:] == wanted and len(got) == len(wanted) + 1}
        if len(sizes) != 1 or any(got == wanted or got[1:] != wanted for got, wanted in shapes):
            named = [f"{path or 'obs'} {got}" for (path, _), (got, _) in zip(leaf_spaces(self.spec.obs), shapes, strict=True)]
            raise ValueError(f"as_python: obs must be one of {self.spec.obs} or a batch of them, got {', '.join(named)}")
        return False, sizes.pop()[0]


def as_python(policy: SpecifiedPolicy, *, deterministic: bool = True) -> AsPython:
    """The policy as a plain NumPy callable, for one observation or a batch: see `AsPython`.

    Args:
        deterministic: the mode of its distribution; else a draw, by the seed.
    """
    return AsPython(policy, deterministic=deterministic)
