"""`predict` from NumPy to NumPy: answers, speed without staleness, and what does not fit."""

import dataclasses
import gc
import re

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import PythonPolicy, envs
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.networks.recurrent import LSTM
from polyak.policies import predict
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from tests.envs import toys
from tests.policies.test_network_policy import (
    BOX,
    KEY,
    REMEMBERS,
    SPEC,
    VECTOR,
    act,
    greedy,
    normalizer_of,
    policy_for,
    time_step,
)

MASKED = EnvSpec(VECTOR, Dict({"a": Discrete(3), "b": MultiDiscrete((2, 3), (1, 0))}), has_action_mask=True)


def test_predict_accepts_single_and_batched_observations():
    policy = greedy(SPEC)
    obs = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    many, carry = policy.predict(obs)
    ones = [policy.predict(one)[0] for one in obs]
    assert isinstance(many, np.ndarray) and many.shape == (6,) and many.dtype == np.int32 and carry == ()
    assert np.shape(ones[0]) == () and np.array_equal(many, ones)
    assert len(set(ones)) > 1


def test_predict_counts_discrete_actions_from_their_start():
    policy = policy_for(SPEC)
    obs = np.ones((50, 3), np.float32)
    drawn, _ = policy.predict(obs, deterministic=False, key=KEY)
    inner = act(policy, time_step(jnp.asarray(obs)), ()).action
    assert np.array_equal(drawn, np.asarray(inner) + 2)
    assert drawn.min() >= 2 and drawn.max() <= 5 and len(np.unique(drawn)) > 1


@pytest.mark.parametrize(("scaling", "low", "high"), [("clip", -1.0, 1.0), ("rescale", -3.0, 5.0)])
def test_box_actions_reach_the_environments_bounds_and_no_further(scaling, low, high):
    spec = EnvSpec(VECTOR, Box([low], [high]), action_scaling=scaling)
    policy = policy_for(spec, scale=0.7)
    action, _ = policy.predict(np.random.default_rng(0).normal(size=(200, 3)), deterministic=False, key=KEY)
    assert action.shape == (200, 1) and action.dtype == np.float32
    assert action.min() == low and action.max() == high and len(np.unique(action)) > 20


NATIVE = {
    "float64": gymnasium.spaces.Box(-0.3, 0.3, (2,), np.float64),
    "float16": gymnasium.spaces.Box(np.float16(-0.3), np.float16(0.3), (2,), np.float16),
    "no float32 between": gymnasium.spaces.Box(0.1, 0.1, (2,), np.float64),
    "int64": gymnasium.spaces.Box(-3, 2**40, (2,), np.int64),
    "tree": gymnasium.spaces.Dict(
        a=gymnasium.spaces.Tuple((gymnasium.spaces.Box(-0.1, 0.7, (2,), np.float64), gymnasium.spaces.Discrete(3, start=2))),
        b=gymnasium.spaces.Box(np.float16(-0.3), np.float16(0.3), (1,), np.float16),
    ),
}


def spec_with_action(space, scaling):
    def make():
        env = toys.Shared()
        env.observation_space, env.action_space = gymnasium.spaces.Box(-9.0, 9.0, (3,)), space
        return env

    return envs.make(make, action_scaling=scaling).spec


@pytest.mark.parametrize("scaling", ["clip", "rescale"])
@pytest.mark.parametrize("name", NATIVE)
def test_the_environments_action_space_contains_every_action_of_predict(name, scaling):
    space, obs = NATIVE[name], np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    spec = spec_with_action(space, scaling)
    policies = [greedy(spec), Greedy(policy_for(spec, scale=50.0))]
    if name == "float64":
        policies.append(PythonPolicy(lambda obs: np.sign(obs[:, :2]) * np.float32(0.3), spec, on_error="clip"))
    for policy in policies:
        actions = [policy.predict(row)[0] for row in obs[:3]]
        batch, _ = policy.predict(obs)
        actions += [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(64)]
        assert all(space.contains(action) for action in actions)
        if name in ("float64", "float16"):
            assert batch.dtype == space.dtype and len(np.unique(batch)) > 1


def test_actions_of_predict_are_writable():
    for spec in (SPEC, EnvSpec(VECTOR, MultiBinary((2,)))):
        action, _ = greedy(spec).predict(np.zeros((2, 3), np.float32))
        action[0] = 0


def test_predict_takes_lists_and_other_widths():
    policy = greedy(SPEC)
    expected, _ = policy.predict(np.array([0.1, -0.2, 0.3], np.float32))
    for obs in ([0.1, -0.2, 0.3], np.array([0.1, -0.2, 0.3]), jnp.array([0.1, -0.2, 0.3])):
        assert policy.predict(obs)[0] == expected


def test_predict_takes_trees():
    spec = EnvSpec(Dict({"x": VECTOR, "pair": Tuple((Discrete(3, start=1), MultiBinary((2,))))}), SPEC.action)
    policy = greedy(spec)
    one = {"x": np.zeros(3), "pair": (3, np.array([1, 0]))}
    two = {"x": np.zeros((2, 3)), "pair": (np.array([3, 1]), np.array([[1, 0], [0, 1]]))}
    single, (both, _) = policy.predict(one)[0], policy.predict(two)
    assert np.shape(single) == () and both.shape == (2,) and both[0] == single


def test_predict_takes_the_bools_of_a_box_of_bools():
    bools = greedy(EnvSpec(Box(False, True, (3,), np.dtype(bool)), SPEC.action))
    obs = np.array([[True, False, True], [False, False, False]])
    assert np.array_equal(bools.predict(obs)[0], greedy(SPEC).predict(obs)[0])
    assert bools.predict([True, False, True])[0] == bools.predict(obs)[0][0]


def test_discrete_observations_are_counted_from_their_start():
    wide = greedy(EnvSpec(Discrete(3, start=-1), Discrete(4)))
    plain = greedy(EnvSpec(Discrete(3), Discrete(4)))
    assert np.array_equal(wide.predict(np.array([-1, 0, 1]))[0], plain.predict(np.array([0, 1, 2]))[0])


@pytest.mark.usefixtures("unchecked")
def test_sampling_needs_a_key_and_is_determined_by_it():
    policy = greedy(EnvSpec(VECTOR, Box([-9.0], [9.0])))
    for no_key in (None, 3):
        with pytest.raises(ValueError, match=rf"needs a key, e\.g\. key=jax\.random\.key\(0\), got {no_key}"):
            policy.predict(np.zeros(3), deterministic=False, key=no_key)
    a, b, c = (policy.predict(np.zeros(3), deterministic=False, key=jax.random.key(seed))[0] for seed in (1, 1, 2))
    assert a == b != c


def test_predict_respects_action_masks():
    policy = policy_for(MASKED)
    mask = {"a": [False, False, True], "b": np.array([1, 0, 0, 1, 0])}
    action, _ = policy.predict(np.zeros(3), action_mask=mask)
    assert action["a"] == 2 and np.array_equal(action["b"], [1, 1])
    many = jax.tree.map(lambda x: np.tile(np.asarray(x, bool), (30, 1)), mask, is_leaf=lambda x: isinstance(x, list))
    drawn, _ = policy.predict(np.zeros((30, 3)), action_mask=many, deterministic=False, key=KEY)
    assert set(drawn["a"]) == {2} and set(map(tuple, drawn["b"])) == {(1, 1)}
    free = {"a": None, "b": mask["b"]}
    drawn, _ = policy.predict(np.zeros((30, 3)), action_mask={**free, "b": many["b"]}, deterministic=False, key=KEY)
    assert len(set(drawn["a"])) > 1


RESCALED = EnvSpec(VECTOR, BOX.action, action_scaling="rescale")
PAIR = EnvSpec(Dict({"x": VECTOR, "n": Discrete(3, start=1)}), Discrete(2))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_policy_of_an_environment_with_masks_needs_one(deterministic):
    message = r"predict: action_mask must be given, as the environment has action masks; pass .*info\['action_mask'\]"
    with pytest.raises(ValueError, match=message):
        greedy(MASKED).predict(np.zeros(3), deterministic=deterministic, key=KEY)
    with pytest.raises(ValueError, match="as_python: action_mask must be given"):
        greedy(MASKED).as_python()(np.zeros(3))


@pytest.mark.parametrize(
    ("spec", "obs", "said"),
    [
        (SPEC, np.zeros(4), "obs must have shape (3,), got (4,); a batch has shape (N, 3)"),
        (SPEC, np.zeros((2, 4)), "obs must have shape (3,), got (2, 4)"),
        (SPEC, np.zeros((2, 2, 3)), "obs must have shape (3,), got (2, 2, 3)"),
        (SPEC, np.zeros((0, 3)), "obs must have shape (3,), got (0, 3)"),
        (SPEC, 1.0, "obs must have shape (3,), got ()"),
        (SPEC, None, "obs must have shape (3,), got ()"),
        (SPEC, np.ma.masked_equal(np.float32([0.5, -9.0, 0.5]), -9.0), "obs must be complete, got 1 masked values"),
        (SPEC, (np.zeros(3), {}), "obs must be an observation, got a tuple with a dict; reset() of Gymnasium returns"),
        (SPEC, ["a", "b", "c"], "obs must have dtype float32 (floats or integers), got <U1"),
        (SPEC, [None, 1.0, 2.0], "obs must have dtype float32 (floats or integers), got object"),
        (SPEC, [np.nan, 0.0, 0.0], "obs must be finite, got nan at [0]"),
        (SPEC, [[0.0, 0.0, 0.0], [0.0, np.inf, 0.0]], "obs must be finite, got inf in environment 1 at [1]"),
        (PAIR, {"x": np.zeros(3)}, "obs must be a tree of 'n', 'x'; 'n' is missing, got a dict with keys ['x']"),
        (PAIR, np.zeros(3), "obs must be a tree of 'n', 'x'; 'n' is missing, got an array of float64 and shape (3,)"),
        (PAIR, {"x": np.zeros(2), "n": 1}, "obs 'x' must have shape (3,), got (2,)"),
        (PAIR, {"x": np.zeros((2, 3)), "n": 1}, "the leaves of obs must have the same batch size"),
        (PAIR, {"x": np.zeros((2, 3)), "n": [1, 1, 1]}, "the leaves of obs must have the same batch size"),
        (PAIR, {"x": np.zeros(3), "n": 1.5}, "obs 'n' must have dtype int32 (integers or bools), got float64"),
        (PAIR, {"x": np.zeros(3), "n": 0}, "obs 'n' must be in [1, 3], got 0"),
        (PAIR, {"x": np.zeros(3), "n": 4}, "obs 'n' must be in [1, 3], got 4"),
    ],
)
def test_invalid_observation_raises_with_the_leaf(spec, obs, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as caught:
        greedy(spec).predict(obs)
    assert str(caught.value).startswith("predict: ")


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ({"a": [True, True], "b": None}, "action_mask 'a' must have shape (3,), got (2,)"),
        ({"a": [False, False, False], "b": None}, "action_mask 'a' allows no action"),
        ({"a": [0.0, -np.inf, 0.0], "b": None}, "action_mask 'a' must hold bools, or 0 and 1, got [0.0, -inf, 0.0]"),
        ({"a": [0.5, 0.3, 0.2], "b": None}, "action_mask 'a' must hold bools, or 0 and 1"),
        ({"a": [True, None, True], "b": None}, "action_mask 'a' must hold bools, or 0 and 1"),
        ({"a": None, "b": [True, True, False, False, False]}, "action_mask 'b' allows no action"),
        ([True, True], "action_mask must be a tree of 'a', 'b'; 'a' is missing"),
    ],
)
def test_mask_of_wrong_shape_or_without_allowed_action_raises(mask, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        greedy(MASKED).predict(np.zeros(3), action_mask=mask)


def test_a_mask_for_a_space_that_has_none_is_an_error():
    with pytest.raises(ValueError, match="has no mask"):
        greedy(EnvSpec(VECTOR, MultiBinary((2,)))).predict(np.zeros(3), action_mask=[True, True])


def test_predict_continues_from_its_carry():
    policy = Greedy(policy_for(BOX, network=REMEMBERS["lstm"], scale=0.5))
    obs = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    first, carry = policy.predict(obs[0])
    second, _ = policy.predict(obs[1], carry)
    alone, _ = policy.predict(obs[1])
    assert first.shape == second.shape == (2,) and not np.allclose(second, alone)
    again, _ = policy.predict(obs[1], policy.predict(obs[0])[1])
    assert np.array_equal(again, second)


def test_predict_rejects_a_carry_of_another_batch_size():
    spec = EnvSpec(VECTOR, Discrete(2))
    policy = policy_for(spec, network=LSTM(4, hidden=(4,), head=PolicyAndValue()))
    _, carry = policy.predict(np.zeros((3, 3), np.float32))
    with pytest.raises(ValueError, match=r"predict: carry must have a batch size of 2 as obs, got an array of shape \(3, 4\)"):
        policy.predict(np.zeros((2, 3), np.float32), carry)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    "spec", [SPEC, BOX, EnvSpec(VECTOR, BOX.action, action_scaling="rescale")], ids=["n", "clip", "rescale"]
)
def test_numpy_predict_equals_compiled_up_to_rounding(spec, activation, monkeypatch):
    squash = spec.action_scaling == "rescale"
    policy = policy_for(spec, network=MLP((5, 4), activation=activation, head=PolicyAndValue()), squash=squash)
    obs = np.random.default_rng(0).normal(1.0, 3.0, (1000, 3)).astype(np.float32)
    policy = dataclasses.replace(policy, normalizer=normalizer_of(obs[:100]))
    compiled = spec.native_action(np.asarray(jax.jit(lambda p, x: p.distribution(time_step(x))[0].mode())(policy, obs)))
    with monkeypatch.context() as without_jax:
        without_jax.setattr(predict, "_mode", None)
        many, ones = policy.predict(obs)[0], np.array([policy.predict(x)[0] for x in obs[:50]])
    assert many.dtype == compiled.dtype
    if squash or spec is not SPEC:
        np.testing.assert_allclose(many, compiled, atol=1e-5)
        np.testing.assert_allclose(ones, compiled[:50], atol=1e-5)
    else:
        assert np.mean(many != compiled) <= 1e-3 and np.mean(ones != compiled[:50]) == 0


def test_the_same_observation_has_the_same_bits_every_time():
    obs = np.random.default_rng(0).normal(size=3).astype(np.float32)
    policy = policy_for(BOX)
    again = jax.tree.map(lambda x: x, policy)
    assert {one.predict(np.array(x))[0].tobytes() for one in (policy, again) for x in [obs] * 100} == {
        policy.predict(obs)[0].tobytes()
    }


def test_predict_cache_is_freed_with_the_policy():
    gc.collect()
    before = len(predict._forms)
    policies = [policy_for(BOX, scale=0.1 * i) for i in range(1, 6)]
    answers = [policy.predict(np.ones(3))[0].tolist() for policy in policies]
    assert len(predict._forms) == before + 5 and len(set(map(tuple, answers))) == 5
    del policies
    gc.collect()
    assert len(predict._forms) == before
    for i in range(20):  # at addresses of those that are gone
        assert policy_for(BOX, scale=0.1 * (i % 5 + 1)).predict(np.ones(3))[0].tolist() == answers[i % 5]


def test_predict_notices_changed_arrays():
    policy = policy_for(EnvSpec(VECTOR, Box([-99.0, -99.0], [99.0, 99.0])))
    first = policy.predict(np.ones(3))[0]
    policy.variables.params["policy"]["linear"]["bias"] += 1.0
    second = policy.predict(np.ones(3))[0]
    np.testing.assert_allclose(second, first + 1.0, atol=1e-5)
    in_numpy = jax.tree.map(np.array, policy)
    assert np.array_equal(in_numpy.predict(np.ones(3))[0], second)
    in_numpy.variables.params["policy"]["linear"]["bias"][:] -= 1.0
    np.testing.assert_allclose(in_numpy.predict(np.ones(3))[0], first, atol=1e-5)


def test_predict_is_unaffected_by_later_donation():
    policy = policy_for(BOX)
    first = policy.predict(np.ones(3))[0]
    jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.0 - 7.0, tree), donate_argnums=0)(policy))
    assert np.array_equal(policy.predict(np.ones(3))[0], first)


def test_a_large_batch_is_compiled_and_a_class_derived_from_ours_too():
    rows, _ = policy_for(BOX).mode_in_numpy()
    assert rows == 2**19 // 15

    class Shy(NetworkPolicy):
        pass

    policy = policy_for(BOX)
    assert Shy(policy.variables, None, policy.network, BOX).mode_in_numpy() is None
    # Nothing is too small to be compiled: answers agree on both sides of the border.
    obs = np.random.default_rng(0).normal(size=(rows + 1, 3)).astype(np.float32)
    np.testing.assert_allclose(policy.predict(obs)[0][:rows], policy.predict(obs[:rows])[0], atol=1e-5)


def test_an_observation_that_overflows_in_the_network_warns_no_more_than_jax():
    action, _ = policy_for(BOX, scale=1e30).predict(np.full(3, 1e30, np.float32))
    assert action.shape == (2,)


def test_scalar_box_action_is_a_zero_dimensional_array():
    spec = EnvSpec(Box([-1.0], [1.0]), Box(np.array(-3.0), np.array(3.0)))
    policy = greedy(spec)
    for action in (policy.predict(np.zeros(1))[0], policy.as_python()(np.zeros(1))):
        assert isinstance(action, np.ndarray) and action.shape == ()


def test_predict_resets_the_carry_of_observations_that_begin_an_episode():
    policy = policy_for(SPEC, network=REMEMBERS["lstm"])
    obs = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    _, carry = policy.predict(obs)
    again, after = policy.predict(obs, carry, first=[False, True, False])
    kept, kept_after = policy.predict(obs, carry)
    fresh, fresh_after = policy.predict(obs)
    rows = np.array([False, True, False])
    assert np.array_equal(again, np.where(rows, fresh, kept))
    for leaf, kept_leaf, fresh_leaf in zip(*map(jax.tree.leaves, (after, kept_after, fresh_after)), strict=True):
        assert np.array_equal(leaf, np.where(rows[:, None], fresh_leaf, kept_leaf))
    one, _ = policy.predict(obs[0], jax.tree.map(lambda x: x[:1], carry), first=True)
    assert one == fresh[0]
    with pytest.raises(ValueError, match=r"first must be one bool per observation, shape \(3,\), got bool \(2,\)"):
        policy.predict(obs, carry, first=[True, False])
    with pytest.raises(ValueError, match=r"first must be one bool per observation, .* got int64"):
        policy.predict(obs, carry, first=[1, 0, 0])


def test_wrappers_that_predict_as_their_inner_policy_reset_its_carry():
    inner = policy_for(SPEC, network=REMEMBERS["lstm"])
    obs = np.ones((2, 3), np.float32)
    _, carry = inner.predict(obs)
    for wrapped in (Greedy(inner), DiscountedReturn(inner, 0.9)):
        got, _ = wrapped.predict(obs, carry, first=[True, False])
        assert np.array_equal(got, inner.predict(obs, carry, first=[True, False])[0])


def test_an_observation_beyond_float32_is_not_finite():
    with pytest.raises(ValueError, match="obs must be finite, got 1e\\+300"):
        greedy(SPEC).predict([0.0, 0.0, 1e300])
