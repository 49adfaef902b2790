"""Exploring among choices: against probabilities written down in NumPy, and by what is drawn."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from polyak.core.spaces import EnvSpec, MultiBinary
from polyak.core.types import Policy
from polyak.ops.distributions.exploration import EpsilonMixture, uniform_over
from polyak.ops.schedules import Linear, Piecewise
from polyak.policies.exploration import Boltzmann, EpsilonGreedy, RandomWarmStart
from polyak.policies.network_policy import DiscountedReturn
from polyak.policies.noise import GaussianNoise
from polyak.policies.numpy_policies import numpy_actor
from polyak.policies.python.policy import PythonPolicy
from tests.copies.inner import BOX, CHOICES, DISCRETE, TREE, Inner, normal, time_step
from tests.policies.test_network_policy import BOX as INTERVAL
from tests.policies.test_network_policy import policy_for

KEY = jax.random.key(5)
LOGITS = np.array([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 3.5], [1.0, 1.5, -2.0, 0.0]], np.float32)
MASK = np.array([[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]], bool)
MODES = [2, 3, 3]
DRAWS = 6000


@jax.jit
def drawn(policy, now, carry, keys):
    """Actions and infos `[DRAWS, B]`."""
    steps = jax.vmap(lambda key: policy.action(now, carry, key))(keys)
    return steps.action, steps.info


@jax.jit
def of_distribution(policy, now, carry, actions):
    """Log-probabilities of actions `[N, B]`, entropy, mode, and the memory afterwards."""
    distribution, after = policy.distribution(now, carry)
    return jax.vmap(distribution.log_prob)(actions), distribution.entropy(), distribution.mode(), after


def inner(logits=LOGITS, spec=DISCRETE):
    return Inner(jax.tree.map(jnp.asarray, logits), spec)


def frequencies(actions, n=4):
    return np.stack([np.mean(np.asarray(actions) == i, axis=0) for i in range(n)], axis=-1)


def assert_drawn_by(actions, probs):
    assert np.all(frequencies(actions)[probs == 0] == 0)
    for row, wanted in zip(np.asarray(actions).T, probs, strict=True):
        counts = np.bincount(row, minlength=4)[wanted > 0]
        if len(counts) > 1:
            assert stats.chisquare(counts, wanted[wanted > 0] / wanted.sum(dtype=float) * len(row)).pvalue > 1e-4


def test_epsilon_greedy_samples_match_its_log_probs():
    epsilon = 0.3
    policy = EpsilonGreedy(inner(), epsilon)
    assert isinstance(policy, Policy)
    probs = epsilon * MASK / MASK.sum(1, keepdims=True)
    probs[np.arange(3), MODES] += 1 - epsilon
    now, carry = time_step(3, mask=MASK), policy.initial_state(3)
    every, entropies, mode, after = of_distribution(policy, now, carry, np.tile(np.arange(4, dtype=np.int32)[:, None], (1, 3)))
    np.testing.assert_allclose(np.exp(every).T, probs, rtol=1e-5)
    entropy = -np.sum(probs * np.log(np.where(probs > 0, probs, 1)), axis=1)
    np.testing.assert_allclose(entropies, entropy, atol=1e-5)
    assert np.array_equal(mode, MODES) and np.array_equal(after, [1, 1, 1])
    actions, info = drawn(policy, now, carry, jax.random.split(KEY, DRAWS))
    assert_drawn_by(actions, probs)
    np.testing.assert_allclose(np.exp(info["log_prob"]), probs[np.arange(3)[None], actions], rtol=1e-5)


def test_the_divergence_of_two_mixtures_is_the_sum():
    @jax.jit
    def two(a, b):
        p, q = (each.distribution(time_step(3, mask=MASK), jnp.zeros(3, jnp.int32))[0] for each in (a, b))
        log_probs = [jnp.stack([d.log_prob(jnp.full(3, action)) for action in range(4)]) for d in (p, q)]
        return log_probs, p.kl_divergence(q), q.mode()

    log_probs, divergence, mode = two(EpsilonGreedy(inner(LOGITS), 0.3), EpsilonGreedy(inner(-LOGITS), 0.6))
    each = [np.exp(x).T for x in log_probs]
    terms = np.where(each[0] > 0, each[0] * np.log(np.where(each[0] > 0, each[0] / np.where(MASK, each[1], 1), 1)), 0)
    np.testing.assert_allclose(divergence, terms.sum(1), atol=1e-5)
    assert np.array_equal(np.asarray(mode) == MODES, [False, False, True])


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_epsilon_of_zero_and_one(epsilon):
    policy = EpsilonGreedy(inner(), epsilon)
    now = time_step(3, mask=MASK)
    actions, info = drawn(policy, now, policy.initial_state(3), jax.random.split(KEY, DRAWS))
    modes = np.eye(4)[MODES]
    assert_drawn_by(actions, modes if epsilon == 0 else MASK / MASK.sum(1, keepdims=True))
    _, entropy, _, _ = of_distribution(policy, now, policy.initial_state(3), np.zeros((4, 3), np.int32))
    np.testing.assert_allclose(entropy, np.zeros(3) if epsilon == 0 else np.log([3.0, 4.0, 1.0]), atol=1e-6)
    assert np.all(np.isfinite(info["log_prob"]))


def test_actions_of_several_parts_are_drawn_as_a_whole():
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(1, n)).astype(np.float32) for name, n in (("a", 3), ("b", 5), ("c", 2))}
    mask = {"a": np.array([[True, False, True]]), "b": np.array([[True, True, False, True, True]]), "c": None}
    policy = EpsilonGreedy(inner(jax.tree.map(jnp.asarray, params), CHOICES), 0.4)
    now, carry = time_step(1, mask=mask), policy.initial_state(1)
    every = np.array(list(itertools.product(range(3), range(2), range(3), range(2), range(2))))
    actions = {"a": every[:, :1], "b": every[:, None, 1:3], "c": every[:, None, 3:].astype(np.int8)}
    log_probs, entropy, mode, _ = of_distribution(policy, now, carry, jax.tree.map(jnp.asarray, actions))
    probs, mode = np.exp(log_probs)[:, 0], jax.tree.map(np.asarray, mode)
    allowed = (every[:, 0] != 1) & (every[:, 2] != 0)
    is_mode = np.all(every == np.concatenate([mode["a"], mode["b"][0], mode["c"][0]]), axis=1)
    np.testing.assert_allclose(probs, allowed * 0.4 / 32 + is_mode * 0.6, rtol=1e-5)
    assert probs.sum() == pytest.approx(1.0, rel=1e-5) and allowed.sum() == 32
    np.testing.assert_allclose(entropy, [-np.sum(probs[allowed] * np.log(probs[allowed]))], rtol=1e-4)
    actions, _ = drawn(policy, now, carry, jax.random.split(KEY, DRAWS))
    actions = jax.tree.map(np.asarray, actions)
    same = (actions["a"] == mode["a"]) & np.all(actions["b"] == mode["b"], -1) & np.all(actions["c"] == mode["c"], -1)
    assert abs(np.mean(same) - (0.6 + 0.4 / 32)) < 0.03 and not np.any(actions["a"] == 1)


@pytest.mark.parametrize("size", [2, 400])
def test_probabilities_of_large_action_spaces_neither_underflow_nor_overflow(size):
    spec = EnvSpec(BOX.obs, MultiBinary((size,)))
    value, others = jnp.zeros((1, size), jnp.int8), jnp.ones((1, size), jnp.int8)

    @jax.jit
    @jax.vmap
    def of(epsilon):
        def log_probs(epsilon):
            mixture = EpsilonMixture(value, uniform_over(spec, 1), epsilon)
            return jnp.stack([mixture.log_prob(value)[0], mixture.log_prob(others)[0], mixture.entropy()[0]])

        kl = EpsilonMixture(value, uniform_over(spec, 1), epsilon).kl_divergence(
            EpsilonMixture(others, uniform_over(spec, 1), jnp.float32(0.5))
        )
        return log_probs(epsilon), jax.jacobian(log_probs)(epsilon), kl[0]

    epsilons, log_n = np.array([0.0, 0.3, 1.0]), size * np.log(2)
    got, gradients, kl = of(jnp.asarray(epsilons, jnp.float32))
    with np.errstate(divide="ignore"):
        mine, each = np.logaddexp(np.log1p(-epsilons), np.log(epsilons) - log_n), np.log(epsilons) - log_n
    share = -epsilons * np.expm1(-log_n)
    entropy = -np.exp(mine) * mine - np.where(share > 0, share * np.where(share > 0, each, 0), 0)
    np.testing.assert_allclose(got, np.stack([mine, each, entropy], 1), rtol=1e-5, atol=1e-6)
    assert np.all(np.isfinite(gradients)) and gradients[1, 0] == pytest.approx(-1 / 0.7, rel=0.5)
    other, shared = np.log(0.5) - log_n, np.logaddexp(np.log(0.5), np.log(0.5) - log_n)
    rest = np.where(share - np.exp(each) > 0, (share - np.exp(each)) * np.where(share > 0, each - other, 0), 0)
    swapped = np.exp(mine) * (mine - other) + np.exp(each) * np.where(share > 0, each - shared, 0)
    np.testing.assert_allclose(kl, swapped + rest, rtol=1e-4, atol=1e-5)


def test_epsilon_follows_a_schedule_of_the_count_that_it_is_given():
    schedule = Piecewise((1.0, Linear(1.0, 0.0, 100)), (50,))

    @jax.jit
    def epsilon(env_steps):
        policy = EpsilonGreedy(inner(), schedule, env_steps)
        return policy.distribution(time_step(3, mask=MASK), policy.initial_state(3))[0].epsilon

    assert [float(epsilon(jnp.uint32(s))) for s in (0, 50, 100, 150)] == [1.0, 1.0, 0.5, 0.0]


def test_a_schedule_is_followed_beyond_32_bits():
    policy = EpsilonGreedy(inner(), Linear(1.0, 0.0, 10**10), 5_000_000_000)
    epsilon = jax.jit(lambda policy: policy.distribution(time_step(3, mask=MASK), policy.initial_state(3))[0].epsilon)
    assert float(epsilon(policy)) == pytest.approx(0.5)


@jax.jit
def softmax(policy, now, carry):
    distribution, after = policy.distribution(now, carry)
    return distribution.probs(), after


def test_boltzmann_is_the_softmax_of_logits_over_temperature():
    for temperature in (0.5, 1.0, 3.0):
        policy = Boltzmann(inner(), temperature)
        weights = np.where(MASK, np.exp((LOGITS - LOGITS.max(1, keepdims=True)) / temperature), 0)
        probs = weights / weights.sum(1, keepdims=True)
        now, carry = time_step(3, mask=MASK), policy.initial_state(3)
        got, after = softmax(policy, now, carry)
        np.testing.assert_allclose(got, probs, atol=1e-6)
        assert np.array_equal(after, [1, 1, 1])
    actions, _ = drawn(policy, now, carry, jax.random.split(KEY, DRAWS))
    assert_drawn_by(actions, probs)


def test_boltzmann_softens_every_part_and_ends_greedy():
    params = {"a": jnp.array([[0.0, 4.0, 1.0]]), "b": jnp.array([[2.0, 0.0, 0.0, 4.0, 0.0]]), "c": jnp.array([[2.0, -2.0]])}
    policy = Boltzmann(inner(params, CHOICES), 2.0)
    parts = policy.distribution(time_step(1), policy.initial_state(1))[0].parts
    np.testing.assert_allclose(parts["b"].logits, params["b"] / 2)
    np.testing.assert_allclose(parts["c"].logits, params["c"] / 2)
    np.testing.assert_allclose(parts["a"].probs(), jax.nn.softmax(params["a"] / 2), rtol=1e-5)
    cold = Boltzmann(inner(1e4 * LOGITS), Linear(1.0, 0.0, 10), 10)
    actions, _ = drawn(cold, time_step(3), cold.initial_state(3), jax.random.split(KEY, DRAWS))
    assert np.array_equal(np.unique(actions, axis=0), np.argmax(LOGITS, 1)[None])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: EpsilonGreedy(Inner(normal([[0.0, 0.0]]), BOX), 0.1),
            "EpsilonGreedy: actions must be Discrete.*GaussianNoise",
        ),
        (lambda: EpsilonGreedy(Inner({}, TREE), 0.1), "EpsilonGreedy: actions must be Discrete"),
        (lambda: EpsilonGreedy(inner(), 1.5), r"EpsilonGreedy: epsilon must be a number in \[0, 1\]"),
        (lambda: EpsilonGreedy(inner(), Linear(1.0, -0.1)), r"EpsilonGreedy: epsilon.end must be a number in \[0, 1\]"),
        (lambda: EpsilonGreedy(inner(), 0.1, -1), r"EpsilonGreedy: env_steps must be a number in \[0, "),
        (
            lambda: EpsilonGreedy(lambda obs: 0, 0.1),
            "EpsilonGreedy: policy must have initial_state, distribution, action and spec",
        ),
        (lambda: Boltzmann(Inner(normal([[0.0, 0.0]]), BOX)), "Boltzmann: actions must be Discrete"),
        (lambda: Boltzmann(inner(), 0.0), r"Boltzmann: temperature must be a number in \(0, inf\)"),
    ],
)
def test_invalid_settings_are_rejected(build, said, unchecked):
    with pytest.raises((TypeError, ValueError), match=said):
        build()


def test_a_random_warm_start_acts_in_numpy_around_policies_whose_noise_has_the_shape_of_the_action():
    network, python = policy_for(INTERVAL), PythonPolicy(lambda obs: np.zeros((len(obs), 2), np.float32), INTERVAL)
    for policy in (network, GaussianNoise(network), DiscountedReturn(network, 0.9)):
        around = RandomWarmStart(policy, 10)
        noise = numpy_actor(around, 3).noise
        assert jax.eval_shape(lambda around=around, noise=noise: noise(around, KEY, 3)).shape == (3, 2, 2)
    for policy in (
        python,
        DiscountedReturn(python, 0.9),
        RandomWarmStart(network, 10),
        DiscountedReturn(RandomWarmStart(network, 10), 0.9),
    ):
        assert numpy_actor(policy, 3) is not None and numpy_actor(RandomWarmStart(policy, 10), 3) is None


def test_boltzmann_rejects_distributions_without_logits():
    nested = Boltzmann(EpsilonGreedy(inner(), 0.1))
    with pytest.raises(TypeError, match=r"with logits .* got EpsilonMixture; .* take agent.policy\(state\).policy"):
        nested.distribution(time_step(3), nested.initial_state(3))
