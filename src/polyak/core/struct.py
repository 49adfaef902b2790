"""Frozen dataclasses that are pytrees, used for all settings and states."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

from polyak.core.checks import check_choice, check_integer, check_number, warn_unused
from polyak.core.docstrings import with_inherited
from polyak.core.printing import short_repr
from polyak.core.suggestions import suggest_attributes, unknown_name

T = TypeVar("T")
MAX_INT32 = 2**31 - 1


def static(**options: Any) -> Any:
    """A field that is part of the tree's structure, not a leaf: its value must be hashable, and a new value recompiles.

    Args:
        **options: options of `dataclasses.field` (`default`, `default_factory`, `repr`, ...).
    """
    metadata = {**options.pop("metadata", {}), "static": True}
    return dataclasses.field(metadata=metadata, **options)


def setting(
    *,
    default: Any = dataclasses.MISSING,
    check: Callable[[str, str, Any], None],
    static: bool = False,
    used_if: tuple[str, Any] | None = None,
) -> Any:
    """A settings field with a check for `check_settings`: `check(owner, name, value)` raises if the value is invalid.

    Args:
        static: the field is static, as with `static()`.
        used_if: another setting and its value, or its range of values, or `...` for any but None, with which this setting has
            an effect; `check_settings` warns if the other setting has another value. None: it always has an effect.
    """
    return dataclasses.field(default=default, metadata={"static": static, "check": check, "used_if": used_if})


def number(
    *,
    default: Any = dataclasses.MISSING,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    above: float = -math.inf,
    optional: bool = False,
    static: bool = False,
    used_if: tuple[str, Any] | None = None,
) -> Any:
    """A `setting` that is a number within bounds or an array of such numbers, or None if `optional`."""
    check = functools.partial(check_number, at_least=at_least, at_most=at_most, above=above, optional=optional)
    return setting(default=default, check=check, static=static, used_if=used_if)


def integer(*, default: int | None, at_least: int = 1, at_most: int | None = MAX_INT32, optional: bool = False) -> Any:
    """A static `setting` that is an integer, by default at most the largest that JAX's default integers hold."""
    check = functools.partial(check_integer, at_least=at_least, at_most=at_most, optional=optional)
    return setting(default=default, check=check, static=True)


def choice(*, default: Any, choices: tuple[Any, ...], used_if: tuple[str, Any] | None = None) -> Any:
    """A static `setting` that must equal an element of `choices`."""
    return setting(default=default, check=functools.partial(check_choice, choices=choices), static=True, used_if=used_if)


def check_settings(settings: Any, owner: str | None = None) -> None:
    """Run the check of every setting, and warn of settings without effect; called by `__post_init__`.

    Static NumPy and JAX scalars become Python values, because JAX compares static fields and cannot compare traced arrays.

    Args:
        owner: name in errors; None is the name of the class.

    Raises:
        TypeError, ValueError: the first invalid setting; or a static number that is an array of several or traced.
    """
    owner = owner or type(settings).__name__
    for field in dataclasses.fields(settings):
        if "check" not in field.metadata:
            continue
        value = getattr(settings, field.name)
        if field.metadata["static"] and isinstance(value, np.generic):
            value = value.item()
            object.__setattr__(settings, field.name, value)
        field.metadata["check"](owner, field.name, value)
        if not field.metadata["static"] and isinstance(value, int) and abs(value) > MAX_INT32:
            # JAX has no such integers.
            object.__setattr__(settings, field.name, float(value))
        if field.metadata["static"] and isinstance(value, np.ndarray | jax.Array):
            if isinstance(value, jax.core.Tracer) or value.size != 1:
                raise TypeError(f"{owner}: {field.name} must be a single number known at compile time, got {value!r}")
            object.__setattr__(settings, field.name, value.item())
    warn_unused(settings)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static, setting, number, integer, choice))
def struct(cls: type[T] | None = None, *, kw_only: bool = False) -> Any:
    """Make `cls` a frozen dataclass that JAX sees as a pytree.

    Fields are children in the order of their declaration; fields marked with `static()` are part of the structure. Validation
    in `__post_init__` runs in the constructor and in `dataclasses.replace`, not when JAX unflattens the tree. The error for an
    unknown keyword argument suggests the nearest field. It prints the fields that differ from their defaults.

    A class inherits the fields of its bases, with their texts under `Attributes:`. It changes the default of one by a plain
    value: `learning_rate: Schedule = 1e-3`; the check of the field remains.

    Args:
        kw_only: fields are arguments by name only, but for those with `static(kw_only=False)`.

    Raises:
        TypeError: from the constructor, for an argument that is not a field.

    >>> @struct
    ... class Point:
    ...     x: float
    ...     unit: str = static(default="m")
    >>> jax.tree.map(lambda x: 2 * x, Point(1.5))
    Point(x=3.0)
    """
    if cls is None:
        return functools.partial(struct, kw_only=kw_only)
    _inherit_defaults(cls)
    made = dataclasses.dataclass(frozen=True, repr=False, kw_only=kw_only)(cls)
    data = suggest_attributes(short_repr()(made))
    fields = dataclasses.fields(data)  # type: ignore[arg-type]
    bases = [base.__doc__ for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    if data.__doc__ is not None and bases:
        data.__doc__ = with_inherited(data.__doc__, bases, [field.name for field in sorted(fields, key=_distance_in(cls))])
    leaf_names = tuple(f.name for f in fields if not f.metadata.get("static", False))
    static_names = tuple(f.name for f in fields if f.metadata.get("static", False))
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in leaf_names)
    new = object.__new__

    def flatten(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values = tree.__dict__
        return tuple([values[name] for name in leaf_names]), tuple([values[name] for name in static_names])

    def flatten_with_keys(tree: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, structure = flatten(tree)
        return tuple(zip(keys, children, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], children: Any) -> Any:
        # Skip __init__ and its validation: JAX also puts tracers, None and shapes into trees.
        tree = new(data)
        values = tree.__dict__
        values.update(zip(static_names, structure, strict=True))
        values.update(zip(leaf_names, children, strict=True))
        return tree

    jax.tree_util.register_pytree_with_keys(data, flatten_with_keys, unflatten, flatten)
    data.__init__ = suggest_names(data.__init__)  # type: ignore[method-assign]
    return data


def _inherit_defaults(cls: type) -> None:
    """Redeclare each inherited field to which the class assigns another default or type."""
    own = {name: getattr(cls, name, dataclasses.MISSING) for name in inspect.get_annotations(cls)} | vars(cls)
    for name, value in own.items():
        inherited = next((_fields_of(base)[name] for base in cls.__mro__[1:] if name in _fields_of(base)), None)
        if inherited is not None and not isinstance(value, dataclasses.Field | property):
            changed = dataclasses.field(default=value, metadata=inherited.metadata, kw_only=inherited.kw_only)
            setattr(cls, name, changed)


def _distance_in(cls: type) -> Callable[[Any], tuple[bool, int]]:
    """A sort key for the texts of fields: positional fields first, then the fields of the class, then of its bases."""
    distance = {
        name: number
        for number, base in enumerate(cls.__mro__)
        for name in _fields_of(base)
        if name in inspect.get_annotations(base)
    }
    return lambda field: (bool(field.kw_only), distance[field.name] if field.kw_only else 0)


def _fields_of(cls: Any) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def suggest_names(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that the error for an unknown keyword argument suggests the nearest field."""
    names = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{type(self).__name__}: {unknown_name(name, names, 'field')}")
        init(self, *args, **kwargs)

    return checked_init
