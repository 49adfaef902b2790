"""Gradients on their way: summed or averaged in float32, clipped, rejected where they are not finite, stepped along once."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.ops.gradient_step import global_norm
from tests.copies.line import ADAM, INF, NAN, SGD, Line, gradient, made, same, w


def test_accumulated_gradients_are_summed_or_averaged_and_the_optimizer_steps_once():
    for reduce, wanted in (("mean", 0.7), ("sum", -0.2)):
        copies = made(optimizer=optax.adam(1e-8))
        for value in (1.0, 2.0, 3.0, 6.0):
            copies = copies.accumulate(gradient(value), reduce=reduce)
        stepped = copies.apply_gradients()
        assert int(stepped.optimizer_state[0].count) == 1
        plain = dataclasses.replace(copies, optimizer=SGD, optimizer_state=SGD.init(copies.online.params)).apply_gradients()
        assert w(plain.online) == pytest.approx(wanted, abs=1e-6)


def test_clip_applies_to_each_gradient_or_to_the_total():
    def total(clip_when, reduce):
        copies = made()
        for value in (10.0, -2.0):
            copies = copies.accumulate(gradient(value), reduce=reduce, clip=1.0, clip_when=clip_when)
        return copies.gradients.read()["w"]

    np.testing.assert_allclose(total("each", "mean"), [0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(total("total", "sum"), np.full(2, np.sqrt(0.5)), rtol=1e-6)
    np.testing.assert_allclose(total("total", "mean"), np.full(2, np.sqrt(0.5)), rtol=1e-6)


def test_sums_are_float32_whatever_the_gradients_dtype():
    copies = made(network=Line("bfloat16"))
    for _ in range(3):
        copies = copies.accumulate({"w": jnp.full(2, 1.0 + 2**-7, jnp.bfloat16), "b": jnp.zeros((), jnp.bfloat16)})
    assert copies.gradients.total["w"].dtype == jnp.float32
    assert copies.gradients.total["w"].tolist() == [3 * (1 + 2**-7)] * 2


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_gradient_is_skipped_and_counted(bad):
    copies = made(optimizer=ADAM).accumulate(gradient(1.0))
    after = copies.accumulate(gradient(bad), reduce="sum")
    assert same(after.gradients.total, copies.gradients.total)
    assert int(after.gradients.skipped) == 1 and int(after.gradients.number) == 1
    stepped = copies.apply_gradients(gradients=gradient(bad))
    assert int(stepped.skipped) == 1
    assert same((stepped.online, stepped.optimizer_state), (copies.online, copies.optimizer_state))
    clean = stepped.apply_gradients(gradients=gradient(1.0))
    assert same(clean.online, copies.apply_gradients(gradients=gradient(1.0)).online)


def test_huge_finite_gradient_is_clipped_to_its_norm_or_skipped():
    copies = made(optimizer=ADAM).accumulate(gradient(1e30), clip=1.0)
    np.testing.assert_allclose(copies.gradients.total["w"], np.full(2, np.sqrt(0.5)), rtol=1e-6)
    rejected = copies.apply_gradients(gradients=gradient(1e30))
    assert int(rejected.skipped) == 1 and same(rejected.optimizer_state, copies.optimizer_state)
    assert float(global_norm({"a": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])})) == 13.0


def test_empty_accumulator_makes_no_step_even_with_momentum():
    copies = made(optimizer=ADAM).apply_gradients(gradients=gradient(1.0))
    assert same(copies.apply_gradients().online, copies.online) and int(copies.apply_gradients().skipped) == 1


def test_reset_gradients_are_true_zeros():
    copies = made().accumulate(gradient(1.0))
    spoilt = dataclasses.replace(copies, gradients=dataclasses.replace(copies.gradients, total=gradient(NAN)))
    assert same(spoilt.reset_gradients().gradients.total, gradient(0.0)) and int(spoilt.reset_gradients().gradients.number) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip must be a number"),
        ({"clip": NAN}, "clip must be a number"),
        ({"clip": "1"}, "clip"),
        ({"reduce": "max"}, "reduce"),
        ({"clip_when": "late"}, "clip_when"),
    ],
)
def test_invalid_arguments_of_accumulate_raise(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        made().accumulate(gradient(1.0), **options)


def test_gradients_of_another_tree_raise_with_the_leaf_name():
    wrong = {"w": jnp.ones(3), "b": jnp.zeros(())}
    for verb in (lambda c: c.accumulate(wrong), lambda c: c.apply_gradients(gradients=wrong)):
        with pytest.raises(ValueError, match=r"leaf 'w': gradients is float32\[3\], params is float32\[2\]"):
            verb(made())
