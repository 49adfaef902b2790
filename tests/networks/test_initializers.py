"""Initial weights: their distribution, and the same bits however they are asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from polyak.networks.initializers import constant, orthogonal, uniform

KEY = jax.random.key(3)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5), (3, 3, 2, 8), (1, 1)])
def test_orthogonal_weights_have_the_gain_as_all_their_singular_values(shape):
    weights = np.asarray(orthogonal(2.0)(KEY, shape, jnp.float32))
    assert weights.shape == shape and weights.dtype == np.float32
    singular = np.linalg.svd(weights.reshape(-1, shape[-1]), compute_uv=False)
    np.testing.assert_allclose(singular, 2.0, rtol=1e-5)


def test_orthogonal_matrices_are_uniformly_distributed():
    # An entry of a uniformly distributed orthogonal matrix in 3 dimensions is uniform on [-1, 1] (Archimedes), the sign of the
    # determinant is a fair coin.
    keys = jax.random.split(KEY, 400)
    matrices = np.stack([orthogonal(1.0)(key, (3, 3), jnp.float32) for key in keys])
    for row, column in ((0, 0), (1, 2), (2, 2)):
        assert scipy.stats.kstest(matrices[:, row, column], "uniform", (-1, 2)).pvalue > 1e-3
    positive = int(np.sum(np.linalg.det(matrices) > 0))
    assert scipy.stats.binomtest(positive, len(matrices)).pvalue > 1e-3


@pytest.mark.parametrize(
    "initializer", [orthogonal(1.5), uniform(0.5), constant(0.25)], ids=["orthogonal", "uniform", "constant"]
)
def test_weights_are_the_same_inside_and_outside_of_jit_and_vmap(initializer):
    def weights(key):
        return initializer(key, (4, 3), jnp.float32)

    keys = jax.random.split(KEY, 2)
    plain = np.stack([weights(key) for key in keys])
    assert np.array_equal(jnp.stack([jax.jit(weights)(key) for key in keys]), plain)
    assert np.array_equal(jnp.broadcast_to(jax.vmap(weights)(keys), plain.shape), plain)
    shape = jax.eval_shape(weights, KEY)
    assert shape.shape == (4, 3) and shape.dtype == jnp.float32


@pytest.mark.parametrize("initializer", [orthogonal(1.0), uniform(1.0)], ids=["orthogonal", "uniform"])
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_weights_depend_on_the_key_alone(initializer, implementation):
    first, second = jax.random.split(jax.random.key(0, impl=implementation))
    again = initializer(first, (4, 4), jnp.float32)
    assert np.array_equal(initializer(first, (4, 4), jnp.float32), again)
    assert not np.array_equal(initializer(second, (4, 4), jnp.float32), again)


def test_uniform_weights_fill_their_interval():
    weights = np.asarray(uniform(0.5)(KEY, (50, 40), jnp.float32)).ravel()
    assert scipy.stats.kstest(weights, "uniform", (-0.5, 1)).pvalue > 1e-3
