"""Two trees that do not fit are an error that names the leaf, both sides and both shapes, before anything is computed."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from polyak.core.tree_check import check_same_tree
from polyak.core.types import Variables
from polyak.ops.optax_updates import apply_updates, incremental_update, periodic_update
from polyak.ops.updates import soft_update
from tests.ops.bits import bits, tree

UPDATES = {
    "soft_update": lambda online, target: soft_update(online, target, 0.5),
    "incremental_update": lambda new, old: incremental_update(new, old, 0.5),
    "periodic_update": lambda new, old: periodic_update(new, old, 4, 2),
    "apply_updates": lambda updates, params: apply_updates(params, updates),
}


@pytest.mark.parametrize(
    ("online", "target"),
    [((3,), (3, 1)), ((1, 4), (3, 4)), ((), (3, 4)), ((3, 4), (4,)), ((3,), ()), ((1,), (3,)), ((2, 3), (3,))],
)
@pytest.mark.parametrize("name", UPDATES)
def test_shapes_that_would_broadcast_raise_with_leaf_sides_and_shapes(name, online, target):
    a, b = ({"params": {"kernel": jnp.ones(shape)}} for shape in (online, target))
    with pytest.raises(ValueError, match="must match") as caught:
        UPDATES[name](a, b)
    message = str(caught.value)
    assert message.startswith(f"{name}: leaf 'params/kernel': ") and message.endswith("Nothing was changed.")
    for shape in (online, target):
        assert f"is float32[{','.join(map(str, shape))}]" in message


def test_message_for_two_shapes():
    with pytest.raises(ValueError) as caught:
        soft_update(
            {"params": {"Dense_0": {"kernel": jnp.ones((1, 4))}}}, {"params": {"Dense_0": {"kernel": jnp.ones((3, 4))}}}, 0.5
        )
    assert str(caught.value) == (
        "soft_update: leaf 'params/Dense_0/kernel': online is float32[1,4], target is float32[3,4]; they must match. "
        "Nothing was changed."
    )


@pytest.mark.parametrize(
    ("online", "target", "only"),
    [
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}, "only in {1}: 'b'"),
        ({"a": 1.0, "c": 1.0}, {"a": 1.0}, "only in {0}: 'c'"),
        ({"weight": 1.0}, {"weights": 1.0}, "only in {0}: 'weight'; only in {1}: 'weights'"),
        ({"a": {"b": 1.0}}, {"a": 1.0}, "only in {0}: 'a/b'; only in {1}: 'a'"),
        ([1.0], {"0": 1.0}, "containers or static fields differ"),
        (Variables({"w": 1.0}, (), "one"), Variables({"w": 1.0}, (), "other"), "containers or static fields differ"),
    ],
)
@pytest.mark.parametrize("name", UPDATES)
def test_different_trees_raise_and_list_names_on_one_side_only(name, online, target, only):
    sides = {"soft_update": ("online", "target"), "apply_updates": ("updates", "params")}.get(name, ("new", "old"))
    with pytest.raises(ValueError, match=f"^{name}: ") as caught:
        UPDATES[name](online, target)
    if name == "apply_updates":
        assert all(part.split(": ")[-1] in str(caught.value) for part in only.format(*sides).split("; "))
    else:
        assert only.format(*sides) in str(caught.value)


@pytest.mark.parametrize("name", UPDATES)
def test_none_on_both_sides_is_preserved_and_on_one_side_raises(name):
    both = UPDATES[name]({"a": None, "w": 1.0}, {"a": None, "w": 2.0})
    assert both["a"] is None
    for online, target in (({"a": None}, {"a": 1.0}), ({"a": 1.0}, {"a": None})):
        with pytest.raises(ValueError, match=r"leaf 'a': .* is None"):
            UPDATES[name](online, target)


@pytest.mark.parametrize("name", UPDATES)
def test_leaves_that_are_no_arrays_are_an_error_naming_them(name):
    with pytest.raises(TypeError, match=r"leaf 'w': .* is a str"):
        UPDATES[name]({"w": "0.5"}, {"w": "0.5"})


@pytest.mark.parametrize(
    "dtypes", [("int32", "float32"), ("float32", "int32"), ("int32", "uint32"), ("bool", "int32"), ("complex64", "float32")]
)
@pytest.mark.parametrize("name", UPDATES)
def test_other_kinds_of_leaves_are_an_error_with_both_dtypes(name, dtypes):
    with pytest.raises(ValueError, match="must match") as caught:
        UPDATES[name](*[{"w": jnp.ones(2, dtype)} for dtype in dtypes])
    assert all(f"is {dtype}[2]" in str(caught.value) for dtype in dtypes)


def test_all_differences_are_reported_before_anything_is_computed():
    online, target = (
        {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)},
        {"a": jnp.zeros(2), "b": jnp.zeros(1), "c": jnp.zeros(3)},
    )
    before = jax.tree.map(bits, target)
    with pytest.raises(ValueError) as caught:
        soft_update(online, target, 0.5)
    assert "'b'" in str(caught.value) and "'c'" in str(caught.value) and "'a'" not in str(caught.value)
    assert jax.tree.map(bits, target) == before


def test_match_by_name_pairs_leaves_whatever_the_containers_and_their_order():
    online = {"params": [jnp.array(1.0), jnp.array(2.0)], "stats": {"mean": jnp.array(3.0)}}
    target = Variables({"1": jnp.array(0.0), "0": jnp.array(0.0)}, {"mean": jnp.array(0.0)})
    moved = soft_update(online, target, 0.5, stats_tau=1.0, match="name")
    assert isinstance(moved, Variables)
    assert (float(moved.params["0"]), float(moved.params["1"]), float(moved.stats["mean"])) == (0.5, 1.0, 3.0)


def test_match_by_name_lists_every_unmatched_name_on_either_side():
    with pytest.raises(ValueError, match="only in online: 'a', 'b'; only in target: 'c', 'd'"):
        soft_update({"a": 1.0, "b": 1.0, "x": 1.0}, {"x": 1.0, "d": 1.0, "c": 1.0}, 0.5, match="name")
    with pytest.raises(ValueError, match="online has more than one leaf named 'a/b'"):
        soft_update({"a": {"b": 1.0}, "a/b": 1.0}, {"a/b": 1.0}, 0.5, match="name")
    with pytest.raises(ValueError, match=r"leaf 'x': online is float32\[2\], target is float32\[\]"):
        soft_update({"x": jnp.ones(2)}, {"x": jnp.array(1.0)}, 0.5, match="name")
    with pytest.raises(ValueError, match="match must be one of"):
        inspect.unwrap(soft_update)({}, {}, 0.5, match="names")


def test_one_check_compares_specs_as_well_as_arrays():
    spec = {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
    check_same_tree(tree(1.0, 2.0), spec, "load")
    with pytest.raises(ValueError, match=r"load: leaf 'w': file is float32\[1\], agent is bfloat16\[2\]"):
        check_same_tree(tree(1.0), spec, "load", sides=("file", "agent"))


def test_a_tree_of_one_leaf_is_named_in_words():
    with pytest.raises(ValueError, match=r"^f: the only leaf: online is float32\[3\], target is float32\[4\]; they must match"):
        check_same_tree(jnp.zeros(3), jnp.zeros(4), "f")
    with pytest.raises(ValueError, match="only in online: one leaf without a name; only in target: 'a'"):
        check_same_tree(jnp.zeros(3), {"a": jnp.zeros(3)}, "f")
