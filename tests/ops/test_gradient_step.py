"""The gradient step, whole and in microbatches, against Optax's, with numbers that overflow, and with NaN and infinity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from polyak.core.types import Variables
from polyak.loops.loop import ENVS, mesh_over
from polyak.ops.gradient_step import (
    QUANTITIES,
    VECTOR_MULTIPLE,
    Aux,
    Guard,
    accumulate,
    adam,
    all_finite,
    apply_gradient,
    clip_to_norm,
    compute_gradient,
    count_microbatches,
    flag_quantities,
    global_norm,
    on_vector,
    ravel,
)
from polyak.ops.rmsprop import rmsprop
from tests.agents.rollouts import same_bits

TRUE = jnp.array(True)


def gradients(count, scale=1.0):
    rng = np.random.default_rng(0)
    return [jnp.asarray(scale * rng.normal(size=7), jnp.float32) for _ in range(count)]


def step(optimizer, params, state, gradient, *, enabled=True):
    bad = {"gradient": ~jnp.isfinite(global_norm(gradient))}
    variables, state, log = apply_gradient(optimizer, Variables(params), state, gradient, Aux({}), bad, enabled)
    return variables.params, state, {name: ~log.bad[QUANTITIES.index(name)] for name in ("gradient", "step")}


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 100.0])
def test_adam_is_optaxs_clip_and_adam_on_a_tree_or_a_vector(max_grad_norm):
    ours = adam(3e-2, eps=1e-5, max_grad_norm=max_grad_norm)
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    oracle = optax.chain(clip, optax.adam(3e-2, eps=1e-5))
    tree = {"a": jnp.linspace(-1.0, 1.0, 5), "b": jnp.ones((1, 2))}
    vector, unravel = ravel(tree)
    theirs, oracle_state = tree, oracle.init(tree)
    state = vector_state = ours.init(tree)
    for gradient in gradients(20):
        gradient = {"a": gradient[:5], "b": gradient[5:].reshape(1, 2)}
        tree, state, _ = step(ours, tree, state, gradient)
        vector, vector_state, _ = step(ours, vector, vector_state, ravel(gradient)[0])
        with jax.numpy_dtype_promotion("standard"):
            updates, oracle_state = oracle.update(gradient, oracle_state)
        theirs = optax.apply_updates(theirs, updates)
    for a, b, c in zip(*(jax.tree.leaves(x) for x in (tree, unravel(vector), theirs)), strict=True):
        np.testing.assert_allclose(a, c, atol=2e-6)
        np.testing.assert_allclose(b, c, atol=2e-6)
    assert same_bits(state, vector_state)


def test_a_step_that_is_not_applied_changes_no_bit():
    optimizer = adam(1e-2, eps=1e-5, max_grad_norm=0.5)
    params, state, _ = step(optimizer, jnp.ones(7), optimizer.init(jnp.ones(7)), gradients(1)[0])
    for gradient in (gradients(1)[0], jnp.full(7, jnp.nan), jnp.full(7, jnp.inf)):
        assert same_bits(step(optimizer, params, state, gradient, enabled=jnp.array(False))[:2], (params, state))


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e37])
def test_the_norm_neither_overflows_nor_underflows(scale):
    gradient = gradients(1)[0]
    expected = np.linalg.norm(np.asarray(gradient, np.float64)) * scale
    assert float(global_norm(gradient * scale)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [1e-25, 1e-10, 1.0, 1e10, 1e25])
def test_the_norm_of_a_leaf_of_one_entry_is_right_in_compiled_code(value):
    norm = jax.jit(lambda tree: global_norm(tree))({"a": jnp.array([value]), "b": jnp.zeros(3), "c": jnp.float32(0.0)})
    assert float(norm) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_norm_of_nan_or_infinity_is_not_finite(bad):
    assert not np.isfinite(float(global_norm([jnp.array([1.0, bad, 2.0]), jnp.ones(1)])))


@pytest.mark.parametrize("tree", [jnp.zeros(3), [], jnp.zeros((0, 2))])
def test_the_norm_of_nothing_is_zero(tree):
    assert float(global_norm(tree)) == 0.0


def test_a_huge_gradient_is_clipped_to_its_direction():
    optimizer, params = adam(1e-2, eps=1e-5, max_grad_norm=0.5), jnp.zeros(7)
    huge, usual = (step(optimizer, params, optimizer.init(params), g) for g in (gradients(1, 1e30)[0], gradients(1, 1e2)[0]))
    np.testing.assert_allclose(huge[0], usual[0], rtol=1e-5)
    np.testing.assert_allclose(global_norm(huge[1][1].mu), 0.1 * 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("max_grad_norm", "scale", "finite"),
    [
        (0.5, 1e30, {"gradient": True, "step": True}),
        (None, 1e30, {"gradient": True, "step": False}),
        (None, 1e18, {"gradient": True, "step": True}),
        (0.5, np.nan, {"gradient": False, "step": False}),
        (0.5, np.inf, {"gradient": False, "step": False}),
    ],
)
def test_a_gradient_is_applied_when_the_moments_stay_finite(max_grad_norm, scale, finite):
    optimizer, params = adam(1e-2, eps=1e-5, max_grad_norm=max_grad_norm), jnp.ones(7)
    state = optimizer.init(params)
    after, new_state, found = step(optimizer, params, state, jnp.full(7, scale))
    assert {name: bool(flag) for name, flag in found.items()} == finite
    assert same_bits((after, new_state), (params, state)) == (not all(finite.values()))


@pytest.mark.parametrize("make", [partial(adam, eps=1e-5), partial(rmsprop, decay=0.9, eps=1e-5)])
def test_a_learning_rate_that_is_not_finite_skips_the_step(make):
    params, gradient = jnp.ones(7), gradients(1)[0]
    for rate, finite in ((np.nan, False), (np.inf, False), (1e3, True)):
        optimizer = make(jnp.float32(rate), max_grad_norm=None)
        state = optimizer.init(params)
        after, new_state, found = step(optimizer, params, state, gradient)
        assert bool(found["step"]) == finite and same_bits((after, new_state), (params, state)) != finite


def test_the_settings_of_adam_may_be_traced():
    def one(settings, gradient):
        optimizer = adam(settings["learning_rate"], eps=settings["eps"], max_grad_norm=settings["max_grad_norm"])
        return step(optimizer, jnp.ones(7), optimizer.init(jnp.ones(7)), gradient)[0]

    new_params = jax.jit(one)
    for rate in (1e-2, 1e-3):
        new_params({"learning_rate": rate, "eps": 1e-5, "max_grad_norm": 0.5}, gradients(1)[0])
    assert new_params._cache_size() == 1


def test_clipping_by_the_global_norm_is_optaxs():
    tree = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
    for norm in (1.0, 13.0, 20.0):
        clipped, (theirs, _) = clip_to_norm(tree, global_norm(tree), norm), optax.clip_by_global_norm(norm).update(tree, None)
        for x, y in zip(jax.tree.leaves(clipped), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


# One vector


def test_a_vector_is_padded_and_becomes_the_tree_again():
    tree = {"a": jnp.arange(3, dtype=jnp.float32), "b": jnp.ones((2, 2))}
    vector, unravel = ravel(tree)
    assert vector.shape == (VECTOR_MULTIPLE,) and not vector[7:].any()
    assert same_bits(unravel(vector), tree) and ravel(vector)[0].shape == vector.shape


def test_narrow_trees_are_a_float32_vector_and_become_narrow_again():
    tree = {"a": jnp.ones(2, jnp.bfloat16)}
    vector, unravel = ravel(tree)
    assert vector.dtype == jnp.float32 and unravel(vector + 1)["a"].dtype == jnp.bfloat16


def test_leaves_are_joined_by_copying():
    """XLA would fuse vectors that are joined with what uses them; on two threads that takes 300 times as long."""
    tree = {"a": jnp.ones((32, 32)), "b": jnp.ones(30)}
    program = jax.jit(lambda tree: 2 * ravel(tree)[0]).lower(tree).compile().as_text()
    assert " concatenate(" in program[program.index("ENTRY") :]


def test_large_trees_are_not_raveled(monkeypatch):
    monkeypatch.setattr("polyak.ops.gradient_step.LARGEST_VECTOR", 6)
    tree = {"a": jnp.ones(4), "b": jnp.ones(3)}
    assert ravel(tree)[0] is tree
    state = on_vector(optax.scale_by_adam()).init(tree)
    assert jax.tree.structure(state.mu) == jax.tree.structure(tree)


# The guard


def after(guard, skipped, steps, *bad):
    flags = flag_quantities({name: TRUE for name in bad})
    return guard.after_update(jnp.uint32(skipped), jnp.uint32(steps - skipped), flags)


def counts(guard):
    name = QUANTITIES[int(guard.nonfinite_source) - 1] if guard.nonfinite_source else None
    return int(guard.skipped), int(guard.consecutive_skipped_updates), name


def test_an_update_whose_steps_were_all_skipped_counts_in_a_row():
    guard = Guard.init()
    assert counts(guard) == (0, 0, None)
    guard = after(guard, 4, 4, "reward", "value")
    assert counts(guard) == (4, 1, "reward")
    guard = after(guard, 4, 4, "obs")
    assert counts(guard) == (8, 2, "obs")


def test_one_applied_step_ends_the_row_and_the_quantity_is_remembered():
    guard = after(Guard.init(), 4, 4, "value")
    guard = after(guard, 3, 4, "reward")
    assert counts(guard) == (7, 0, "reward")
    guard = after(guard, 0, 4)
    assert counts(guard) == (7, 0, "reward")


def test_steps_skipped_without_a_bad_quantity_are_no_row():
    guard = after(Guard.init(), 4, 4)
    assert counts(guard) == (4, 0, None)
    # All steps were over, or had no weight, before a bad number could matter.
    guard = after(guard, 0, 0, "reward")
    assert counts(guard) == (4, 0, "reward")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_floats_can_be_non_finite(bad):
    assert not bool(all_finite({"x": jnp.array([[1.0, 2.0], [bad, 4.0]]), "n": jnp.arange(2), "none": None}))
    assert bool(all_finite({"n": jnp.arange(3)})) and bool(all_finite(()))


def quadratic(params, index):
    x = jnp.stack([jnp.sin(index.astype(jnp.float32)), jnp.cos(index.astype(jnp.float32))], -1)
    loss = jnp.sum(jnp.square(x @ params - 1.0)) / 24
    return loss, {"loss": loss, "sum": jnp.sum(x)}


slope = jax.jit(jax.grad(quadratic, has_aux=True))


@pytest.mark.parametrize("parts", [1, 2, 4, 6, 24])
def test_a_gradient_in_parts_is_the_gradient(parts):
    params, index = jnp.array([0.3, -0.7]), jnp.arange(24, dtype=jnp.int32)[::-1]
    gradient, terms = slope(params, index)
    sizes = []

    def counted(params, part):
        sizes.append(part.shape[0])
        return quadratic(params, part)

    def gradient_of(part):
        return jax.grad(counted, has_aux=True)(params, part), 2 * part

    (got, got_terms), doubled = jax.jit(lambda index: accumulate(gradient_of, index, parts))(index)
    assert set(sizes) == {24 // parts}
    np.testing.assert_array_equal(doubled.reshape(-1), 2 * index)
    np.testing.assert_allclose(got, gradient, rtol=1e-6)
    np.testing.assert_allclose(got_terms["loss"], terms["loss"], rtol=1e-6)
    np.testing.assert_allclose(got_terms["sum"], terms["sum"], atol=1e-5)


def test_terms_are_in_one_order_in_all_processes():
    names = [f"term{number}" for number in range(8)]

    def loss_fn(params, batch):
        return jnp.sum(params * batch), Aux({name: jnp.sum(batch) for name in names} | {"error": batch})

    _, aux = compute_gradient(loss_fn, jnp.ones(3), jnp.ones(3))
    # Hashes of strings differ between processes, and so would programs.
    assert list(aux.terms) == ["loss", *names, "error", "grad_norm"]


def test_parts_of_several_devices_add_up():
    params, index = jnp.array([0.3, -0.7]), np.arange(24, dtype=np.int32)
    split = jax.shard_map(
        lambda index: accumulate(lambda part: (jax.grad(lambda p: quadratic(p, part)[0])(params), part), index, 3, ENVS),
        mesh=mesh_over(2, 2),
        in_specs=PartitionSpec(ENVS),
        out_specs=(PartitionSpec(), PartitionSpec(ENVS)),
        check_vma=False,
    )
    gradient, samples = jax.jit(split)(index)
    np.testing.assert_allclose(gradient, slope(params, index)[0], rtol=1e-5)
    np.testing.assert_array_equal(samples.reshape(-1), index)


@pytest.mark.parametrize(("limit", "parts"), [(24, 1), (12, 2), (7, 4), (5, 6), (1, 24)])
def test_microbatches_are_the_fewest_that_fit_the_cache(monkeypatch, limit, parts):
    monkeypatch.setattr("polyak.ops.gradient_step.SAMPLES_IN_CACHE", limit)
    assert count_microbatches(24, None) == parts
    monkeypatch.setattr("polyak.ops.gradient_step.SAMPLES_IN_CORE_CACHE", 2 * limit)
    assert count_microbatches(48, None, ENVS) == parts


def test_microbatches_of_sequences_are_counted_in_samples(monkeypatch):
    monkeypatch.setattr("polyak.ops.gradient_step.SAMPLES_IN_CACHE", 64)
    assert count_microbatches(8, None, samples_each=8) == 1
    assert count_microbatches(8, None, samples_each=16) == 2
    assert count_microbatches(8, None, samples_each=1000) == 8, "a sequence is not split"
    assert count_microbatches(8, 4, samples_each=16) == 2


def test_size_without_a_fitting_divisor_is_one_microbatch(monkeypatch):
    monkeypatch.setattr("polyak.ops.gradient_step.SAMPLES_IN_CACHE", 12)
    assert count_microbatches(23, None) == 1


def test_microbatches_of_images_are_smaller_on_a_cpu(monkeypatch):
    assert count_microbatches(256, None, has_images=True) == count_microbatches(256, None, ENVS, has_images=True) == 8
    assert count_microbatches(256, 128, has_images=True) == 2
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count_microbatches(256, None, has_images=True) == 1


def test_a_given_microbatch_size_decides_whatever_fits_the_cache(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count_microbatches(24, 3) == 8 and count_microbatches(10**6, None) == 1
