"""Frozen dataclasses that are pytrees: the one shape of settings and states in polyak."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.names import unknown_name

T = TypeVar("T")


def static(**options: Any) -> Any:
    """A field that is part of the tree's structure, not a leaf: hashable, and a new value recompiles.

    Args:
        **options: those of `dataclasses.field` (`default`, `default_factory`, `repr`, ...).
    """
    metadata = {**options.pop("metadata", {}), "static": True}
    return dataclasses.field(metadata=metadata, **options)


def setting(*, default: Any, check: Callable[[str, str, Any], None], static: bool = False) -> Any:
    """A field of settings that `check_settings` looks at: `check(owner, name, value)` raises where the value is wrong.

    Args:
        static: as by `static()`: a new value recompiles.
    """
    return dataclasses.field(default=default, metadata={"static": static, "check": check})


def number(
    *,
    default: float | None,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    above: float = -math.inf,
    optional: bool = False,
    static: bool = False,
) -> Any:
    """A `setting` that is a number within bounds, or an array of them; or None if `optional`."""
    check = functools.partial(check_number, at_least=at_least, at_most=at_most, above=above, optional=optional)
    return setting(default=default, check=check, static=static)


def integer(*, default: int | None, at_least: int = 1, at_most: int | None = None, optional: bool = False) -> Any:
    """A static `setting` that is an integer."""
    check = functools.partial(check_integer, at_least=at_least, at_most=at_most, optional=optional)
    return setting(default=default, check=check, static=True)


def choice(*, default: Any, choices: tuple[Any, ...]) -> Any:
    """A static `setting` that is one of a few values."""
    return setting(default=default, check=functools.partial(check_choice, choices=choices), static=True)


def check_settings(settings: Any) -> None:
    """Refuse the first wrong setting, by its owner and name; what `__post_init__` calls.

    A static number becomes one of Python's: JAX compares what is static, and while tracing cannot tell if arrays are equal.

    Raises:
        TypeError, ValueError: as its check says; a static number that is an array of several.
    """
    for field in dataclasses.fields(settings):
        if "check" not in field.metadata:
            continue
        owner, value = type(settings).__name__, getattr(settings, field.name)
        field.metadata["check"](owner, field.name, value)
        if field.metadata["static"] and isinstance(value, np.generic | np.ndarray | jax.Array):
            if isinstance(value, jax.core.Tracer) or value.size != 1:
                raise TypeError(f"{owner}: {field.name} must be one number, known before compiling, got {value!r}")
            object.__setattr__(settings, field.name, value.item())


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static, setting, number, integer, choice))
def struct(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that JAX sees as a pytree.

    Fields are children in the order of their declaration; those marked with `static()` are part of the structure. A
    `__post_init__` that validates runs when a person builds the object and under `dataclasses.replace`, never when JAX
    rebuilds it around tracers. An unknown keyword argument is refused with the nearest field's name.

    Raises:
        TypeError: from the constructor, for an argument that is no field.

    >>> @struct
    ... class Point:
    ...     x: float
    ...     unit: str = static(default="m")
    >>> jax.tree.map(lambda x: 2 * x, Point(1.5))
    Point(x=3.0, unit='m')
    """
    data = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(data)  # type: ignore[arg-type]
    leaves = tuple(f.name for f in fields if not f.metadata.get("static", False))
    fixed = tuple(f.name for f in fields if f.metadata.get("static", False))
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in leaves)
    new = object.__new__

    def flatten(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        fields_of = tree.__dict__
        return tuple([fields_of[name] for name in leaves]), tuple([fields_of[name] for name in fixed])

    def flatten_with_keys(tree: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, structure = flatten(tree)
        return tuple(zip(keys, children, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], children: Any) -> Any:
        # Around __init__: what JAX puts into a tree (tracers, None, shapes) is not a person's input to validate.
        tree = new(data)
        fields_of = tree.__dict__
        fields_of.update(zip(fixed, structure, strict=True))
        fields_of.update(zip(leaves, children, strict=True))
        return tree

    jax.tree_util.register_pytree_with_keys(data, flatten_with_keys, unflatten, flatten)
    data.__init__ = suggest_names(data.__init__)  # type: ignore[method-assign]
    return data


def suggest_names(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose error about an unknown keyword suggests the nearest known one."""
    names = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{type(self).__name__}: {unknown_name(name, names, 'field')}")
        init(self, *args, **kwargs)

    return checked


def check_needed(settings: Any, name: str, *others: str) -> None:
    """Refuse a setting that is given where none of the others is, which it means nothing without.

    Raises:
        ValueError: naming all of them.
    """
    if getattr(settings, name) is not None and all(getattr(settings, other) is None for other in others):
        raise ValueError(
            f"{type(settings).__name__}: {name}={getattr(settings, name)} needs {' or '.join(others)}, which must be a number "
            f"above 0; got None"
        )
