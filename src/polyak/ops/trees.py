"""Trees of arrays: leaves by name, the check that two trees fit together, finite leaves, and sums over devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from polyak.core.types import PyTree


def leaf_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf as errors and `match="name"` write it.

    >>> leaf_name(jax.tree_util.tree_leaves_with_path({"params": [1.0]})[0][0])
    'params/0'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def quoted(name: str) -> str:
    """A leaf by its name, in errors; a tree that is one leaf has no name."""
    return f"leaf '{name}'" if name else "the only leaf"


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Every leaf with its name, in the tree's order; None is a leaf too."""
    return [(leaf_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_none)]


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """The leaves, None among them, and the structure around them."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
    return leaves, structure


def check_same_tree(
    a: PyTree, b: PyTree, what: str, *, sides: tuple[str, str] = ("online", "target"), otherwise: str = ""
) -> None:
    """Two trees have the same containers and names, shapes, and kinds of leaves; floats may differ in width.

    It looks at shapes and dtypes only, so under `jit` it runs once, while tracing.

    Args:
        what: who asks, for the message.
        sides: how the message calls the two.
        otherwise: what the caller offers for trees whose leaves alone agree.

    Raises:
        ValueError: with every difference: the leaf's name, both sides, both shapes.
        TypeError: a leaf is no array, number, bool, PRNG key or None.
    """
    left, right = named_leaves(a), named_leaves(b)
    if [name for name, _ in left] != [name for name, _ in right]:
        _refuse_names(left, right, what, sides)
    structures = flatten(a)[1], flatten(b)[1]
    # Of trees without leaves (two Python policies, say) nothing can fail to fit.
    if left and structures[0] != structures[1]:
        raise ValueError(
            f"{what}: the names of all leaves agree, but containers or static fields differ: {sides[0]} is "
            f"{_short(structures[0])}, {sides[1]} is {_short(structures[1])}; they must match{otherwise}. Nothing was changed."
        )
    _refuse_leaves([(name, x, y) for (name, x), (_, y) in zip(left, right, strict=True)], what, sides)


def pair_by_name(a: PyTree, b: PyTree, what: str, *, sides: tuple[str, str] = ("online", "target")) -> list[Any]:
    """The leaves of `a` in the order of `b`, paired by name whatever the containers and their order.

    Raises:
        ValueError: names on one side only, all of them; a name that two leaves of a tree share; leaves that do not fit.
        TypeError: a leaf is no array, number, bool, PRNG key or None.
    """
    left, right = named_leaves(a), named_leaves(b)
    for leaves, side in ((left, sides[0]), (right, sides[1])):
        names = [name for name, _ in leaves]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"{what}: {side} has more than one leaf of the name {_listed(twice)}. Nothing was changed.")
    by_name = dict(left)
    if by_name.keys() != dict(right).keys():
        _refuse_names(left, right, what, sides)
    _refuse_leaves([(name, by_name[name], y) for name, y in right], what, sides)
    return [by_name[name] for name, _ in right]


def describe(leaf: Any) -> str:
    """A leaf's dtype and shape, such as `float32[3,4]`.

    Raises:
        TypeError: it is no array, number, bool, PRNG key or None.
    """
    if leaf is None:
        return "None"
    shape, dtype = _spec(leaf)
    return f"{dtype}[{','.join(map(str, shape))}]"


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """No float in the tree is NaN or infinite."""
    return finite_rows(tree, 0)


def finite_rows(tree: PyTree, ndim: int) -> Bool[Array, "..."]:
    """Which rows, by the first `ndim` axes of all leaves, hold no NaN or infinity; one True for all if no leaf is a float."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    finite = [jnp.isfinite(leaf).all(axis=tuple(range(ndim, leaf.ndim))) for leaf in floats]
    return functools.reduce(jnp.logical_and, finite, jnp.array(True))


def in_float32(tree: PyTree) -> PyTree:
    """The tree, with floats narrower than float32 cast to float32."""

    def widen(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32
        return leaf.astype(jnp.float32) if is_narrow else leaf

    return jax.tree.map(widen, tree)


def sum_over_devices(x: Shaped[Array, "*S"], axis_name: str | None) -> Shaped[Array, "*S"]:
    """Σ over the mesh axis (inside `jax.shard_map`), or `x` itself where `axis_name` is None."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def any_over_devices(x: Bool[Array, "*S"], axis_name: str | None) -> Bool[Array, "*S"]:
    """True where it is True on some device."""
    return sum_over_devices(x.astype(jnp.int32), axis_name) > 0


def _spec(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = jax.typeof(leaf)
    return leaf.shape, leaf.dtype


def _refuse_names(left: list[tuple[str, Any]], right: list[tuple[str, Any]], what: str, sides: tuple[str, str]) -> None:
    names = [name for name, _ in left], [name for name, _ in right]
    only = [sorted(set(names[0]) - set(names[1])), sorted(set(names[1]) - set(names[0]))]
    parts = [f"only in {side}: {_listed(extra)}" for side, extra in zip(sides, only, strict=True) if extra]
    if not parts:
        parts = [f"the same names in another order: {side} has {_listed(n)}" for side, n in zip(sides, names, strict=True)]
    raise ValueError(
        f"{what}: the trees differ; {'; '.join(parts)}. {sides[0]} and {sides[1]} must match. Nothing was changed."
    )


def _refuse_leaves(leaves: list[tuple[str, Any, Any]], what: str, sides: tuple[str, str]) -> None:
    wrong = []
    for name, x, y in leaves:
        try:
            fits = _fit(x, y)
        except TypeError:
            raise TypeError(
                f"{what}: {quoted(name)}: {sides[0]} is a {type(x).__name__}, {sides[1]} a {type(y).__name__}; "
                "leaves must be arrays, numbers, bools, PRNG keys or None. Nothing was changed."
            ) from None
        if not fits:
            wrong.append(f"{quoted(name)}: {sides[0]} is {describe(x)}, {sides[1]} is {describe(y)}")
    if wrong:
        raise ValueError(f"{what}: {'; '.join(wrong)}; they must match. Nothing was changed.")


def _fit(x: Any, y: Any) -> bool:
    if x is None or y is None:
        return x is y
    (x_shape, x_dtype), (y_shape, y_dtype) = _spec(x), _spec(y)
    return x_shape == y_shape and (
        x_dtype == y_dtype
        or any(jnp.issubdtype(x_dtype, kind) and jnp.issubdtype(y_dtype, kind) for kind in (jnp.floating, jnp.complexfloating))
    )


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" if name else "one leaf without a name" for name in names) or "nothing"


def _short(structure: Any) -> str:
    text = str(structure)
    return text if len(text) <= 300 else f"{text[:300]}..."
