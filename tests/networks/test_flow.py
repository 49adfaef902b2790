"""Networks of noise: Euler's method and the scaling of actions, against slow versions and numbers."""

import jax
import jax.numpy as jnp
import numpy as np

import polyak
from polyak.core.spaces import Box, Dict, EnvSpec
from polyak.networks.flow import integrate, noise_spec

KEY = jax.random.key(0)
TREE = Dict({"a": Box([-1.0] * 2, [1.0] * 2), "b": Box(-2.0, 4.0, (1, 2))})
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), TREE)


def test_a_velocity_sees_observation_noise_and_time():
    spec = noise_spec(SPEC, has_time=True)
    obs, noise, time = spec.obs.spaces
    assert obs == SPEC.obs and time.shape == (1,)
    assert {name: (part.shape, part.bounded) for name, part in noise.spaces.items()} == {
        "a": ((2,), False),
        "b": ((1, 2), False),
    }
    assert len(noise_spec(SPEC, has_time=False).obs.spaces) == 2 and spec.action == TREE


def test_the_flow_is_the_sum_of_eulers_steps():
    network = polyak.Actor((5,), std="fixed")
    variables = network.init(KEY, noise_spec(SPEC, has_time=True))
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(4, 3)).astype(np.float32)
    noise = {"a": rng.normal(size=(4, 2)).astype(np.float32), "b": rng.normal(size=(4, 1, 2)).astype(np.float32)}
    got = integrate(network, variables, SPEC, jnp.asarray(obs), jax.tree.map(jnp.asarray, noise), 3)
    params = jax.tree.map(np.float64, variables.params)
    hidden, head = params["actor"]["dense"]["layers"][0], params["policy"]["linear"]
    a, b = np.float64(noise["a"]), np.float64(noise["b"])
    for k in range(3):
        row = np.concatenate([obs, a, b.reshape(4, 2), np.full((4, 1), k / 3)], axis=1)
        v = np.maximum(row @ hidden["kernel"] + hidden["bias"], 0) @ head["kernel"] + head["bias"]
        a, b = a + v[:, :2] / 3, b + v[:, 2:].reshape(4, 1, 2) / 3
    np.testing.assert_allclose(got["a"], a, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["b"], b, rtol=1e-5, atol=1e-6)
