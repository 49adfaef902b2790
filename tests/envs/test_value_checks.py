"""Values in batches: NaN, infinity, bounds, and an agent's wrong actions."""

import gymnasium
import numpy as np
import pytest

from polyak import envs
from tests.envs import toys
from tests.envs.test_single_env import stepped, with_fault

UNBOUNDED = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)


def at_step_20(obs=None, reward=1.0, **options):
    """Two environments; the one with index 1 answers so in step 20."""
    count = iter(range(2))

    def faulty():
        def answer(o, r, *rest):
            return (o if obs is None else obs, reward, *rest)

        return toys.Faulty(at=20, answer=answer if next(count) == 1 else None, obs_space=options.get("space"))

    rules = {name: value for name, value in options.items() if name != "space"}
    env = envs.make(faulty, num_envs=2, **rules)
    env.reset(0)
    for _ in range(19):
        env.step(np.zeros(2, np.int32))
    return env


@pytest.mark.parametrize("space", [None, UNBOUNDED])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_obs_is_an_error_naming_env_and_step(bad, space):
    obs = np.array([0, 0, bad], np.float32)
    seed = np.random.SeedSequence(0).generate_state(2)[1]
    env = at_step_20(obs, space=space)
    with pytest.raises(
        ValueError, match=rf"faulty: env 1, step 20 \(seed {seed}\): the observation must be finite, got {bad} at \[2\]"
    ):
        env.step(np.zeros(2, np.int32))


def test_one_environment_has_the_seed_alone():
    env = envs.make(lambda: toys.Faulty(at=1, answer=lambda obs, *rest: (obs * np.nan, *rest)))
    env.reset(0)
    with pytest.raises(ValueError, match=rf"env 0, step 1 \(seed {np.random.SeedSequence(0).generate_state(1)[0]}\): the obs"):
        for _ in range(2):
            env.step(np.zeros(1, np.int32))


def test_a_float64_too_large_for_float32_is_an_error():
    env = at_step_20(np.array([0, 0, 1e300]), space=gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64))
    with pytest.raises(ValueError, match=r"env 1, step 20 .*the observation must be finite, got 1e\+300 at \[2\]"):
        env.step(np.zeros(2, np.int32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_nonfinite_pass_passes_bad_numbers_on(bad):
    space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    env = at_step_20(np.array([0, 0, bad]), reward=bad, space=space, nonfinite="pass")
    time_step = env.step(np.zeros(2, np.int32))
    assert np.isfinite(time_step.obs[0]).all() and np.isfinite(time_step.reward[0])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal([time_step.obs[1, 2], time_step.reward[1]], np.array([bad, bad]).astype(np.float32))


def test_an_observation_out_of_bounds_is_warned_of_once_naming_env_and_step():
    env = envs.make(lambda: toys.Faulty(on_reset=lambda: (np.array([0, 2, 0], np.float32), {})), num_envs=2)
    with pytest.warns(UserWarning, match=r"env 0, step 0 .*: the observation must be in \[-1, 1\], got 2.0 at \[1\]"):
        assert env.reset(0).obs[0, 1] == 2
    assert env.reset(0).obs[0, 1] == 2  # warnings are errors here


def test_an_observation_out_of_bounds_is_an_error_with_out_of_bounds_error():
    env = at_step_20(np.array([0, 2, 0], np.float32), out_of_bounds="error")
    with pytest.raises(ValueError, match=r"faulty: env 1, step 20 .*the observation must be in \[-1, 1\], got 2.0 at \[1\]"):
        env.step(np.zeros(2, np.int32))


def test_an_observation_out_of_bounds_is_clipped_with_out_of_bounds_clip():
    time_step = at_step_20(np.array([0, 2, -5], np.float32), out_of_bounds="clip").step(np.zeros(2, np.int32))
    np.testing.assert_array_equal(time_step.obs[1], [0, 1, -1])
    np.testing.assert_array_equal(time_step.obs[0], [0.5] * 3)


@pytest.mark.parametrize("rule", ["warn", "error", "clip"])
def test_an_integer_out_of_its_space_is_always_an_error(rule):
    space = gymnasium.spaces.Discrete(3, start=5)
    for wrong in (4, 8):
        env = envs.make(lambda w=wrong: toys.Faulty(obs_space=space, on_reset=lambda: (w, {})), out_of_bounds=rule)
        with pytest.raises(ValueError, match=rf"env 0, step 0 .*the observation must be in \[5, 7\], got {wrong}"):
            env.reset(0)


@pytest.mark.parametrize(("dtype", "value"), [(np.int64, 2**40), (np.int64, -(2**40)), (np.uint64, 2**40)])
def test_an_integer_beyond_32_bits_is_an_error_that_names_the_limit(dtype, value):
    class Large(toys.Scripted):
        def __init__(self):
            super().__init__()
            self.observation_space = gymnasium.spaces.Box(-(2**50) if dtype is np.int64 else 0, 2**50, (4,), dtype)

        def obs(self, action):
            return np.array([0, 0, value if self.t else 0, 0], dtype)

        def step(self, action):
            self.t += 1
            return self.obs(action), 0.0, False, False, {}

    env = envs.make(Large)
    env.reset(0)
    with pytest.raises(
        ValueError, match=r"must be in \[.*\], got -?1099511627776 at \[2\]; agents get integers of 32 bits \(u?int"
    ):
        env.step(np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (gymnasium.spaces.Discrete(3, start=2**40), np.array([2], np.int32), 2**40 + 2),
        (gymnasium.spaces.MultiDiscrete([2, 3], start=[2**40, -(2**40)]), np.array([[1, 2]], np.int32), [2**40 + 1, 2 - 2**40]),
    ],
)
def test_actions_may_start_beyond_32_bits(space, action, expected):
    class Seeing(toys.Scripted):
        def __init__(self):
            super().__init__()
            self.action_space = space

        def step(self, action):
            assert self.action_space.contains(action) and np.all(action == expected), action
            return self.advance(0)

    env = envs.make(Seeing)
    env.reset(0)
    env.step(action)


def test_a_leaf_of_a_tree_is_named():
    tree = toys.Tree()
    obs = tree.obs(0)
    obs["c"]["far"][1] = np.nan
    env = envs.make(lambda: toys.Faulty(obs_space=tree.observation_space, on_reset=lambda: (obs, {})))
    with pytest.raises(ValueError, match=r"env 0, step 0 .*the observation 'c/far' must be finite, got nan at \[1\]"):
        env.reset(0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_a_reward_that_is_not_finite_is_an_error_naming_env_and_step(bad):
    env = at_step_20(reward=bad)
    with pytest.raises(
        ValueError, match=r"faulty: env 1, step 20 \(seed \d+\): the reward must be finite, got (nan|-?inf|1e\+39)"
    ):
        env.step(np.zeros(2, np.int32))


@pytest.mark.parametrize("reward", [1e38, -1e38, 1e-40, 0.0])
def test_any_finite_reward_is_passed_on(reward):
    assert at_step_20(reward=reward).step(np.zeros(2, np.int32)).reward[1] == np.float32(reward)


@pytest.mark.parametrize(
    ("action", "error", "says"),
    [
        (np.array([0, 2, 0]), ValueError, r"the action must be in \[0, 1\], got 2 in environment 1"),
        (np.array([0, 0, -1]), ValueError, r"the action must be in \[0, 1\], got -1 in environment 2"),
        (np.array([99, 0, 0]), ValueError, r"the action must be in \[0, 1\], got 99 in environment 0"),
        (np.array([0.0, 1.0, 0.0]), TypeError, r"the action must have dtype int32 \(integers or bools\), got float64"),
        (
            np.array([0.3, 1.0, 0.0], np.float32),
            TypeError,
            r"the action must have dtype int32 \(integers or bools\), got float32",
        ),
        (np.array([0, 1]), ValueError, r"the action must have shape \(3,\), got \(2,\)"),
        (np.array([[0, 1, 0]]), ValueError, r"the action must have shape \(3,\), got \(1, 3\)"),
        (1, ValueError, r"the action must have shape \(3,\), got \(\)"),
        (None, TypeError, r"the action must have dtype int32 \(integers or bools\), got NoneType None"),
    ],
)
def test_a_wrong_action_is_an_error_and_nothing_is_done(action, error, says):
    env = with_fault(None)
    with pytest.raises(error, match=f"faulty: {says}"):
        env.step(action)
    assert [member.env.steps for member in env._batch.group.envs] == [2, 2, 2]
    assert stepped(env).reward.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("action", "error", "says"),
    [
        (np.array([[0.0], [np.nan]], np.float32), ValueError, r"the action must be finite, got nan in environment 1 at \[0\]"),
        (np.array([[np.inf], [0.0]], np.float32), ValueError, r"the action must be finite, got inf in environment 0 at \[0\]"),
        (np.array([[0], [1]]), TypeError, r"the action must have dtype float32 \(floats\), got int64"),
        (np.zeros(2, np.float32), ValueError, r"the action must have shape \(2, 1\), got \(2,\)"),
    ],
)
def test_a_wrong_box_action_is_an_error(action, error, says):
    env = envs.make("Pendulum-v1", num_envs=2)
    env.reset(0)
    with pytest.raises(error, match=f"Pendulum-v1: {says}"):
        env.step(action)


def test_a_part_of_a_tree_of_actions_is_named():
    env = envs.make(toys.Tree)
    env.reset(0)
    good = {"bits": np.zeros((1, 2), np.int8), "go": (np.zeros(1, int), np.zeros((1, 2))), "which": np.zeros((1, 2), int)}
    env.step(good)
    with pytest.raises(ValueError, match=r"the action 'which' must be in \[0, 1\], got 2 in environment 0 at \[1\]"):
        env.step({**good, "which": np.array([[2, 2]])})
    with pytest.raises(ValueError, match=r"the action 'bits' must be in \[0, 1\], got 5 in environment 0 at \[0\]"):
        env.step({**good, "bits": np.array([[5, 0]])})
    with pytest.raises(TypeError, match=r"the action 'go/1' must have dtype float32 \(floats\), got int64"):
        env.step({**good, "go": (np.zeros(1, int), np.zeros((1, 2), int))})
    for wrong in ({"bits": good["bits"]}, np.zeros(3), {**good, "go": ()}):
        with pytest.raises(ValueError, match=r"the action must be a tree of 'bits', 'go/0', 'go/1', 'which'; '.*' is missing"):
            env.step(wrong)


class Walking(gymnasium.Env):
    """Numbers that start at the first argument and move by random steps of the size of the second."""

    def __init__(self, start, size, dtype=np.float64):
        self.start, self.size, self.dtype = start, size, dtype
        self.observation_space = gymnasium.spaces.Box(-(2**30), 2**31 - 1, (2,), dtype)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = np.array([0.0, self.start])
        return self.x.astype(self.dtype), {}

    def step(self, action):
        self.x = self.x + self.np_random.choice([-self.size, self.size], 2)
        return self.x.astype(self.dtype), 0.0, False, False, {}


@pytest.mark.parametrize(("start", "size", "dtype"), [(4_649_776.0, 0.1, np.float64), (1_700_000_000, 1, np.int32)])
def test_changes_that_float32_does_not_resolve_are_warned_of_once(start, size, dtype):
    env = envs.make(lambda: Walking(start, size, dtype), num_envs=2)
    env.reset(0)
    with pytest.warns(UserWarning, match=r"env 0, step 63 .*the observation at \[1\] is .*float32 does not resolve") as shown:
        for _ in range(200):
            env.step(np.zeros(2, np.int32))
    assert len(shown) == 1


@pytest.mark.parametrize(
    ("start", "size", "dtype"),
    [(4_649_776.0, 10.0, np.float64), (1.0, 1e-9, np.float64), (4_649_776.0, 0.0, np.float64), (2**20, 1, np.int32)],
)
def test_changes_that_float32_resolves_or_that_are_small_near_zero_are_not_warned_of(start, size, dtype):
    env = envs.make(lambda: Walking(start, size, dtype), num_envs=2)
    env.reset(0)
    for _ in range(100):
        env.step(np.zeros(2, np.int32))


class Bytes(gymnasium.Env):
    """One number in a Box of bytes."""

    def __init__(self, value, high):
        self.value = np.full((2, 2, 3), value, np.uint8)
        self.observation_space = gymnasium.spaces.Dict({"image": gymnasium.spaces.Box(0, high, (2, 2, 3), np.uint8)})
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"image": self.value}, {}

    def step(self, action):
        return {"image": self.value}, 0.0, False, False, {}


def steps_of(value, high):
    env = envs.make(lambda: Bytes(value, high), num_envs=2)
    env.reset(0)
    for _ in range(80):
        env.step(np.zeros(2, np.int32))


def test_bytes_far_below_the_bound_that_networks_divide_by_are_warned_of_once():
    expected = r"env 0, step 63 .*the observation .image. has been at most 10, but networks divide it by 255, .*; if it stays"
    with pytest.warns(UserWarning, match=expected) as shown:
        steps_of(10, 255)
    assert len(shown) == 1


@pytest.mark.parametrize(("value", "high"), [(16, 255), (0, 255), (1, 1), (1, 10)])
def test_bytes_near_their_bound_or_always_0_are_not_warned_of(value, high):
    steps_of(value, high)
