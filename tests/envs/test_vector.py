"""Vector environments of every autoreset mode, as next-step ones; and what they may do wrong."""

from typing import ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from polyak import envs
from tests.envs import oracle, toys

MODES = list(AutoresetMode)


class Through(VectorWrapper):
    """Changes nothing, but hides that there is a SyncVectorEnv, which we would step ourselves."""


def sync(mode, lengths=(3, 1, 5), num_envs=3, make_env=toys.Scripted):
    return SyncVectorEnv([lambda: make_env(lengths=lengths)] * num_envs, autoreset_mode=mode)


def actions_of(num_steps, num_envs=3):
    return np.random.default_rng(0).integers(0, 4, (num_steps, num_envs)).astype(np.int32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(3, 1, 5), (1,), (2, 4)])
def test_every_mode_of_a_foreign_vector_environment_becomes_next_step_exactly(mode, lengths):
    env, actions = envs.make(Through(sync(mode, lengths))), actions_of(40)
    # No episode is left out: the oracle resets each environment once.
    oracle.assert_same(oracle.record(env, 7, actions), oracle.play(lambda: toys.Scripted(lengths), [7, 8, 9], actions))


@pytest.mark.parametrize("mode", MODES)
def test_episodes_are_whole_whatever_the_mode(mode):
    """From first to last, one count at a time, in one episode, by the actions that were given."""
    env, actions = envs.make(Through(sync(mode))), actions_of(60)
    obs, reward, terminated, truncated, first = oracle.record(env, 1, actions)
    last = terminated | truncated
    assert last.sum() > 20
    np.testing.assert_array_equal(first[1:], last[:-1])
    for t in range(60):
        for i in range(3):
            if last[t, i]:
                assert obs[t + 1, i, 1] == 0 and obs[t + 1, i, 2] == -1 and reward[t + 1, i] == 0
            else:
                assert obs[t + 1, i, 0] == obs[t, i, 0] and obs[t + 1, i, 1] == obs[t, i, 1] + 1
                assert obs[t + 1, i, 2] == actions[t, i]


@pytest.mark.parametrize("mode", MODES)
def test_a_sync_vector_environment_is_stepped_by_ourselves_and_equal_in_every_mode(mode):
    env, actions = envs.make(sync(mode)), actions_of(40)
    assert env.num_envs == 3
    seeds = np.random.SeedSequence(7).generate_state(3).tolist()
    oracle.assert_same(oracle.record(env, 7, actions), oracle.play(toys.Scripted, seeds, actions))


def test_an_async_vector_environment_in_same_step_mode_becomes_next_step():
    given = AsyncVectorEnv([toys.Scripted] * 2, context="forkserver", autoreset_mode=AutoresetMode.SAME_STEP)
    env, actions = envs.make(given), actions_of(20, 2)
    oracle.assert_same(oracle.record(env, 7, actions), oracle.play(toys.Scripted, [7, 8], actions, resets_twice=True))
    env.close()
    assert given.closed


@pytest.mark.parametrize("mode", MODES)
def test_masks_go_with_their_rows_in_every_mode(mode):
    env = envs.make(Through(sync(mode, make_env=toys.Masked)))
    assert env.spec.has_action_mask
    time_step = env.reset(0)
    for _ in range(20):
        for i in range(3):
            t = int(time_step.obs[i, 1])
            allowed = np.ones(4, bool) if time_step.last[i] or time_step.first[i] else np.arange(4) != t % 4
            np.testing.assert_array_equal(time_step.action_mask[i], allowed)
        time_step = env.step(np.zeros(3, np.int32))


class OneArray(toys.Scripted):
    """All environments of this class write every observation into one tree of arrays and return that."""

    tree: ClassVar = {"count": np.zeros(4), "pair": (np.zeros(1, np.float32), np.zeros(2, np.int32))}

    def __init__(self, lengths=(3, 1, 5)):
        super().__init__(lengths)
        box = self.observation_space
        pair = gymnasium.spaces.Tuple(
            (gymnasium.spaces.Box(-1e6, 1e6, (1,)), gymnasium.spaces.Box(-1000, 1000, (2,), np.int32))
        )
        self.observation_space = gymnasium.spaces.Dict({"count": box, "pair": pair})

    def _write(self, obs):
        self.tree["count"][:] = obs
        self.tree["pair"][0][:] = obs[0]
        self.tree["pair"][1][:] = obs[1:3]
        return self.tree

    def reset(self, **options):
        obs, info = super().reset(**options)
        return self._write(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self._write(obs), *rest


class OwnSync(SyncVectorEnv):
    """Changes nothing, but is not stepped by ourselves."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["function", "sync", "wrapped", "derived"])
def test_environments_that_return_one_array_have_rows_of_their_own(form, mode):
    lengths = [(3, 1, 5), (2, 4), (1,)]

    def make(cls):
        functions = [lambda own=own: cls(lengths=own) for own in lengths]
        if form == "function":
            left = iter(functions)
            return envs.make(lambda: next(left)(), num_envs=3)
        given = (OwnSync if form == "derived" else SyncVectorEnv)(functions, autoreset_mode=mode)
        return envs.make(Through(given) if form == "wrapped" else given)

    env, plain, actions = make(OneArray), make(toys.Scripted), actions_of(20)
    time_steps = [env.reset(0)] + [env.step(action) for action in actions]
    expected = [plain.reset(0)] + [plain.step(action) for action in actions]
    for ours, theirs in zip(time_steps, expected, strict=True):
        np.testing.assert_array_equal(ours.obs["count"], theirs.obs)
        np.testing.assert_array_equal(ours.obs["pair"][0], theirs.obs[:, :1])
        np.testing.assert_array_equal(ours.obs["pair"][1], theirs.obs[:, 1:3])


@pytest.mark.parametrize("mode", MODES)
def test_trees_go_through_every_mode(mode):
    class Ending(toys.Tree):
        def reset(self, **options):
            self.seen = []
            return super().reset(**options)

        def step(self, action):
            obs, reward, *_, info = super().step(action)
            return obs, reward, len(self.seen) == 3, False, info

    env = envs.make(Through(SyncVectorEnv([Ending] * 2, autoreset_mode=mode)))
    time_step = env.reset(0)
    action = {"bits": np.zeros((2, 2), np.int8), "go": (np.zeros(2, int), np.zeros((2, 2))), "which": np.zeros((2, 2), int)}
    for k in (0, 1, 2, 3, 0, 1, 2, 3, 0):
        np.testing.assert_array_equal(time_step.obs["a"], np.full((2, 2, 2), k, np.uint8))
        np.testing.assert_array_equal(time_step.obs["b"][0], [k % 3] * 2)
        np.testing.assert_array_equal(time_step.obs["c"]["far"], [[k, -k]] * 2)
        assert time_step.terminated.tolist() == [k == 3] * 2
        time_step = env.step(action)


class Fake(VectorEnv):
    """Two environments that never end, answering as told."""

    def __init__(self, mode=AutoresetMode.NEXT_STEP, **answers):
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.num_envs = 2
        self.single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.answers = answers

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 3), np.float32), {}

    def step(self, action):
        good = {"obs": np.full((2, 3), 0.5, np.float32), "reward": np.ones(2), "terminated": np.zeros(2, bool)}
        good = {**good, "truncated": np.zeros(2, bool), "info": {}, **self.answers}
        return tuple(good.values())


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("obs", np.zeros((2, 4), np.float32), ValueError, r"the observation must have shape \(2, 3\), got \(2, 4\)"),
        ("obs", np.zeros(3, np.float32), ValueError, r"the observation must have shape \(2, 3\), got \(3,\)"),
        ("obs", None, TypeError, r"the observation must have dtype float32 .*, got NoneType"),
        ("reward", np.ones(1), TypeError, r"the reward must be 2 numbers, got float64 of shape \(1,\)"),
        ("reward", np.array(["1", "2"]), TypeError, r"the reward must be 2 numbers, got <U1"),
        (
            "reward",
            np.ma.masked_array([1.0, 2.0], mask=[0, 1]),
            TypeError,
            "the reward must be 2 numbers, got masked float64",
        ),
        ("terminated", np.zeros(2), TypeError, "terminated must be 2 bools, got float64"),
        ("truncated", False, TypeError, r"truncated must be 2 bools, got bool of shape \(\)"),
        ("info", None, TypeError, r"step\(\) must return info as a dict of arrays, got NoneType"),
        (
            "info",
            [{}, {}],
            TypeError,
            r"step\(\) must return info as a dict .*, got list; leave out the wrapper DictInfoToList",
        ),
        (
            "info",
            {"action_mask": np.ones((2, 2))},
            ValueError,
            "info must not have an action_mask, as the first reset returned none",
        ),
        ("more", 1, TypeError, r"step\(\) must return .*got 6 values"),
    ],
)
def test_what_a_vector_environment_does_wrong_is_an_error_naming_the_step(name, value, error, says):
    env = envs.make(Fake(**{name: value}))
    env.reset(0)
    with pytest.raises(error, match=rf"Fake: step 1: {says}"):
        env.step(np.zeros(2, np.int32))


def test_nan_in_a_row_is_an_error_naming_env_and_step():
    obs = np.zeros((2, 3), np.float32)
    obs[1, 2] = np.nan
    env = envs.make(Fake(obs=obs))
    env.reset(3)
    with pytest.raises(
        ValueError, match=r"Fake: env 1, step 1 \(seed 3 of all\): the observation must be finite, got nan at \[2\]"
    ):
        env.step(np.zeros(2, np.int32))


def test_an_exception_of_a_vector_environment_keeps_its_type_and_says_where():
    class Raising(Fake):
        def step(self, action):
            raise KeyError("the user's own")

    env = envs.make(Raising())
    env.reset(3)
    with pytest.raises(KeyError) as caught:
        env.step(np.zeros(2, np.int32))
    assert caught.value.__notes__ == ["Raising: step 1: raised in step() of Raising; seed 3"]


@pytest.mark.parametrize("mode", [None, "Sometimes"])
def test_a_vector_environment_that_does_not_say_its_mode_is_rejected(mode):
    with pytest.raises(ValueError, match=r"metadata\['autoreset_mode'\] must be AutoresetMode\.NEXT_STEP or .*, got"):
        envs.make(Fake(mode))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_vector_environment_that_ignores_reset_mask_is_reported(mode):
    class Deaf(Through):
        def reset(self, *, seed=None, options=None):
            return self.env.reset(seed=seed)

    members = [lambda length=length: toys.Scripted((length,)) for length in (3, 4, 2)]
    env = envs.make(Deaf(SyncVectorEnv(members, autoreset_mode=mode)))
    env.reset(0)
    with pytest.raises(
        ValueError,
        match=r"must reset only the environments of options\['reset_mask'\].*AutoresetMode\.NEXT_STEP",
    ):
        for _ in range(5):
            env.step(np.zeros(3, np.int32))


def test_a_same_step_environment_without_final_obs_is_an_error():
    class Forgetful(Through):
        def step(self, actions):
            return (*self.env.step(actions)[:4], {})

    env = envs.make(Forgetful(sync(AutoresetMode.SAME_STEP, (2,))))
    env.reset(0)
    env.step(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="step 2: info must have 'final_obs' where an episode ended"):
        env.step(np.zeros(3, np.int32))


class Batches(Fake):
    """Ends an episode of its second environment in each step, with all final observations in one tree of batches."""

    def __init__(self, final_obs):
        super().__init__(AutoresetMode.SAME_STEP, info={"final_obs": final_obs}, terminated=np.array([False, True]))
        part = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.single_observation_space = gymnasium.spaces.Dict(a=part, b=gymnasium.spaces.Dict(c=part))

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros((2, 3), np.float32), "b": {"c": np.zeros((2, 3), np.float32)}}, {}

    def step(self, action):
        return self.reset()[0], *super().step(action)[1:]


def test_final_observations_may_be_a_tree_of_batches():
    nan = np.full(3, np.nan, np.float32)  # no episode ended there
    env = envs.make(Batches({"a": np.stack([nan, np.ones(3, np.float32)]), "b": {"c": np.array([[5.0] * 3, [0.5] * 3])}}))
    env.reset(0)
    obs = env.step(np.zeros(2, np.int32)).obs
    assert obs["a"][:, 0].tolist() == [0, 1] and obs["b"]["c"][:, 0].tolist() == [0, 0.5]


@pytest.mark.parametrize("final", [7, [None], [None, np.zeros(3), np.zeros(3)], np.zeros((1, 3), np.float32)])
def test_final_observations_of_another_number_are_an_error(final):
    env = envs.make(Batches(final))
    env.reset(0)
    with pytest.raises(ValueError, match=r"step 1: info\['final_obs'\] must have 2 entries, got"):
        env.step(np.zeros(2, np.int32))


def test_a_reward_on_a_reset_row_is_none():
    class Generous(Through):
        def step(self, actions):
            obs, reward, *rest = self.env.step(actions)
            return obs, reward + 100, *rest

    _, reward, _, _, first = oracle.record(envs.make(Generous(sync(AutoresetMode.NEXT_STEP))), 0, actions_of(20))
    assert (reward[1:][first[1:]] == 0).all() and (reward[1:][~first[1:]] > 50).all()


def test_jax_arrays_of_a_vector_environment_become_numpys():
    env = envs.make(Fake(obs=jnp.full((2, 3), 0.25), reward=jnp.ones(2), terminated=jnp.zeros(2, bool)))
    env.reset(0)
    time_step = env.step(jnp.zeros(2, jnp.int32))
    assert all(type(x) is np.ndarray and x.flags.writeable for x in jax.tree.leaves(time_step))
    np.testing.assert_array_equal(time_step.obs, np.full((2, 3), 0.25))


@pytest.mark.filterwarnings("ignore:.*AutoresetMode")
def test_rows_of_phys2d_stand_still_while_another_resets_so_that_its_vectorised_form_is_not_taken():
    """If this fails, Gymnasium has mended it, and `make` may take the form again."""
    stood_still = False
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        vector = gymnasium.make_vec("phys2d/CartPole-v1", num_envs=2)
        vector.reset(seed=0)
        for t in range(40):
            before, ended = np.asarray(vector.state), np.asarray(vector.prev_done)
            vector.step(np.array([t % 2, 1]))
            if ended.any() and not ended.all():
                stood_still |= bool(np.array_equal(before[~ended], np.asarray(vector.state)[~ended]))
    assert stood_still
