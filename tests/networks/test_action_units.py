"""Actions in units of [-1, 1], and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.spaces import Box, Discrete, EnvSpec, Tuple
from polyak.networks.action_units import from_unit, to_unit


@pytest.mark.parametrize(
    ("low", "high", "action", "unit"),
    [
        ([-2.0, 0.0], [4.0, 1.0], [4.0, 0.25], [1.0, -0.5]),
        ([2.0, 0.0], [2.0, 10.0], [2.0, 5.0], [0.0, 0.0]),
        ([-3e38, -3e38], [3e38, 3e38], [1.5e38, 0.0], [0.5, 0.0]),
    ],
)
def test_bounds_are_scaled_to_the_unit_box_and_back(low, high, action, unit):
    spec = EnvSpec(Box([0.0], [1.0]), Box(low, high))
    rows = jnp.asarray([action], jnp.float32)
    np.testing.assert_allclose(to_unit(spec, rows), [unit], rtol=1e-6)
    np.testing.assert_allclose(from_unit(spec, to_unit(spec, rows)), rows, rtol=1e-6)


def test_only_bounded_boxes_are_scaled():
    spec = EnvSpec(Box([0.0], [1.0]), Tuple((Box([-2.0, 0.0], [np.inf, 1.0]), Discrete(3), Box([0.0], [4.0]))))
    action = np.array([[5.0, 0.5]], np.float32), np.array([2]), np.array([[3.0]], np.float32)
    unbounded, discrete, unit = to_unit(spec, action)
    np.testing.assert_array_equal(unbounded, action[0])
    np.testing.assert_array_equal(discrete, action[1])
    np.testing.assert_array_equal(unit, [[0.5]])


def test_actions_beyond_the_bounds_are_clipped():
    spec = EnvSpec(Box([0.0], [1.0]), Box([-2.0, 0.0], [4.0, 5.0]))
    np.testing.assert_allclose(from_unit(spec, jnp.array([[-1.5, -2.0], [2.0, 0.2]])), [[-2.0, 0.0], [4.0, 3.0]])
    rescaled = EnvSpec(Box([0.0], [1.0]), Box([-2.0], [4.0]), action_scaling="rescale")
    np.testing.assert_allclose(from_unit(rescaled, jnp.array([[0.5], [2.0]])), [[0.5], [1.0]])
