"""Snapshots: plain data, exact where they exist, None where they would not be, and nothing in them ever runs."""

import json

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from polyak import envs
from polyak.envs import snapshots
from tests.envs import toys

PLAIN = (bool, int, float, str)


def is_plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return type(value) in PLAIN or (type(value) is np.ndarray and value.dtype.kind in "biuf")


def through_a_file(value):
    """What a checkpoint does: arrays aside, all else as JSON."""
    arrays = []

    def out(x):
        if isinstance(x, np.ndarray):
            arrays.append(x.copy())
            return {"array": len(arrays) - 1}
        raise TypeError(type(x))

    def back(x):
        return arrays[x["array"]] if set(x) == {"array"} else x

    return json.loads(json.dumps(value, default=out), object_hook=back)


def random_action(env, rng):
    shape = (env.num_envs, *env.spec.action.shape)
    if env.spec.action.dtype.kind == "f":
        return rng.uniform(-1, 1, shape).astype(np.float32)
    return rng.integers(0, env.spec.action.n, shape).astype(np.int32)


CASES = [
    ("CartPole-v1", "own", 60),
    ("CartPole-v1", "sync", 60),
    ("CartPole-v1", "async", 20),
    ("Pendulum-v1", "sync", 210),
    ("Acrobot-v1", "sync", 30),
    ("MountainCar-v0", "sync", 210),
    ("MountainCarContinuous-v0", "sync", 30),
    ("FrozenLake-v1", "sync", 60),
    ("Taxi-v4", "sync", 210),
    ("CliffWalking-v1", "sync", 30),
    ("Blackjack-v1", "sync", 30),
    ("InvertedPendulum-v5", "sync", 40),
    ("HalfCheetah-v5", "sync", 30),
    ("Ant-v5", "sync", 40),
    ("Hopper-v5", "sync", 60),
    ("Humanoid-v5", "sync", 30),
    ("Reacher-v5", "sync", 60),
]


@pytest.mark.parametrize(
    ("name", "vectorization", "steps"),
    [pytest.param(*case, marks=() if case[0] == "CartPole-v1" else pytest.mark.slow) for case in CASES],
)
def test_a_fresh_environment_goes_on_bit_for_bit_from_a_snapshot(name, vectorization, steps):
    rng = np.random.default_rng(0)
    env = envs.make(name, num_envs=2, vectorization=vectorization)
    env.reset(4)
    for _ in range(steps // 2 + 7):
        env.step(random_action(env, rng))
    snapshot = env.snapshot()
    assert is_plain(snapshot)
    stored = through_a_file(snapshot)
    fresh = envs.make(name, num_envs=2, vectorization=vectorization)
    fresh.restore(stored)
    resets = 0
    for _ in range(steps):
        action = random_action(env, rng)
        expected, ours = env.step(action), fresh.step(action)
        jax.tree.map(np.testing.assert_array_equal, ours, expected)
        assert jax.tree.map(lambda x: x.dtype, ours) == jax.tree.map(lambda x: x.dtype, expected)
        resets += int(ours.first.sum())
    if steps >= 60:
        assert resets > 0
    # The snapshot was not touched by going on, neither there nor here.
    fresh.restore(stored)
    jax.tree.map(np.testing.assert_array_equal, through_a_file(fresh.snapshot()), through_a_file(snapshot))
    env.close()
    fresh.close()


WRAPPERS = {
    "recorded": lambda env: gymnasium.wrappers.RecordEpisodeStatistics(env, buffer_length=2),
    "stacked": lambda env: gymnasium.wrappers.FrameStackObservation(env, 3),
    "with its time": lambda env: gymnasium.wrappers.TimeAwareObservation(env),
    "with its time in a dict": lambda env: gymnasium.wrappers.TimeAwareObservation(env, flatten=False, normalize_time=True),
    "delayed": lambda env: gymnasium.wrappers.DelayObservation(env, 2),
    "normalized": lambda env: gymnasium.wrappers.NormalizeObservation(env),
    "of normalized rewards": lambda env: gymnasium.wrappers.NormalizeReward(env),
    "of a dtype": lambda env: gymnasium.wrappers.DtypeObservation(env, np.float16),
    "sticky": lambda env: gymnasium.wrappers.StickyAction(env, 0.5),
    "skipping": lambda env: gymnasium.wrappers.MaxAndSkipObservation(env, 2),
    "rescaled": lambda env: gymnasium.wrappers.RescaleObservation(gymnasium.wrappers.RescaleAction(env, -1, 1), -1, 1),
    "clipped": lambda env: gymnasium.wrappers.ClipReward(gymnasium.wrappers.ClipAction(env), -1, 1),
    "flat": lambda env: gymnasium.wrappers.FlattenObservation(gymnasium.wrappers.ReshapeObservation(env, (3, 1))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.filterwarnings("ignore:.*precision lowered", "ignore:make. Normalize")
def test_gymnasiums_wrappers_go_on_bit_for_bit_from_a_snapshot(wrapper):
    def make():
        return WRAPPERS[wrapper](gymnasium.make("Pendulum-v1", max_episode_steps=9))

    rng, env = np.random.default_rng(0), envs.make(make, num_envs=2)
    env.reset(4)
    for _ in range(25):
        env.step(random_action(env, rng))
    snapshot = env.snapshot()
    assert is_plain(snapshot)
    fresh = envs.make(make, num_envs=2)
    fresh.restore(through_a_file(snapshot))
    for _ in range(25):
        action = random_action(env, rng)
        jax.tree.map(np.testing.assert_array_equal, fresh.step(action), env.step(action))


def test_a_snapshot_also_goes_back_in_the_same_environment():
    env, rng = envs.make("Ant-v5", num_envs=2), np.random.default_rng(0)
    env.reset(0)
    for _ in range(12):
        env.step(random_action(env, rng))
    snapshot = env.snapshot()
    actions = [random_action(env, rng) for _ in range(15)]
    first = [env.step(action) for action in actions]
    env.restore(snapshot)
    again = [env.step(action) for action in actions]
    for a, b in zip(first, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_snapshot_at_an_episodes_end_resets_next():
    env = envs.make(toys.Counting, num_envs=2)
    env.reset(0)
    for _ in range(7):
        last = env.step(np.zeros(2, np.int32))
    assert last.last.all()
    fresh = envs.make(toys.Counting, num_envs=2)
    fresh.restore(env.snapshot())
    for _ in range(3):
        expected, ours = env.step(np.zeros(2, np.int32)), fresh.step(np.zeros(2, np.int32))
        jax.tree.map(np.testing.assert_array_equal, ours, expected)
    assert fresh._steps == 10


def test_an_environment_that_tells_its_state_is_saved_with_its_generator():
    env = envs.make(toys.Counting, num_envs=2)
    env.reset(3)
    env.step(np.zeros(2, np.int32))
    assert is_plain(env.snapshot())
    fresh = envs.make(toys.Counting, num_envs=2)
    fresh.reset(99)
    fresh.restore(through_a_file(env.snapshot()))
    for _ in range(20):
        expected, ours = env.step(np.zeros(2, np.int32)), fresh.step(np.zeros(2, np.int32))
        jax.tree.map(np.testing.assert_array_equal, ours, expected)


def wrapped(env):
    class UsersOwn(gymnasium.Wrapper):
        pass

    return UsersOwn(env)


@pytest.mark.parametrize(
    "make_env",
    [
        toys.Secretive,
        toys.Scripted,
        # Importing Box2D warns, and dies where warnings are errors.
        pytest.param("LunarLander-v3", marks=pytest.mark.filterwarnings("ignore")),
        lambda: wrapped(gymnasium.make("Pendulum-v1")),
        lambda: gymnasium.wrappers.TransformObservation(toys.Secretive(), abs, toys.Secretive().observation_space),
    ],
)
def test_where_a_state_cannot_be_had_exactly_there_is_no_snapshot(make_env):
    env = envs.make(make_env)
    env.reset(0)
    assert env.snapshot() is None


def test_before_a_reset_there_is_no_snapshot():
    assert envs.make("CartPole-v1").snapshot() is None


class NeedsArgument(toys.Counting):
    def get_state(self, part):
        return {}


class StateProperty(toys.Counting):
    @property
    def get_state(self):
        return {}


class LikeMujoco(toys.Counting):
    def get_state(self):
        return np.zeros(2), np.zeros(2)

    def set_state(self, qpos, qvel):
        pass


class Raising(toys.Counting):
    def get_state(self):
        raise RuntimeError("not while rendering")


class Cyclic(toys.Counting):
    def get_state(self):
        state = {}
        return state | {"self": [state, state.setdefault("state", state)]}


@pytest.mark.parametrize(
    ("make_env", "says"),
    [
        (
            lambda: toys.Counting({"x": {"y": object()}}),
            r"Counting.get_state\(\)\['x'\]\['y'\] must be plain data .*, got object",
        ),
        (lambda: toys.Counting({"x": [1, {2}]}), r"get_state\(\)\['x'\]\[1\] must be plain data .*, got set"),
        (lambda: toys.Counting({(object(),): 2}), r"a key of Counting.get_state\(\)\[0\] must be plain data .*, got object"),
        (lambda: toys.Counting({"x": np.array([object()])}), r"\['x'\] must be plain data .*, got ndarray"),
        (NeedsArgument, r"NeedsArgument.get_state\(\) must take no argument: missing a required argument: 'part'"),
        (StateProperty, r"StateProperty.get_state must be a method, got property"),
        (LikeMujoco, r"LikeMujoco.set_state\(\) must take the state: missing a required argument: 'qvel'"),
        (Cyclic, r"Cyclic.get_state\(\) refers to itself"),
        (Raising, r"Raising.get_state\(\) raised RuntimeError: not while rendering"),
    ],
)
def test_an_unusable_state_is_no_snapshot_with_one_warning_from_make(make_env, says):
    with pytest.warns(UserWarning, match=rf"{says}; there is no snapshot, so that a resumed training begins new") as warned:
        env = envs.make(make_env, num_envs=2)
        env.reset(0)
        assert env.snapshot() is None and env.snapshot() is None
    assert len(warned) == 1


def test_an_unusable_state_of_a_vector_environment_is_no_snapshot_with_one_warning():
    class Own(CartPoleVectorEnv):
        def get_state(self):
            return {"x": object()}

        def set_state(self, state):
            pass

    with pytest.warns(UserWarning, match=r"Own.get_state\(\)\['x'\] must be plain data .*, got object; there is no") as warned:
        env = envs.make(Own(num_envs=2))
        env.reset(0)
        assert env.snapshot() is None
    assert len(warned) == 1


class Typed(toys.Counting):
    """Its state holds NumPy scalars, None, a tuple and other keys than strings."""

    def get_state(self):
        return {"count": np.int64(self.count), "goal": None, "place": (1, 2.0), 3: np.float32(0.5)}

    def set_state(self, state):
        assert type(state["count"]) is np.int64 and state["goal"] is None and state["place"] == (1, 2.0)
        assert type(state[3]) is np.float32
        self.count = int(state["count"])


class Live(toys.Counting):
    """Hands out the array that it counts in."""

    def reset(self, **options):
        self.array = np.zeros(1)
        return super().reset(**options)

    def get_state(self):
        self.array[0] = self.count
        return {"count": self.array}

    def set_state(self, state):
        self.count = int(state["count"][0])

    def step(self, action):
        result = super().step(action)
        self.array[0] = self.count
        return result


@pytest.mark.parametrize("make_env", [Typed, Live])
def test_a_state_comes_back_with_its_types_and_as_it_was(make_env):
    env = envs.make(make_env, num_envs=2)
    env.reset(3)
    env.step(np.zeros(2, np.int32))
    snapshot = env.snapshot()
    expected = env.step(np.zeros(2, np.int32))
    assert is_plain(snapshot)
    fresh = envs.make(make_env, num_envs=2)
    fresh.restore(through_a_file(snapshot))
    jax.tree.map(np.testing.assert_array_equal, fresh.step(np.zeros(2, np.int32)), expected)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**100,
        1.5,
        float("inf"),
        "text",
        (1, (2.0, None)),
        [1, [2]],
        {"a": {3: "x"}, (1, 2): [None]},
        np.float32(1.5),
        np.int64(7),
        np.bool_(True),
        np.arange(6, dtype=np.int16).reshape(2, 3),
    ],
)
def test_encoding_there_and_back_keeps_value_and_type(value):
    encoded = snapshots.encode(value)
    assert is_plain(encoded)
    back = snapshots.decode(through_a_file(encoded))
    assert type(back) is type(value)
    np.testing.assert_array_equal(back, value) if isinstance(value, np.ndarray) else None
    assert isinstance(value, np.ndarray) or back == value


@pytest.mark.parametrize("bits", snapshots.BIT_GENERATORS)
def test_every_generator_goes_on_where_it_was(bits):
    generator = np.random.Generator(bits(5))
    generator.integers(0, 10, 3, np.uint32)  # leaves half a word over
    encoded = snapshots.encode(generator)
    assert is_plain(encoded)
    again = snapshots.decode(through_a_file(encoded))
    np.testing.assert_array_equal(again.random(9), generator.random(9))
    np.testing.assert_array_equal(again.integers(0, 10, 9, np.uint32), generator.integers(0, 10, 9, np.uint32))


@pytest.mark.parametrize("value", [object(), len, np.random.RandomState(0), np.array(["x"]), np.array([None]), {1, 2}, b"x"])
def test_what_is_no_data_is_not_encoded(value):
    with pytest.raises(snapshots.NotPlain):
        snapshots.encode(value)


def saved(name="CartPole-v1", **options):
    env = envs.make(name, num_envs=2, **options)
    env.reset(0)
    return env, env.snapshot()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.update(id="Pendulum-v1"), r"the snapshot must be of .*, got \{'id': 'Pendulum-v1'"),
        (lambda s: s.update(num_envs=3), "'num_envs': 3"),
        (lambda s: s.pop("id"), "'id': None"),
        (lambda s: s.update(form="single"), "'form': 'single'"),
        (lambda s: s.update(last=np.zeros(3, bool)), "cannot reshape"),
        (lambda s: s.pop("last"), r"the snapshot is invalid: KeyError\('last'"),
        (lambda s: s.update(batch=[{}]), r"the snapshot is invalid: KeyError\('env'"),
        (lambda s: s.update(batch=[{"env": 5}]), "the snapshot is invalid"),
        (lambda s: s["batch"].append(s["batch"][0]), "too many values"),
    ],
)
def test_a_snapshot_of_another_environment_is_rejected(change, says):
    env, snapshot = saved()
    change(snapshot)
    before = env._batch.env.state.copy()
    with pytest.raises(ValueError, match=says):
        env.restore(snapshot)
    np.testing.assert_array_equal(env._batch.env.state, before)


def test_a_snapshot_of_fewer_environments_is_rejected():
    env, snapshot = saved("Pendulum-v1")
    snapshot["batch"].pop()
    with pytest.raises(ValueError, match="the snapshot must be of 2 environments, got 1"):
        env.restore(snapshot)


def test_a_snapshot_goes_from_a_loop_to_workers():
    env, snapshot = saved("Pendulum-v1")
    other = envs.make("Pendulum-v1", num_envs=2, vectorization="async")
    other.restore(snapshot)
    action = np.ones((2, 1), np.float32)
    np.testing.assert_array_equal(other.step(action).obs, env.step(action).obs)
    other.close()


def test_a_snapshot_of_another_chain_of_wrappers_is_rejected():
    _, snapshot = saved("Pendulum-v1")
    other = envs.make(lambda: gymnasium.wrappers.TimeLimit(gymnasium.make("Pendulum-v1"), 5), num_envs=2)
    snapshot["id"] = other.spec.id
    with pytest.raises(ValueError, match=r"the snapshot must be of TimeLimit in TimeLimit in .*, got TimeLimit in"):
        other.restore(snapshot)


def test_a_mujoco_state_of_another_model_is_rejected():
    env, snapshot = saved("HalfCheetah-v5")
    layer = snapshot["batch"][0]["env"]["layers"][-1]
    layer["mujoco"]["state"] = layer["mujoco"]["state"][:-1]
    with pytest.raises(ValueError, match="MuJoCo state must have"):
        env.restore(snapshot)


@pytest.mark.parametrize("name", ["step", "reset", "np_random", "__class__", "unwrapped", "model", "not an identifier"])
def test_a_snapshot_cannot_stand_in_for_what_runs(name):
    env, snapshot = saved("Pendulum-v1")
    snapshot["batch"][0]["env"]["layers"][-1]["attributes"][name] = "os.system"
    with pytest.raises(ValueError, match="must hold only state, got the attribute"):
        env.restore(snapshot)


@pytest.mark.parametrize("kind", ["object", "function", None])
def test_a_snapshot_that_names_a_kind_we_do_not_know_is_rejected(kind):
    env, snapshot = saved("Pendulum-v1")
    snapshot["batch"][0]["env"]["layers"][-1]["attributes"]["state"] = {"kind": kind, "name": "os.system"}
    with pytest.raises(ValueError, match="unknown kind"):
        env.restore(snapshot)


def test_a_generator_is_one_of_numpys():
    with pytest.raises(ValueError, match="unknown kind"):
        snapshots.decode({"kind": "generator", "name": "os.system", "state": {}})


class Foreign(gymnasium.Env):
    """An adapter whose `unwrapped` is an object of another library, as Jumanji's is."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    @property
    def unwrapped(self):
        return object()

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: gymnasium.wrappers.TimeLimit(env, 5)])
def test_an_environment_whose_unwrapped_is_another_object_has_no_snapshot(wrap):
    env = envs.make(lambda: wrap(Foreign()), num_envs=2)
    env.reset(0)
    assert env.snapshot() is None
