"""The cross-entropy method against a slow version in NumPy, and on functions whose maximum is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.ops.cross_entropy_method import CEMSettings, cem_maximum

K, N, B = 3, 16, 5


def slow_cem(score, noise, *, num_elites, initial_std, min_std, action):
    """One row at a time: `score(x, row)` of one action; noise `[K, N, D]`."""
    best = []
    for row in range(noise.shape[2]):
        mean, std = np.zeros(noise.shape[3]), np.full(noise.shape[3], initial_std)
        for draws in noise[:, :, row]:
            samples = [np.clip(mean + np.maximum(std, min_std) * z, -1, 1) for z in draws]
            elites = np.array(sorted(samples, key=lambda x: -score(x, row))[:num_elites])
            mean, std = elites.mean(0), np.sqrt(((elites - elites.mean(0)) ** 2).mean(0))
        best.append(elites[0] if action == "best" else mean)
    return np.array(best)


@pytest.mark.parametrize("action", ["best", "mean"])
def test_actions_equal_those_of_a_slow_version(action):
    rng = np.random.default_rng(0)
    noise, weight = rng.normal(size=(K, N, B, 2)), rng.normal(size=(B, 2)) * 4
    noise, weight = noise.astype(np.float32), weight.astype(np.float32)
    score = lambda x, row: np.sin(x @ weight[row]) - (x**2).sum()  # noqa: E731
    options = {"num_elites": 4, "initial_std": 0.7, "min_std": 0.05}
    settings = CEMSettings(num_samples=N, num_iterations=K, cem_action=action, **options)
    fast = lambda x: jnp.sin(jnp.sum(x * weight[None], axis=2)) - jnp.sum(x**2, axis=2)  # noqa: E731
    found = cem_maximum(fast, jnp.asarray(noise, jnp.float32), settings)
    np.testing.assert_allclose(found, slow_cem(score, noise, action=action, **options), rtol=1e-5, atol=1e-6)


def test_the_maximum_of_a_quadratic_is_found_in_a_tree_of_actions():
    peak = {"a": jnp.array([[0.3], [-0.8]]), "b": jnp.array([[[0.5, 0.1]], [[-0.2, 2.0]]])}  # the last beyond the bounds
    keys = jax.random.split(jax.random.key(0), 2)
    noise = {
        name: jax.random.normal(key, (8, 64, *x.shape), jnp.float32) for (name, x), key in zip(peak.items(), keys, strict=True)
    }

    def score(action):
        squares = jax.tree.map(lambda x, p: jnp.square(x - p[None]).reshape(*x.shape[:2], -1).sum(2), action, peak)
        return -sum(squares.values())

    found = cem_maximum(score, noise, CEMSettings(num_iterations=8, num_elites=8))
    for name, x in peak.items():
        np.testing.assert_allclose(found[name], np.clip(x, -1, 1), atol=0.03)


def test_equal_and_nan_scores_are_ranked():
    noise = jnp.asarray(np.linspace(-0.5, 0.5, 4, dtype=np.float32)).reshape(1, 4, 1, 1)
    settings = CEMSettings(num_samples=4, num_elites=2, num_iterations=1, cem_action="mean")
    equal = cem_maximum(lambda x: jnp.zeros(x.shape[:2]), noise, settings)
    np.testing.assert_allclose(equal, noise[0, :2].mean(0), atol=1e-7)  # the first ones
    nan = cem_maximum(lambda x: jnp.where(x[..., 0] < 0, jnp.nan, -x[..., 0]), noise, settings)
    np.testing.assert_allclose(nan, noise[0, 2:].mean(0), atol=1e-7)


def test_more_elites_than_samples_are_rejected():
    with pytest.raises(ValueError, match="CEMSettings: num_elites must be at most num_samples=4, got 6"):
        CEMSettings(num_samples=4).check_cem()
