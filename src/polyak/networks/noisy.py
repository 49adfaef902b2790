"""Noisy linear layers, whose weights have learned noise: exploration by a network (Fortunato et al. 2018)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.kernels.matmul import matmul
from polyak.networks.initializers import constant, uniform

INITIAL_STD = 0.5


class NoisyLayer(nnx.Module):
    """A linear layer with factorized Gaussian noise.

        y = (μ + σ ∘ f(ε_in) f(ε_out)ᵀ) x + μ_b + σ_b ∘ f(ε_out),    f(ε) = sign(ε) √|ε|

    Each row has its own noise. Without a key, σ counts as 0.

    Source: Fortunato et al. 2018, arXiv:1706.10295, eqs. 9 to 11.
    """

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        mean, std = uniform(inputs**-0.5), constant(INITIAL_STD * inputs**-0.5)
        self.kernel = nnx.Param(mean(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(mean(rngs.params(), (outputs,), jnp.float32))
        self.kernel_std = nnx.Param(std(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias_std = nnx.Param(std(rngs.params(), (outputs,), jnp.float32))

    def __call__(self, x: Float[Array, "rows inputs"], key: PRNGKeyArray | None) -> Float[Array, "rows outputs"]:
        """Y of each row."""
        mean = matmul(x, self.kernel[...]) + self.bias[...][None]
        if key is None:
            return mean
        keys = jax.random.split(key)
        noise_in, noise_out = (_noise(key, (len(x), width)) for key, width in zip(keys, self.kernel.shape, strict=True))
        # (σ ∘ f_in f_outᵀ) x = f_out ∘ (σ (f_in ∘ x)): no matrix of noise for each row.
        return mean + noise_out * (matmul(noise_in * x, self.kernel_std[...]) + self.bias_std[...][None])


def split_key(key: PRNGKeyArray | None, count: int) -> list[PRNGKeyArray | None]:
    """Keys of `count` layers; None for each without a key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def _noise(key: PRNGKeyArray, shape: tuple[int, int]) -> Float[Array, "rows width"]:
    noise = jax.random.normal(key, shape, jnp.float32)
    return jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
