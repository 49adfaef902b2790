"""Noise on Box actions, and smoothing: step by step against NumPy, and by what is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.spaces import Box, EnvSpec
from polyak.core.types import Policy
from polyak.ops.distributions import Deterministic
from polyak.ops.schedules import Linear
from polyak.policies.exploration import EpsilonGreedy
from polyak.policies.info import with_info
from polyak.policies.network_policy import Greedy
from polyak.policies.noise import ActionSmoothing, GaussianNoise, MixedNoise, OUNoise
from polyak.policies.numpy_policies import numpy_actor
from polyak.policies.scripted import Uniform
from tests.copies.inner import BOX, DISCRETE, RESCALED, TREE, Inner, normal, time_step
from tests.policies.test_network_policy import policy_for

KEY = jax.random.key(7)
LOC = np.array([[0.5, -1.0], [0.95, 0.4], [-3.0, 0.0]], np.float32)
LOW, HIGH = BOX.action.low, BOX.action.high
DRAWS = 4000


def inner(spec=BOX, loc=LOC, **settings):
    params = {"go": normal(loc), "gear": jnp.array([[0.0, 2.0, 1.0]] * 3)} if spec is TREE else normal(loc)
    return Inner(params, spec, **settings)


@jax.jit
def act(policy, now, carry, key):
    return policy.action(now, carry, key)


@jax.jit
def draws(policy, now, carry, keys):
    return jax.vmap(lambda key: policy.action(now, carry, key).action)(keys)


@jax.jit
def distribution_of(policy, now, carry):
    return policy.distribution(now, carry)


log_prob = jax.jit(lambda distribution, action: distribution.log_prob(action))
mode_of = jax.jit(lambda distribution: distribution.mode())


def test_gaussian_noise_is_around_the_clipped_mode_and_within_bounds():
    policy = GaussianNoise(inner(), 0.3)
    assert isinstance(policy, Policy)
    now, carry = time_step(3), policy.initial_state(3)
    drawn = np.asarray(draws(policy, now, carry, jax.random.split(KEY, DRAWS)))
    assert np.all((drawn >= LOW) & (drawn <= HIGH))
    by_numpy = np.clip(np.clip(LOC, LOW, HIGH) + 0.3 * np.random.default_rng(0).normal(size=(40_000, 3, 2)), LOW, HIGH)
    np.testing.assert_allclose(drawn.mean(0), by_numpy.mean(0), atol=0.02)
    np.testing.assert_allclose(drawn.std(0), by_numpy.std(0), atol=0.02)
    distribution, after = distribution_of(policy, now, carry)
    assert np.array_equal(mode_of(distribution), np.clip(LOC, LOW, HIGH)) and np.array_equal(after, [1, 1, 1])
    same = (drawn == LOW).mean(0)[2, 0]
    assert same == pytest.approx(0.5, abs=0.04), "half of what is drawn around a bound lies on it"


def test_each_environment_has_a_scale_of_its_own_until_its_episode_ends():
    low, high, loc = 0.05, 0.2, np.zeros((256, 2), np.float32)
    policy = MixedNoise(Inner(normal(loc), BOX), low, high)
    assert isinstance(policy, Policy)
    begins = time_step(256, first=True)
    _, draw = (step := act(policy, begins, policy.initial_state(256), KEY)).carry
    drawn, (_, after) = distribution_of(policy, time_step(256), step.carry)
    scale = np.asarray(drawn.scale)
    assert np.array_equal(scale[:, 0], scale[:, 1]) and np.array_equal(after.number, draw.number)
    np.testing.assert_allclose(scale[:, 0], low + (high - low) * np.asarray(draw.number), rtol=1e-6)
    np.testing.assert_allclose([scale.min(), scale.mean(), scale.max()], [low, (low + high) / 2, high], atol=0.01)
    actions = np.asarray(draws(policy, time_step(256), step.carry, jax.random.split(KEY, DRAWS)))
    np.testing.assert_allclose(actions.std(0)[:, 0], scale[:, 0], rtol=0.06)
    # Drawn anew only where an episode begins.
    half = np.arange(256) < 128
    _, again = act(policy, time_step(256, first=half), step.carry, jax.random.fold_in(KEY, 1)).carry
    assert np.array_equal(np.asarray(again.number == draw.number), ~half)
    middle, _ = distribution_of(policy, begins, policy.initial_state(256))
    np.testing.assert_allclose(middle.scale, (low + high) / 2, rtol=1e-6)


def test_where_the_environment_rescales_noise_lies_between_minus_one_and_one():
    policy = GaussianNoise(inner(RESCALED), 2.0)
    drawn = draws(policy, time_step(3), policy.initial_state(3), jax.random.split(KEY, 50))
    assert float(drawn.min()) == -1.0 and float(drawn.max()) == 1.0


def test_noise_leaves_discrete_parts_unchanged():
    policy = GaussianNoise(inner(TREE), Linear(1.0, 0.0, 10), 5)
    step = act(policy, time_step(3), policy.initial_state(3), KEY)
    assert np.array_equal(step.action["gear"], [1, 1, 1]) and not np.any(step.action["go"][0] == LOC[0])
    distribution, _ = distribution_of(policy, time_step(3), policy.initial_state(3))
    assert np.array_equal(distribution.parts["go"].scale, np.full((3, 2), 0.5, np.float32))
    assert np.all(np.isfinite(log_prob(distribution, step.action)))
    assert np.array_equal(log_prob(distribution, step.action | {"gear": jnp.array([0, 0, 0])}), [-np.inf] * 3)


@pytest.mark.parametrize(("scale", "value"), [(0.3, 0.3), (Linear(1.0, 0.0, 10), 0.5)])
def test_in_numpy_the_noise_is_scaled_when_it_acts_and_drawn_from_the_key_alone(scale, value, monkeypatch):
    policy = GaussianNoise(policy_for(BOX), scale, 5)
    actor = numpy_actor(policy, 3)
    noise = np.asarray(actor.noise(policy, KEY, 3))
    np.testing.assert_array_equal(noise, jax.random.normal(KEY, (3, 2)))
    if isinstance(scale, float):
        monkeypatch.setattr("polyak.policies.numpy_policies.value_at", None)
    monkeypatch.setattr("polyak.policies.numpy_policies.numpy_mode", lambda *arrays, squash: lambda obs: LOC)
    action = actor.start(policy)(time_step(3), (), noise).action
    assert action.dtype == np.float32
    np.testing.assert_allclose(action, np.clip(np.clip(LOC, LOW, HIGH) + value * noise, LOW, HIGH), rtol=1e-6)


def test_ou_noise_follows_its_recursion_in_each_environment():
    theta, scale = 0.2, 0.4
    policy = OUNoise(inner(), scale, theta)
    carry, slow = policy.initial_state(3), np.zeros((3, 2), np.float32)
    unbroken = []
    for t in range(6):
        first = np.array([t == 0, t in (0, 3), t == 0])
        now = time_step(3, first=first)
        distribution, moved = distribution_of(policy, now, carry)
        faded = (1 - theta) * np.where(first[:, None], 0, slow)
        step = act(policy, now, carry, jax.random.fold_in(KEY, t))
        drawn = np.asarray(jax.random.normal(jax.random.split(jax.random.fold_in(KEY, t), 1)[0], (3, 2)))
        slow = faded + scale * drawn
        np.testing.assert_allclose(step.carry[1], slow, atol=1e-6)
        np.testing.assert_allclose(step.action, np.clip(np.clip(LOC, LOW, HIGH) + slow, LOW, HIGH), atol=1e-6)
        np.testing.assert_allclose(mode_of(distribution), np.clip(np.clip(LOC, LOW, HIGH) + faded, LOW, HIGH), atol=1e-6)
        np.testing.assert_allclose(moved[1], faded, atol=1e-6)
        assert np.array_equal(step.carry[0], moved[0]) and np.all(np.isfinite(log_prob(distribution, step.action)))
        carry = step.carry
        unbroken.append(step.carry[0][0])
    assert unbroken == [1, 2, 3, 4, 5, 6] and int(carry[0][1]) == 3


def test_ou_noise_has_the_variance_and_autocorrelation_of_the_process():
    theta, scale, steps = 0.3, 0.1, 60
    policy = OUNoise(Inner(normal(np.zeros((2000, 2))), BOX), scale, theta)

    @jax.jit
    def walk(carry, keys):
        def step(carry, key):
            carry = policy.action(time_step(2000), carry, key).carry
            return carry, carry[1]

        return jax.lax.scan(step, carry, keys)[1]

    noise = np.asarray(walk(policy.initial_state(2000), jax.random.split(KEY, steps)))
    np.testing.assert_allclose(noise[-1].std(0), scale / np.sqrt(1 - (1 - theta) ** 2), rtol=0.06)
    correlation = (noise[-1] * noise[-4]).mean(0) / (noise[-1].std(0) * noise[-4].std(0))
    np.testing.assert_allclose(correlation, (1 - theta) ** 3, atol=0.07)
    assert abs(np.corrcoef(noise[-1, :-1, 0], noise[-1, 1:, 0])[0, 1]) < 0.08, "environments are independent"


@pytest.mark.parametrize("spec", [BOX, TREE], ids=["box", "tree"])
def test_smoothed_actions_follow_their_recursion(spec):
    share = 0.25
    policy = ActionSmoothing(inner(spec), share)
    carry, slow = policy.initial_state(3), None
    for t in range(4):
        first = np.array([t == 0, t in (0, 2), t == 0])
        key = jax.random.fold_in(KEY, t)
        now = time_step(3, first=first)
        raw = act(policy.policy, now, carry[0], key)
        step = act(policy, now, carry, key)
        boxed, got = (x["go"] if spec is TREE else x for x in (raw.action, step.action))
        slow = boxed if slow is None else np.where(first[:, None], boxed, slow + share * (boxed - slow))
        np.testing.assert_allclose(got, slow, atol=1e-6)
        assert spec is not TREE or np.array_equal(step.action["gear"], raw.action["gear"])
        assert np.array_equal(step.carry[0], raw.carry) and np.array_equal(step.info["steps"], raw.info["steps"])
        carry = step.carry


@pytest.mark.parametrize("squash", [False, True])
def test_distribution_of_a_smoothed_action_matches_its_samples(squash):
    spec = RESCALED if squash else BOX
    policy = ActionSmoothing(inner(spec, squash=squash), 0.5)
    last = jnp.array([[0.2, -0.4], [0.0, 0.0], [1.0, -1.0]])
    now, carry = time_step(3, first=[False, True, False]), (jnp.zeros(3, jnp.int32), last)
    distribution, (_, mode) = distribution_of(policy, now, carry)
    drawn = np.asarray(draws(policy, now, carry, jax.random.split(KEY, DRAWS)))
    share = np.array([[0.5], [1.0], [0.5]], np.float32)
    inside, _ = distribution_of(policy.policy, now, carry[0])
    raw = (drawn[0] - (1 - share) * np.asarray(last)) / share
    wanted = log_prob(inside, jnp.asarray(raw)) - 2 * np.log(share[:, 0])
    np.testing.assert_allclose(log_prob(distribution, jnp.asarray(drawn[0])), wanted, rtol=2e-3)
    np.testing.assert_allclose(mode, mode_of(distribution), rtol=1e-6)


def test_noise_is_smoothed_and_a_greedy_policy_too():
    last = jnp.array([[0.2, -0.4], [0.0, 0.0], [0.9, -1.0]])
    noisy = ActionSmoothing(GaussianNoise(inner(), 0.3), 0.5)
    distribution, _ = noisy.distribution(time_step(3), (jnp.zeros(3, jnp.int32), last))
    np.testing.assert_allclose(distribution.mode(), 0.5 * np.clip(LOC, LOW, HIGH) + 0.5 * last, atol=1e-6)
    np.testing.assert_allclose(distribution.low, 0.5 * LOW + 0.5 * np.asarray(last), atol=1e-6)
    still, _ = ActionSmoothing(Greedy(inner(TREE)), 0.5).distribution(
        time_step(3), (jnp.zeros(3, jnp.int32), {"go": last, "gear": ()})
    )
    assert isinstance(still, Deterministic) and np.array_equal(still.value["gear"], [1, 1, 1])
    np.testing.assert_allclose(still.value["go"], 0.5 * LOC + 0.5 * last, atol=1e-6)


def test_smoothed_action_on_a_bound_has_the_probability_of_the_bound():
    low, high = np.float32(-1.7), np.float32(2.3)
    spec = EnvSpec(BOX.obs, Box([low] * 2, [high] * 2))
    noisy = GaussianNoise(Inner(normal(jax.random.normal(KEY, (512, 2))), spec), 2.0)
    for policy in (noisy, Uniform(spec)):
        smoothed, now, carry = with_info(ActionSmoothing(policy, 0.3)), time_step(512), policy.initial_state(512)
        last = jax.random.uniform(jax.random.key(1), (512, 2), minval=low, maxval=high)
        step = act(smoothed, now, (carry, last), KEY)
        raw = (np.asarray(step.action, float) - 0.7 * np.asarray(last)) / 0.3
        below, above = raw < low + 1e-5, raw > high - 1e-5
        raw = np.where(below, low, np.where(above, high, raw)).astype(np.float32)
        # Only what lies between the bounds has a density, which the smaller share makes larger.
        dense = ~(below | above) if policy is noisy else np.ones((512, 2), bool)
        inside, _ = distribution_of(policy, now, carry)
        wanted = np.asarray(log_prob(inside, jnp.asarray(raw))) - dense.sum(1) * np.log(0.3)
        np.testing.assert_allclose(step.info["log_prob"], wanted, atol=1e-3)
        assert np.mean(dense) < 0.7 or policy is not noisy


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: GaussianNoise(Inner({}, DISCRETE)), "GaussianNoise: some action must be a Box.*EpsilonGreedy"),
        (lambda: GaussianNoise(inner(), -0.1), r"GaussianNoise: scale must be a number in \[0, inf\)"),
        (lambda: GaussianNoise(inner(), np.full(2, 0.1)), r"GaussianNoise: scale must be one number .*, got shape \(2,\)"),
        (lambda: OUNoise(Inner({}, DISCRETE)), "OUNoise: some action must be a Box"),
        (lambda: OUNoise(inner(), -1.0), "OUNoise: scale"),
        (lambda: OUNoise(inner(), jnp.full(3, 0.1)), r"OUNoise: scale must be one number .*, got shape \(3,\)"),
        (lambda: OUNoise(inner(), theta=1.5), r"OUNoise: theta must be a number in \(0, 1\], got 1.5"),
        (lambda: ActionSmoothing(EpsilonGreedy(Inner({}, DISCRETE), 0.1)), "ActionSmoothing: some action must be a Box"),
        (lambda: ActionSmoothing(inner(), 0.0), r"ActionSmoothing: share must be a number in \(0, 1\], got 0.0"),
    ],
)
def test_invalid_settings_are_rejected(build, said, unchecked):
    with pytest.raises((TypeError, ValueError), match=said):
        build()
