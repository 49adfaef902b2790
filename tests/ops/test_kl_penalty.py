"""The KL penalty's coefficient and the cutoff, by numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.ops.distributions import Categorical
from polyak.ops.kl_penalty import LARGEST_BETA, SMALLEST_BETA, adapted_beta, kl_cutoff

LIMIT = {"factor": 2.0, "target": 0.01, "coef": 1000.0}


def test_the_published_divergence_and_its_cutoff():
    old, new = (Categorical(jnp.log(jnp.array(p))) for p in ((0.4, 0.2, 0.4), (0.3, 0.4, 0.3)))
    kl = old.kl_divergence(new)
    assert float(kl) == pytest.approx(0.09151624, abs=1e-7)
    assert float(kl_cutoff(kl, **LIMIT)) == pytest.approx(1000 * (0.09151624 - 0.02) ** 2, rel=1e-5)


@pytest.mark.parametrize(("kl", "value", "slope"), [(0.0, 0.0, 0.0), (0.02, 0.0, 0.0), (0.03, 0.1, 20.0), (0.12, 10.0, 200.0)])
def test_the_cutoff_is_a_square_beyond_its_limit(kl, value, slope):
    assert float(kl_cutoff(jnp.float32(kl), **LIMIT)) == pytest.approx(value, abs=1e-6)
    assert float(jax.grad(lambda x: kl_cutoff(x, **LIMIT))(jnp.float32(kl))) == pytest.approx(slope, abs=1e-4)


@pytest.mark.parametrize(
    ("beta", "kl", "after"),
    [
        (1.0, 0.016, 1.5),
        (1.0, 0.0149, 1.0),
        (1.0, 0.01, 1.0),
        (1.0, 0.0051, 1.0),
        (1.0, 0.004, 1 / 1.5),
        (3.0, 0.0, 2.0),
        (LARGEST_BETA, 1.0, LARGEST_BETA),
        (SMALLEST_BETA, 0.0, SMALLEST_BETA),
        (2.0, np.nan, 2.0),
        (2.0, np.inf, 2.0),
    ],
)
def test_beta_moves_by_a_half_outside_the_tolerance_and_stays_bounded(beta, kl, after):
    moved = adapted_beta(jnp.float32(beta), jnp.float32(kl), target=0.01, tolerance=0.5)
    assert float(moved) == pytest.approx(after, rel=1e-6)


def test_beta_comes_back_from_its_bounds():
    assert float(adapted_beta(jnp.float32(LARGEST_BETA), jnp.float32(0), target=0.01, tolerance=0.5)) < LARGEST_BETA
    assert float(adapted_beta(jnp.float32(SMALLEST_BETA), jnp.float32(1), target=0.01, tolerance=0.5)) > SMALLEST_BETA
