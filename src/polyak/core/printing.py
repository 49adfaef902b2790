"""Short printed forms of objects: at most ten lines."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

MAX_LINES, MAX_WIDTH = 10, 120
# An attribute takes at most three lines, and a collection shows its first elements.
MAX_TEXT = 3 * (MAX_WIDTH - 8)
MAX_ITEMS = 4


def format_number(value: float) -> str:
    """A number for a terminal: `21.2`, and from a million on `6.173e+07`."""
    return f"{value:.1f}" if abs(value) < 1e6 else f"{value:.4g}"


def short_repr(*names: str) -> Callable[[type[T]], type[T]]:
    """Give a class a short `__repr__`, unless it defines its own.

    Args:
        *names: the attributes to show, but for None and empty collections; without names, the fields of a dataclass that differ
            from their defaults.
    """

    def decorate(cls: type[T]) -> type[T]:
        def to_text(value: Any) -> str:
            shown = [(name, getattr(value, name)) for name in names] if names else _changed_fields(value)
            parts = [f"{name.lstrip('_')}={text_of(x)}" for name, x in shown if not (names and _is_empty(x))]
            return _fill(type(value).__name__, parts)

        if "__repr__" not in vars(cls):
            cls.__repr__ = to_text  # type: ignore[method-assign]
        return cls

    return decorate


def text_of(value: Any) -> str:
    """A value on one line: arrays by dtype and shape, functions by name, long collections shortened.

    >>> text_of({"weights": [1.0, 1 / 3], "update": max})
    "{'weights': [1.0, 0.333333], 'update': max}"
    """
    if isinstance(value, type) or type(value).__name__ in ("function", "builtin_function_or_method"):
        return str(value.__qualname__)
    if _is_array(value):
        return _array_text(value)
    if isinstance(value, Mapping | list | tuple):
        return _collection_text(value)
    if isinstance(value, float):
        return min(repr(value), f"{value:.6g}", key=len) if value % 1 else repr(value)
    # On one line: `Name( a=1, )` of several becomes `Name(a=1)`.
    text = " ".join(repr(value).split()).replace("( ", "(").replace(", )", ")")
    return _shorten(text, MAX_TEXT)


def _changed_fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that differ from their defaults."""
    changed = []
    # Not all are there: JAX builds trees without validation, and prints them in its errors.
    fields = sorted(dataclasses.fields(value), key=lambda field: bool(field.kw_only))  # as the arguments come
    for field in (field for field in fields if field.repr and field.name in vars(value)):
        content = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if not (_is_equal(content, default) or (default is dataclasses.MISSING and _is_empty(content))):
            changed.append((field.name, content))
    return changed


def _is_equal(content: Any, default: Any) -> bool:
    """Return True if a value equals the default; False for arrays, which may be traced, and for values that contain arrays."""
    if content is default:
        return True
    if type(content) is not type(default) or _is_array(content):
        return False
    if dataclasses.is_dataclass(content):
        return all(_is_equal(vars(content).get(name), x) for name, x in vars(default).items())
    return bool(content == default)


def _is_array(value: Any) -> bool:
    """Return True for arrays of NumPy and JAX, also traced ones and `ShapeDtypeStruct`s, but not for spaces."""
    return getattr(value, "dtype", None) is not None and not dataclasses.is_dataclass(value)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, tuple | dict) and not value)


def _array_text(array: Any) -> str:
    if array.shape == ():
        try:
            number = array.item()
            return f"{number:g}" if isinstance(number, float) else str(number)
        except (AttributeError, TypeError, RuntimeError):
            pass  # a PRNG key, a traced array, or one that was donated
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _collection_text(value: Any) -> str:
    arrays = list(_arrays_in(value))
    if len(arrays) > MAX_ITEMS:
        return f"{len(arrays)} arrays of {sum(math.prod(array.shape) for array in arrays):,} numbers"
    name, ends = "", "[]" if isinstance(value, list) else "()"
    if isinstance(value, Mapping):
        ends, items = "{}", (f"{key!r}: {text_of(x)}" for key, x in value.items())
    elif names := getattr(value, "_fields", None):  # a NamedTuple
        name, items = type(value).__name__, (f"{key}={text_of(x)}" for key, x in zip(names, value, strict=True))
    else:
        items = (text_of(x) for x in value)
    parts = list(islice(items, MAX_ITEMS))
    if len(value) > MAX_ITEMS:
        parts.append(f"... {len(value) - MAX_ITEMS} more")
    comma = "," if ends == "()" and len(value) == 1 and not name else ""
    return _shorten(f"{name}{ends[0]}{', '.join(parts)}{comma}{ends[1]}", MAX_TEXT)


def _arrays_in(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping | list | tuple):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays_in(child)
    elif _is_array(value):
        yield value


def _fill(name: str, parts: list[str]) -> str:
    """`name(part, part)`, on one line if it fits, otherwise on indented lines."""
    line = f"{name}({', '.join(parts)})"
    if len(line) <= MAX_WIDTH:
        return line
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= MAX_WIDTH:
            lines[-1] += f" {part},"
        else:
            text = _shorten(part, MAX_TEXT - 1) + ","
            lines += textwrap.wrap(text, MAX_WIDTH, initial_indent=4 * " ", subsequent_indent=8 * " ")
    most = MAX_LINES - 2
    if len(lines) > most:
        lines = [*lines[: most - 1], f"    ... {len(lines) - most + 1} more lines"]
    return "\n".join([f"{name}(", *lines, ")"])


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
