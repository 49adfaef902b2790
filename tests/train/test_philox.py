"""Philox keys: JAX's own numbers, and the same ones whatever they are mapped with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.train.philox import philox_key

WORDS = jax.random.bits(jax.random.key(0), (5, 4), jnp.uint32)
DRAWS = {
    "uniform": lambda key: jax.random.uniform(key, (3,)),
    "normal": lambda key: jax.random.normal(key, (2, 3)),
    "integers": lambda key: jax.random.randint(key, (4,), 0, 10),
    "bits of a byte": lambda key: jax.random.bits(key, (4,), jnp.uint8),
    "of a split key": lambda key: jax.random.normal(jax.random.split(key)[1], (2,)),
    "of a folded key": lambda key: jax.random.uniform(jax.random.fold_in(key, 7), (2,)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_they_draw_jaxs_numbers_and_under_vmap_the_same_as_alone(draw):
    alone = [jax.jit(lambda words: draw(philox_key(words)))(words) for words in WORDS]
    for words, got in zip(WORDS, alone, strict=True):
        assert np.array_equal(got, draw(jax.random.wrap_key_data(words, impl="rbg")))
    mapped = jax.jit(jax.vmap(lambda words: draw(philox_key(words))))(WORDS)
    assert np.array_equal(mapped, np.stack(alone))
    assert len(np.unique(np.asarray(mapped), axis=0)) == 5
