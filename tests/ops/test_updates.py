"""How one tree follows another: numbers, special values and leaves, errors, transformations; Optax is the oracle."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.core.types import Variables
from polyak.ops.trees import check_same_tree
from polyak.ops.updates import apply_updates, incremental_update, periodic_update, soft_update, valid_share

NAN, INF = float("nan"), float("inf")
UPDATES = {
    "soft_update": lambda online, target: soft_update(online, target, 0.5),
    "incremental_update": lambda new, old: incremental_update(new, old, 0.5),
    "periodic_update": lambda new, old: periodic_update(new, old, 4, 2),
    "apply_updates": lambda updates, params: apply_updates(params, updates),
}


def tree(*values, dtype=jnp.float32):
    return {"w": jnp.array(values, dtype)}


def bits(x):
    return np.asarray(x).tobytes()


def same_bits(a, b):
    return jax.tree.map(lambda x, y: bits(x) == bits(y) and x.dtype == y.dtype, a, b) == jax.tree.map(lambda x: True, b)


def test_soft_update_gives_the_published_numbers():
    target = tree(0.0, 10.0)
    for wanted in ([0.25, 5.0], [0.4375, 1.25], [0.578125, -1.5625]):
        target = soft_update(tree(1.0, -10.0), target, 0.25)
        assert target["w"].tolist() == wanted


def test_soft_update_converges_at_its_rate():
    def after(n):
        return jax.jit(lambda: jax.lax.fori_loop(0, n, lambda _, t: soft_update(tree(1.0), t, 0.005), tree(0.0)))()["w"]

    np.testing.assert_allclose(after(100), [0.3942296], rtol=1e-5)
    np.testing.assert_allclose(after(1000), [0.9933460], rtol=1e-5)


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


@settings(max_examples=400, deadline=None)
@given(
    online=trees,
    target=trees,
    tau=st.sampled_from([0.0, 1e-30, 0.005, 0.5, 1.0 - 2**-24, 1.0, -0.1, 1.5, NAN]),
    alike=st.booleans(),
)
def test_U18_any_two_trees_and_any_tau_give_an_error_or_the_targets_spec_finite_and_within_the_interval(
    online, target, tau, alike
):
    if alike:
        online = jax.tree.map(lambda t: np.roll(np.full_like(t, t.ravel()[0]), 1), target)
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
        r, o = np.asarray(result[name]), online[name].astype(t.dtype)
        assert r.shape == t.shape == online[name].shape and r.dtype == t.dtype
        if t.dtype.kind in "ib":
            assert np.array_equal(r, online[name] if tau == 1 else t)
            continue
        o = np.where(np.isfinite(o.astype(np.float64)), o, np.copysign(jnp.finfo(t.dtype).max, o)).astype(np.float64)
        t = t.astype(np.float64)
        r = r.astype(np.float64)
        # XLA takes numbers below 1.2e-38 for 0.
        small = 1.2e-38
        assert np.all(np.isfinite(r)) and np.all(r >= np.minimum(o, t) - small) and np.all(r <= np.maximum(o, t) + small)


@settings(max_examples=60, deadline=None)
@given(
    new=st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3),
    old=st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3),
    tau=st.sampled_from([0.0, 0.005, 0.3, 1.0]),
    step=st.integers(0, 7),
    period=st.integers(1, 4),
)
def test_where_optax_is_right_the_results_are_optaxs(new, old, tau, step, period):
    new, old = tree(*new), tree(*old)
    scale = 1e-6 * max(1.0, *(float(jnp.abs(x["w"]).max()) for x in (new, old)))
    for ours, theirs in (
        (incremental_update(new, old, tau), optax.incremental_update(new, old, tau)),
        (soft_update(new, old, tau), optax.incremental_update(new, old, tau)),
        (periodic_update(new, old, step, period), optax.periodic_update(new, old, step, period)),
        (apply_updates(old, new), optax.apply_updates(old, new)),
    ):
        np.testing.assert_allclose(ours["w"], theirs["w"], rtol=1e-6, atol=scale)


@pytest.mark.parametrize("name", ["apply_updates", "incremental_update"])
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_gradients_flow_as_in_optax(name, tau):
    def through(module_function, args):
        return lambda *values: module_function(*[tree(*v) if v.ndim else v for v in values])["w"].sum()

    ours, theirs = {
        "apply_updates": (apply_updates, optax.apply_updates),
        "incremental_update": (incremental_update, optax.incremental_update),
    }[name]
    args = [jnp.array([1.0, 2.0]), jnp.array([-3.0, 5.0])] + ([jnp.array(tau)] if name == "incremental_update" else [])
    got, wanted = (jax.grad(through(f, args), argnums=tuple(range(len(args))))(*args) for f in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, wanted)


def test_gradients_flow_through_a_periodic_update_to_the_side_that_was_taken():
    def summed(new, old, steps):
        return periodic_update(tree(new), tree(old), steps, 2)["w"].sum()

    assert jax.grad(summed, argnums=(0, 1))(1.0, 2.0, 4) == (1.0, 0.0)
    assert jax.jit(jax.grad(summed, argnums=(0, 1)))(1.0, 2.0, 5) == (0.0, 1.0)


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_no_gradient_flows_through_a_soft_update(tau):
    def summed(online, target, tau):
        return soft_update({"w": online}, {"w": target}, tau)["w"].sum()

    zeros = jax.grad(summed, argnums=(0, 1, 2))(jnp.ones(2), 2 * jnp.ones(2), jnp.array(tau))
    assert all(not np.any(g) for g in zeros)


@pytest.mark.parametrize(
    ("online", "target"),
    [((3,), (3, 1)), ((1, 4), (3, 4)), ((), (3, 4)), ((3, 4), (4,)), ((3,), ()), ((1,), (3,)), ((2, 3), (3,))],
)
@pytest.mark.parametrize("name", UPDATES)
def test_U1_U2_U16_shapes_that_would_broadcast_are_an_error_with_leaf_sides_and_shapes(name, online, target):
    a, b = ({"params": {"kernel": jnp.ones(shape)}} for shape in (online, target))
    with pytest.raises(ValueError, match="must match") as caught:
        UPDATES[name](a, b)
    message = str(caught.value)
    assert message.startswith(f"{name}: leaf 'params/kernel': ") and message.endswith("Nothing was changed.")
    for shape in (online, target):
        assert f"is float32[{','.join(map(str, shape))}]" in message


def test_the_message_for_two_shapes_is_this_one():
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
def test_U3_other_trees_are_an_error_that_lists_what_stands_on_one_side_only(name, online, target, only):
    sides = {"soft_update": ("online", "target"), "apply_updates": ("updates", "params")}.get(name, ("new", "old"))
    with pytest.raises(ValueError, match=f"^{name}: ") as caught:
        UPDATES[name](online, target)
    if name == "apply_updates":
        assert all(part.split(": ")[-1] in str(caught.value) for part in only.format(*sides).split("; "))
    else:
        assert only.format(*sides) in str(caught.value)


@pytest.mark.parametrize("name", UPDATES)
def test_U10_None_on_both_sides_stays_and_on_one_side_is_an_error_naming_it(name):
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


def test_U11_all_differences_are_found_before_anything_is_computed():
    online, target = (
        {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)},
        {"a": jnp.zeros(2), "b": jnp.zeros(1), "c": jnp.zeros(3)},
    )
    before = jax.tree.map(bits, target)
    with pytest.raises(ValueError) as caught:
        soft_update(online, target, 0.5)
    assert "'b'" in str(caught.value) and "'c'" in str(caught.value) and "'a'" not in str(caught.value)
    assert jax.tree.map(bits, target) == before


@pytest.mark.parametrize(
    "tau", [2, -1, 1.0000001, -1e-9, NAN, INF, -INF, "0.5", None, True, [0.1, 0.2], np.full(4, 0.5), np.full(1, 0.5), 0.5j]
)
@pytest.mark.parametrize("argument", ["tau", "stats_tau", "step_size"])
def test_U4_a_tau_that_is_no_share_is_an_error_that_shows_it(argument, tau):
    if argument == "stats_tau" and tau is None:
        pytest.skip("None: as tau")
    with pytest.raises(
        (ValueError, TypeError), match=rf"^(soft|incremental)_update: {argument} must be a (scalar|number) in \[0, 1\]"
    ):
        if argument == "step_size":
            incremental_update(tree(1.0), tree(2.0), tau)
        else:
            soft_update(tree(1.0), tree(2.0), **({"tau": 0.5} | {argument: tau}))


def test_U4_a_traced_vector_is_refused_while_tracing():
    with pytest.raises(ValueError, match=r"tau must be a scalar in \[0, 1\], got float32\[1\]"):
        jax.jit(soft_update)(tree(1.0), tree(2.0), jnp.ones(1))


@pytest.mark.parametrize("tau", [2.0, -1.0, NAN, INF])
def test_U5_a_traced_tau_outside_of_the_interval_changes_no_bit_and_is_flagged(tau):
    target = tree(NAN, 2.0, -0.0)
    result, valid = jax.jit(lambda tau: (soft_update(tree(1.0, 1.0, 1.0), target, tau), valid_share(tau)))(tau)
    assert same_bits(result, target) and not valid
    assert jax.jit(valid_share)(0.5)


@pytest.mark.parametrize("compile", [False, True])
def test_U7_tau_1_clears_NaN_from_the_target_and_tau_0_lets_none_in(compile):
    update = jax.jit(soft_update) if compile else soft_update
    bad, good = tree(NAN, INF, -0.0, 1.5), tree(1.0, -0.0, NAN, -INF)
    assert same_bits(update(good, bad, 1.0), good)
    assert same_bits(update(good, bad, 0.0), bad)
    assert same_bits(incremental_update(good, bad, 1.0), good) and same_bits(incremental_update(good, bad, 0), bad)


def test_U6_a_number_that_is_not_finite_stays_visible_to_the_guard():
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
        moved = np.asarray(jax.jit(soft_update)({"w": online}, {"w": target}, tau)["w"])
        assert np.all(moved >= np.minimum(online, target)) and np.all(moved <= np.maximum(online, target))


def test_numbers_further_apart_than_the_largest_one_move_towards_each_other():
    for tau, wanted in ((0.25, -1.5e38), (0.75, 1.5e38)):
        moved = soft_update(tree(3e38, -3e38), tree(-3e38, 3e38), tau)["w"]
        np.testing.assert_allclose(moved, [wanted, -wanted], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tau", [0.005, 1e-3])
def test_U8_a_float32_target_of_a_narrow_network_arrives_at_its_value(dtype, tau):
    online = {"w": jnp.array([2.0, 0.1], dtype)}
    target = jax.jit(lambda t: jax.lax.fori_loop(0, 20_000, lambda _, t: soft_update(online, t, tau), t))(tree(1.0, 1.0))
    assert target["w"].dtype == jnp.float32
    np.testing.assert_allclose(target["w"], online["w"].astype(jnp.float32), rtol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_U8_a_narrow_target_arrives_by_stochastic_rounding_and_not_without(dtype):
    def after(rounds):
        def body(n, t):
            return soft_update(tree(2.0), t, 0.005, key=jax.random.key(n) if rounds else None)

        return jax.jit(lambda: jax.lax.fori_loop(0, 3000, body, {"w": jnp.ones(1, dtype)}))()["w"]

    stuck, arrived = after(rounds=False), after(rounds=True)
    assert arrived.dtype == jnp.dtype(dtype) and float(arrived[0]) > 1.99
    assert float(stuck[0]) < 1.95


def test_stochastic_rounding_is_right_on_average_and_exact_where_nothing_has_to_be_rounded():
    target = {"w": jnp.ones(20_000, jnp.bfloat16)}
    moved = soft_update({"w": jnp.full(20_000, 2.0)}, target, 0.005, key=jax.random.key(0))["w"]
    assert set(np.unique(np.asarray(moved, np.float32))) == {1.0, 1.0078125}
    np.testing.assert_allclose(moved.astype(jnp.float32).mean(), 1.005, atol=1e-4)
    assert same_bits(soft_update(target, target, 0.3, key=jax.random.key(0)), target)
    for tau in (0.0, 1.0):
        wanted = {"w": jnp.full(20_000, 1.0 + tau, jnp.bfloat16)}
        assert same_bits(jax.jit(soft_update)({"w": jnp.full(20_000, 2.0)}, target, tau, key=jax.random.key(0)), wanted)


@pytest.mark.parametrize("online", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_U9_the_targets_dtype_is_kept_whatever_the_others_are_and_a_traced_tau_fits_a_scan(online, target):
    online, target = {"w": jnp.full(2, 2.0, online)}, {"w": jnp.ones(2, target)}

    def body(t, tau):
        return soft_update(online, t, tau), None

    moved, _ = jax.lax.scan(body, target, jnp.full(3, 0.5, jnp.float32))
    assert moved["w"].dtype == target["w"].dtype and moved["w"].tolist() == [1.875, 1.875]
    for tau in (0.5, np.float32(0.5), np.float64(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)):
        assert same_bits(soft_update(online, target, tau), {"w": jnp.full(2, 1.5, target["w"].dtype)})


def test_U9_another_tau_compiles_nothing_new():
    update = jax.jit(lambda online, target, tau: soft_update(online, target, tau))
    for tau in (0.1, 0.2, 1.0, 0.0, 0.005):
        update(tree(1.0), tree(2.0), tau)
    assert update._cache_size() == 1


def special(sign):
    return {
        "count": jnp.array(3 * sign, jnp.int32),
        "flag": jnp.array(sign > 0),
        "typed": jax.random.key(7 * (sign + 2)),
        "raw": jax.random.PRNGKey(7 * (sign + 2)),
        "w": jnp.array(float(sign)),
    }


@pytest.mark.parametrize("compile", [False, True])
def test_U10_integers_bools_and_keys_are_copied_when_hard_left_alone_when_soft_and_never_averaged(compile):
    update = jax.jit(soft_update) if compile else soft_update
    online, target = special(1), special(-1)

    def raw(tree):
        return {**tree, "typed": jax.random.key_data(tree["typed"])}

    hard, soft = update(online, target, 1.0), update(online, target, 0.5)
    assert same_bits(raw(hard), raw(online))
    assert same_bits(raw(soft), raw(target) | {"w": jnp.array(0.0)})
    assert jnp.issubdtype(soft["typed"].dtype, jax.dtypes.prng_key)


def test_U10_apply_updates_adds_integers_skips_float0_and_refuses_bools():
    params = {"n": jnp.array([1, 2]), "w": jnp.ones(2, jnp.bfloat16), "flag": jnp.array(True), "none": None}
    float0 = np.zeros((), jax.dtypes.float0)
    result = apply_updates(params, {"n": jnp.array([3, 4]), "w": jnp.full(2, 0.5), "flag": float0, "none": None})
    assert result["n"].tolist() == [4, 6] and result["n"].dtype == jnp.int32
    assert result["w"].tolist() == [1.5, 1.5] and result["w"].dtype == jnp.bfloat16
    assert bool(result["flag"]) and result["none"] is None
    with pytest.raises(TypeError, match="leaf 'flag'"):
        apply_updates({"flag": jnp.array(True)}, {"flag": jnp.array(True)})
    with pytest.raises(ValueError, match="leaf 'n'"):
        apply_updates({"n": jnp.ones(2, jnp.int32)}, {"n": np.zeros((3,), jax.dtypes.float0)})


def test_U16_a_narrow_parameter_takes_a_wide_update_rounded_once():
    moved = apply_updates({"w": jnp.ones(1, jnp.bfloat16)}, tree(2.0**-8 + 2.0**-12))["w"]
    assert moved.dtype == jnp.bfloat16 and float(moved[0]) == 1.0078125


def test_U12_an_initial_copy_can_be_donated_beside_its_source():
    online = tree(1.0, 2.0)
    for copy in (soft_update(online, tree(0.0, 0.0), 1.0), jax.jit(soft_update)(online, tree(0.0, 0.0), 1.0)):
        step = jax.jit(lambda o, t: (o, soft_update(o, t, 0.5)), donate_argnums=(0, 1))
        step(jax.tree.map(jnp.copy, online), copy)
    copy = soft_update(online, tree(0.0, 0.0), 1.0)
    step(online, copy)
    assert online["w"].is_deleted() and copy["w"].is_deleted()


def test_a_donated_target_is_updated_in_place():
    lowered = jax.jit(soft_update, donate_argnums=1).lower(tree(1.0, 2.0), tree(0.0, 0.0), 0.5).compile()
    assert "input_output_alias={ {}: (1" in lowered.as_text() or "{0}: (1" in lowered.as_text()


def test_U17_statistics_follow_by_their_own_share():
    online, target = (
        Variables({"w": jnp.full(2, x)}, {"mean": jnp.full(2, x), "count": jnp.array(int(x))}, "graph") for x in (1.0, 0.0)
    )
    mixed = soft_update(online, target, 0.25, stats_tau=1.0)
    assert (
        mixed.params["w"].tolist() == [0.25] * 2
        and mixed.stats["mean"].tolist() == [1.0] * 2
        and int(mixed.stats["count"]) == 1
    )
    only_stats = soft_update(online, target, 0.0, stats_tau=1.0)
    assert only_stats.params["w"].tolist() == [0.0] * 2 and only_stats.stats["mean"].tolist() == [1.0] * 2
    as_weights = soft_update({"net": online}, {"net": target}, 0.5)["net"]
    assert as_weights.stats["mean"].tolist() == [0.5] * 2 and int(as_weights.stats["count"]) == 0
    without = jax.jit(lambda o, t, s: soft_update(o, t, 1.0, stats_tau=s))(online, target, 0.0)
    assert (
        without.params["w"].tolist() == [1.0] * 2
        and without.stats["mean"].tolist() == [0.0] * 2
        and int(without.stats["count"]) == 0
    )


def test_U17_statistics_can_be_told_by_their_path():
    online, target = ({"bn": {"mean": jnp.array(x), "scale": jnp.array(x)}} for x in (1.0, 0.0))
    moved = soft_update(online, target, 0.5, stats_tau=1.0, is_stat=lambda path: path == "bn/mean")
    assert (float(moved["bn"]["mean"]), float(moved["bn"]["scale"])) == (1.0, 0.5)


def test_match_by_name_pairs_leaves_whatever_the_containers_and_their_order():
    online = {"params": [jnp.array(1.0), jnp.array(2.0)], "stats": {"mean": jnp.array(3.0)}}
    target = Variables({"1": jnp.array(0.0), "0": jnp.array(0.0)}, {"mean": jnp.array(0.0)})
    moved = soft_update(online, target, 0.5, stats_tau=1.0, match="name")
    assert isinstance(moved, Variables)
    assert (float(moved.params["0"]), float(moved.params["1"]), float(moved.stats["mean"])) == (0.5, 1.0, 3.0)


def test_match_by_name_lists_every_unmatched_name_on_either_side():
    with pytest.raises(ValueError, match="only in online: 'a', 'b'; only in target: 'c', 'd'"):
        soft_update({"a": 1.0, "b": 1.0, "x": 1.0}, {"x": 1.0, "d": 1.0, "c": 1.0}, 0.5, match="name")
    with pytest.raises(ValueError, match="online has more than one leaf of the name 'a/b'"):
        soft_update({"a": {"b": 1.0}, "a/b": 1.0}, {"a/b": 1.0}, 0.5, match="name")
    with pytest.raises(ValueError, match=r"leaf 'x': online is float32\[2\], target is float32\[\]"):
        soft_update({"x": jnp.ones(2)}, {"x": jnp.array(1.0)}, 0.5, match="name")
    with pytest.raises(ValueError, match="match must be one of"):
        inspect.unwrap(soft_update)({}, {}, 0.5, match="names")


def test_a_tau_may_be_a_callable_of_the_step():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    assert soft_update(tree(1.0), tree(0.0), schedule, step=2)["w"].tolist() == [0.5]
    assert jax.jit(lambda n: soft_update(tree(1.0), tree(0.0), schedule, step=n))(jnp.uint32(3))["w"].tolist() == [0.25]
    with pytest.raises(TypeError, match="tau is a callable, which needs step="):
        soft_update(tree(1.0), tree(0.0), schedule)
    with pytest.raises(ValueError, match=r"tau must be a number in \[0, 1\], got 2"):
        soft_update(tree(1.0), tree(0.0), lambda step: 2.0, step=0)


def test_vmap_over_tau_gives_each_its_own():
    moved = jax.vmap(lambda tau: soft_update(tree(1.0), tree(0.0), tau))(jnp.array([0.0, 0.25, 1.0, 2.0]))
    assert moved["w"][:, 0].tolist() == [0.0, 0.25, 1.0, 0.0]


def test_python_numbers_and_numpy_arrays_are_leaves_too():
    moved = soft_update({"a": 1.0, "b": np.ones(2)}, {"a": 0.0, "b": np.zeros(2)}, 0.5)
    assert float(moved["a"]) == 0.5 and moved["b"].tolist() == [0.5, 0.5] and moved["b"].dtype == jnp.float32


def sharded(tree_, partition):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(tree_, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*partition)))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("tau", [0.3, 1.0])
def test_replicated_and_sharded_trees_give_the_same_numbers_and_keep_their_sharding(compile, tau):
    online, target = ({"w": jnp.arange(16.0) * scale} for scale in (1.0, -2.0))
    update = jax.jit(soft_update) if compile else soft_update
    wanted = np.asarray(update(online, target, tau)["w"])
    for partition in ((), ("d",)):
        t = sharded(target, partition)
        moved = update(sharded(online, partition), t, tau)["w"]
        assert moved.sharding.is_equivalent_to(t["w"].sharding, 1)
        np.testing.assert_array_equal(moved, wanted)
    mixed = soft_update(sharded(online, ()), sharded(target, ("d",)), tau)["w"]
    assert mixed.sharding.spec == jax.sharding.PartitionSpec("d")
    np.testing.assert_allclose(mixed, wanted, rtol=1e-6)


@pytest.mark.parametrize("period", [0, -1, 2.5, NAN, "2", True, None, np.ones(2, np.int32)])
def test_U13_a_period_that_is_no_positive_integer_is_an_error(period):
    with pytest.raises((TypeError, ValueError), match=r"periodic_update: update_period must be an integer"):
        periodic_update(tree(1.0), tree(2.0), 3, period)
    with pytest.raises(TypeError, match=r"periodic_update: steps must be an integer scalar"):
        periodic_update(tree(1.0), tree(2.0), 2.5, 2)


def test_U13_a_periodic_update_fires_at_step_0_and_at_multiples_of_any_integer_dtype():
    new, old = tree(1.0, dtype=jnp.bfloat16), tree(2.0)
    for step, fires in ((0, True), (1, False), (6, True), (2**31, False), (2**32 - 1, True)):
        wanted = [1.0 if fires else 2.0]
        assert periodic_update(new, old, step, 3)["w"].tolist() == wanted
        compiled = jax.jit(lambda n: periodic_update(new, old, n, 3))(jnp.uint32(step))["w"]
        assert compiled.tolist() == wanted and compiled.dtype == jnp.float32
    assert jax.jit(lambda n, p: periodic_update(new, old, n, p))(4, 0)["w"].tolist() == [2.0]
    assert jax.jit(lambda p: periodic_update(new, old, 4, p))(2)["w"].tolist() == [1.0]
    assert jax.jit(lambda n: periodic_update(new, old, n, 2**40))(jnp.int32(8))["w"].tolist() == [2.0]


def test_an_update_inside_a_scan_equals_the_same_updates_one_by_one():
    online, start = tree(1.0, -3.0), tree(0.0, 5.0)
    scanned, _ = jax.lax.scan(lambda t, tau: (soft_update(online, t, tau), None), start, jnp.array([0.1, 1.0, 0.5]))
    one_by_one = start
    for tau in (0.1, 1.0, 0.5):
        one_by_one = soft_update(online, one_by_one, tau)
    np.testing.assert_allclose(scanned["w"], one_by_one["w"], rtol=1e-6)


def test_complex_leaves_move_too():
    moved = soft_update({"w": jnp.array([1.0 + 2.0j])}, {"w": jnp.array([0.0j])}, 0.5)["w"]
    assert moved.tolist() == [0.5 + 1.0j]


def test_one_check_compares_specs_as_well_as_arrays():
    spec = {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
    check_same_tree(tree(1.0, 2.0), spec, "load")
    with pytest.raises(ValueError, match=r"load: leaf 'w': file is float32\[1\], agent is bfloat16\[2\]"):
        check_same_tree(tree(1.0), spec, "load", sides=("file", "agent"))
