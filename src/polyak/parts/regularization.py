"""Which weights belong to the policy, which to the value, and which to both; and the squares of them that a loss punishes."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal as Constant
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from polyak.core.spaces import EnvSpec, zeros
from polyak.core.types import Network, PyTree, RecurrentNetwork, Scalar, Variables

Role: TypeAlias = Literal["policy", "value", "shared", "none"]


def roles(network: Network, variables: Variables, spec: EnvSpec) -> PyTree:
    """In the tree of the parameters: whose each one is, found by what of `(action_params, value)` is computed from it.

    Nothing is computed here: the network's program is read. Where it calls a function that is jitted by itself, all that the
    function returns counts as computed from all that it is given.
    """
    rows = 1
    obs = jax.tree.map(jnp.asarray, zeros(spec.obs, (rows,)))
    carry = network.initial_carry(rows) if isinstance(network, RecurrentNetwork) else ()

    def outputs(params: PyTree) -> tuple[PyTree, Array]:
        (action_params, value), _, _ = network.apply(Variables(params, variables.stats, variables.graph), obs, carry)
        return action_params, value

    program = jax.make_jaxpr(outputs)(variables.params).jaxpr
    origins: dict[Any, frozenset[int]] = {variable: frozenset([i]) for i, variable in enumerate(program.invars)}
    for equation in program.eqns:
        sources = [origins.get(v, frozenset()) for v in equation.invars if not isinstance(v, Constant)]
        for variable in equation.outvars:
            origins[variable] = frozenset().union(*sources)
    *action, value = [frozenset() if isinstance(v, Constant) else origins.get(v, frozenset()) for v in program.outvars]
    of_policy, of_value = frozenset().union(*action), value
    names: dict[tuple[bool, bool], Role] = {(True, True): "shared", (True, False): "policy", (False, True): "value"}
    leaves = [names.get((i in of_policy, i in of_value), "none") for i in range(len(program.invars))]
    return jax.tree.unflatten(jax.tree.structure(variables.params), leaves)


def l2_coefficients(
    network: Network, variables: Variables, spec: EnvSpec, coefficients: Mapping[str, Scalar]
) -> Float[Array, " n"] | None:
    """For each entry of the raveled parameters, the coefficient of its square: its role's for kernels, 0 for all else.

    Kernels are what has two axes or more; biases and the logarithm of a deviation are none. None without coefficients.
    """
    if not coefficients:
        return None

    def leaf(path: Any, x: Array, role: Role) -> Array:
        return jnp.full(x.shape, coefficients.get(role, 0.0) if _is_kernel(path, x) else 0.0, jnp.float32)

    tree = jax.tree_util.tree_map_with_path(leaf, variables.params, roles(network, variables, spec))
    return ravel_pytree(tree)[0]


def check_kernels(owner: str, network: Network, spec: EnvSpec, coefficients: Mapping[str, Scalar]) -> None:
    """Refuse a coefficient of kernels that the network does not have; nothing is computed.

    Raises:
        ValueError: which, and the roles that there are.
    """
    if not coefficients:
        return
    variables: Variables = jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))
    found = {
        role
        for (path, leaf), role in zip(
            jax.tree_util.tree_leaves_with_path(variables.params), jax.tree.leaves(roles(network, variables, spec)), strict=True
        )
        if _is_kernel(path, leaf)
    }
    for role in coefficients:
        if role not in found:
            there = ", ".join(sorted(found)) or "none"
            raise ValueError(f"{owner}: l2_{role} must be None for a network without {role} kernels; it has {there}")


def _is_kernel(path: Any, leaf: Any) -> bool:
    return leaf.ndim >= 2 and "log_std" not in jax.tree_util.keystr(path)
