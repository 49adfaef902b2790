"""Policies that look at nothing, and policies chosen for an episode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from polyak.core.policy_faults import check_error_flags, failed_envs, has_error_flags
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiDiscrete
from polyak.core.types import Policy
from polyak.policies.info import with_info
from polyak.policies.mixture import Mixture
from polyak.policies.network_policy import Greedy
from polyak.policies.noise import ActionSmoothing
from polyak.policies.scripted import Scripted, Uniform
from tests.copies.inner import BOX, CHOICES, DISCRETE, OBS, RESCALED, TREE, Inner, normal, time_step

KEY = jax.random.key(9)
EIGHT = EnvSpec(OBS, Discrete(4, start=3))


@jax.jit
def act(policy, now, carry, key):
    return policy.action(now, carry, key)


def test_uniform_samples_every_allowed_action_equally_often():
    policy = Uniform(CHOICES)
    assert isinstance(policy, Policy)
    allowed = {"a": [True, False, True], "b": [True, True, False, True, True], "c": None}
    mask = {name: None if row is None else np.tile(row, (6000, 1)) for name, row in allowed.items()}
    now = time_step(6000, mask=mask)
    action = act(policy, now, (), KEY).action
    action = jax.tree.map(np.asarray, action)
    parts = [action["a"] // 2, action["b"][:, 0], action["b"][:, 1] - 1, *action["c"].T]
    numbers = sum(part.astype(int) * weight for part, weight in zip(parts, (16, 8, 4, 2, 1), strict=True))
    counts = np.bincount(numbers, minlength=32)
    assert len(counts) == 32 and stats.chisquare(counts).pvalue > 1e-4
    log_prob = jax.jit(lambda now, action: policy.distribution(now)[0].log_prob(action))(now, action)
    np.testing.assert_allclose(log_prob, np.full(6000, -np.log(32)), rtol=1e-5)


@pytest.mark.parametrize("spec", [BOX, RESCALED], ids=["clip", "rescale"])
def test_uniform_fills_a_box_to_its_bounds(spec):
    action = act(Uniform(spec), time_step(4000), (), KEY).action
    native = spec.native_action(np.asarray(action))
    for column, low, high in zip(native.T, spec.action.low, spec.action.high, strict=True):
        assert low <= column.min() and column.max() <= high
        assert stats.kstest(column, stats.uniform(low, high - low).cdf).pvalue > 1e-3


@pytest.mark.parametrize("scaling", ["clip", "rescale"])
def test_uniform_over_an_integer_box_is_uniform_after_rounding(scaling):
    spec = EnvSpec(OBS, Box([-1], [2], dtype=np.int32), action_scaling=scaling)
    native = spec.native_action(np.asarray(act(Uniform(spec), time_step(4000), (), KEY).action))
    assert stats.chisquare(np.bincount(native[:, 0] + 1)).pvalue > 1e-4 and set(native[:, 0]) == {-1, 0, 1, 2}


def test_uniform_rejects_unbounded_boxes(unchecked):
    with pytest.raises(ValueError, match=r"Uniform: a Box needs finite bounds, got Box.* at action 'go'"):
        Uniform(EnvSpec(OBS, Dict({"go": Box([-np.inf], [1.0])})))
    with pytest.raises(TypeError, match="Uniform: spec must be an EnvSpec"):
        Uniform(Discrete(3))


def test_a_script_is_followed_from_the_beginning_of_every_episode():
    policy = Scripted(EIGHT, [(2, 3), (1, 0), (3, 2)])
    assert isinstance(policy, Policy)
    script = [3, 3, 0, 2, 2, 2]
    carry, seen, at = policy.initial_state(2), [], np.zeros(2, int)
    for t in range(9):
        first = np.array([t == 0 or t == 4, t == 0 or t == 7])
        # The second environment's episode is as long as the script: its last action is ignored, and is no error.
        step = act(policy, time_step(2, first=first, last=[t == 3, t == 6]), carry, KEY)
        at = np.where(first, 0, at)
        seen.append((np.asarray(step.action).tolist(), [script[min(i, 5)] for i in at]))
        at, carry = at + 1, step.carry
    assert all(got == wanted for got, wanted in seen)
    assert has_error_flags(carry) and not np.any(failed_envs(carry, 2))
    check_error_flags(carry)


def test_an_episode_beyond_the_scripts_end_is_an_error_that_names_it():
    policy = ActionSmoothing(Scripted(TREE, [(1, {"go": [0.5, -1.0], "gear": 2}), (1, {"go": [1.0, 0.5], "gear": 0})]), 0.5)
    carry = policy.initial_state(3)
    for t in range(4):
        check_error_flags(carry)
        step = act(policy, time_step(3, first=[t == 0, t in (0, 1), t == 0], last=[False, False, t == 2]), carry, KEY)
        carry = step.carry
        if t == 2:
            assert np.array_equal(failed_envs(carry, 3), [True, False, False])
            break
    assert np.array_equal(step.action["gear"], [0, 0, 0]), "the last action is held"
    with pytest.raises(RuntimeError, match=r"Scripted: the script has ended after its 2 steps, and environments \[0\] went on"):
        check_error_flags(carry)
    again = act(policy, time_step(3, first=True), carry, KEY).carry
    assert np.array_equal(failed_envs(again, 3), [True, False, False]), "what went wrong is not forgotten"


def test_predict_of_a_script_returns_native_actions_and_raises_at_its_end():
    policy = Scripted(EIGHT, [(1, 3), (1, 0)])
    obs, carry, answers = np.zeros(2), None, []
    for _ in range(2):
        action, carry = policy.predict(obs, carry)
        answers.append(int(action))
    assert answers == [6, 3]
    with pytest.raises(RuntimeError, match="the script has ended after its 2 steps"):
        policy.predict(obs, carry)


@pytest.mark.parametrize(
    ("spec", "script", "said"),
    [
        (EIGHT, [], "Scripted: script must have at least one"),
        (EIGHT, [1, 2], r"Scripted: script must be a list of \(repeat, action\)"),
        (EIGHT, [(0, 1)], "Scripted: repeat of part 0 must be an integer >= 1, got 0"),
        (EIGHT, [(1, 1), (1.5, 1)], "Scripted: repeat of part 1 must be an integer"),
        (EIGHT, [(1, 1), (1, 4)], r"Scripted: action of part 1 must be in \[0, 3\], got 4"),
        (EIGHT, [(1, 0.5)], r"Scripted: action of part 0 must have dtype int32 \(integers or bools\), got float64"),
        (BOX, [(1, [0.0, 0.6])], r"Scripted: action of part 0 must be in \[.*\], got 0.6 at \[1\]"),
        (BOX, [(1, [0.0, np.nan])], r"Scripted: action of part 0 must be in \[.*\], got nan at \[1\]"),
        (BOX, [(1, [0.0])], r"Scripted: action of part 0 must have shape \(2,\), got \(1,\)"),
        (RESCALED, [(1, [0.0, -2.0])], r"must be in \[-1, 1\], got -2.0 at \[1\]"),
        (TREE, [(1, {"go": [0.0, 0.0]})], "Scripted: action of part 0 must be a tree of .* is missing"),
        (EnvSpec(OBS, MultiDiscrete((2, 3))), [(2**31, [1, 1])], "Scripted: script must have at most 2147483647 steps"),
        (None, [(1, 1)], "Scripted: spec must be an EnvSpec"),
    ],
)
def test_invalid_script_is_rejected(spec, script, said, unchecked):
    with pytest.raises((TypeError, ValueError), match=said):
        Scripted(spec, script)


def constant(action, spec=DISCRETE, batch=1):
    """A policy that has no doubt, with a memory."""
    return Inner(jnp.tile(100.0 * np.eye(4, dtype=np.float32)[action], (batch, 1)), spec)


def mixture(weights, batch=2000):
    return Mixture(tuple(constant(action, batch=batch) for action in range(len(weights))), weights)


def test_mixture_draws_a_policy_by_weight_at_each_new_episode():
    weights = (1.0, 0.0, 2.0, 5.0)
    policy = mixture(weights)
    assert isinstance(policy, Policy)
    carry = policy.initial_state(2000)
    episodes = []
    for t in range(5):
        first = np.arange(2000) % 2 == 0 if t == 3 else np.full(2000, t == 0)
        step = act(policy, time_step(2000, first=first), carry, jax.random.fold_in(KEY, t))
        carry = step.carry
        episodes.append(np.asarray(step.action))
    assert np.array_equal(episodes[0], episodes[1]) and np.array_equal(episodes[1], episodes[2])
    assert np.array_equal(episodes[2][1::2], episodes[3][1::2]) and np.array_equal(episodes[3], episodes[4])
    for drawn in (episodes[0], episodes[3][::2]):
        counts = np.bincount(drawn, minlength=4)
        assert counts[1] == 0 and stats.chisquare(counts[[0, 2, 3]], np.array([1, 2, 5]) / 8 * len(drawn)).pvalue > 1e-4
    assert abs(np.corrcoef(episodes[2][::2] == 3, episodes[3][::2] == 3)[0, 1]) < 0.12, "episodes are drawn anew"
    assert all(np.array_equal(each[:2], [2, 5]) for each in carry[1]), "all memories go on"
    assert np.array_equal(step.info["steps"][:2], [2, 5])


def test_distribution_of_a_mixture_is_that_of_the_drawn_policy():
    policy = Mixture((Inner(jnp.zeros((3, 4)), DISCRETE), constant(1, batch=3)), (0.5, 0.5))
    carry = act(policy, time_step(3, first=True), policy.initial_state(3), jax.random.key(2)).carry
    distribution, after = policy.distribution(time_step(3), carry)
    choice = np.asarray(distribution.choice)
    assert set(choice) == {0, 1}
    np.testing.assert_allclose(distribution.log_prob(jnp.ones(3, jnp.int32)), np.where(choice == 1, 0, -np.log(4)), atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(), np.where(choice == 1, 0, np.log(4)), atol=1e-5)
    assert np.array_equal(distribution.mode(), choice) and np.array_equal(
        policy.distribution(time_step(3), after)[0].choice, choice
    )
    np.testing.assert_allclose(distribution.kl_divergence(distribution), np.zeros(3), atol=1e-5)
    _, log_prob = distribution.sample_and_log_prob(seed=KEY)
    np.testing.assert_allclose(log_prob, np.where(choice == 1, 0, -np.log(4)), atol=1e-5)


def test_greedy_mixture_draws_a_policy_and_without_key_takes_the_largest_weight():
    policy = Greedy(mixture((1.0, 2.0)))
    now, carry = time_step(2000, first=True), policy.initial_state(2000)
    step = act(policy, now, carry, KEY)
    assert abs(np.mean(step.action == 1) - 2 / 3) < 0.05
    later = act(policy, time_step(2000), step.carry, jax.random.fold_in(KEY, 1))
    assert np.array_equal(later.action, step.action)
    distribution, after = policy.distribution(now, carry)
    assert np.all(distribution.mode() == 1) and np.all(act(policy, time_step(2000), after, KEY).action == 1)
    alone = mixture((1.0, 2.0), batch=1)
    every = np.ones(4, bool)
    assert all(alone.predict(np.zeros(2), action_mask=every)[0] == 1 for _ in range(2))
    keys = [jax.random.key(seed) for seed in range(12)]
    drawn = [alone.predict(np.zeros(2), deterministic=False, key=key, action_mask=every)[0] for key in keys]
    assert set(map(int, drawn)) == {0, 1}


def test_mixtures_nest_and_report_policy_ids():
    each = tuple(with_info(constant(action, batch=500), policy_id=action) for action in range(3))
    policy = with_info(Mixture((Mixture(each[:2]), each[2]), (2.0, 1.0)), log_prob=False)
    step = act(policy, time_step(500, first=True), policy.initial_state(500), KEY)
    assert np.array_equal(step.info["policy_id"], step.action) and np.allclose(step.info["log_prob"], 0, atol=1e-5)
    assert stats.chisquare(np.bincount(np.asarray(step.action)), [500 / 3] * 3).pvalue > 1e-4


def test_a_script_may_end_where_another_policy_was_chosen():
    short, long = Scripted(EIGHT, [(2, 1)]), Scripted(EIGHT, [(9, 2)])
    policy = Mixture((Mixture((short, long), (1.0, 1.0)), long), (2.0, 1.0))

    @jax.jit
    def run(carry):
        def step(carry, t):
            now = dataclasses.replace(time_step(64), first=jnp.full(64, t == 0))
            _, (_, followed) = policy.distribution(now, carry)
            step = policy.action(now, carry, jax.random.fold_in(KEY, t))
            return step.carry, (step.action, failed_envs(step.carry, 64), failed_envs(followed, 64))

        return jax.lax.scan(step, carry, jnp.arange(4))

    carry, (action, failed, followed) = run(policy.initial_state(64))
    is_short = np.asarray(action[0]) == 1
    assert 5 < is_short.sum() < 40
    assert not failed[:2].any() and np.array_equal(failed[2:], [is_short] * 2)
    assert np.array_equal(followed[1:], failed[1:])
    with pytest.raises(RuntimeError, match="the script has ended after its 2 steps"):
        check_error_flags(carry)
    again = act(policy, time_step(64, first=True), carry, KEY).carry
    assert np.array_equal(failed_envs(again, 64), is_short), "what went wrong is not forgotten"
    alone = Mixture((long, short), weights=(1, 0))
    for t in range(4):
        carry = act(alone, time_step(2, first=t == 0), alone.initial_state(2) if t == 0 else carry, KEY).carry
    check_error_flags(carry)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Mixture(()), "Mixture: policies must be a tuple of at least one policy"),
        (lambda: Mixture((constant(0), 3)), r"Mixture: policies\[1\]: policy must have initial_state"),
        (lambda: Mixture((constant(0), Uniform(BOX))), r"Mixture: action of policies\[0\]'s spec is .* of policies\[1\]'s Box"),
        (lambda: mixture((1.0, -1.0)), "Mixture: weights must be at least 0"),
        (lambda: mixture((0.0, 0.0)), "Mixture: weights must be at least 0, and at least one above 0"),
        (lambda: mixture((1.0, np.nan)), "Mixture: weights must be at least 0"),
        (lambda: Mixture((constant(0),), (1.0, 1.0)), "Mixture: weights must be 1 numbers, one for each policy"),
    ],
)
def test_invalid_mixture_is_rejected(build, said, unchecked):
    with pytest.raises((TypeError, ValueError), match=said):
        build()


def test_mixture_rejects_policies_with_different_info():
    policy = Mixture((constant(0), Uniform(DISCRETE)))
    with pytest.raises((TypeError, ValueError)):
        policy.action(time_step(1), policy.initial_state(1), KEY)


def test_normal_policies_are_mixed_row_by_row():
    policy = Mixture((Greedy(Inner(normal([[0.5, 0.0]] * 200), BOX)), Greedy(Inner(normal([[-0.5, 0.25]] * 200), BOX))))
    action = np.asarray(act(policy, time_step(200, first=True), policy.initial_state(200), KEY).action)
    rows = {tuple(row) for row in action.tolist()}
    assert rows == {(0.5, 0.0), (-0.5, 0.25)}
