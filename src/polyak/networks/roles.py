"""Which weights belong to the policy, which to the value, and which to both; and the squares of them that a loss punishes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as Constant
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from polyak.core.spaces import EnvSpec, zeros
from polyak.core.types import Network, PyTree, RecurrentNetwork, Scalar, Variables

Role: TypeAlias = Literal["policy", "value", "shared", "none"]


def roles(network: Network, variables: Variables, spec: EnvSpec) -> PyTree:
    """In the tree of the parameters: whose each one is, found by what of `(action_params, value)` is computed from it.

    Nothing is computed here: the network's program is read. What a loop or a branch in it returns counts as computed from all
    that it is given.
    """
    rows = 1
    obs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, zeros(spec.obs, (rows,))))
    carry = jax.eval_shape(lambda: network.initial_carry(rows)) if isinstance(network, RecurrentNetwork) else ()

    def outputs(params: PyTree, stats: PyTree, obs: PyTree, carry: PyTree) -> tuple[PyTree, Array]:
        (action_params, value), _, _ = network.apply(Variables(params, stats, variables.graph), obs, carry)
        return action_params, value

    # All is an argument: when settings are checked, there are shapes without numbers, and JAX has not started.
    program = jax.make_jaxpr(outputs)(variables.params, variables.stats, obs, carry).jaxpr
    *action, value = _origins(program, [frozenset([i]) for i in range(len(program.invars))])
    of_policy = frozenset().union(*action)
    names: dict[tuple[bool, bool], Role] = {(True, True): "shared", (True, False): "policy", (False, True): "value"}
    leaves, tree = jax.tree.flatten(variables.params)
    return jax.tree.unflatten(tree, [names.get((i in of_policy, i in value), "none") for i in range(len(leaves))])


def l2_coefficients(
    network: Network, variables: Variables, spec: EnvSpec, coefficients: Mapping[Role, Scalar]
) -> dict[Role, Float[Array, " n"]] | None:
    """By role, for each entry of the raveled parameters, the coefficient of its square: 0 for all but the role's kernels.

    Kernels are what has two axes or more, but for what is called `bias`, `log_std` or `log_scale` (or stands below these last
    two). None without coefficients.
    """
    if not coefficients:
        return None

    its_role = roles(network, variables, spec)

    def of(wanted: Role, coefficient: Scalar) -> Array:
        def leaf(path: Any, x: Array, role: Role) -> Array:
            return jnp.full(x.shape, coefficient if role == wanted and _is_kernel(path, x) else 0.0, jnp.float32)

        return ravel_pytree(jax.tree_util.tree_map_with_path(leaf, variables.params, its_role))[0]

    return {role: of(role, coefficient) for role, coefficient in coefficients.items()}


def check_kernels(owner: str, network: Network, spec: EnvSpec, coefficients: Mapping[Role, Scalar]) -> None:
    """Refuse a coefficient of kernels that the network does not have; nothing is computed.

    Raises:
        ValueError: which, and the roles that there are.
    """
    if not coefficients:
        return
    # A key's shape is enough; a key would start JAX before its devices are settled.
    variables: Variables = jax.eval_shape(lambda key: network.init(key, spec), jax.eval_shape(lambda: jax.random.key(0)))
    found = {
        role
        for (path, leaf), role in zip(
            jax.tree_util.tree_leaves_with_path(variables.params), jax.tree.leaves(roles(network, variables, spec)), strict=True
        )
        if _is_kernel(path, leaf)
    }
    for role, coefficient in coefficients.items():
        if role not in found and not _is_zero(coefficient):
            there = ", ".join(sorted(found)) or "none"
            raise ValueError(f"{owner}: l2_{role} must be None for a network without {role} kernels; it has {there}")


def _is_zero(coefficient: Any) -> bool:
    """It is known to be 0, so that nothing is punished."""
    return not isinstance(coefficient, jax.core.Tracer) and not np.any(np.asarray(coefficient))


def _origins(program: Jaxpr, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """From which of the inputs each output of a program is computed, by the inputs' own origins."""
    origins: dict[Any, frozenset[int]] = dict(zip(program.invars, inputs, strict=True))

    def of(variable: Any) -> frozenset[int]:
        return frozenset() if isinstance(variable, Constant) else origins.get(variable, frozenset())

    for equation in program.eqns:
        sources = [of(variable) for variable in equation.invars]
        if equation.primitive.name in ("jit", "pjit", "remat2", "checkpoint"):
            called: ClosedJaxpr | Jaxpr = equation.params["jaxpr"]
            outputs = _origins(called.jaxpr if isinstance(called, ClosedJaxpr) else called, sources)
        else:
            outputs = [frozenset().union(*sources)] * len(equation.outvars)
        origins.update(zip(equation.outvars, outputs, strict=True))
    return [of(variable) for variable in program.outvars]


def _is_kernel(path: Any, leaf: Any) -> bool:
    words = re.findall(r"\w+", jax.tree_util.keystr(path))
    return leaf.ndim >= 2 and not {"log_std", "log_scale"} & set(words) and words[-1] != "bias"
