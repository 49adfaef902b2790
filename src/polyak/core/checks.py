"""Check settings, and that the step of an environment keeps its types; errors name the value, and what was expected."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from polyak.core.warn import warn


def check_number(
    owner: str,
    name: str,
    value: Any,
    *,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    above: float = -math.inf,
    optional: bool = False,
    or_else: str = "",
) -> None:
    """Check that a value is a real number that float32 can hold (or an array of them, for `vmap`), within the bounds.

    Args:
        owner: the class or function with the setting.
        name: the setting.
        value: its value.
        at_least: inclusive lower bound.
        at_most: inclusive upper bound.
        above: exclusive lower bound.
        optional: None is allowed too; errors of flags such as `--gamma`, which are None where they are left out, do not say so.
        or_else: other values that the caller allows, for the error.

    Raises:
        TypeError: not a number.
        ValueError: NaN, infinite, too large for float32, or out of bounds.
    """
    if isinstance(value, jax.core.Tracer) or (optional and value is None):
        return
    others = "".join(f" or {other}" for other in (or_else, "None" if optional and not name.startswith("--") else "") if other)
    wanted = _interval(at_least, at_most, above) + others
    if isinstance(value, bool | np.ma.MaskedArray) or not isinstance(value, int | float | np.number | np.ndarray | jax.Array):
        raise TypeError(f"{owner}: {name} must be a number {wanted}, got {value!r}")
    number: Any = value
    if isinstance(value, int) and abs(value) >= 2**63:
        # NumPy makes objects of such integers, and no float of the largest.
        number = float(value) if abs(value) < 2**1023 else math.inf
    array = np.asarray(number)
    if not (jax.numpy.issubdtype(array.dtype, np.floating) or array.dtype.kind in "iu") or array.size == 0:
        raise TypeError(f"{owner}: {name} must be a number {wanted}, got {value!r}")
    array = array.astype(np.float64)
    if not np.all(np.isfinite(array) & (array >= at_least) & (array <= at_most) & (array > above)):
        raise ValueError(f"{owner}: {name} must be a number {wanted}, got {value!r}")
    if np.any(np.abs(array) > np.finfo(np.float32).max):
        raise ValueError(f"{owner}: {name} must be a number that float32 can hold, at most 3.4e38, got {value!r}")


def check_integer(
    owner: str, name: str, value: Any, *, at_least: int = 1, at_most: int | None = None, optional: bool = False
) -> None:
    """Check that a value is a Python integer within the bounds.

    Args:
        optional: see `check_number`.

    Raises:
        TypeError: not an integer (neither a bool nor 2.0 is).
        ValueError: out of bounds.
    """
    if optional and value is None:
        return
    bounds = f">= {at_least}" if at_most is None else f"in [{at_least}, {at_most}]"
    expected = f"an integer {bounds}{' or None' if optional and not name.startswith('--') else ''}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} must be {expected}, got {value!r}")
    if value < at_least or (at_most is not None and value > at_most):
        raise ValueError(f"{owner}: {name} must be {expected}, got {value}")


def check_key(owner: str, key: Any) -> None:
    """Check that a value is a JAX key.

    Raises:
        TypeError: the value is something else, such as an integer.
    """
    if not isinstance(key, jax.Array | np.ndarray):
        wanted = f"jax.random.key({key})" if isinstance(key, int) else "jax.random.key(0)"
        raise TypeError(f"{owner}: key must be a JAX key, got {key!r:.80}; pass key={wanted}")


def check_choice(owner: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Check that a value is one of the choices.

    Raises:
        ValueError: the value is something else.
    """
    if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_unset(settings: Any, names: Iterable[str], reason: str) -> None:
    """Check that settings have the values of their defaults.

    Raises:
        ValueError: a setting has another value; the message has its name and the reason.
    """
    for name in changed_settings(settings, names):
        raise ValueError(f"{type(settings).__name__}: {name} {reason}")


def changed_settings(settings: Any, names: Iterable[str]) -> list[str]:
    """Return the names of these settings that have other values than their defaults."""
    fields = [field for field in dataclasses.fields(settings) if field.name in names]
    return [field.name for field in fields if not _is_default(getattr(settings, field.name), field.default)]


def warn_unused(settings: Any) -> None:
    """Warn of settings that have no effect because of another, such as `clip_obs` with `normalize_obs=False`.

    The metadata `used_if` of a field is the name of that setting and the value, or the range of values, with which the field
    has an effect; `...` is any but None. None and the default are always accepted. An unused setting is no error, so that runs
    that were stored with one load.
    """
    for field in dataclasses.fields(settings):
        if field.metadata.get("used_if") is None:
            continue
        other, needed = field.metadata["used_if"]
        value, got = getattr(settings, field.name), getattr(settings, other)
        if not _is_used(got, needed) and value is not None and not _is_default(value, field.default):
            wanted = f"{needed.start} or more" if isinstance(needed, range) else needed
            only = f"only if {other} is set" if needed is ... else f"only with {other}={wanted}"
            warn(f"{type(settings).__name__}: {field.name}={value!r:.80} has no effect with {other}={got!r:.80}, {only}")


def _is_used(got: Any, needed: Any) -> bool:
    if needed is ...:
        return got is not None
    return got in needed if isinstance(needed, range) else got is needed or (isinstance(got, str) and got == needed)


def check_created_with(settings: Any, *, equal: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Check that the state given to `update` was created with these settings; the state's would silently replace them.

    Args:
        equal: values in the state that must equal the setting of the name.
        present: values in the state that must be None where the setting is None, and only there.

    Raises:
        ValueError: a setting differs; the message names it.
    """
    differences = [
        (f"{name}={value!r}", f"sets {name}={getattr(settings, name)!r}")
        for name, value in equal.items()
        if value != getattr(settings, name)
    ]
    for name, value in present.items():
        if (value is None) != (getattr(settings, name) is None):
            differences.append((f"{name}=None", f"sets {name}") if value is None else (name, f"has {name}=None"))
    if differences:
        created, has = differences[0]
        raise ValueError(f"update: this state was created with {created} but the agent {has}; create it with agent.init(key)")


def _is_default(value: Any, default: Any) -> bool:
    """Return True if a setting has the default of its field; also for a traced value, which cannot be compared."""
    if isinstance(value, jax.core.Tracer):
        return True
    if isinstance(value, str):
        return bool(value == default)  # Equal strings of a file or the command line are not the same object.
    if value is None or default is None or not isinstance(value, int | float | np.ndarray | jax.Array):
        return value is default
    array = np.asarray(value)
    return bool(np.all((array == np.float32(default)) | (array == default)))


def _interval(at_least: float, at_most: float, above: float) -> str:
    low = f"({above:g}" if above >= at_least and above != -math.inf else f"[{at_least:g}" if at_least != -math.inf else "(-inf"
    high = f"{at_most:g}]" if at_most != math.inf else "inf)"
    return f"in {low}, {high}"


def check_same_types(env_id: str, part: str, before: Any, after: Any, *, weak: bool = False) -> None:
    """Check that a step of an environment keeps tree, shapes and dtypes, as `scan` requires.

    Args:
        part: `"the state"` or `"the time step"`.
        weak: compare weak types too, as a change of them compiles the step again.

    Raises:
        TypeError: with the first difference.
    """
    if change := describe_change(part, before, after, weak=weak):
        raise TypeError(f"{env_id}: step() changes {change}")


def describe_change(part: str, before: Any, after: Any, *, weak: bool = False) -> str:
    """Return the first difference between the trees, shapes and dtypes of two values; "" if there is none.

    Args:
        part: what the values are, such as `"the state"`.
        weak: compare weak types too.
    """
    trees: Any = jax.tree.structure(before), jax.tree.structure(after)
    if trees[0] != trees[1]:
        leaves = map(jax.tree_util.tree_leaves_with_path, (before, after))
        old_names, new_names = ([jax.tree_util.keystr(path) for path, _ in tree] for tree in leaves)
        changes = [f"{name} is gone" for name in old_names if name not in new_names]
        changes += [f"{name} is new" for name in new_names if name not in old_names]
        if changes:
            return f"the tree of {part}: {', '.join(changes):.300}"
        return f"the tree of {part} from {trees[0]!s:.300} to {trees[1]!s:.300}"
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        types: Any = jax.typeof(old), jax.typeof(new)
        same = [(t.shape, t.dtype, weak and t.weak_type) for t in types]
        if same[0] != same[1]:
            was, got = (f"{'weak ' if weak and t.weak_type else ''}{t.dtype}{list(t.shape)}" for t in types)
            where = f"{part}{jax.tree_util.keystr(path)}"
            remedy = "cast it" if types[0].shape == types[1].shape else "it must keep its shape"
            return f"{where} from {was} to {got}; {remedy}"
    return ""
