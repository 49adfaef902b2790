"""A greedy policy as a pure function of arrays, from the environment's observation and the carry to the action."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from polyak.core.spaces import Discrete, EnvSpec, MultiDiscrete, leaf_spaces, unflatten
from polyak.core.types import Policy, PyTree, TimeStep


@dataclass(frozen=True)
class ExportFunction:
    """`outputs = function(*inputs)` for any batch size; normalizer, integer starts and action scaling are included.

    Attributes:
        function: a pure function of arrays `[N, ...]`.
        inputs: shapes and dtypes, by name, without the first axis: `obs` (or `obs/camera`, ... for a Dict or Tuple) in the
            environment's form, then `action_mask` (or `action_mask/...`) if the environment has masks. Recurrent policies add
            `carry/...` and `first`: if True, an episode begins, without the carry.
        outputs: shapes and dtypes, by name, without the first axis: `action` (or `action/...`), and the next `carry/...`.
    """

    function: Callable[..., tuple[Array, ...]]
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Mapping[str, jax.ShapeDtypeStruct]


def export_function(policy: Policy, spec: EnvSpec) -> ExportFunction:
    """Return the mode of a policy's distribution as a function of arrays."""
    carry = policy.initial_state(1)
    carry_names, leaves = _name_leaves("carry", carry)
    carry_inputs = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in zip(carry_names, leaves, strict=True)}
    first_input = {"first": jax.ShapeDtypeStruct((), bool)} if leaves else {}
    obs_inputs = {_join("obs", path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaf_spaces(spec.obs)}
    masks = mask_inputs(spec)
    before_carry = len(obs_inputs) + len(masks)
    structure = jax.tree.structure(carry)

    def step(*inputs: Array) -> tuple[Array, ...]:
        batch = [x[None] for x in inputs]
        obs = spec.agent_obs(unflatten(spec.obs, batch[: len(obs_inputs)]))
        false = jnp.zeros((1,), bool)
        given = dict(zip(masks, batch[len(obs_inputs) : before_carry], strict=True))
        parts = [given.get(_join("action_mask", path)) for path, _ in leaf_spaces(spec.action)]
        mask = unflatten(spec.action, parts) if masks else None
        first = batch[before_carry] if first_input else false
        previous = jax.tree.unflatten(structure, batch[before_carry + len(first_input) :])
        time_step = TimeStep(obs, jnp.zeros((1,)), false, false, first, action_mask=mask)
        distribution, next_carry = policy.distribution(time_step, previous)
        action = spec.native_action(distribution.mode())
        return tuple(x[0] for x in (*jax.tree.leaves(action), *jax.tree.leaves(next_carry)))

    inputs = {**obs_inputs, **masks, **first_input, **carry_inputs}
    outputs = jax.eval_shape(step, *inputs.values())
    action_names = [_join("action", path) for path, _ in leaf_spaces(spec.action)]
    # Mapped over single steps: a user-defined network may need the batch size as a number, which is unknown here.
    return ExportFunction(jax.vmap(step), inputs, dict(zip([*action_names, *carry_names], outputs, strict=True)))


def mask_inputs(spec: EnvSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the inputs for action masks: a bool for each action of a Discrete, `sum(nvec)` of a MultiDiscrete; else {}."""
    sizes = {
        _join("action_mask", path): leaf.n if isinstance(leaf, Discrete) else sum(leaf.nvec)
        for path, leaf in leaf_spaces(spec.action)
        if spec.has_action_mask and isinstance(leaf, Discrete | MultiDiscrete)
    }
    return {name: jax.ShapeDtypeStruct((size,), np.bool_) for name, size in sizes.items()}


def _name_leaves(name: str, tree: PyTree) -> tuple[list[str], list[Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [_join(name, jax.tree_util.keystr(path, simple=True, separator="/")) for path, _ in leaves]
    return names, [x for _, x in leaves]


def _join(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name
