"""How one tree follows another: numbers, special values and leaves, errors, transformations; Optax is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.core.types import Variables
from polyak.ops.optax_updates import apply_updates, incremental_update, periodic_update
from polyak.ops.updates import is_valid_tau, soft_update
from tests.ops.bits import INF, NAN, same_bits, sharded, tree


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


by_optax = jax.jit(optax.periodic_update)


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
        (periodic_update(new, old, step, period), by_optax(new, old, step, period)),
        (apply_updates(old, new), optax.apply_updates(old, new)),
    ):
        np.testing.assert_allclose(ours["w"], theirs["w"], rtol=1e-6, atol=scale)


def test_gradients_flow_through_a_periodic_update_to_the_side_that_was_taken():
    def summed(new, old, steps):
        return periodic_update(tree(new), tree(old), steps, 2)["w"].sum()

    assert jax.grad(summed, argnums=(0, 1))(1.0, 2.0, 4) == (1.0, 0.0)
    assert jax.jit(jax.grad(summed, argnums=(0, 1)))(1.0, 2.0, 5) == (0.0, 1.0)


@pytest.mark.parametrize(
    "tau", [2, -1, 1.0000001, -1e-9, NAN, INF, -INF, "0.5", None, True, [0.1, 0.2], np.full(4, 0.5), np.full(1, 0.5), 0.5j]
)
@pytest.mark.parametrize("argument", ["tau", "stats_tau", "step_size"])
def test_invalid_tau_raises_with_its_value(argument, tau):
    if argument == "stats_tau" and tau is None:
        pytest.skip("None: as tau")
    with pytest.raises(
        (ValueError, TypeError), match=rf"^(soft|incremental)_update: {argument} must be a (scalar|number) in \[0, 1\]"
    ):
        if argument == "step_size":
            incremental_update(tree(1.0), tree(2.0), tau)
        else:
            soft_update(tree(1.0), tree(2.0), **({"tau": 0.5} | {argument: tau}))


def test_traced_vector_tau_raises_while_tracing():
    with pytest.raises(ValueError, match=r"tau must be a scalar in \[0, 1\], got float32\[1\]"):
        jax.jit(soft_update)(tree(1.0), tree(2.0), jnp.ones(1))


@pytest.mark.parametrize("tau", [2.0, -1.0, NAN, INF])
def test_traced_tau_outside_the_interval_changes_no_bit_and_is_flagged(tau):
    target = tree(NAN, 2.0, -0.0)
    result, valid = jax.jit(lambda tau: (soft_update(tree(1.0, 1.0, 1.0), target, tau), is_valid_tau(tau)))(tau)
    assert same_bits(result, target) and not valid
    assert jax.jit(is_valid_tau)(0.5)


def test_another_tau_does_not_recompile():
    update = jax.jit(lambda online, target, tau: soft_update(online, target, tau))
    for tau in (0.1, 0.2, 1.0, 0.0, 0.005):
        update(tree(1.0), tree(2.0), tau)
    assert update._cache_size() == 1


def test_apply_updates_adds_integers_skips_float0_and_rejects_bools():
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


def test_wide_update_of_a_narrow_parameter_is_rounded_once():
    new_params = apply_updates({"w": jnp.ones(1, jnp.bfloat16)}, tree(2.0**-8 + 2.0**-12))["w"]
    assert new_params.dtype == jnp.bfloat16 and float(new_params[0]) == 1.0078125


def test_initial_copy_can_be_donated_together_with_its_source():
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


def test_statistics_are_updated_with_stats_tau():
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


def test_statistics_can_be_selected_by_path():
    online, target = ({"bn": {"mean": jnp.array(x), "scale": jnp.array(x)}} for x in (1.0, 0.0))
    new_params = soft_update(online, target, 0.5, stats_tau=1.0, is_stat=lambda path: path == "bn/mean")
    assert (float(new_params["bn"]["mean"]), float(new_params["bn"]["scale"])) == (1.0, 0.5)


def test_a_tau_may_be_a_callable_of_the_step():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    assert soft_update(tree(1.0), tree(0.0), schedule, step=2)["w"].tolist() == [0.5]
    assert jax.jit(lambda n: soft_update(tree(1.0), tree(0.0), schedule, step=n))(jnp.uint32(3))["w"].tolist() == [0.25]
    with pytest.raises(TypeError, match="tau is a callable, which needs step="):
        soft_update(tree(1.0), tree(0.0), schedule)
    with pytest.raises(ValueError, match=r"tau must be a number in \[0, 1\], got 2"):
        soft_update(tree(1.0), tree(0.0), lambda step: 2.0, step=0)


def test_vmap_over_tau_gives_each_its_own():
    new_params = jax.vmap(lambda tau: soft_update(tree(1.0), tree(0.0), tau))(jnp.array([0.0, 0.25, 1.0, 2.0]))
    assert new_params["w"][:, 0].tolist() == [0.0, 0.25, 1.0, 0.0]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("tau", [0.3, 1.0])
def test_replicated_and_sharded_trees_give_the_same_numbers_and_keep_their_sharding(compile, tau):
    online, target = ({"w": jnp.arange(16.0) * scale} for scale in (1.0, -2.0))
    update = jax.jit(soft_update) if compile else soft_update
    wanted = np.asarray(update(online, target, tau)["w"])
    for partition in ((), ("d",)):
        t = sharded(target, partition)
        new_params = update(sharded(online, partition), t, tau)["w"]
        assert new_params.sharding.is_equivalent_to(t["w"].sharding, 1)
        np.testing.assert_array_equal(new_params, wanted)
    mixed = soft_update(sharded(online, ()), sharded(target, ("d",)), tau)["w"]
    assert mixed.sharding.spec == jax.sharding.PartitionSpec("d")
    np.testing.assert_allclose(mixed, wanted, rtol=1e-6)


@pytest.mark.parametrize("period", [0, -1, 2.5, NAN, "2", True, None, np.ones(2, np.int32)])
def test_period_that_is_not_a_positive_integer_raises(period):
    with pytest.raises((TypeError, ValueError), match=r"periodic_update: update_period must be an integer"):
        periodic_update(tree(1.0), tree(2.0), 3, period)
    with pytest.raises(TypeError, match=r"periodic_update: steps must be an integer scalar"):
        periodic_update(tree(1.0), tree(2.0), 2.5, 2)


def test_periodic_update_copies_at_step_0_and_at_multiples_for_any_integer_dtype():
    new, old = tree(1.0, dtype=jnp.bfloat16), tree(2.0)
    for step, fires in ((0, True), (1, False), (6, True), (2**31, False), (2**32 - 1, True)):
        wanted = [1.0 if fires else 2.0]
        assert periodic_update(new, old, step, 3)["w"].tolist() == wanted
        compiled = jax.jit(lambda n: periodic_update(new, old, n, 3))(jnp.uint32(step))["w"]
        assert compiled.tolist() == wanted and compiled.dtype == jnp.float32
    assert jax.jit(lambda n, p: periodic_update(new, old, n, p))(4, 0)["w"].tolist() == [2.0]
    assert jax.jit(lambda p: periodic_update(new, old, 4, p))(2)["w"].tolist() == [1.0]
    assert jax.jit(lambda n: periodic_update(new, old, n, 2**40))(jnp.int32(8))["w"].tolist() == [2.0]


def test_periodic_update_counts_steps_and_periods_of_different_dtypes():
    """In int32, 3·10⁹ steps would be -1,294,967,296, a multiple of 7; and 300 is no uint8."""
    both = jax.jit(lambda n, p: periodic_update(tree(1.0), tree(2.0), n, p))
    for step in (3 * 10**9, 7 * 428_571_429, 2**31, 2**32 - 4, 2**32 - 1):
        assert both(jnp.uint32(step), jnp.int32(7))["w"].tolist() == [1.0 if step % 7 == 0 else 2.0]
    for step in (-(2**31), -14, -1):
        assert both(jnp.int32(step), jnp.uint8(7))["w"].tolist() == [1.0 if step % 7 == 0 else 2.0]
    for step, fires in ((300, True), (301, False), (3 * 10**9, True)):
        result = jax.jit(lambda p, step=step: periodic_update(tree(1.0), tree(2.0), step, p))(jnp.uint8(100))
        assert result["w"].tolist() == [1.0 if fires else 2.0]


def test_a_tau_of_0_returns_arrays_of_jax_as_other_taus_do():
    for tau in (0.0, 0.5):
        result = soft_update({"w": np.ones(2)}, {"w": np.zeros(2)}, tau)["w"]
        assert isinstance(result, jax.Array) and result.dtype == jnp.float32


def test_an_update_inside_a_scan_equals_the_same_updates_one_by_one():
    online, start = tree(1.0, -3.0), tree(0.0, 5.0)
    scanned, _ = jax.lax.scan(lambda t, tau: (soft_update(online, t, tau), None), start, jnp.array([0.1, 1.0, 0.5]))
    one_by_one = start
    for tau in (0.1, 1.0, 0.5):
        one_by_one = soft_update(online, one_by_one, tau)
    np.testing.assert_allclose(scanned["w"], one_by_one["w"], rtol=1e-6)
