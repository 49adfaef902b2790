"""The loss of a flow: the error of a velocity (Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import EnvSpec
from polyak.core.types import Network, PyTree, Variables
from polyak.networks.flow import apply_to_noise, sample_noise
from polyak.ops.losses import mean_square


def flow_error(
    network: Network, variables: Variables, spec: EnvSpec, obs: PyTree, action: PyTree, key: PRNGKeyArray
) -> tuple[Float[Array, " B"], PyTree]:
    """The squared error of a velocity against the straight way from noise to the action, and the network's statistics.

        e = |v(s, x_t, t) - (a - x_0)|² / dim A,    x_t = (1 - t) x_0 + t a,    x_0 ~ N(0, I),    t ~ U(0, 1)

    Its minimum over all functions v is the field whose flow takes N(0, I) to the distribution of actions in each state.

    Args:
        action: a, in [-1, 1].
        key: for x_0, t, and dropout.

    Source: Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003.
    """
    noise_key, time_key, dropout_key = jax.random.split(key, 3)
    batch_size = len(jax.tree.leaves(action)[0])
    start, time = sample_noise(spec.action, batch_size, noise_key), jax.random.uniform(time_key, (batch_size, 1), jnp.float32)

    def between(x: Array, a: Array) -> Array:
        t = time.reshape(batch_size, *(1,) * (a.ndim - 1))
        return (1 - t) * x + t * a

    inputs = obs, jax.tree.map(between, start, action), time
    velocity, stats = apply_to_noise(network, variables, spec, inputs, train=True, key=dropout_key)
    return mean_square(velocity, jax.tree.map(jnp.subtract, action, start)), stats
