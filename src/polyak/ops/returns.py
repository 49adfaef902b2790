"""Returns and advantages of time-major rewards: discounted, λ-returns, generalized advantages, V-trace.

All functions distinguish `terminated` and `truncated`. `terminated`: the next state has value 0. `truncated`: the next state
has its value, but the sum ends there. The end of the arrays is treated as a truncation.

Rows that start from a `last` time step (the resets of next-step autoreset) are not transitions. Callers give them weight 0,
and their values, even NaN, do not affect other rows: sums are cut by `where`, not by a factor, since 0 · NaN = NaN. For the
same reason the next value of a terminated row is ignored.
"""

# The linter reads the shape "T *B" as a product of two names. mypy looks for undefined names as well, and knows better.
# ruff: noqa: F821

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from polyak.core.types import Scalar


def discounted_returns(
    reward: Float[Array, "T *B"],
    next_value: Float[Array, "T *B"],
    terminated: Bool[Array, "T *B"],
    truncated: Bool[Array, "T *B"],
    *,
    gamma: Scalar,
) -> Float[Array, "T *B"]:
    """The discounted sum of rewards to the end of the episode, G_t = Σ_k γ^k r_{t+k}.

        G_t = r_t + γ · { 0               if terminated_t
                        { V(s_{t+1})      if truncated_t, or t is the last row
                        { G_{t+1}         else

    Args:
        reward: r_t, in the environment's units.
        next_value: V of the observation on which the step ended; zeros for the sum of the received rewards only.
        terminated: the step reached a terminal state.
        truncated: the episode was cut short (time limit).
        gamma: discount per step, in [0, 1].

    Source: Sutton and Barto 2018, eq. 3.9.

    >>> ones, no = jnp.ones(3), jnp.zeros(3, bool)
    >>> discounted_returns(ones, 0 * ones, no, no, gamma=0.5)
    Array([1.75, 1.5 , 1.  ], dtype=float32)
    """
    last = terminated | truncated
    bootstrap = jnp.where(terminated, 0.0, next_value)

    def step(later: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        reward, bootstrap, last = row
        returns = reward + gamma * jnp.where(last, bootstrap, later)
        return returns, returns

    return jax.lax.scan(step, _bootstrap_value(next_value), (reward, bootstrap, last), reverse=True)[1]


def lambda_returns(
    reward: Float[Array, "T *B"],
    next_value: Float[Array, "T *B"],
    terminated: Bool[Array, "T *B"],
    truncated: Bool[Array, "T *B"],
    *,
    gamma: Scalar,
    gae_lambda: Scalar,
) -> Float[Array, "T *B"]:
    """The λ-return, an average of all n-step returns with weights (1-λ) λ^{n-1}.

        G_t = r_t + γ · { 0                                   if terminated_t
                        { V(s_{t+1})                          if truncated_t, or t is the last row
                        { (1-λ) V(s_{t+1}) + λ G_{t+1}        else

    Equal to `gae(...) + value` where the next value of a row is the value of the row after it.

    Args:
        reward: r_t, in the environment's units.
        next_value: V of the observation on which the step ended.
        terminated: the step reached a terminal state.
        truncated: the episode was cut short (time limit).
        gamma: discount per step, in [0, 1].
        gae_lambda: λ, in [0, 1]; 0 is the one-step return, 1 the discounted return.

    Source: Sutton and Barto 2018, eq. 12.2.

    >>> ones, no = jnp.ones(3), jnp.zeros(3, bool)
    >>> lambda_returns(ones, 8 * ones, no, no, gamma=0.5, gae_lambda=0.5)
    Array([4.0625, 4.25  , 5.    ], dtype=float32)
    """
    last = terminated | truncated
    one_step = reward + gamma * jnp.where(terminated, 0.0, next_value)

    def step(later: Array, row: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        reward, next_value, one_step, last = row
        returns = jnp.where(last, one_step, reward + gamma * ((1.0 - gae_lambda) * next_value + gae_lambda * later))
        return returns, returns

    return jax.lax.scan(step, _bootstrap_value(next_value), (reward, next_value, one_step, last), reverse=True)[1]


def gae(
    reward: Float[Array, "T *B"],
    value: Float[Array, "T *B"],
    next_value: Float[Array, "T *B"],
    terminated: Bool[Array, "T *B"],
    truncated: Bool[Array, "T *B"],
    *,
    gamma: Scalar,
    gae_lambda: Scalar,
) -> Float[Array, "T *B"]:
    """Generalized advantage estimation, A_t = Σ_k (γλ)^k δ_{t+k}.

        δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)
        A_t = δ_t + γλ (1 - last_t) A_{t+1},    last = terminated | truncated,    A_T = 0

    `terminated`: the next state has value 0. `truncated`: the next state has its value, but the sum ends there.

    Args:
        reward: r_t, in the environment's units.
        value: V(s_t), in the same units.
        next_value: V of the observation on which the step ended.
        terminated: the step reached a terminal state.
        truncated: the episode was cut short (time limit).
        gamma: discount per step, in [0, 1].
        gae_lambda: trace decay, in [0, 1]; 0 is the one-step TD error, 1 is Monte Carlo.

    Returns:
        A_t; the value target is `A_t + value`. Gradients flow; apply `jax.lax.stop_gradient` to train on it.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; truncation: Pardo et al. 2018, arXiv:1712.00378.

    >>> ones, no = jnp.ones(3), jnp.zeros(3, bool)
    >>> gae(ones, 0 * ones, 0 * ones, no, no, gamma=1.0, gae_lambda=1.0)
    Array([3., 2., 1.], dtype=float32)
    """
    last = terminated | truncated
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda

    def step(later: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, last = row
        advantage = delta + decay * jnp.where(last, 0.0, later)
        return advantage, advantage

    return jax.lax.scan(step, jnp.zeros(reward.shape[1:], reward.dtype), (delta, last), reverse=True)[1]


def vtrace(
    log_rho: Float[Array, "T *B"],
    reward: Float[Array, "T *B"],
    value: Float[Array, "T *B"],
    next_value: Float[Array, "T *B"],
    terminated: Bool[Array, "T *B"],
    truncated: Bool[Array, "T *B"],
    *,
    gamma: Scalar,
    gae_lambda: Scalar = 1.0,
    rho_clip: Scalar = 1.0,
    c_clip: Scalar = 1.0,
) -> tuple[Float[Array, "T *B"], Float[Array, "T *B"]]:
    """V-trace: value targets v_t and advantages A_t of a policy π, from actions of another policy μ.

        ρ_t = π(a_t|s_t) / μ(a_t|s_t)
        δ_t = min(ρ̄, ρ_t) (r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t))
        v_t - V(s_t) = δ_t + γλ min(c̄, ρ_t) (1 - last_t) (v_{t+1} - V(s_{t+1})),    last = terminated | truncated

        A_t = min(ρ̄, ρ_t) (r_t + γ · { 0               if terminated_t
                                     { V(s_{t+1})      if truncated_t, or t is the last row
                                     { v_{t+1}         else                                     - V(s_t))

    At ρ = 1 the targets are `gae(...) + value`, and at λ = 1 the advantages are `gae(...)`: the n-step return minus the value.

    Args:
        log_rho: log ρ_t, the difference of the two log-probabilities.
        reward: r_t, in the environment's units.
        value: V(s_t), in the same units.
        next_value: V of the observation on which the step ended.
        terminated: the step reached a terminal state.
        truncated: the episode was cut short (time limit).
        gamma: discount per step, in [0, 1].
        gae_lambda: λ, in [0, 1].
        rho_clip: ρ̄; it decides which policy's values are learned: 1 lies between μ and π, infinity is π.
        c_clip: c̄, at most ρ̄; it decides how fast.

    Returns:
        v_t and A_t. Gradients flow; apply `jax.lax.stop_gradient` to train on them.

    Source: Espeholt et al. 2018, arXiv:1802.01561, eq. 1, section 4.2 and remark 2.

    >>> ones, no = jnp.ones(3), jnp.zeros(3, bool)
    >>> vtrace(jnp.log(0.5 * ones), ones, 0 * ones, 0 * ones, no, no, gamma=1.0)
    (Array([0.875, 0.75 , 0.5  ], dtype=float32), Array([0.875, 0.75 , 0.5  ], dtype=float32))
    """
    last, rho = terminated | truncated, jnp.exp(log_rho)
    clipped_rho, decay = jnp.minimum(rho_clip, rho), gamma * gae_lambda * jnp.minimum(c_clip, rho)
    bootstrap = jnp.where(terminated, 0.0, next_value)
    delta = clipped_rho * (reward + gamma * bootstrap - value)

    def step(later: Array, row: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        delta, decay, last = row
        later = jnp.where(last, 0.0, later)
        correction = delta + decay * later
        return correction, (correction, later)

    start = jnp.zeros(reward.shape[1:], reward.dtype)
    _, (correction, next_correction) = jax.lax.scan(step, start, (delta, decay, last), reverse=True)
    return value + correction, clipped_rho * (reward + gamma * (bootstrap + next_correction) - value)


def advantages_and_targets(
    reward: Float[Array, "T *B"],
    value: Float[Array, "T *B"],
    next_value: Float[Array, "T *B"],
    terminated: Bool[Array, "T *B"],
    truncated: Bool[Array, "T *B"],
    *,
    gamma: Scalar,
    gae_lambda: Scalar,
    advantages: Literal["gae", "monte_carlo"] = "gae",
    value_targets: Literal["td_lambda", "monte_carlo"] = "td_lambda",
) -> tuple[Float[Array, "T *B"], Float[Array, "T *B"]]:
    """Advantages and value targets of a policy-gradient agent.

    Args:
        advantages: `gae`, or the discounted return minus the value.
        value_targets: the λ-return `gae + value`, or the discounted return.
    """
    args = (next_value, terminated, truncated)
    gae_advantages = gae(reward, value, *args, gamma=gamma, gae_lambda=gae_lambda)
    returns = discounted_returns(reward, *args, gamma=gamma)
    return (
        gae_advantages if advantages == "gae" else returns - value,
        gae_advantages + value if value_targets == "td_lambda" else returns,
    )


def running_return(
    reward: Float[Array, "T *B"], first: Bool[Array, "T *B"], before: Float[Array, "*B"], *, gamma: Scalar
) -> Float[Array, "T *B"]:
    """The discounted sum of past rewards of the episode, R_t = r_t + γ R_{t-1}, 0 at the first time step.

    Args:
        reward: r_t; NaN and infinity count as 0, since they would stay in the sum until the episode ends.
        first: the time step is the first of an episode.
        before: R before the first time step.
        gamma: discount per step, in [0, 1].

    Source: Engstrom et al. 2020, arXiv:2005.12729, section 3, reward scaling.
    """

    def step(discounted: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        discounted = running_return_step(*row, discounted, gamma=gamma)
        return discounted, discounted

    return jax.lax.scan(step, before, (reward, first))[1]


def running_return_step(
    reward: Float[Array, "*B"], first: Bool[Array, "*B"], before: Float[Array, "*B"], *, gamma: Scalar
) -> Float[Array, "*B"]:
    """One time step of `running_return`."""
    return jnp.where(first, 0.0, jnp.where(jnp.isfinite(reward), reward, 0.0) + gamma * before)


def _bootstrap_value(next_value: Float[Array, "T *B"]) -> Float[Array, "*B"]:
    """V(s_T), the return after the last row, so that the last row ends as if truncated; zeros without rows."""
    return next_value[-1] if len(next_value) else jnp.zeros(next_value.shape[1:], next_value.dtype)
