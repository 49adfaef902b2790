"""A greedy policy as a plain function of arrays: the environment's observation in, its own action out, memory beside them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from polyak.core.spaces import Discrete, EnvSpec, Leaf, MultiDiscrete, leaf_spaces, map_space
from polyak.core.types import Policy, PyTree, TimeStep


@dataclass(frozen=True)
class NativeStep:
    """`outputs = function(*inputs)` for any number of rows; normaliser, integer starts and action scaling are inside.

    Attributes:
        function: pure, of arrays `[N, ...]`.
        inputs: each by its name, without the first axis: `obs` (or `obs/camera`, ... of a Dict or Tuple) as the environment
            gives it. Of a policy with a memory also `carry/...` and `first`: an episode begins, its carry is not looked at.
        outputs: likewise: `action` (or `action/...`) as the environment takes it, and `carry/...` for the next step.
    """

    function: Callable[..., tuple[Array, ...]]
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Mapping[str, jax.ShapeDtypeStruct]


def native_step(policy: Policy, spec: EnvSpec) -> NativeStep:
    """The mode of a policy's distribution as a function of arrays.

    Raises:
        ValueError: the environment says which actions are allowed; a plain function of the observation cannot know.
    """
    if spec.has_action_mask:
        raise ValueError(f"export: {spec.id or 'the environment'} has action masks, which an exported policy does not take")
    carry = policy.initial_state(1)
    names, leaves = _named("carry", carry)
    remembers = {"first": jax.ShapeDtypeStruct((), bool)} if leaves else {}
    memory = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in zip(names, leaves, strict=True)}
    seen = {_name("obs", path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaf_spaces(spec.obs)}
    structure = jax.tree.structure(carry)

    def one_row(*inputs: Array) -> tuple[Array, ...]:
        rows = [x[None] for x in inputs]
        given = iter(rows[: len(seen)])
        obs = map_space(lambda leaf: _counted(leaf, next(given)), spec.obs)
        no = jnp.zeros((1,), bool)
        first = rows[len(seen)] if remembers else no
        before = jax.tree.unflatten(structure, rows[len(seen) + len(remembers) :])
        distribution, after = policy.distribution(TimeStep(obs, jnp.zeros((1,)), no, no, first), before)
        action = spec.native_action(distribution.mode())
        return tuple(x[0] for x in (*jax.tree.leaves(action), *jax.tree.leaves(after)))

    inputs = {**seen, **remembers, **memory}
    # Row by row: the networks that people write may ask for the number of rows, which is not known here.
    said = jax.eval_shape(one_row, *inputs.values())
    acts = [_name("action", path) for path, _ in leaf_spaces(spec.action)]
    return NativeStep(jax.vmap(one_row), inputs, dict(zip([*acts, *names], said, strict=True)))


def _counted(space: Leaf, x: Array) -> Any:
    """As agents see it: integers from 0."""
    if isinstance(space, Discrete):
        return x - x.dtype.type(space.start) if space.start else x
    if isinstance(space, MultiDiscrete):
        return x - jnp.asarray(space.start, x.dtype)[None] if any(space.start) else x
    return x


def _named(name: str, tree: PyTree) -> tuple[list[str], list[Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [_name(name, jax.tree_util.keystr(path, simple=True, separator="/")) for path, _ in leaves]
    return names, [x for _, x in leaves]


def _name(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name
