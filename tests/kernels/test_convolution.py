"""Convolutions: those of XLA, and on a CPU gradients that are made of products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.kernels.convolution import convolve


def plain(x, kernel, stride):
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def gradients(convolution, x, kernel, stride, weights):
    """Gradients of a weighted sum, and the outputs that were computed on the way to them."""

    def loss(x, kernel):
        y = convolution(x, kernel, stride)
        return (y * weights).sum(), y

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, kernel)


# The last two leave pixels over at the right and the bottom.
@pytest.mark.parametrize(
    ("height", "width", "side", "stride"), [(12, 8, 8, 4), (6, 10, 4, 2), (5, 4, 3, 1), (15, 13, 8, 4), (7, 9, 4, 2)]
)
def test_values_and_gradients_are_those_of_the_convolution(height, width, side, stride):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, height, width, 3)), rng.normal(size=(side, side, 3, 2))
    x, kernel = jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)
    y = plain(x, kernel, stride)
    np.testing.assert_array_equal(convolve(x, kernel, stride), y)
    weights = jnp.asarray(rng.normal(size=y.shape), jnp.float32)
    got, wanted = (gradients(f, x, kernel, stride, weights) for f in (convolve, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, wanted)


def test_no_gradient_on_a_cpu_is_a_convolution_with_holes():
    x, kernel = jnp.ones((2, 8, 8, 1)), jnp.ones((4, 4, 1, 2))
    weights = jnp.ones((2, 3, 3, 2))
    programs = [
        jax.jit(functools.partial(gradients, f, stride=2, weights=weights)).lower(x, kernel).as_text()
        for f in (convolve, plain)
    ]
    # The plain one shows that the word is looked for in the right place.
    assert ["dilate = [2, 2]" in program for program in programs] == [False, True]


def test_several_seeds_at_once_have_their_own_gradients():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 3, 8, 8, 1)), jnp.float32)
    kernels = jnp.asarray(rng.normal(size=(2, 4, 4, 1, 2)), jnp.float32)
    loss = jax.jit(jax.grad(lambda kernel, x: (convolve(x, kernel, 2) ** 2).sum()))
    together = jax.jit(jax.vmap(loss))(kernels, x)
    for i in range(2):
        np.testing.assert_allclose(together[i], loss(kernels[i], x[i]), rtol=1e-4)
