"""Converts plain Python data to and from strict JSON exactly: NaN, large integers, tuples and arrays, each under a tag."""

import base64
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from polyak.core.suggestions import escape_control

Dtype = np.dtype[Any]

DTYPES: dict[str, Dtype] = {
    str(dtype): dtype
    for dtype in map(
        jnp.dtype,
        [
            *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
            *("uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
            *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
            *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3b11fnuz"),
            *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        ],
    )
}
"""Supported dtypes by name: numbers and bools, so that bytes from a file never become objects."""

EXACT_INT = 2**53
"""Larger integers are written as text, as readers that use doubles would round them."""

MAX_FILL_BYTES = 256 * 2**20
"""Maximum memory of all arrays of one document that are stored as one repeated value."""

_READABLE = 64
_MAX_EQUAL_HASHES = 64
_HEX = re.compile(r"-?0x[0-9a-f]+\Z")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Handler = Callable[[Any, str], Any]


def reject(value: Any, path: str) -> Any:
    """Raise a TypeError for an object that is not plain data."""
    raise TypeError(
        f"{path}: must be dicts, lists, tuples, numbers, strings, bools, None or arrays, got a {type(value).__name__}"
    )


def _reject_class(value: Any, path: str) -> Any:
    name = value.get("$class", value.get("$unsupported"))
    raise ValueError(f"{path}: must be plain data, got an object ({str(name)[:80]!r})")


def encode(value: Any, path: str, other: Handler = reject) -> Any:
    """Convert a value to JSON data from which `decode` creates an equal value.

    Dicts, lists, strings, bools, None, finite floats and small integers are written directly, the rest under a tag that
    starts with `$`. Scalar JAX arrays become numbers, larger ones NumPy arrays; NumPy scalars keep their dtype.

    Args:
        path: the name of the value in errors; parts of the value are `path.key` and `path[0]`.
        other: called with each object that is not plain data, and its path; returns JSON data or raises.

    Raises:
        TypeError: from `other`.
        ValueError: a container contains itself.
    """
    try:
        return _encode(value, path, other)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply, or contains itself") from None


def _encode(value: Any, path: str, other: Handler) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < EXACT_INT else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, dict):
        return _encode_dict(value, path, other)
    if type(value) is list:
        return [_encode(x, f"{path}[{i}]", other) for i, x in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_encode(x, f"{path}[{i}]", other) for i, x in enumerate(value)]}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    return _encode_numeric(value, path, other)


def _encode_dict(value: dict[Any, Any], path: str, other: Handler) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(x, _join(path, key), other) for key, x in value.items()}
    return {"$dict": [[_encode(k, path, other), _encode(x, f"{path}[{k!r}]", other)] for k, x in value.items()]}


def _encode_numeric(value: Any, path: str, other: Handler) -> Any:
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        name = np.dtype(value).name
        return {"$dtype": name} if name in DTYPES else other(value, path)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return other(value, path)
    if isinstance(value, jax.Array):
        array = np.asarray(value)
        return _encode(array.item(), path, other) if array.ndim == 0 else {"$array": _array(array)}
    if isinstance(value, np.ndarray | np.generic) and str(value.dtype) in DTYPES:
        return {"$array" if isinstance(value, np.ndarray) else "$scalar": _array(np.asarray(value))}
    return other(value, path)


def _array(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the shortest exact form: the numbers of a small array, the single value of a constant array, else the bytes."""
    data = array.tobytes()
    form: dict[str, Any] = {"dtype": array.dtype.name, "shape": list(array.shape)}
    readable = array.dtype.kind in "biuf" and array.dtype.name != "float8_e5m2" and not np.any(np.isnan(array))
    if readable and array.size <= _READABLE:
        return form | {"values": [_encode(x, "", reject) for x in array.ravel().tolist()]}
    if readable and data == data[: array.itemsize] * array.size:
        return form | {"fill": _encode(array.flat[0].item(), "", reject)}
    return form | {"base64": base64.b64encode(data).decode()}


def _join(path: str, key: str) -> str:
    # Each entry of a list has the path as a part of its own: a long key must not be copied for each.
    return f"{path}.{escape_control(key[:80])}"


class _Decoder:
    """Reads one document: `other` handles `$class` objects; limits the memory of repeated values."""

    def __init__(self, other: Handler) -> None:
        self.other = other
        self.fill_bytes_left = MAX_FILL_BYTES

    def decode(self, data: Any, path: str) -> Any:
        if isinstance(data, list):
            return [self.decode(x, f"{path}[{i}]") for i, x in enumerate(data)]
        if not isinstance(data, dict):
            return data
        tag = next((key for key in data if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(x, _join(path, key)) for key, x in data.items()}
        if tag in ("$class", "$unsupported"):
            return self.other({k: v if k.startswith("$") else self.decode(v, _join(path, k)) for k, v in data.items()}, path)
        if len(data) != 1:
            raise ValueError(f"{path}: {tag[:80]} must be the only key, got {len(data)} keys")
        try:
            return self.tagged(tag, data[tag], path)
        except (TypeError, KeyError, ArithmeticError) as error:
            raise ValueError(f"{path}: malformed {tag[:80]}: {error}") from None

    def tagged(self, tag: str, content: Any, path: str) -> Any:
        match tag:
            case "$int" if isinstance(content, str) and _HEX.match(content):
                return int(content, 16)
            case "$float" if content in _NON_FINITE:
                return _NON_FINITE[content]
            case "$tuple" if isinstance(content, list):
                return tuple(self.decode(content, path))
            case "$dict" if isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
                keys = [self.decode(key, path) for key, _ in content]
                # Integers can be chosen to have one hash: a dict of them takes quadratic time.
                if max(Counter(map(hash, keys)).values(), default=0) > _MAX_EQUAL_HASHES:
                    raise ValueError(f"{path}: more than {_MAX_EQUAL_HASHES} keys of a $dict have the same hash")
                return {key: self.decode(value, path) for key, (_, value) in zip(keys, content, strict=True)}
            case "$bytes":
                return _bytes(content, path)
            case "$dtype" if content in DTYPES:
                return DTYPES[content]
            case "$array" | "$scalar" if isinstance(content, dict):
                with np.errstate(over="raise"):
                    array = self.array(content, path)
                return array if tag == "$array" else array[()]
        raise ValueError(f"{path}: malformed or unknown tag {tag[:80]!r}")

    def array(self, content: dict[str, Any], path: str) -> npt.NDArray[Any]:
        dtype, shape = DTYPES[content["dtype"]], parse_shape(content["shape"], path)
        size = math.prod(shape)
        forms = content.keys() - {"dtype", "shape"}
        if len(forms) != 1 or not forms <= {"base64", "values", "fill"}:
            raise ValueError(f"{path}: an array has one of base64, values, fill; got {', '.join(sorted(forms)) or 'none'}")
        if "base64" in forms:
            data = _bytes(content["base64"], path)
            if len(data) != size * dtype.itemsize:
                raise ValueError(f"{path}: array {dtype}{list(shape)} needs {size * dtype.itemsize} bytes, got {len(data)}")
            return np.frombuffer(data, dtype).reshape(shape).copy()
        if "values" in forms:
            values = [_number(self.decode(x, path), dtype, path) for x in content["values"]]
            if len(values) != size:
                raise ValueError(f"{path}: array {dtype}{list(shape)} needs {size} values, got {len(values)}")
            return np.array(values, dtype).reshape(shape)
        self.fill_bytes_left -= size * dtype.itemsize
        if self.fill_bytes_left < 0:
            raise ValueError(f"{path}: array {dtype}{list(shape)} is too large to be filled with one value")
        return np.full(shape, _number(self.decode(content["fill"], path), dtype, path), dtype)


def decode(data: Any, path: str, other: Handler = _reject_class) -> Any:
    """Convert the result of `encode` to a value, of plain data and results of `other`.

    Args:
        data: JSON data from `parse_json`.
        path: name of the data in errors.
        other: called with each `$class` or `$unsupported` object, with decoded fields, and its path.

    Raises:
        ValueError: the data are malformed; at most the size of the document plus `MAX_FILL_BYTES` is allocated.
    """
    return _Decoder(other).decode(data, path)


def parse_shape(shape: Any, path: str) -> tuple[int, ...]:
    """Check a shape from a file; returns a tuple of dimensions.

    Raises:
        ValueError: the data are no shape, or too large.
    """
    is_shape = isinstance(shape, list) and len(shape) <= 32 and all(type(n) is int and n >= 0 for n in shape)
    # 0 counts as 1, as NumPy rejects sizes that it cannot address, even of an empty array.
    if not is_shape or math.prod(max(n, 1) for n in shape) > 2**48:
        raise ValueError(f"{path}: a shape is a list of at most 32 dimensions and 2^48 entries, got {str(shape)[:80]}")
    return tuple(shape)


def finite_or_none(value: Any) -> Any:
    """Replace NaN and infinity, also in lists and dicts, by None, for JSON files that other programs read."""
    if isinstance(value, Mapping):
        return {name: finite_or_none(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _bytes(text: Any, path: str) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{path}: base64 text expected, got {type(text).__name__}")
    try:
        return base64.b64decode(text.encode(), validate=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _number(value: Any, dtype: Dtype, path: str) -> Any:
    wanted = {"b": (bool,), "f": (float, int)}.get(dtype.kind, (int,))
    if type(value) not in wanted:
        raise ValueError(f"{path}: an array of {dtype} cannot hold {str(value)[:40]!r}")
    return value
