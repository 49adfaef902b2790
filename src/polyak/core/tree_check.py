"""Checks that two trees of arrays match, and the names of leaves in errors."""

from typing import Any

import jax
import jax.numpy as jnp

from polyak.core.types import PyTree


def quoted(name: str) -> str:
    """A leaf name for error messages; a tree that is a single leaf has no name."""
    return f"leaf '{name}'" if name else "the only leaf"


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """All leaves with their names, as used in errors and by `match="name"`, in tree order; None is a leaf.

    >>> named_leaves({"params": [1.0, None]})
    [('params/0', 1.0), ('params/1', None)]
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_none)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """Leaves (including None) and tree structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
    return leaves, structure


def check_same_tree(
    a: PyTree, b: PyTree, owner: str, *, sides: tuple[str, str] = ("online", "target"), otherwise: str = ""
) -> None:
    """Check that two trees have the same containers, names, shapes and kinds of leaves; floats may differ in width.

    Only shapes and dtypes are compared, so under `jit` the check runs once, while tracing.

    Args:
        owner: the prefix of the message.
        sides: names of the two trees in the message.
        otherwise: an alternative to suggest if only the containers differ.

    Raises:
        ValueError: the trees differ; the message lists every leaf name with both shapes.
        TypeError: a leaf is not an array, number, bool, PRNG key or None.
    """
    left, right = named_leaves(a), named_leaves(b)
    if [name for name, _ in left] != [name for name, _ in right]:
        _raise_names_differ(left, right, owner, sides)
    structures = flatten(a)[1], flatten(b)[1]
    # Trees without leaves (such as two Python policies) always match.
    if left and structures[0] != structures[1]:
        raise ValueError(
            f"{owner}: leaf names match, but containers or static fields differ: {sides[0]} is "
            f"{_truncate(structures[0])}, {sides[1]} is {_truncate(structures[1])}; they must match{otherwise}. "
            "Nothing was changed."
        )
    _check_leaves([(name, x, y) for (name, x), (_, y) in zip(left, right, strict=True)], owner, sides)


def pair_by_name(online: PyTree, target: PyTree, owner: str) -> list[Any]:
    """The leaves of `online` in the order of `target`, paired by name; containers and order may differ.

    Raises:
        ValueError: only one tree has a name, two leaves of a tree have the same name, or leaves differ.
        TypeError: a leaf is not an array, number, bool, PRNG key or None.
    """
    left, right, sides = named_leaves(online), named_leaves(target), ("online", "target")
    for leaves, side in ((left, sides[0]), (right, sides[1])):
        names = [name for name, _ in leaves]
        duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if duplicates:
            raise ValueError(f"{owner}: {side} has more than one leaf named {_quote_all(duplicates)}. Nothing was changed.")
    by_name = dict(left)
    if by_name.keys() != dict(right).keys():
        _raise_names_differ(left, right, owner, sides)
    _check_leaves([(name, by_name[name], y) for name, y in right], owner, sides)
    return [by_name[name] for name, _ in right]


def describe_leaf(leaf: Any) -> str:
    """A leaf's dtype and shape, such as `float32[3,4]`.

    Raises:
        TypeError: the leaf is not an array, number, bool, PRNG key or None.
    """
    if leaf is None:
        return "None"
    shape, dtype = _spec(leaf)
    return f"{dtype}[{','.join(map(str, shape))}]"


def _spec(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = jax.typeof(leaf)
    return leaf.shape, leaf.dtype


def _raise_names_differ(left: list[tuple[str, Any]], right: list[tuple[str, Any]], owner: str, sides: tuple[str, str]) -> None:
    names = [name for name, _ in left], [name for name, _ in right]
    only = [sorted(set(names[0]) - set(names[1])), sorted(set(names[1]) - set(names[0]))]
    parts = [f"only in {side}: {_quote_all(extra)}" for side, extra in zip(sides, only, strict=True) if extra]
    if not parts:
        parts = [f"the same names in another order: {side} has {_quote_all(n)}" for side, n in zip(sides, names, strict=True)]
    raise ValueError(
        f"{owner}: the trees differ; {'; '.join(parts)}. {sides[0]} and {sides[1]} must match. Nothing was changed."
    )


def _check_leaves(leaves: list[tuple[str, Any, Any]], owner: str, sides: tuple[str, str]) -> None:
    problems = []
    for name, x, y in leaves:
        try:
            is_match = _is_match(x, y)
        except TypeError:
            raise TypeError(
                f"{owner}: {quoted(name)}: {sides[0]} is a {type(x).__name__}, {sides[1]} a {type(y).__name__}; "
                "leaves must be arrays, numbers, bools, PRNG keys or None. Nothing was changed."
            ) from None
        if not is_match:
            problems.append(f"{quoted(name)}: {sides[0]} is {describe_leaf(x)}, {sides[1]} is {describe_leaf(y)}")
    if problems:
        raise ValueError(f"{owner}: {'; '.join(problems)}; they must match. Nothing was changed.")


def _is_match(x: Any, y: Any) -> bool:
    if x is None or y is None:
        return x is y
    (x_shape, x_dtype), (y_shape, y_dtype) = _spec(x), _spec(y)
    return x_shape == y_shape and (
        x_dtype == y_dtype
        or any(jnp.issubdtype(x_dtype, kind) and jnp.issubdtype(y_dtype, kind) for kind in (jnp.floating, jnp.complexfloating))
    )


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _quote_all(names: list[str]) -> str:
    return ", ".join(f"'{name}'" if name else "one leaf without a name" for name in names) or "nothing"


def _truncate(structure: Any) -> str:
    text = str(structure)
    return text if len(text) <= 300 else f"{text[:300]}..."
