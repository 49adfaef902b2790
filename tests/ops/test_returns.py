import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.ops.returns import (
    advantages_and_targets,
    discounted_returns,
    gae,
    lambda_returns,
    running_return,
    running_return_step,
    vtrace,
)

jit_gae, jit_lambda, jit_discounted = (jax.jit(f) for f in (gae, lambda_returns, discounted_returns))
jit_both = jax.jit(advantages_and_targets, static_argnames=("advantages", "value_targets"))
jit_vtrace = jax.jit(vtrace)
jit_so_far, jit_on = jax.jit(running_return), jax.jit(running_return_step)


def slow_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """The sum of the definition, term by term, in float64."""
    reward, value, next_value = (np.asarray(x, np.float64) for x in (reward, value, next_value))
    advantage = np.zeros_like(reward)
    for t, *b in np.ndindex(reward.shape):
        for k in range(len(reward) - t):
            row = (t + k, *b)
            bootstrap = 0.0 if terminated[row] else gamma * next_value[row]
            advantage[(t, *b)] += (gamma * gae_lambda) ** k * (reward[row] + bootstrap - value[row])
            if terminated[row] or truncated[row]:
                break
    return advantage


def slow_n_step(reward, next_value, terminated, truncated, gamma, n):
    """n rewards, then a value, in float64."""
    reward, next_value = (np.asarray(x, np.float64) for x in (reward, next_value))
    returns = np.zeros_like(reward)
    for t, *b in np.ndindex(reward.shape):
        for k in range(n):
            row = (t + k, *b)
            returns[(t, *b)] += gamma**k * reward[row]
            ends = terminated[row] or truncated[row] or t + k == len(reward) - 1 or k == n - 1
            if ends:
                returns[(t, *b)] += 0.0 if terminated[row] else gamma ** (k + 1) * next_value[row]
                break
    return returns


def slow_vtrace(log_rho, reward, value, next_value, terminated, truncated, gamma, gae_lambda, rho_clip, c_clip, sign=-1.0):
    """The sums of the definition, term by term, in float64; with a sign of 1, of absolute values."""
    log_rho, reward, value, next_value = (np.asarray(x, np.float64) for x in (log_rho, reward, value, next_value))
    rho, last, num_steps = np.exp(log_rho), terminated | truncated, len(reward)
    bootstrap = np.where(terminated, 0.0, next_value)
    delta = np.minimum(rho_clip, rho) * (reward + gamma * bootstrap + sign * value)
    target, advantage = value.copy(), np.zeros_like(reward)
    for t, *b in np.ndindex(reward.shape):
        for k in range(t, num_steps):
            between = [(i, *b) for i in range(t, k)]
            if any(last[row] for row in between):
                break
            traces = np.prod([gae_lambda * min(c_clip, rho[row]) for row in between])
            target[(t, *b)] += gamma ** (k - t) * traces * delta[(k, *b)]
    for t, *b in np.ndindex(reward.shape):
        row, goes_on = (t, *b), t + 1 < num_steps and not last[(t, *b)]
        after = target[(t + 1, *b)] - value[(t + 1, *b)] + next_value[row] if goes_on else bootstrap[row]
        advantage[row] = min(rho_clip, rho[row]) * (reward[row] + gamma * after + sign * value[row])
    return target, advantage


def rows(seed, num_steps, ends=0.3, scale=1.0):
    """reward, value, next_value (unrelated numbers) and the two flags, which may both be set."""
    rng = np.random.default_rng(seed)
    numbers = [(scale * rng.normal(size=(num_steps, 3))).astype(np.float32) for _ in range(3)]
    flags = [rng.random((num_steps, 3)) < ends for _ in range(2)]
    return *numbers, *flags


def assert_close(got, wanted, scale):
    """Within 1e-6 of the sum of the absolute values of the terms, which is what float32 can promise."""
    np.testing.assert_array_less(np.abs(np.asarray(got, np.float64) - wanted), 1e-6 * scale + 1e-30)


discount = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
length = st.sampled_from([0, 1, 2, 9])
density = st.sampled_from([0.0, 0.3, 1.0])
seeds = st.integers(0, 2**31)


@settings(max_examples=80, deadline=None)
@given(seeds, length, density, discount, discount)
def test_gae_is_the_sum_of_its_definition(seed, num_steps, ends, gamma, gae_lambda):
    reward, value, next_value, terminated, truncated = rows(seed, num_steps, ends)
    got = jit_gae(
        reward,
        value,
        next_value,
        terminated,
        truncated,
        gamma=np.float32(gamma),
        gae_lambda=np.float32(gae_lambda),
    )
    gamma, gae_lambda = np.float64(np.float32(gamma)), np.float64(np.float32(gae_lambda))
    wanted = slow_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda)
    scale = slow_gae(abs(reward), -abs(value), abs(next_value), terminated, truncated, gamma, gae_lambda)
    assert_close(got, wanted, scale)


@settings(max_examples=60, deadline=None)
@given(seeds, length, density, discount, discount)
def test_lambda_returns_are_gae_plus_value(seed, num_steps, ends, gamma, gae_lambda):
    reward, value, next_value, terminated, truncated = rows(seed, num_steps, ends)
    # The two are the same where the next value is the value of the next row.
    next_value[:-1] = np.where(terminated | truncated, next_value, np.roll(value, -1, axis=0))[:-1]
    got = jit_lambda(reward, next_value, terminated, truncated, gamma=np.float32(gamma), gae_lambda=np.float32(gae_lambda))
    gamma, gae_lambda = np.float64(np.float32(gamma)), np.float64(np.float32(gae_lambda))
    wanted = slow_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda) + value
    scale = slow_gae(abs(reward), -abs(value), abs(next_value), terminated, truncated, gamma, gae_lambda) + abs(value)
    assert_close(got, wanted, scale)


@settings(max_examples=40, deadline=None)
@given(seeds, length, density, discount)
def test_discounted_returns_are_n_step_returns_without_end(seed, num_steps, ends, gamma):
    reward, _, next_value, terminated, truncated = rows(seed, num_steps, ends)
    got = jit_discounted(reward, next_value, terminated, truncated, gamma=np.float32(gamma))
    wanted = slow_n_step(reward, next_value, terminated, truncated, np.float64(np.float32(gamma)), max(num_steps, 1))
    scale = slow_n_step(abs(reward), abs(next_value), terminated, truncated, gamma, max(num_steps, 1))
    assert_close(got, wanted, scale)


clip = st.sampled_from([0.5, 1.0, 3.0])


@settings(max_examples=80, deadline=None)
@given(seeds, length, density, discount, discount, clip, clip, st.sampled_from([0.0, 1.0, 30.0]))
def test_vtrace_is_the_sum_of_its_definition(seed, num_steps, ends, gamma, gae_lambda, rho_clip, c_clip, spread):
    reward, value, next_value, *flags = rows(seed, num_steps, ends)
    log_rho = (spread * np.random.default_rng(seed).normal(size=reward.shape)).astype(np.float32)
    numbers = {"gamma": gamma, "gae_lambda": gae_lambda, "rho_clip": rho_clip, "c_clip": c_clip}
    numbers = {name: np.float32(x) for name, x in numbers.items()}
    got = jit_vtrace(log_rho, reward, value, next_value, *flags, **numbers)
    numbers = {name: np.float64(x) for name, x in numbers.items()}
    wanted = slow_vtrace(log_rho, reward, value, next_value, *flags, **numbers)
    scales = slow_vtrace(log_rho, abs(reward), abs(value), abs(next_value), *flags, **numbers, sign=1.0)
    for one, other, scale in zip(got, wanted, scales, strict=True):
        assert_close(one, other, scale + 1.0)


@settings(max_examples=40, deadline=None)
@given(seeds, length, density, discount, discount)
def test_vtrace_of_one_policy_is_gae(seed, num_steps, ends, gamma, gae_lambda):
    reward, value, next_value, *flags = rows(seed, num_steps, ends)
    numbers = {"gamma": np.float32(gamma), "gae_lambda": np.float32(gae_lambda)}
    target, advantage = jit_vtrace(np.zeros_like(reward), reward, value, next_value, *flags, **numbers)
    np.testing.assert_allclose(target, jit_gae(reward, value, next_value, *flags, **numbers) + value, atol=5e-6)
    if gae_lambda == 1.0:
        np.testing.assert_allclose(advantage, target - value, atol=5e-6)


def test_closed_numbers_of_vtrace():
    """Three steps, ρ = 2, ½, 1 with bounds 1: the middle one is cut, the last has its whole weight."""
    no = jnp.zeros(3, bool)
    log_rho, value = jnp.log(jnp.array([2.0, 0.5, 1.0])), jnp.array([1.0, 2.0, 4.0, 8.0])
    target, advantage = jit_vtrace(log_rho, jnp.ones(3), value[:-1], value[1:], no, no, gamma=0.5, gae_lambda=1.0)
    # δ = 1 (1 + 1 - 1), ½ (1 + 2 - 2), 1 (1 + 4 - 4); a₂ = 1, a₁ = ½ + ½ ½ 1, a₀ = 1 + ½ 1 ¾.
    np.testing.assert_allclose(target, [2.375, 2.75, 5.0], rtol=1e-6)
    np.testing.assert_allclose(advantage, [1.375, 0.75, 1.0], rtol=1e-6)
    target, advantage = jit_vtrace(
        log_rho, jnp.ones(3), value[:-1], value[1:], no, no, gamma=0.5, gae_lambda=1.0, rho_clip=2.0, c_clip=2.0
    )
    # δ₀ = 2, a₀ = 2 + ½ 2 ¾; A₀ = 2 (1 + ½ 2¾ - 1).
    np.testing.assert_allclose(target, [3.75, 2.75, 5.0], rtol=1e-6)
    np.testing.assert_allclose(advantage, [2.75, 0.75, 1.0], rtol=1e-6)


def test_rows_that_only_reset_reach_no_result_of_vtrace():
    reward, value, next_value, terminated, truncated = rows(3, 9, ends=0.0)
    terminated[3, 0] = truncated[5, 1] = True
    masked = np.zeros_like(terminated)
    masked[4, 0] = masked[6, 1] = True
    # The value after a terminal step does not count either.
    next_value = np.where(terminated, np.nan, next_value)
    before = jit_vtrace(value, reward, value, next_value, terminated, truncated, gamma=0.9, gae_lambda=0.9)
    bad = [np.where(masked, np.nan, x) for x in (value, reward, value, next_value)]
    after = jit_vtrace(*bad, terminated, truncated, gamma=0.9, gae_lambda=0.9)
    for one, other in zip(before, after, strict=True):
        assert np.isfinite(np.asarray(one)).all()
        np.testing.assert_array_equal(np.asarray(one)[~masked], np.asarray(other)[~masked])


def test_published_numbers_of_gae():
    no = jnp.zeros(3, bool)
    value = jnp.array([0.5, 1.0, -1.0, 3.0])
    got = jit_gae(jnp.array([1.0, 0.0, 2.0]), value[:-1], value[1:], no, no, gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(got, [2.98688, 2.204, 5.7], rtol=1e-6)
    value = jnp.array([1.0, 2.0, 3.0, 40.0])
    got = jit_gae(jnp.ones(3), value[:-1], value[1:], no, no, gamma=0.9, gae_lambda=0.95)
    np.testing.assert_allclose(got, [28.108345, 30.769997, 34.0], rtol=1e-6)


def test_terminated_and_truncated_differ_by_the_discounted_value_of_the_final_obs():
    reward, value, next_value = (jnp.array(x, jnp.float32) for x in ([1, 2, 3], [4, 5, 6], [7, 8, 9]))
    no, end = jnp.zeros(3, bool), jnp.array([False, True, False])
    gamma = 0.5
    cut = jit_gae(reward, value, next_value, no, end, gamma=gamma, gae_lambda=1.0)
    over = jit_gae(reward, value, next_value, end, no, gamma=gamma, gae_lambda=1.0)
    np.testing.assert_array_equal(cut - over, [gamma * gamma * 8, gamma * 8, 0])
    both = jit_gae(reward, value, next_value, end, end, gamma=gamma, gae_lambda=1.0)
    np.testing.assert_array_equal(both, over)


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_steps_that_each_end_an_episode_are_independent(flag):
    reward, value, next_value, *_ = rows(0, 5)
    flags = {"terminated": np.zeros((5, 3), bool), "truncated": np.zeros((5, 3), bool)} | {flag: np.ones((5, 3), bool)}
    got = jit_gae(reward, value, next_value, **flags, gamma=0.9, gae_lambda=0.9)
    bootstrap = 0.9 * next_value if flag == "truncated" else 0.0
    np.testing.assert_allclose(got, reward + bootstrap - value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("junk", [1e9, np.nan, np.inf])
def test_values_of_reset_steps_do_not_affect_other_steps(junk):
    reward, value, next_value, terminated, truncated = rows(3, 12, ends=0.15)
    terminated[-1] = truncated[-1] = False
    last = terminated | truncated
    # Next-step autoreset: the row after a last one only resets, and ends no episode.
    for t in range(1, 12):
        terminated[t] &= ~last[t - 1]
        truncated[t] &= ~last[t - 1]
        last = terminated | truncated
    hidden = np.concatenate([np.zeros((1, 3), bool), last[:-1]])
    assert hidden.any() and terminated.any() and (truncated & ~terminated).any()
    junk = np.float32(junk)
    junk_rows = (np.where(h, junk, x) for h, x in ((hidden, reward), (hidden, value), (hidden | terminated, next_value)))

    @jax.jit
    def all_of(reward, value, next_value):
        flags = {"terminated": jnp.asarray(terminated), "truncated": jnp.asarray(truncated), "gamma": 0.9}
        return [
            gae(reward, value, next_value, **flags, gae_lambda=0.8),
            lambda_returns(reward, next_value, **flags, gae_lambda=0.8),
            discounted_returns(reward, next_value, **flags),
        ]

    for clean, dirty in zip(all_of(reward, value, next_value), all_of(*junk_rows), strict=True):
        np.testing.assert_array_equal(np.asarray(clean)[~hidden], np.asarray(dirty)[~hidden])


def test_gradients_stay_clear_of_hidden_rows():
    last, hidden = jnp.array([False, True, False, False]), np.array([False, False, True, False])
    no = jnp.zeros(4, bool)
    value = jnp.asarray(np.where(hidden, np.float32(np.nan), np.arange(4, dtype=np.float32)))

    def total(reward):
        return jnp.sum(jnp.where(hidden, 0.0, gae(reward, value, value + 1, last, no, gamma=0.5, gae_lambda=1.0)))

    np.testing.assert_array_equal(
        jax.jit(jax.grad(total))(np.where(hidden, np.float32(np.nan), np.float32(1))), [1.0, 1.5, 0.0, 1.0]
    )


def test_one_compiled_function_serves_every_gamma_and_vmap_maps_over_it():
    reward, value, next_value, terminated, truncated = (jnp.asarray(x) for x in rows(1, 4))
    gammas = jnp.array([0.0, 0.5, 1.0])
    f = functools.partial(jit_gae, reward, value, next_value, terminated, truncated)
    together = jax.vmap(lambda gamma: f(gamma=gamma, gae_lambda=0.9))(gammas)
    for gamma, got in zip(np.asarray(gammas), together, strict=True):
        np.testing.assert_allclose(got, f(gamma=gamma, gae_lambda=0.9), rtol=1e-6, atol=1e-6)


# What an agent learns from: rewards 1, 2, 4, the end after the second, values 0.5, 1, 2 and 8 after the last.
LEARNED_FROM = {
    # GAE with γ = 0.5, λ = 0.5, and by Monte Carlo: 4 + 0.5 · 8 = 8 is the last return, 2 the one before it.
    "terminated": {"gae": [1.25, 1.0, 6.0], "td_lambda": [1.75, 2.0, 8.0], "monte_carlo": [2.0, 2.0, 8.0]},
    # The second step's next value, 3, still counts: its return is 2 + 1.5.
    "truncated": {"gae": [1.625, 2.5, 6.0], "td_lambda": [2.125, 3.5, 8.0], "monte_carlo": [2.75, 3.5, 8.0]},
}


@pytest.mark.parametrize("end", LEARNED_FROM)
@pytest.mark.parametrize("advantages", ["gae", "monte_carlo"])
@pytest.mark.parametrize("value_targets", ["td_lambda", "monte_carlo"])
def test_advantages_and_value_targets_by_hand(end, advantages, value_targets):
    no, yes = jnp.zeros(3, bool), jnp.array([False, True, False])
    flags = {"terminated": no, "truncated": no} | {end: yes}
    reward, value, next_value = (jnp.array(x) for x in ([1.0, 2.0, 4.0], [0.5, 1.0, 2.0], [1.0, 3.0, 8.0]))
    settings = {"gamma": 0.5, "gae_lambda": 0.5, "advantages": advantages, "value_targets": value_targets}
    got, goal = jit_both(reward, value, next_value, **flags, **settings)
    wanted = LEARNED_FROM[end]
    np.testing.assert_allclose(got, wanted["gae"] if advantages == "gae" else np.array(wanted["monte_carlo"]) - value)
    np.testing.assert_allclose(goal, wanted[value_targets])


@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_running_return_by_hand_with_a_non_finite_reward_as_zero(junk):
    reward = jnp.array([[1.0, 1.0], [2.0, 2.0], [9.0, junk], [3.0, 3.0]])
    first = jnp.array([[False, True], [False, False], [True, False], [False, False]])
    got = jit_so_far(reward, first, jnp.array([10.0, 10.0]), gamma=0.5)
    np.testing.assert_array_equal(got, [[6.0, 0.0], [5.0, 2.0], [0.0, 1.0], [3.0, 3.5]])


def test_one_time_step_after_another_is_all_of_them():
    reward, _, _, first, _ = rows(4, 6)
    carry, steps = jnp.arange(3.0), []
    for t in range(6):
        carry = jit_on(reward[t], first[t], carry, gamma=0.9)
        steps.append(carry)
    np.testing.assert_allclose(jit_so_far(reward, first, jnp.arange(3.0), gamma=0.9), np.stack(steps), rtol=1e-6)
