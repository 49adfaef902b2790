"""Translates a function of arrays to an ONNX model for any batch size, one traced operation at a time.

Unlike jax2onnx and tf2onnx, this needs only `onnx`, and names operations that have no translation.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import onnx
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from onnx import helper, numpy_helper

from polyak.export.archive import ONNX_HASH, ExportError, seal_onnx
from polyak.export.onnx_operations import OPERATIONS, Graph

OPSET, IR_VERSION = 18, 9
"""Versions of 2022 and 2023, which older ONNX runtimes can read."""

ROWS = "rows"

# Calls of a function, which are inlined; without loops, which run their body more than once.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}

# Operations that move or round numbers, and their effect on bounds.
_KEEP_BOUNDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Transpose", "Slice"), float),
    **{"Round": np.rint, "Floor": np.floor, "Ceil": np.ceil},
}


def model(
    function: Callable[..., Any],
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    about: Mapping[str, str],
) -> bytes:
    """Translate a function of arrays `[N, ...]`, for any N, to an ONNX file.

    Args:
        inputs: shapes and dtypes, by name, without the first axis, which is named `rows` in the model.
        outputs: shapes without the first axis, and the dtypes that the function's outputs are cast to. An output with the name
            of an input, such as a carry, is named `next_...`.
        about: entries of the file's metadata.

    Raises:
        ExportError: an operation has no translation; the message names JAX's primitive.
    """
    (rows,) = export.symbolic_shape(ROWS)
    arguments = [jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in inputs.values()]
    program = jax.make_jaxpr(function)(*arguments)
    graph = _Nodes(next(iter(inputs)))
    values = graph.run(program, list(inputs))
    names = {name: f"next_{name}" if name in inputs else name for name in outputs}
    for value, (name, x) in zip(values, outputs.items(), strict=True):
        graph.add("Cast", [value], name=names[name], to=int(helper.np_dtype_to_tensor_dtype(np.dtype(x.dtype))))
    nodes, constants = graph.needed(names.values())
    result = helper.make_model(
        helper.make_graph(
            nodes,
            "policy",
            [_value_info(name, x) for name, x in inputs.items()],
            [_value_info(name, x) for name, x in zip(names.values(), outputs.values(), strict=True)],
            constants,
        ),
        producer_name="polyak",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    helper.set_model_props(result, dict([*about.items(), ONNX_HASH]))
    onnx.checker.check_model(result, full_check=True)
    return seal_onnx(bytes(result.SerializeToString()))


def _value_info(name: str, x: jax.ShapeDtypeStruct) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(x.dtype)), [ROWS, *x.shape])


def _literal(literal: Any) -> npt.NDArray[Any]:
    return np.asarray(literal.val, literal.aval.dtype)


class _Nodes(Graph):
    """Nodes in the order of computation. A value is the name of a node's output, or a NumPy array for a constant."""

    def __init__(self, batch_input: str) -> None:
        self._batch_input = batch_input
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._bounds: dict[str, tuple[float, float]] = {}
        self._count = 0

    def add(self, operation: str, inputs: Sequence[Any], *, name: str = "", **attributes: Any) -> str:
        (made,) = self.add_many(operation, inputs, [name or self._new_name(operation)], attributes)
        if operation in _KEEP_BOUNDS:
            low, high = map(_KEEP_BOUNDS[operation], self.bounds(inputs[0]))
            self._bounds[made] = (low, high)
        elif operation in ("Min", "Max"):
            least, most = zip(*map(self.bounds, inputs), strict=True)
            self._bounds[made] = (min(least), min(most)) if operation == "Min" else (max(least), max(most))
        return made

    def bounds(self, x: Any) -> tuple[float, float]:
        if isinstance(x, str):
            return self._bounds.get(x, (-math.inf, math.inf))
        return (float(np.min(x)), float(np.max(x))) if np.size(x) else (-math.inf, math.inf)

    def split(self, x: Any, sizes: Sequence[int], axis: int) -> list[Any]:
        names = [self._new_name("Split") for _ in sizes]
        return self.add_many("Split", [x, np.array(sizes, np.int64)], names, {"axis": axis})

    def add_many(self, operation: str, inputs: Sequence[Any], names: list[str], attributes: Mapping[str, Any]) -> list[Any]:
        names_of_inputs = [self._name(x) for x in inputs]
        self._nodes.append(helper.make_node(operation, names_of_inputs, names, **attributes))
        return names

    def rows(self, size: Any) -> str:
        if str(size) != ROWS:
            raise ExportError(f"export: format onnx knows sizes that are numbers or {ROWS}, got {size}")
        return self.add("Shape", [self._batch_input], start=0, end=1)

    def cast(self, x: Any, dtype: Any) -> str:
        return self.add("Cast", [x], to=int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))

    def run(self, program: ClosedJaxpr, inputs: list[Any]) -> list[Any]:
        """Add the nodes of a program; returns its outputs."""
        return self._run(program.jaxpr, [np.asarray(x) for x in program.consts], inputs)

    def needed(self, outputs: Iterable[str]) -> tuple[list[Any], list[Any]]:
        """Return the nodes and constants on which the outputs depend."""
        wanted, nodes = set(outputs), []
        for node in reversed(self._nodes):
            if wanted & set(node.output):
                nodes.append(node)
                wanted |= set(node.input)
        return nodes[::-1], [tensor for name, tensor in self._constants.items() if name in wanted]

    def _run(self, jaxpr: Jaxpr, constants: list[Any], inputs: list[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def value(variable: Any) -> Any:
            return _literal(variable) if isinstance(variable, Literal) else values[variable]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [value(variable) for variable in equation.invars])
            values |= dict(zip(equation.outvars, outputs, strict=True))
        return [value(variable) for variable in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        inner = params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"] if name in _CALLS else None
        if isinstance(inner, ClosedJaxpr):
            return self.run(inner, inputs)
        is_constant = all(isinstance(x, np.ndarray) for x in inputs)
        if is_constant and all(isinstance(n, int) for x in equation.outvars for n in x.aval.shape):
            outputs = equation.primitive.bind(*inputs, **params)
            return [np.asarray(x) for x in (outputs if equation.primitive.multiple_results else [outputs])]
        for dtype in (x.aval.dtype for x in equation.outvars):
            if jnp.issubdtype(dtype, np.floating) and dtype.itemsize < 4:
                raise ExportError(f"export: format onnx computes in float32, got {name!r} in {dtype}")
        if name not in OPERATIONS:
            raise ExportError(f"export: format onnx has no translation of the operation {name!r} in the policy's network")
        outputs = OPERATIONS[name](self, equation, inputs)
        return outputs if isinstance(outputs, list) else [outputs]

    def _name(self, x: Any) -> str:
        if isinstance(x, str):
            return x
        array: npt.NDArray[Any] = np.ascontiguousarray(x).reshape(np.shape(x))
        name = self._new_name("constant")
        self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def _new_name(self, what: str) -> str:
        self._count += 1
        return f"{what.lower()}_{self._count}"
