"""`matmul` equals `x @ kernel`, and so do its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.kernels.matmul import matmul


def operands(rows, inputs, outputs, lead=()):
    rng = np.random.default_rng(0)
    shapes = ((rows, inputs), (inputs, outputs), (rows, outputs))
    return [jnp.asarray(rng.normal(size=(*lead, *shape)), jnp.float32) for shape in shapes]


def loss(multiply, x, kernel, weights):
    return (multiply(x, kernel) * weights).sum()


# Few inputs, few outputs, one of each, as many.
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 2, 7), (5, 7, 2), (4, 3, 1), (1, 1, 3), (6, 4, 4)])
def test_values_and_gradients_are_those_of_the_product(rows, inputs, outputs):
    x, kernel, weights = operands(rows, inputs, outputs)
    np.testing.assert_array_equal(matmul(x, kernel), x @ kernel)
    got = jax.jit(jax.grad(lambda *a: loss(matmul, *a), (0, 1)))(x, kernel, weights)
    exact = [np.asarray(a, np.float64) for a in (x, kernel, weights)]
    np.testing.assert_allclose(got[0], exact[2] @ exact[1].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], exact[0].T @ exact[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", [0, 1])
def test_gradient_of_one_operand_with_the_other_constant(of):
    x, kernel, weights = operands(5, 2, 3)
    wanted = jax.jit(jax.grad(lambda *a: loss(jnp.matmul, *a), of))(x, kernel, weights)
    gradients = (
        jax.grad(lambda *a: loss(matmul, *a), of),
        jax.jacfwd(lambda *a: loss(matmul, *a), of),
        lambda *a: jax.grad(
            lambda *p: loss(matmul, *(q if i == of else jax.lax.stop_gradient(q) for i, q in enumerate(p))), of
        )(*a),
    )
    for gradient in gradients:
        np.testing.assert_allclose(jax.jit(gradient)(x, kernel, weights), wanted, rtol=1e-5, atol=1e-6)


def test_forward_derivatives_and_second_ones_are_those_of_the_product():
    def curved(multiply):
        return lambda x, kernel: jnp.sum(jnp.tanh(multiply(x, kernel)) ** 2)

    x, kernel, _ = operands(3, 2, 4)
    for derivative in (jax.jacfwd, lambda f, of: jax.jacfwd(jax.grad(f, of), of)):
        got, wanted = (jax.jit(derivative(curved(multiply), (0, 1)))(x, kernel) for multiply in (matmul, jnp.matmul))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_under_vmap():
    stacked = operands(3, 4, 2, lead=(2,))
    gradient = jax.grad(lambda *a: loss(matmul, *a), (0, 1))
    together = jax.jit(jax.vmap(gradient))(*stacked)
    for i in range(2):
        for a, b in zip(together, jax.jit(gradient)(*(x[i] for x in stacked)), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("inputs", "outputs"), [(17, 64), (64, 6)])
def test_cpu_gradients_do_not_contract_the_leading_axes(inputs, outputs):
    x, kernel, weights = operands(64, inputs, outputs)

    def slow(multiply):
        program = jax.jit(jax.grad(lambda *a: loss(multiply, *a), 1)).lower(x, kernel, weights).compile().as_text()
        return "lhs_contracting_dims={0}, rhs_contracting_dims={0}" in program

    # The plain one shows that the words are looked for in the right place.
    assert [slow(multiply) for multiply in (matmul, jnp.matmul)] == [False, True]


def test_other_platforms_keep_their_own_product(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, kernel, weights = operands(5, 2, 3)
    gradient = jax.jit(jax.grad(lambda *a: loss(matmul, *a), 1))
    assert "optimization_barrier" not in gradient.lower(x, kernel, weights).as_text()
    np.testing.assert_allclose(gradient(x, kernel, weights), np.asarray(x).T @ np.asarray(weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_leading_axes(lead):
    x, kernel, _ = operands(1, 4, 2, lead=lead)
    x, kernel = x[..., 0, :], kernel.reshape(-1, 4, 2)[0]
    np.testing.assert_allclose(matmul(x, kernel), np.asarray(x) @ np.asarray(kernel), rtol=1e-5, atol=1e-6)
