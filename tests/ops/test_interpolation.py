"""Interpolation of leaves: exact at both ends and within the interval, in every dtype, compared with Optax."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.ops.optax_updates import apply_updates, incremental_update
from polyak.ops.updates import soft_update
from tests.ops.bits import INF, NAN, same_bits, tree

SHAPES = [(), (3,), (1, 3)]
DTYPES = ["float32", "bfloat16", "int32", "bool"]
NUMBERS = [0.0, -0.0, 1.0, -2.5, 1e-3, 65504.0, 3e38, -3e38, 1e-38]


@st.composite
def leaves(draw):
    shape, dtype = draw(st.sampled_from(SHAPES)), jnp.dtype(draw(st.sampled_from(DTYPES)))
    values = np.array(draw(st.lists(st.sampled_from(NUMBERS), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))))
    with np.errstate(over="ignore"):
        if dtype.kind in "ib":
            return np.clip(values, -9, 9).astype(dtype).reshape(shape)
        cast = values.astype(dtype)
    largest = jnp.finfo(dtype).max
    return np.where(np.isfinite(cast.astype(np.float64)), cast, largest).astype(dtype).reshape(shape)


trees = st.dictionaries(st.sampled_from("ab"), st.one_of(leaves(), st.none()), min_size=1, max_size=2)


@st.composite
def pairs(draw):
    """An online tree and a target: two of a kind more often than not."""
    target = draw(trees)
    if draw(st.sampled_from(["alike", "alike", "any"])) == "any":
        return draw(trees), target

    def fitting(leaf):
        numbers = draw(st.lists(st.sampled_from(NUMBERS[:-1]), min_size=leaf.size, max_size=leaf.size))
        if leaf.dtype.kind in "ib":
            return np.clip(np.array(numbers), -9, 9).astype(leaf.dtype).reshape(leaf.shape)
        return np.array(numbers).astype(draw(st.sampled_from([leaf.dtype, np.float32]))).reshape(leaf.shape)

    return jax.tree.map(fitting, target), target


@settings(max_examples=400, deadline=None)
@given(pair=pairs(), tau=st.sampled_from([0.0, 1e-30, 0.005, 0.5, 0.9, 1.0 - 2**-24, 1.0, -0.1, 1.5, NAN]))
def test_any_two_trees_and_any_tau_give_an_error_or_the_targets_spec_finite_within_the_interval_and_where_optax_is(pair, tau):
    online, target = pair
    try:
        result = soft_update(online, target, tau)
    except (ValueError, TypeError) as error:
        assert str(error).startswith("soft_update: ") and ("'" in str(error) or "tau" in str(error))
        return
    assert 0 <= tau <= 1
    assert jax.tree.structure(result) == jax.tree.structure(target) and result.keys() == online.keys()
    for name, t in target.items():
        if t is None:
            assert online[name] is None and result[name] is None
            continue
        r, o = np.asarray(result[name]), online[name]
        assert r.shape == t.shape == o.shape and r.dtype == t.dtype
        if t.dtype.kind in "ib":
            assert np.array_equal(r, o if tau == 1 else t)
        else:
            is_between(r, o, t)
            if t.dtype == o.dtype == np.float32:
                theirs = optax.incremental_update(o, t, tau)
                # XLA takes numbers below 1.2e-38 for 0.
                np.testing.assert_array_less(np.abs(r - theirs), 4e-7 * np.maximum(np.abs(o), np.abs(t)) + 1.2e-38)


def is_between(result, online, target):
    """Finite, and not outside of the interval; an online number that the target's dtype cannot hold counts as its largest."""
    largest = float(jnp.finfo(target.dtype).max)
    o, t, r = (np.asarray(x, np.float64) for x in (online, target, result))
    with np.errstate(over="ignore"):
        o = np.asarray(np.clip(o, -largest, largest).astype(target.dtype), np.float64)
    small = 1.2e-38
    assert np.all(np.isfinite(r)) and np.all(r >= np.minimum(o, t) - small) and np.all(r <= np.maximum(o, t) + small)


FUNCTIONS = {
    "apply_updates": (apply_updates, optax.apply_updates),
    "incremental_update": (incremental_update, optax.incremental_update),
}


@partial(jax.jit, static_argnums=0)
def gradients(function, *args):
    def summed(*values):
        return function(*[{"w": v} if v.ndim else v for v in values])["w"].sum()

    return jax.grad(summed, argnums=tuple(range(len(args))))(*args)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_gradients_flow_as_in_optax(name, tau):
    args = [jnp.array([1.0, 2.0]), jnp.array([-3.0, 5.0])] + ([jnp.array(tau)] if name == "incremental_update" else [])
    got, wanted = (gradients(f, *args) for f in FUNCTIONS[name])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, wanted)


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_no_gradient_flows_through_a_soft_update(tau):
    zeros = gradients(soft_update, jnp.ones(2), jnp.full(2, 2.0), jnp.array(tau))
    assert all(not np.any(g) for g in zeros)


@pytest.mark.parametrize("compile", [False, True])
def test_tau_1_replaces_nan_in_the_target_and_tau_0_copies_none(compile):
    update = jax.jit(soft_update) if compile else soft_update
    bad, good = tree(NAN, INF, -0.0, 1.5), tree(1.0, -0.0, NAN, -INF)
    assert same_bits(update(good, bad, 1.0), good)
    assert same_bits(update(good, bad, 0.0), bad)
    assert same_bits(incremental_update(good, bad, 1.0), good) and same_bits(incremental_update(good, bad, 0), bad)


def test_non_finite_values_reach_the_guard():
    result = soft_update(tree(NAN, INF, -INF), tree(1.0, 1.0, 1.0), 0.5)["w"]
    assert not np.any(np.isfinite(result))


@pytest.mark.parametrize("compile", [False, True])
def test_online_equal_to_target_is_a_fixed_point_to_the_bit(compile):
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 10.0 ** np.random.default_rng(1).integers(
        -30, 30, 10_000
    )
    same = tree(*[0.0, -0.0, 3.4e38, -3.4e38], *values)
    update = jax.jit(soft_update) if compile else soft_update
    for tau in (0.005, 0.5, 0.51, 0.9999999, 1.0 - 2**-24):
        assert same_bits(update(same, same, tau), same)
        assert same_bits(update(tree(*np.asarray(same["w"])), same, jnp.float32(tau)), same)


def test_the_result_never_leaves_the_interval_not_even_by_rounding():
    generator = np.random.default_rng(2)
    online, target = (
        generator.standard_normal(100_000).astype(np.float32) * 10.0 ** generator.integers(-5, 9, 100_000) for _ in range(2)
    )
    online, target = online.astype(np.float32), target.astype(np.float32)
    for tau in (0.005, 0.5, 0.500001, 0.999, 1 - 2**-23, 1 - 2**-24):
        new_params = np.asarray(jax.jit(soft_update)({"w": online}, {"w": target}, tau)["w"])
        assert np.all(new_params >= np.minimum(online, target)) and np.all(new_params <= np.maximum(online, target))


@pytest.mark.parametrize("size", [7, 70_001])
@pytest.mark.parametrize("tau", [0.0, 0.005, 0.5, 0.75, 1.0])
def test_traced_tau_gives_the_same_result_as_a_float(tau, size):
    values = np.random.default_rng(3).standard_normal((2, size)).astype(np.float32)
    online, target = ({"w": jnp.asarray(row)} for row in values)
    wanted = soft_update(online, target, tau)["w"]
    traced = jax.jit(soft_update)(online, target, tau)["w"]
    np.testing.assert_allclose(traced, wanted, rtol=2e-6, atol=1e-7)
    assert np.all(traced >= values.min(0)) and np.all(traced <= values.max(0))


def test_numbers_further_apart_than_the_largest_one_move_towards_each_other():
    for tau, wanted in ((0.25, -1.5e38), (0.75, 1.5e38)):
        new_params = soft_update(tree(3e38, -3e38), tree(-3e38, 3e38), tau)["w"]
        np.testing.assert_allclose(new_params, [wanted, -wanted], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tau", [0.005, 1e-3])
def test_float32_target_of_a_narrow_network_converges(dtype, tau):
    online = {"w": jnp.array([2.0, 0.1], dtype)}
    target = jax.jit(lambda t: jax.lax.fori_loop(0, 100_000, lambda _, t: soft_update(online, t, tau), t))(tree(1.0, 1.0))
    assert target["w"].dtype == jnp.float32
    np.testing.assert_allclose(target["w"], online["w"].astype(jnp.float32), rtol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_target_converges_only_with_stochastic_rounding(dtype):
    def after(rounds):
        def body(n, t):
            return soft_update(tree(2.0), t, 0.005, key=jax.random.key(n) if rounds else None)

        return jax.jit(lambda: jax.lax.fori_loop(0, 3000, body, {"w": jnp.ones(1, dtype)}))()["w"]

    stuck, arrived = after(rounds=False), after(rounds=True)
    assert arrived.dtype == jnp.dtype(dtype) and float(arrived[0]) > 1.99
    assert float(stuck[0]) < 1.95


def test_stochastic_rounding_is_right_on_average_and_exact_where_nothing_has_to_be_rounded():
    target = {"w": jnp.ones(20_000, jnp.bfloat16)}
    rounded = jax.jit(soft_update, static_argnames="tau")
    new_params = rounded({"w": jnp.full(20_000, 2.0)}, target, 0.005, key=jax.random.key(0))["w"]
    assert set(np.unique(np.asarray(new_params, np.float32))) == {1.0, 1.0078125}
    np.testing.assert_allclose(np.mean(new_params, dtype=np.float32), 1.005, atol=1e-4)
    assert same_bits(rounded(target, target, 0.3, key=jax.random.key(0)), target)
    for tau in (0.0, 1.0):
        wanted = {"w": jnp.full(20_000, 1.0 + tau, jnp.bfloat16)}
        assert same_bits(jax.jit(soft_update)({"w": jnp.full(20_000, 2.0)}, target, tau, key=jax.random.key(0)), wanted)


@pytest.mark.parametrize("online", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_target_dtype_is_preserved_and_a_traced_tau_fits_a_scan(online, target):
    online, target = {"w": jnp.full(2, 2.0, online)}, {"w": jnp.ones(2, target)}

    def body(t, tau):
        return soft_update(online, t, tau), None

    new_params, _ = jax.lax.scan(body, target, jnp.full(3, 0.5, jnp.float32))
    assert new_params["w"].dtype == target["w"].dtype and new_params["w"].tolist() == [1.875, 1.875]
    for tau in (0.5, np.float32(0.5), np.float64(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)):
        assert same_bits(soft_update(online, target, tau), {"w": jnp.full(2, 1.5, target["w"].dtype)})


def special(sign):
    return {
        "count": jnp.array(3 * sign, jnp.int32),
        "flag": jnp.array(sign > 0),
        "typed": jax.random.key(7 * (sign + 2)),
        "raw": jax.random.PRNGKey(7 * (sign + 2)),
        "w": jnp.array(float(sign)),
    }


@pytest.mark.parametrize("compile", [False, True])
def test_integers_bools_and_keys_are_copied_if_tau_is_1_else_unchanged(compile):
    update = jax.jit(soft_update) if compile else soft_update
    online, target = special(1), special(-1)

    def raw(tree):
        return {**tree, "typed": jax.random.key_data(tree["typed"])}

    hard, soft = update(online, target, 1.0), update(online, target, 0.5)
    assert same_bits(raw(hard), raw(online))
    assert same_bits(raw(soft), raw(target) | {"w": jnp.array(0.0)})
    assert jnp.issubdtype(soft["typed"].dtype, jax.dtypes.prng_key)


def test_python_numbers_and_numpy_arrays_are_leaves_too():
    new_params = soft_update({"a": 1.0, "b": np.ones(2)}, {"a": 0.0, "b": np.zeros(2)}, 0.5)
    assert float(new_params["a"]) == 0.5 and new_params["b"].tolist() == [0.5, 0.5] and new_params["b"].dtype == jnp.float32


def test_soft_update_interpolates_complex_leaves():
    new_params = soft_update({"w": jnp.array([1.0 + 2.0j])}, {"w": jnp.array([0.0j])}, 0.5)["w"]
    assert new_params.tolist() == [0.5 + 1.0j]
