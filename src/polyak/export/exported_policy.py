"""A policy that was exported and is back: what it needs to act is in the file, and it only acts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.spaces import EnvSpec, map_space
from polyak.core.types import PyTree
from polyak.policies.predict import obs_batch


@dataclass(frozen=True)
class ExportedPolicy:
    """Answers `predict` as the policy did from which it was made.

    Attributes:
        spec: the spaces.
        step: the arrays `[N, ...]` of a `NativeStep`'s outputs, from those of its inputs.
        memory: shape and dtype of each array of its carry, without the first axis; empty for a policy without a memory.
    """

    spec: EnvSpec
    step: Callable[..., Any]
    memory: Mapping[str, jax.ShapeDtypeStruct]

    def initial_state(self, batch_size: int) -> PyTree:
        """A carry for the beginning of episodes: its numbers are not looked at where `predict` gets None."""
        return tuple(np.zeros((batch_size, *x.shape), x.dtype) for x in self.memory.values())

    def predict(self, obs: Any, carry: PyTree = None, *, deterministic: bool = True) -> tuple[Any, PyTree]:
        """The environment's action for one observation or a batch of them, and the carry for the next call.

        Args:
            obs: as the environment gives it.
            carry: what the call before returned; None at the start of an episode.

        Raises:
            TypeError, ValueError: as `predict` of a policy that was not exported; a sample, which this one cannot draw.
        """
        if not deterministic:
            raise ValueError("predict: an exported policy is greedy; got deterministic=False")
        rows, batch = obs_batch(self.spec.obs, obs, native=True)
        size = batch or 1
        inputs: list[npt.NDArray[Any]] = []
        map_space(lambda _, x: inputs.append(x), self.spec.obs, rows)
        if self.memory:
            inputs += [np.full(size, carry is None), *self._memory_of(carry, size)]
        outputs = self.step(*inputs)
        # Copies, for what JAX hands out is read-only.
        acted = iter(np.array(x) for x in outputs)
        action = map_space(lambda _: next(acted), self.spec.action)
        after = tuple(outputs[len(outputs) - len(self.memory) :])
        return (action if batch else jax.tree.map(lambda a: a[0], action)), after

    def _memory_of(self, carry: PyTree, size: int) -> PyTree:
        if carry is None:
            return self.initial_state(size)
        wanted, got = [(size, *x.shape) for x in self.memory.values()], [np.shape(x) for x in jax.tree.leaves(carry)]
        if got != wanted:
            raise ValueError(f"predict: carry must have arrays of the shapes {wanted}, got {got}")
        return carry
