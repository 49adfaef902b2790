"""Roles of parameters (policy, value or shared), and L2 penalties by role."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as Constant
from jaxtyping import Array, Float

from polyak.core.spaces import EnvSpec, zeros
from polyak.core.types import Network, PyTree, RecurrentNetwork, Scalar, Variables

Role: TypeAlias = Literal["policy", "value", "shared", "none"]


def roles(network: Network, variables: Variables, spec: EnvSpec) -> PyTree:
    """The role of each parameter, in their tree: which of `(action_params, value)` depends on it.

    Nothing is computed: the network is traced and its program is read. The outputs of a loop or a branch count as depending on
    all of its inputs.
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


def kernel_roles(network: Network, variables: Variables, spec: EnvSpec) -> tuple[Role | None, ...]:
    """The role of each leaf of the parameters that is a kernel, None for the others.

    A kernel has two axes or more, and is not called `bias`, `log_std` or `log_scale` (nor is below `log_std` or `log_scale`).
    """
    leaves = jax.tree_util.tree_leaves_with_path(variables.params)
    leaf_roles = jax.tree.leaves(roles(network, variables, spec))
    return tuple(role if _is_kernel(path, leaf) else None for (path, leaf), role in zip(leaves, leaf_roles, strict=True))


def sum_of_squares(params: PyTree, kernels: tuple[Role | None, ...], role: Role) -> Float[Array, ""]:
    """Σ w² over the kernels of this role; `kernels` as by `kernel_roles`."""
    leaves = zip(jax.tree.leaves(params), kernels, strict=True)
    return sum((jnp.sum(jnp.square(leaf)) for leaf, found in leaves if found == role), jnp.float32(0.0))


def check_kernels(owner: str, network: Network, spec: EnvSpec, coefficients: Mapping[Role, Scalar]) -> None:
    """Check that the network has kernels of every role with an L2 coefficient; nothing is computed.

    Raises:
        ValueError: no kernel has the role; the message lists the roles of the kernels.
    """
    if not coefficients:
        return
    # A key's shape is enough; a key would start JAX before its devices are settled.
    variables: Variables = jax.eval_shape(lambda key: network.init(key, spec), jax.eval_shape(lambda: jax.random.key(0)))
    found = set(kernel_roles(network, variables, spec)) - {None}
    for role, coefficient in coefficients.items():
        if role not in found and not _is_zero(coefficient):
            there = ", ".join(sorted(cast(set[str], found))) or "none"
            raise ValueError(f"{owner}: l2_{role} must be None for a network without {role} kernels; it has {there}")


def _is_zero(coefficient: Any) -> bool:
    """The coefficient is known to be 0, so there is no penalty."""
    return not isinstance(coefficient, jax.core.Tracer) and not np.any(np.asarray(coefficient))


def _origins(program: Jaxpr, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The inputs that each output of a program depends on, by the inputs' own origins."""
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
