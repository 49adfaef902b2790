"""Exploration by the noise of a stochastic policy, held for some steps, as in FlashSAC."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, PRNGKeyArray, UInt32

from polyak.core.checks import check_integer
from polyak.core.struct import static, struct
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.ops.distributions import Distribution
from polyak.policies.network_policy import NetworkPolicy
from polyak.policies.wrapper import PolicyWrapper

EXPONENT = 2.0
"""μ of the authors' code."""


@struct
class NoiseCarry:
    """The noise of each environment.

    Attributes:
        seed: the seed of ε.
        steps: steps for which it is still held; 0 before the first.
    """

    seed: UInt32[Array, " B"]
    steps: Int32[Array, " B"]


@struct
class RepeatedNoise(PolicyWrapper):
    """Samples of a network's distribution whose noise ε is the same for k steps, for each environment.

        a_t = tanh(μ(s_t) + σ(s_t) ε),    ε ~ N(0, 1) and P(k) ∝ k⁻², k = 1 ... max_repeats, drawn anew after k steps

    So actions are correlated in time, and the distribution of a single action is the network's, which `distribution` returns.
    The end of an episode draws nothing. Samples of other distributions are repeated alike, by the seed of their random numbers.

    Attributes:
        policy: policy of a network without recurrent state.
        max_repeats: the largest k; 1 draws each sample independently.

    Raises:
        TypeError, ValueError: `max_repeats` is no integer of at least 1.

    Source: Kim et al. 2026, arXiv:2604.04539. In the authors' code all environments have one k.
    """

    policy: NetworkPolicy
    max_repeats: int = static(default=16)

    def __post_init__(self) -> None:
        check_integer("RepeatedNoise", "max_repeats", self.max_repeats)

    def initial_state(self, batch_size: int) -> NoiseCarry:
        """No noise yet."""
        return NoiseCarry(jnp.zeros(batch_size, jnp.uint32), jnp.zeros(batch_size, jnp.int32))

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The distribution of the action over all draws of ε."""
        distribution, _ = self.policy.distribution(time_step)
        return distribution, carry

    def action(self, time_step: TimeStep, carry: NoiseCarry, key: PRNGKeyArray) -> PolicyStep:
        """The sample with the noise of each environment."""
        seed_key, steps_key = jax.random.split(key)
        is_drawn, shape = carry.steps == 0, carry.steps.shape
        log_weights = -EXPONENT * jnp.log(jnp.arange(1, self.max_repeats + 1, dtype=jnp.float32))
        repeats = 1 + jax.random.categorical(steps_key, log_weights, shape=shape).astype(jnp.int32)
        seed = jnp.where(is_drawn, jax.random.bits(seed_key, shape, jnp.uint32), carry.seed)
        steps = jnp.where(is_drawn, repeats, carry.steps) - 1
        distribution, _ = self.policy.distribution(time_step)
        # With other generators, a row's draw depends on the other rows.
        sample = jax.vmap(lambda row, seed: row.sample(seed=jax.random.key(seed, impl="threefry2x32")))
        return PolicyStep(sample(distribution, seed), NoiseCarry(seed, steps))


def repeat_noise(policy: NetworkPolicy, max_repeats: int | None) -> NetworkPolicy | RepeatedNoise:
    """Repeat the noise of a policy's samples; None for `max_repeats` returns the policy itself."""
    return policy if max_repeats is None else RepeatedNoise(policy, max_repeats)
