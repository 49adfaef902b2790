"""Normalisation over a tree of spaces."""

import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from polyak.ops.normalize import ObsNormalizer
from tests.agents.rollouts import sample

SPACE = Dict({
    "x": Box([-1.0, -1.0], [1.0, 1.0]),
    "pixels": Box(0, 255, (2, 2), np.uint8),
    "pair": Tuple((Discrete(3), MultiBinary((2,)), Box(-np.ones((2, 3)), np.ones((2, 3))))),
})  # fmt: skip


def test_float_parts_are_normalised_and_all_others_pass_as_they_are():
    obs = sample(SPACE, np.random.default_rng(0), (50,))
    normalizer = ObsNormalizer.init(SPACE).update(obs, jnp.ones(50))
    out = normalizer.normalize(obs)
    for x, y in ((obs["x"], out["x"]), (obs["pair"][2], out["pair"][2])):
        np.testing.assert_allclose(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-8), atol=1e-5)
    assert out["pixels"] is obs["pixels"] and out["pair"][0] is obs["pair"][0] and out["pair"][1] is obs["pair"][1]


def test_rows_without_weight_do_not_count_and_two_halves_make_a_whole():
    obs = sample(SPACE, np.random.default_rng(1), (4, 6))
    weight = np.random.default_rng(2).integers(0, 2, (4, 6)).astype(np.float32)
    whole = ObsNormalizer.init(SPACE).update(obs, weight)
    half = ObsNormalizer.init(SPACE)
    for rows in (slice(0, 2), slice(2, 4)):
        part = {"x": obs["x"][rows], "pixels": obs["pixels"][rows], "pair": tuple(x[rows] for x in obs["pair"])}
        half = half.update(part, weight[rows])
    counted = obs["x"][weight > 0]
    np.testing.assert_allclose(whole.stats["x"].mean, counted.mean(0), atol=1e-6)
    np.testing.assert_allclose(half.stats["x"].mean, whole.stats["x"].mean, atol=1e-6)
    np.testing.assert_allclose(half.stats["x"].variance, whole.stats["x"].variance, rtol=1e-5)


def test_a_new_normalizer_only_clips():
    normalizer = ObsNormalizer.init(SPACE.spaces["x"])
    out = normalizer.normalize(np.array([[0.5, 1e9], [-2.0, -1e9]], np.float32))
    np.testing.assert_allclose(out, [[0.5, 10.0], [-2.0, -10.0]], rtol=1e-6)
