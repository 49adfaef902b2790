"""Whatever a single environment does wrong is told with its name, its index and its step."""

import dataclasses

import gymnasium
import numpy as np
import pytest

from polyak import envs
from tests.envs import toys

GOOD = np.zeros(3, np.float32)


def with_fault(answer, at=3):
    """Three environments, of which the one with index 1 answers so in step 3; stepped until then."""
    count = iter(range(3))

    def faulty():
        return toys.Faulty(at=at, answer=answer if next(count) == 1 else None)

    env = envs.make(faulty, num_envs=3)
    env.reset(0)
    for _ in range(at - 1):
        env.step(np.zeros(3, np.int32))
    return env


def stepped(env):
    return env.step(np.array([0, 1, 0], np.int32))


@pytest.mark.parametrize(
    ("obs", "error", "says"),
    [
        (np.zeros(4, np.float32), ValueError, r"must have shape \(3,\), got \(4,\)"),
        (np.zeros(1, np.float32), ValueError, r"must have shape \(3,\), got \(1,\)"),
        (np.zeros((1, 3), np.float32), ValueError, r"must have shape \(3,\), got \(1, 3\)"),
        (np.float32(0.0), ValueError, r"must have shape \(3,\), got \(\)"),
        (0.0, ValueError, r"must have shape \(3,\), got \(\)"),
        (np.ma.masked_equal(np.float32([0.5, -9.0, 0.5]), -9.0), ValueError, "must be complete, got 1 masked values"),
    ],
)
def test_an_observation_of_the_wrong_shape_is_an_error_naming_env_and_step(obs, error, says):
    env = with_fault(lambda o, *rest: (obs, *rest))
    with pytest.raises(error, match=rf"faulty: env 1, step 3: the observation {says}"):
        stepped(env)


@pytest.mark.parametrize(
    ("obs", "says"),
    [
        (None, r"dtype float32 \(floats or integers\), got NoneType None"),
        ("up", r"dtype float32 \(floats or integers\), got str 'up'"),
        ({"a": GOOD}, r"dtype float32 \(floats or integers\), got dict"),
        (np.array([None, 1, 2]), r"dtype float32 \(floats or integers\), got object"),
        (np.zeros(3, bool), r"dtype float32 \(floats or integers\), got bool"),
        (np.zeros(3, complex), r"dtype float32 \(floats or integers\), got complex128"),
        ([[1.0], [1.0, 2.0]], "is not an array"),
    ],
)
def test_an_observation_of_the_wrong_kind_is_an_error_naming_env_and_step(obs, says):
    env = with_fault(lambda o, *rest: (obs, *rest))
    with pytest.raises(TypeError, match=rf"faulty: env 1, step 3: the observation .*{says}"):
        stepped(env)


@pytest.mark.parametrize(
    "obs", [np.array([0.25, 0, 1], np.float64), np.array([0, 0, 1]), [0.25, 0.0, 1.0], (0, 0, 1), np.ma.array([0.25, 0, 1])]
)
def test_numbers_of_another_width_are_cast(obs):
    time_step = stepped(with_fault(lambda o, *rest: (obs, *rest)))
    assert time_step.obs.dtype == np.float32
    np.testing.assert_array_equal(time_step.obs[1], np.array(obs, np.float32))


def test_floats_for_integers_are_an_error():
    space = gymnasium.spaces.Box(0, 9, (3,), np.uint8)
    env = envs.make(lambda: toys.Faulty(obs_space=space, at=1))
    with pytest.raises(TypeError, match=r"step 0: the observation must have dtype uint8 \(integers or bools\), got float32"):
        env.reset(0)


def test_an_integer_that_would_wrap_around_is_an_error():
    space = gymnasium.spaces.Box(0, 255, (3,), np.uint8)
    env = envs.make(lambda: toys.Faulty(obs_space=space, on_reset=lambda: (np.array([0, 300, 1]), {})))
    with pytest.raises(ValueError, match=r"env 0, step 0: the observation must be in \[0, 255\], got 300 at \[1\]"):
        env.reset(0)


@pytest.mark.parametrize(
    ("obs", "says"),
    [
        ({"b": 0}, "'a' is missing, got a dict with keys"),
        (np.zeros(3), "'a' is missing, got an array"),
        ({"a": np.zeros((2, 2), np.uint8), "b": (np.int64(5),), "c": {}}, "'b/1' is missing, got tuple"),
    ],
)
def test_another_tree_is_an_error_with_the_missing_path(obs, says):
    space = toys.Tree().observation_space
    env = envs.make(lambda: toys.Faulty(obs_space=space, on_reset=lambda: (obs, {})))
    with pytest.raises(ValueError, match=rf"env 0, step 0: the observation must be a tree of 'a', 'b/0', .*; {says}"):
        env.reset(0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda obs: obs | {"zzz": np.nan}, r"a dict with keys \['a', 'b', .*; 'zzz' is not in the space"),
        (lambda obs: obs | {"b": (*obs["b"], 1)}, "a tuple of length 2 at 'b', got length 3"),
    ],
)
def test_an_entry_that_is_not_in_the_space_is_an_error(change, says):
    space = toys.Tree().observation_space
    obs = change(toys.Tree().reset(seed=0)[0])
    env = envs.make(lambda: toys.Faulty(obs_space=space, on_reset=lambda: (obs, {})))
    with pytest.raises(ValueError, match=f"env 0, step 0: the observation must be {says}"):
        env.reset(0)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (None, "NoneType None"),
        ("1.0", "str '1.0'"),
        (np.array([1.0, 2.0]), r"ndarray array.*; mo_gymnasium\.wrappers\.LinearReward .*, SuperSuit splits several agents$"),
        (np.array([1.0]), "ndarray array"),
        (1j, "complex 1j"),
        (np.ma.masked_array(1.0, mask=True), "a masked array"),
        ([1.0], r"list \[1.0\]$"),
    ],
)
def test_a_reward_that_is_no_number_is_an_error_naming_env_and_step(reward, says):
    env = with_fault(lambda o, r, *rest: (o, reward, *rest))
    with pytest.raises(TypeError, match=rf"faulty: env 1, step 3: the reward must be one number, got {says}"):
        stepped(env)


@pytest.mark.parametrize("reward", [2, np.float32(2), np.int64(2), np.array(2.0), np.float64(2)])
def test_any_one_number_is_a_reward(reward):
    assert stepped(with_fault(lambda o, r, *rest: (o, reward, *rest))).reward.tolist() == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("place", [2, 3])
@pytest.mark.parametrize(
    ("flag", "says"), [(2, "int 2"), (None, "NoneType None"), (np.zeros(1, bool), "ndarray"), (1.0, "float")]
)
def test_a_flag_that_is_no_bool_is_an_error_naming_env_and_step(place, flag, says):
    env = with_fault(lambda *good: (*good[:place], flag, *good[place + 1 :]))
    name = ("terminated", "truncated")[place - 2]
    with pytest.raises(TypeError, match=rf"faulty: env 1, step 3: {name} must be a bool, got {says}"):
        stepped(env)


def test_numpys_bools_are_flags():
    time_step = stepped(with_fault(lambda o, r, te, tr, i: (o, r, np.True_, np.False_, i)))
    assert time_step.terminated.tolist() == [False, True, False]


def test_terminated_and_truncated_at_once_are_passed_on():
    time_step = stepped(with_fault(lambda o, r, te, tr, i: (o, r, True, True, i)))
    assert time_step.terminated.tolist() == time_step.truncated.tolist() == [False, True, False]


@pytest.mark.parametrize(("answer", "says"), [((GOOD, 1.0, False, {}), "4 values"), (None, "None"), ([0] * 5, "5 values")])
def test_a_step_of_another_form_is_an_error(answer, says):
    env = with_fault(lambda *good: answer)
    with pytest.raises(TypeError, match=rf"env 1, step 3: step\(\) must return \(obs, .*, info\), got {says}"):
        stepped(env)


@pytest.mark.parametrize("info", [None, [], "info"])
def test_an_info_that_is_no_dict_is_an_error(info):
    env = with_fault(lambda o, r, te, tr, i: (o, r, te, tr, info))
    with pytest.raises(TypeError, match=r"env 1, step 3: the info of step\(\) must be a dict"):
        stepped(env)


@pytest.mark.parametrize("answer", [GOOD, (GOOD,), (GOOD, {}, {}), None])
def test_a_reset_without_info_is_an_error_before_anything_runs(answer):
    with pytest.raises(TypeError, match=r"env 0, step 0: reset\(\) must return \(obs, info\), got"):
        envs.make(lambda: toys.Faulty(on_reset=lambda: answer))


def test_an_info_of_reset_that_is_no_dict_is_an_error():
    with pytest.raises(TypeError, match=r"env 0, step 0: the info of reset\(\) must be a dict, got None"):
        envs.make(lambda: toys.Faulty(on_reset=lambda: (GOOD, None)))


def test_an_exception_in_step_keeps_its_type_and_says_where():
    env = with_fault(toys.raise_key_error)
    with pytest.raises(KeyError, match="the user's own") as caught:
        stepped(env)
    seed = np.random.SeedSequence(0).generate_state(3)[1]
    assert caught.value.__notes__ == [f"faulty: env 1, step 3: raised in step(); seed {seed}, last action 1"]
    assert any(entry.name == "raise_key_error" for entry in caught.traceback)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception whose attributes cannot be set, so that it takes no notes."""


def test_a_frozen_exception_in_step_and_close_keeps_its_type():
    def fail(*_):
        raise Frozen

    with pytest.raises(Frozen):
        stepped(with_fault(fail))
    with pytest.raises(Frozen):
        envs.make(lambda: toys.Faulty(on_close=fail)).close()


def test_an_exception_in_reset_keeps_its_type_and_says_where():
    calls = []

    def on_reset():
        calls.append(1)
        return (GOOD, {}) if len(calls) == 1 else toys.raise_key_error()

    env = envs.make(lambda: toys.Faulty(on_reset=on_reset))
    with pytest.raises(KeyError) as caught:
        env.reset(5)
    seed = np.random.SeedSequence(5).generate_state(1)[0]
    assert caught.value.__notes__ == [f"<lambda>: env 0, step 0: raised in reset(seed={seed})"]


def test_an_exception_in_close_keeps_its_type_and_the_others_are_closed():
    closed, count = [], iter(range(3))

    def make():
        index = next(count)
        return toys.Faulty(on_close=toys.raise_key_error if index == 1 else lambda: closed.append(index))

    env = envs.make(make, num_envs=3)
    with pytest.raises(KeyError) as caught:
        env.close()
    assert closed == [0, 2] and "env 1" in caught.value.__notes__[0]
    env.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration])
def test_stop_signs_are_what_they_are(error):
    def stop(*_):
        raise error

    with pytest.raises(error):
        stepped(with_fault(stop))


@pytest.mark.parametrize(
    ("masks", "says"),
    [
        (np.zeros(4, bool), "must allow at least one action"),
        (np.ones(3, bool), r"must have shape \(4,\), got \(3,\)"),
        (np.full(4, 0.5), "must hold bools"),
        (np.array([0, 1, 2, 1]), "must hold bools"),
    ],
)
def test_a_bad_action_mask_is_an_error_naming_env_and_step(masks, says):
    env = envs.make(lambda: toys.Masked(masks), num_envs=2)
    env.reset(0)
    with pytest.raises(ValueError, match=rf"env 0, step 1: the action_mask {says}"):
        env.step(np.zeros(2, np.int32))


def test_an_action_mask_that_comes_later_is_an_error():
    env = envs.make(lambda: toys.Masked(from_reset=False))
    env.reset(0)
    with pytest.raises(ValueError, match="env 0, step 1: info must not have an action_mask, as the first reset returned none"):
        env.step(np.zeros(1, np.int32))


def test_a_missing_action_mask_is_an_error():
    class Forgetful(toys.Masked):
        def step(self, action):
            return (*super().step(action)[:4], {})

    env = envs.make(Forgetful)
    env.reset(0)
    with pytest.raises(ValueError, match="env 0, step 1: info must have an action_mask, as the first reset returned one"):
        env.step(np.zeros(1, np.int32))


def test_an_action_mask_for_a_box_is_rejected():
    class Odd(toys.Shared):
        def reset(self, **options):
            return super().reset(**options)[0], {"action_mask": np.ones(2)}

    with pytest.raises(TypeError, match=r"info\['action_mask'\] is supported for Discrete and MultiDiscrete actions, got Box"):
        envs.make(Odd)


def test_environments_with_different_spaces_are_rejected():
    sizes = iter((4, 4, 5))
    with pytest.raises(ValueError, match=r"env 2 must have the spaces of env 0, .*, got"):
        envs.make(lambda: toys.Scripted(n=next(sizes)), num_envs=3)


def test_only_some_with_masks_are_rejected():
    makers = iter((toys.Masked, toys.Scripted))
    with pytest.raises(ValueError, match="env 1 returns no action_mask, but env 0 does"):
        envs.make(lambda: next(makers)(), num_envs=2)


def test_what_is_no_environment_is_rejected():
    with pytest.raises(TypeError, match=r"env 0 must be a gymnasium\.Env, got int"):
        envs.make(lambda: 5)
