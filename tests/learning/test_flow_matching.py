"""The error of a velocity, against numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, EnvSpec
from polyak.core.types import Variables
from polyak.learning.flow_matching import flow_error
from polyak.networks.flow import integrate

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class StraightWay:
    """The velocity (c - x) / (1 - t), which takes every noise to c."""

    c: float

    def init(self, key, spec):
        raise NotImplementedError

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        _, x, time = obs
        return ({"loc": (self.c - x) / (1 - time), "log_scale": jnp.zeros_like(x)}, None), carry, ()


def test_the_error_is_zero_for_the_straight_way_and_the_flow_ends_at_its_action():
    spec = EnvSpec(Box([0.0], [1.0]), Box([-1.0] * 2, [1.0] * 2))
    obs, action = jnp.zeros((6, 1)), jnp.full((6, 2), 0.3)
    error, _ = flow_error(StraightWay(0.3), Variables({}, {}), spec, obs, action, KEY)
    np.testing.assert_allclose(error, 0.0, atol=1e-6)
    off, _ = flow_error(StraightWay(0.5), Variables({}, {}), spec, obs, action, KEY)
    _, time_key, _ = jax.random.split(KEY, 3)
    time = np.asarray(jax.random.uniform(time_key, (6, 1), jnp.float32))
    np.testing.assert_allclose(off, (0.2 / (1 - time[:, 0])) ** 2, rtol=1e-3)
    end = integrate(StraightWay(0.3), Variables({}, {}), spec, obs, jax.random.normal(KEY, (6, 2)), 10)
    np.testing.assert_allclose(end, 0.3, atol=1e-5)
