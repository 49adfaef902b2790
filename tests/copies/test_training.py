"""Training a copy and asking several: what is found before the step, nothing bad gets in, batch normalization."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.copies.follow import Follow
from polyak.networks.adapters import FlaxNNX
from polyak.ops.gradient_step import global_norm
from tests.copies.line import ADAM, GOALS, INPUTS, KEY, NAN, Line, made, moved, normalized, same, squared


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_training_returns_the_loss_before_the_step_and_leaves_the_target_unchanged(shared):
    copies = made(Follow(), shared=shared)
    weights = jnp.array([1.0, 0.5, 2.0, 0.0])
    stepped, found = copies.train_and_sync(squared, INPUTS, GOALS, weights, clip=0.5)
    out = INPUTS.sum(1)
    errors = out - GOALS
    assert float(found.terms["squared"]) == pytest.approx(float(jnp.mean(weights * errors**2)))
    assert float(found.terms["loss"]) == pytest.approx(float(found.terms["squared"] + found.terms["absolute"]))
    np.testing.assert_allclose(found.terms["out"], out)
    slope = weights * (2 * errors + 0.1 * jnp.sign(errors)) / 4
    wanted = {"w": jnp.sum(slope[:, None] * INPUTS, 0), "b": slope.sum()}
    norm = float(global_norm(wanted))
    assert float(found.terms["grad_norm"]) == pytest.approx(norm) and norm > 0.5 and bool(found.applied)
    np.testing.assert_allclose(stepped.online.params["w"], 1 - 0.1 * wanted["w"] * 0.5 / norm, rtol=1e-5)
    assert same(stepped.target, copies.target)
    assert int(stepped.online.stats["calls"]) == 1
    if shared:
        assert same(stepped.shared.variables, stepped.online) and int(stepped.shared.version) == int(stepped.version) == 1


def test_training_on_non_finite_inputs_changes_neither_weights_nor_statistics():
    for shared in (False, True):
        copies = made(Follow(), shared=shared, optimizer=ADAM)
        stepped, found = jax.jit(lambda c: c.train_and_sync(squared, INPUTS * NAN, GOALS))(copies)
        assert not bool(found.applied) and int(stepped.skipped) == 1
        assert same(dataclasses.replace(stepped, guard=copies.guard), copies)


def test_non_finite_statistics_skip_the_step_and_are_diagnosed():
    copies = made(network=Line(bad_mean=True))
    stepped, found = copies.train_and_sync(squared, INPUTS, GOALS)
    assert not bool(found.applied) and np.isfinite(found.terms["loss"]) and same(stepped.online, copies.online)
    assert "infinite is 'statistics'" in stepped.diagnose(max_skipped_steps=1)


def test_loss_that_is_not_one_value_per_sample_raises():
    with pytest.raises(ValueError, match=r"loss part 'sum' must have one value per sample, shape \[B\], got \[\]"):
        made().train_and_sync(lambda out, _: ({"sum": out.sum()}, {}), INPUTS, GOALS)
    with pytest.raises(ValueError, match=r"\[3\] \(the shape of importance_weights\), got \[4\]"):
        made().train_and_sync(squared, INPUTS, GOALS, jnp.ones(3))


@pytest.mark.parametrize(
    "loss", [lambda out, _: (out.mean(), {}), lambda out, _: {"a": out}, lambda out, _: out, lambda out, _: ({}, {})]
)
def test_loss_that_returns_no_parts_raises(loss):
    for method in (made().train_and_sync, made().compute_gradients):
        with pytest.raises(TypeError, match=r"loss_fn must return \(parts, others\), dicts of arrays"):
            method(loss, INPUTS, GOALS)


def test_predictions_are_in_order_and_a_copy_may_appear_twice():
    copies = moved(made(Follow()), 2.0)
    first, second, third = copies.predict([("online", INPUTS), ("target", INPUTS), ("online", INPUTS[:1])])
    np.testing.assert_allclose(first, 2 * INPUTS.sum(1))
    np.testing.assert_allclose(second, INPUTS.sum(1))
    np.testing.assert_allclose(third, 2 * INPUTS[:1].sum(1))


def test_several_predictions_are_one_compiled_program():
    copies = made(Follow())
    traced = jax.make_jaxpr(lambda c: c.predict([("online", INPUTS), ("target", INPUTS), ("online", INPUTS)]))(copies)
    assert [equation.params["name"] for equation in traced.eqns if equation.primitive.name == "jit"] == ["predict_all"]
    assert {equation.primitive.name for equation in traced.eqns} <= {"jit", "convert_element_type"}


def test_target_predicts_in_inference_mode_even_with_train():
    copies = made(Follow())
    online, target = copies.predict([("online", INPUTS), ("target", INPUTS)], train=True, key=KEY)
    assert not np.allclose(online, INPUTS.sum(1)) and np.allclose(target, INPUTS.sum(1))
    online, again = copies.predict([("online", INPUTS), ("online", INPUTS)], train=True, key=KEY)
    assert not np.allclose(online, again)
    assert np.allclose(copies.predict([("online", INPUTS)], key=KEY)[0], INPUTS.sum(1))


def test_batch_normalization_works_end_to_end():
    copies = made(Follow(0.1, stats_tau=1.0), network=FlaxNNX(normalized), optimizer=ADAM)
    mean = copies.online.stats["norm"]["mean"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        before = copies.predict([("target", INPUTS)])[0]
        step = jax.jit(lambda c: c.train_and_sync(squared, INPUTS, GOALS))
        trained, first = step(copies)
        for _ in range(30):
            trained, found = step(trained)
        assert float(found.terms["loss"]) < float(first.terms["loss"])
        np.testing.assert_allclose(trained.online.stats["norm"]["mean"], INPUTS.mean(0), rtol=1e-3)
        np.testing.assert_array_equal(trained.target.stats["norm"]["mean"], mean)
        followed = trained.follow(updates=1)
        np.testing.assert_array_equal(followed.target.stats["norm"]["mean"], trained.online.stats["norm"]["mean"])
        kernels = [x.params["out"]["kernel"] for x in (copies.online, trained.online, followed.target)]
        np.testing.assert_allclose(kernels[2] - kernels[0], 0.1 * (kernels[1] - kernels[0]), rtol=1e-4)
        online, target = followed.predict([("online", INPUTS), ("target", INPUTS)], train=True)
    assert not np.allclose(target, before) and not np.allclose(online, target)
