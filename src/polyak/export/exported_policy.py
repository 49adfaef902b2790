"""A policy loaded from an exported file; inference only, without the training stack or a network library."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.printing import short_repr
from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiDiscrete, map_space, only_value, zeros
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import PyTree, TimeStep
from polyak.export.archive import ExportError, from_members, read_export
from polyak.export.numpy_format import check_weights
from polyak.export.policy_function import mask_inputs
from polyak.export.stablehlo import MEMBER, load_program
from polyak.policies.numpy_reader import Policy as NumPyReader
from polyak.policies.predict import AsPython, first_of_batch, mask_batch, obs_batch


@short_repr("spec", "carry_spec")
@dataclass(frozen=True, repr=False)
class ExportedPolicy:
    """A greedy policy from a file; `predict` returns the actions of the original policy, up to rounding.

    Attributes:
        spec: spec of the environment.
        function: maps the inputs of an `ExportFunction` to its outputs, arrays `[N, ...]`.
        carry_spec: shape and dtype of each array of the carry, without the first axis; empty if the policy is not recurrent.
    """

    spec: EnvSpec
    function: Callable[..., Any]
    carry_spec: Mapping[str, jax.ShapeDtypeStruct]

    def initial_state(self, batch_size: int) -> PyTree:
        """Return a carry of zeros for the start of episodes; `predict` with `carry=None` ignores the numbers."""
        return tuple(np.zeros((batch_size, *x.shape), x.dtype) for x in self.carry_spec.values())

    @suggest_arguments("predict")
    def predict(
        self,
        obs: Any,
        carry: PyTree = None,
        *,
        deterministic: bool = True,
        first: Any = None,
        action_mask: Any = None,
        key: Any = None,
    ) -> tuple[Any, PyTree]:
        """Return the environment's action for one observation or a batch of observations, and the carry for the next call.

        Args:
            obs: an observation of the environment.
            carry: returned by the previous call; None at the start of an episode.
            deterministic: must be True.
            first: one bool per observation, True if an episode begins, which resets its carry.
            action_mask: the allowed actions; required if the environment has masks, see `predict` of other policies.
            key: not used; other policies use it to sample actions.

        Raises:
            TypeError, ValueError: see `predict` of other policies; or `deterministic=False`, as the file has no distribution.
        """
        if not deterministic:
            raise ValueError("predict: an exported policy is greedy; got deterministic=False")
        rows, batch = obs_batch(self.spec.obs, obs, native=True)
        size = batch or 1
        resets = first_of_batch(first, size, carry is None)
        inputs: list[npt.NDArray[Any]] = []
        map_space(lambda _, x: inputs.append(x), self.spec.obs, rows)
        inputs += self._mask_arrays(mask_batch(self.spec, action_mask, batch, "predict"), size)
        if self.carry_spec:
            inputs += [resets, *self._carry_arrays(carry, size)]
        outputs = self.function(*inputs)
        # Copies, because NumPy views of JAX arrays are read-only.
        leaves = map(np.array, outputs)
        action = map_space(lambda leaf: _in_dtype(leaf, next(leaves)), self.spec.action)
        next_carry = tuple(outputs[len(outputs) - len(self.carry_spec) :])
        return (action if batch else only_value(self.spec.action, action)), next_carry

    def as_python(self) -> AsPython:
        """Return the policy as a NumPy callable with agents' observations and actions, for a `PythonPolicy`."""

        def act(time_step: TimeStep, carry: PyTree, seed: int) -> tuple[PyTree, PyTree]:
            obs, mask = self.spec.native_obs(time_step.obs), time_step.action_mask
            action, carry = self.predict(obs, carry, first=np.asarray(time_step.first), action_mask=mask)
            return self.spec.agent_action(action), carry

        return AsPython(self.spec, self.initial_state, act)

    def _mask_arrays(self, masks: PyTree, size: int) -> list[npt.NDArray[np.bool_]]:
        """The masks that the file's function takes, all actions allowed where a part of the tree is None."""
        if masks is not None and not self.spec.has_action_mask:
            raise ValueError("predict: action_mask must be None, as the exported policy is of an environment without masks")
        if masks is None:
            return []
        parts: list[tuple[Leaf, Any]] = []
        map_space(lambda leaf, mask: parts.append((leaf, mask)), self.spec.action, masks)
        given = [mask for leaf, mask in parts if isinstance(leaf, Discrete | MultiDiscrete)]
        wanted = mask_inputs(self.spec).values()
        return [np.ones((size, *x.shape), bool) if mask is None else mask for x, mask in zip(wanted, given, strict=True)]

    def _carry_arrays(self, carry: PyTree, size: int) -> PyTree:
        if carry is None:
            return self.initial_state(size)
        wanted, got = [(size, *x.shape) for x in self.carry_spec.values()], [np.shape(x) for x in jax.tree.leaves(carry)]
        if got != wanted:
            raise ValueError(f"predict: carry must have arrays of the shapes {wanted}, got {got}")
        return carry


def _in_dtype(leaf: Leaf, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = array.astype(leaf.dtype)
    return np.clip(array, leaf.low, leaf.high) if isinstance(leaf, Box) else array


def load_exported(path: str | os.PathLike[str]) -> ExportedPolicy:
    """Load a policy that `polyak export` wrote as stablehlo or numpy; the file is checked before anything runs.

    Raises:
        ExportError: the file is missing, damaged, of another format, or does not fit its spaces.
    """
    export, what = read_export(path), str(path)
    carry_spec = {name: x for name, x in export.inputs.items() if name.startswith("carry")}
    if export.kind == "stablehlo":
        if set(export.members) != {MEMBER}:
            raise ExportError(f"{what}: has the members {sorted(export.members)}, expected {MEMBER}")
        program = load_program(export.members[MEMBER], export.inputs, export.outputs, what, writer=export.jax_version)
        return ExportedPolicy(export.spec, program, carry_spec)
    arrays = from_members(export.members, what)
    reader = NumPyReader(export.about, arrays)
    policy = ExportedPolicy(export.spec, lambda *inputs: (reader(*inputs),), carry_spec)
    try:
        if carry_spec:
            raise ValueError(f"it is recurrent, with the carry {list(carry_spec)}")
        check_weights(export.spec, export.about, arrays)
        masks = [np.ones(x.shape, bool) for x in mask_inputs(export.spec).values()]
        policy.predict(zeros(export.spec.obs), action_mask=masks[0] if masks else None)
    except Exception as error:
        raise ExportError(f"{what}: its weights do not make a policy: {error!r}") from None
    return policy
