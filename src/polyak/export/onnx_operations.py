"""Translations of JAX primitives to ONNX nodes."""

import string
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from polyak.export.archive import ExportError


@runtime_checkable
class Graph(Protocol):
    """The graph to which translations add nodes. A value is the name of a node's output, or a NumPy array."""

    def add(self, operation: str, inputs: Sequence[Any], *, name: str = "", **attributes: Any) -> str:
        """Add a node; returns its only output."""
        ...

    def split(self, x: Any, sizes: Sequence[int], axis: int) -> list[Any]:
        """Add a split along an axis; returns the parts."""
        ...

    def rows(self, size: Any) -> str:
        """Return the batch size as a vector of one integer; raises ExportError if `size` is not the batch size."""
        ...

    def bounds(self, x: Any) -> tuple[float, float]:
        """Return the known lower and upper bound of all numbers in `x`."""
        ...

    def cast(self, x: Any, dtype: Any) -> str:
        """Add a cast to another dtype."""
        ...


Translation: TypeAlias = Callable[[Graph, Any, list[Any]], Any]


def _as(operation: str) -> Translation:
    return lambda graph, equation, inputs: graph.add(operation, inputs)


def _vector(numbers: Sequence[Any]) -> Any:
    return np.array([int(n) for n in numbers], np.int64)


def _is_number(size: Any) -> bool:
    return isinstance(size, int | np.integer)


def _reshape(graph: Graph, x: Any, shape: Sequence[Any]) -> Any:
    """Reshape to a shape in which one size may depend on the batch size."""
    if sum(not _is_number(size) for size in shape) > 1:
        raise ExportError(f"export: format onnx cannot reshape to {tuple(shape)}: two sizes depend on the batch size")
    return graph.add("Reshape", [x, _vector([size if _is_number(size) else -1 for size in shape])])


def _broadcast_in_dim(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    """Add axes by a reshape, then expand; expanding an axis to 1 keeps its length."""
    shape, places = equation.params["shape"], equation.params["broadcast_dimensions"]
    sizes = dict(zip(map(int, places), equation.invars[0].aval.shape, strict=True))
    aligned = [sizes.get(i, 1) for i in range(len(shape))]
    x = inputs[0] if len(aligned) == len(sizes) else _reshape(graph, inputs[0], aligned)
    longer = [1 if old == new else new for old, new in zip(aligned, shape, strict=True)]
    if all(_is_number(size) and size == 1 for size in longer):
        return x if isinstance(x, str) else graph.add("Identity", [x])
    if all(map(_is_number, longer)):
        return graph.add("Expand", [x, _vector(longer)])
    parts = [_vector([size]) if _is_number(size) else graph.rows(size) for size in longer]
    return graph.add("Expand", [x, graph.add("Concat", parts, axis=0)])


def _slice(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(starts)
    sizes = equation.invars[0].aval.shape
    axes = [i for i, size in enumerate(sizes) if not (limits[i] == size and starts[i] == 0 and strides[i] == 1)]
    if not all(_is_number(limits[i]) and _is_number(starts[i]) for i in axes):
        raise ExportError(f"export: format onnx cannot slice {starts} to {limits}: a limit depends on the batch size")
    slices = [_vector([values[i] for i in axes]) for values in (starts, limits, range(len(sizes)), strides)]
    return graph.add("Slice", [inputs[0], *slices])


def _stack(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    axis = int(equation.params["axis"])
    return graph.add("Concat", [graph.add("Unsqueeze", [x, _vector([axis])]) for x in inputs], axis=axis)


def _convert(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    old, new = equation.invars[0].aval.dtype, np.dtype(equation.params["new_dtype"])
    if old.kind == "f" and new.kind in "iu":
        (low, high), limits = graph.bounds(inputs[0]), np.iinfo(new)
        if not (limits.min <= low and high <= limits.max):
            raise ExportError(f"export: format onnx casts to {new} only numbers clipped to [{limits.min}, {limits.max}]")
    return graph.cast(inputs[0], new)


def _argmax(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    (axis,) = equation.params["axes"]
    index = graph.add("ArgMax", inputs, axis=int(axis), keepdims=0)
    return graph.cast(index, equation.params["index_dtype"])


def _reduce(operation: str) -> Translation:
    return lambda graph, equation, inputs: graph.add(operation, [inputs[0], _vector(equation.params["axes"])], keepdims=0)


def _reduce_or(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    return graph.cast(_reduce("ReduceMax")(graph, equation, [graph.cast(inputs[0], np.dtype(np.int32))]), np.dtype(bool))


def _select(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    if len(inputs) != 3 or equation.invars[0].aval.dtype != np.bool_:
        raise ExportError("export: format onnx selects between two arrays by a bool, nothing else")
    which, if_false, if_true = inputs
    return graph.add("Where", [which, if_true, if_false])


def _clamp(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    low, x, high = inputs
    return graph.add("Min", [graph.add("Max", [x, low]), high])


def _number_like(equation: Any, number: int) -> Any:
    return np.array(number, equation.invars[0].aval.dtype)


def _round(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    if int(equation.params["rounding_method"]) != 1:
        raise ExportError("export: format onnx rounds halves to the even number, not away from 0")
    return graph.add("Round", inputs)


def _dot_general(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    ranks = [variable.aval.ndim for variable in equation.invars]
    if (list(left), list(right)) == ([ranks[0] - 1], [0]) and not left_batch and ranks[1] == 2:
        return graph.add("MatMul", inputs)
    letters = iter(string.ascii_lowercase)
    first, second = ([next(letters) for _ in range(rank)] for rank in ranks)
    for i, j in [*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)]:
        second[j] = first[i]
    free = [c for i, c in enumerate(first) if i not in (*left, *left_batch)]
    free += [c for j, c in enumerate(second) if j not in (*right, *right_batch)]
    terms = ["".join(part) for part in (first, second, [first[i] for i in left_batch] + free)]
    return graph.add("Einsum", inputs, equation=f"{terms[0]},{terms[1]}->{terms[2]}")


def _convolution(graph: Graph, equation: Any, inputs: list[Any]) -> Any:
    params, plan = equation.params, equation.params["dimension_numbers"]
    if any(n != 1 for n in params["lhs_dilation"]) or params["batch_group_count"] != 1:
        raise ExportError("export: format onnx has no translation of a transposed or batch-grouped convolution")
    x, kernel = (
        graph.add("Transpose", [x], perm=[int(i) for i in spec])
        for x, spec in zip(inputs, (plan.lhs_spec, plan.rhs_spec), strict=True)
    )
    out = graph.add(
        "Conv",
        [x, kernel],
        strides=[int(n) for n in params["window_strides"]],
        pads=[int(pair[i]) for i in (0, 1) for pair in params["padding"]],
        dilations=[int(n) for n in params["rhs_dilation"]],
        group=int(params["feature_group_count"]),
    )
    return graph.add("Transpose", [out], perm=[int(i) for i in np.argsort(plan.out_spec)])


OPERATIONS: dict[str, Translation] = {
    **{name: _as(operation) for name, operation in {
        "abs": "Abs", "add": "Add", "add_any": "Add", "and": "And", "ceil": "Ceil", "copy": "Identity", "copy_p": "Identity",
        "cos": "Cos", "div": "Div", "eq": "Equal", "erf": "Erf", "exp": "Exp", "floor": "Floor", "ge": "GreaterOrEqual",
        "gt": "Greater", "le": "LessOrEqual", "log": "Log", "logistic": "Sigmoid", "lt": "Less", "max": "Max", "min": "Min",
        "mul": "Mul", "neg": "Neg", "not": "Not", "or": "Or", "pow": "Pow", "sign": "Sign", "sin": "Sin", "sqrt": "Sqrt",
        "stop_gradient": "Identity", "sub": "Sub", "tanh": "Tanh", "xor": "Xor",
    }.items()},
    "argmax": _argmax,
    "broadcast_in_dim": _broadcast_in_dim,
    "clamp": _clamp,
    "concatenate": lambda graph, equation, x: graph.add("Concat", x, axis=int(equation.params["dimension"])),
    "conv_general_dilated": _convolution,
    "convert_element_type": _convert,
    "dot_general": _dot_general,
    "expm1": lambda graph, equation, x: graph.add("Sub", [graph.add("Exp", x), _number_like(equation, 1)]),
    "integer_pow": lambda graph, equation, x: graph.add("Pow", [*x, _number_like(equation, equation.params["y"])]),
    "log1p": lambda graph, equation, x: graph.add("Log", [graph.add("Add", [*x, _number_like(equation, 1)])]),
    "ne": lambda graph, equation, x: graph.add("Not", [graph.add("Equal", x)]),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_or": _reduce_or,
    "reduce_min": _reduce("ReduceMin"),
    "reduce_sum": _reduce("ReduceSum"),
    "reshape": lambda graph, equation, x: _reshape(graph, x[0], equation.params["new_sizes"]),
    "round": _round,
    "rsqrt": lambda graph, equation, x: graph.add("Reciprocal", [graph.add("Sqrt", x)]),
    "select_n": _select,
    "slice": _slice,
    "split": lambda graph, equation, x: graph.split(x[0], [*map(int, equation.params["sizes"])], int(equation.params["axis"])),
    "square": lambda graph, equation, x: graph.add("Mul", [*x, *x]),
    "squeeze": lambda graph, equation, x: graph.add("Squeeze", [*x, _vector(equation.params["dimensions"])]),
    "stack": _stack,
    "transpose": lambda graph, equation, x: graph.add("Transpose", x, perm=[*map(int, equation.params["permutation"])]),
}  # fmt: skip
