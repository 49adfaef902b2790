"""Gymnasium environments as a `HostEnv`: next-step resets, what agents see and environments get, seeds, masks."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import envs
from polyak.core.spaces import Dict
from polyak.core.types import HostEnv
from tests.envs import oracle, toys


def random_actions(shape, n, seed=0):
    return np.random.default_rng(seed).integers(0, n, shape).astype(np.int32)


@pytest.mark.parametrize("lengths", [(3, 1, 5), (1,), (2, 4)])
def test_time_steps_are_those_of_a_plain_loop(lengths):
    env = envs.make(lambda: toys.Scripted(lengths), num_envs=3)
    actions = random_actions((40, 3), 4)
    ours = oracle.record(env, 7, actions)
    seeds = np.random.SeedSequence(7).generate_state(3).tolist()
    oracle.assert_same(ours, oracle.play(lambda: toys.Scripted(lengths), seeds, actions))
    # All three kinds of ends came, in some row.
    terminated, truncated = ours[2], ours[3]
    assert (terminated & ~truncated).any() and (truncated & ~terminated).any() and (terminated & truncated).any()


@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "FrozenLake-v1"])
def test_gymnasiums_own_environments_are_the_same_as_in_a_plain_loop(name):
    space = gymnasium.make(name).action_space
    env = envs.make(name, num_envs=2, vectorization="sync")
    rng = np.random.default_rng(0)
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    actions = random_actions((250, 2), int(space.n)) if discrete else rng.uniform(-2, 2, (250, 2, 1)).astype(np.float32)
    seeds = np.random.SeedSequence(3).generate_state(2).tolist()
    ours, expected = oracle.record(env, 3, actions), oracle.play(lambda: gymnasium.make(name), seeds, actions)
    np.testing.assert_array_equal(ours[0], expected[0])
    for mine, theirs in zip(ours[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(mine, theirs.astype(mine.dtype))
    assert ours[0].dtype == (np.int32 if name == "FrozenLake-v1" else np.float32)
    assert ours[4][1:].any()


def test_a_gymnasium_environment_is_a_host_env():
    assert isinstance(envs.make(toys.Scripted), HostEnv)


def test_observations_of_float64_are_float32_and_rewards_too():
    env = envs.make(toys.Scripted)
    assert env.spec.obs.dtype == np.float32
    assert env.reset(0).obs.dtype == np.float32 and env.step(np.zeros(1, np.int32)).reward.dtype == np.float32


def test_trees_of_every_supported_kind_go_in_and_out():
    made = []
    env = envs.make(lambda: made.append(toys.Tree()) or made[-1], num_envs=2)
    time_step = env.reset(0)
    for k in range(4):
        obs = time_step.obs
        np.testing.assert_array_equal(obs["a"], np.full((2, 2, 2), k, np.uint8))
        np.testing.assert_array_equal(obs["b"][0], [k % 3] * 2)  # from 0, not from 5
        np.testing.assert_array_equal(obs["b"][1], [[k % 2, k % 4]] * 2)
        np.testing.assert_array_equal(obs["c"]["bits"], [[k % 2, 1, 0]] * 2)
        np.testing.assert_array_equal(obs["c"]["far"], [[k, -k]] * 2)
        dtypes = [x.dtype for x in jax.tree.leaves(obs)]
        assert dtypes == [np.uint8, np.int32, np.int32, np.int8, np.float32]
        action = {
            "bits": np.array([[0, 1], [1, 1]], np.int8),
            "go": (np.array([0, 2], np.int32), np.array([[-9.0, 0.5], [9.0, 1.0]], np.float32)),
            "which": np.array([[0, 1], [2, 0]], np.int32),
        }
        time_step = env.step(action)
    first, second = (member.seen[-1] for member in made)
    assert first["go"][0] == -1 and second["go"][0] == 1
    np.testing.assert_array_equal(first["go"][1], [-2.0, 0.5])
    np.testing.assert_array_equal(second["go"][1], [3.0, 1.0])
    assert second["go"][1].dtype == np.float64
    np.testing.assert_array_equal(second["which"], [12, 20])
    np.testing.assert_array_equal(first["bits"], [0, 1])


def test_actions_may_come_from_jax_and_start_where_the_environment_says():
    made = []
    env = envs.make(lambda: made.append(toys.Scripted(n=3, start=-5)) or made[-1], num_envs=2)
    env.reset(0)
    time_step = env.step(jnp.array([0, 2]))
    np.testing.assert_array_equal(time_step.obs[:, 2], [-5, -3])


@pytest.mark.parametrize(("scaling", "agents", "native"), [("clip", 0.5, 0.5), ("rescale", 0.5, 1.0), ("clip", 9.0, 2.0)])
def test_box_actions_are_clipped_or_rescaled(scaling, agents, native):
    env = envs.make("Pendulum-v1", action_scaling=scaling)
    env.reset(0)
    env.step(np.full((1, 1), agents, np.float32))
    assert env._batch.group.envs[0].env.unwrapped.last_u == np.float32(native)


def test_a_float64_bound_is_not_rounded():
    class Narrow(toys.Shared):
        def __init__(self):
            super().__init__()
            self.action_space = gymnasium.spaces.Box(-0.1, 0.1, (2,), np.float64)
            self.seen = None

        def step(self, action):
            self.seen = action.copy()
            assert self.action_space.contains(action)
            return super().step(action)

    made = []
    env = envs.make(lambda: made.append(Narrow()) or made[-1])
    env.reset(0)
    env.step(np.array([[-5.0, 5.0]], np.float32))
    assert made[0].seen.tolist() == [-0.1, 0.1]


@pytest.mark.parametrize("given", ["single", "vector"])
def test_returned_arrays_are_not_reused(given):
    class SharedVector(gymnasium.vector.VectorEnv):
        """Hands out its own arrays."""

        def __init__(self):
            self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
            self.num_envs = 2
            self.single_observation_space = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32)
            self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
            self.obs, self.reward = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
            self.flags = np.zeros(2, bool), np.zeros(2, bool)

        def reset(self, *, seed=None, options=None):
            self.obs[:] = 0
            return self.obs, {}

        def step(self, action):
            self.obs += 1
            self.reward += 1
            action *= 0
            return self.obs, self.reward, *self.flags, {}

    env = envs.make(toys.Shared, num_envs=2) if given == "single" else envs.make(SharedVector())
    action = np.ones((2, 2), np.float32)
    kept = [env.reset(0)] + [env.step(action) for _ in range(3)]
    np.testing.assert_array_equal([t.obs[0, 0] for t in kept], [0, 1, 2, 3])
    assert np.all(action == 1)
    for time_step in kept:
        for array in jax.tree.leaves(time_step):
            array[:] = 1
    after = env.step(action)
    assert after.obs[0, 0] == 4
    assert not after.terminated.any() and not after.truncated.any()


def test_the_callers_changes_to_a_time_step_do_not_reach_the_environment():
    env = envs.make(lambda: toys.Scripted((2,)), num_envs=2)
    env.reset(0)
    env.step(np.zeros(2, np.int32))
    end = env.step(np.zeros(2, np.int32))
    assert end.last.all()
    end.terminated[:] = False
    end.truncated[:] = False
    end.first[:] = True
    assert env.step(np.zeros(2, np.int32)).first.all()


def test_a_seed_makes_the_same_episodes_again_and_another_makes_others():
    env, actions = envs.make(toys.Scripted, num_envs=2), random_actions((20, 2), 4)
    first, again, other = (oracle.record(env, seed, actions) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])


def test_each_environment_has_its_own_seed_and_runs_share_none():
    starts = [envs.make(toys.Scripted, num_envs=4).reset(seed).obs[:, 3] for seed in (0, 1, 2)]
    assert len(np.unique(np.concatenate(starts))) == 12


@pytest.mark.parametrize("vectorization", ["own", "sync"])
def test_the_vectorised_cartpole_steps_as_the_single_one_does(vectorization):
    """Same state, same action: same next state, reward and flags, also at the time limit."""
    env = envs.make("CartPole-v1", num_envs=5, vectorization=vectorization)
    single = gymnasium.make("CartPole-v1")
    time_step, steps = env.reset(0), np.zeros(5, int)
    for t in range(60):
        action = random_actions(5, 2, seed=t)
        before = time_step
        if vectorization == "own":
            state = env._batch.env.state.T.copy()
        else:
            state = np.stack([m.env.unwrapped.state for m in env._batch.group.envs])
        time_step = env.step(action)
        steps = np.where(time_step.first, 0, steps + 1)
        for i in range(5):
            if before.last[i]:
                assert time_step.first[i] and time_step.reward[i] == 0 and not time_step.last[i]
                assert np.all(np.abs(time_step.obs[i]) <= 0.05)
                continue
            single.reset(seed=0)
            single.unwrapped.state = state[i]
            obs, reward, terminated, _, _ = single.step(int(action[i]))
            np.testing.assert_allclose(time_step.obs[i], obs, rtol=1e-6, atol=1e-7)
            assert (time_step.reward[i], time_step.terminated[i], time_step.truncated[i]) == (reward, terminated, False)


@pytest.mark.filterwarnings("ignore:.*out of date")
@pytest.mark.parametrize("vectorization", ["own", "sync"])
@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", 500), ("CartPole-v0", 200)])
def test_the_time_limit_of_the_vectorised_cartpole_is_the_registered_one(name, limit, vectorization):
    env = envs.make(name, num_envs=2, vectorization=vectorization)
    time_step, length = env.reset(1), 0
    while not time_step.last[0]:
        x, v, angle, w = time_step.obs.T
        time_step = env.step((3 * angle + w + 0.3 * x + 0.5 * v > 0).astype(np.int32))
        length += 1
    assert length == limit == gymnasium.spec(name).max_episode_steps
    assert time_step.truncated[0] and not time_step.terminated[0]
    assert env.step(np.zeros(2, np.int32)).first[0]


def test_masks_are_passed_on_and_are_all_ones_where_the_episode_is_over():
    env = envs.make(toys.Masked, num_envs=3)
    assert env.spec.has_action_mask
    time_step = env.reset(0)
    assert time_step.action_mask.shape == (3, 4) and time_step.action_mask.dtype == bool and time_step.action_mask.all()
    for t in range(1, 6):
        time_step = env.step(np.zeros(3, np.int32))
        for i in range(3):
            # Episodes of 3 steps, then a reset, then of 1.
            allowed = np.ones(4, bool) if time_step.last[i] or time_step.first[i] else np.arange(4) != t % 4
            np.testing.assert_array_equal(time_step.action_mask[i], allowed)


def test_masks_of_taxi_equal_those_of_gymnasium():
    env, plain = envs.make("Taxi-v4"), gymnasium.make("Taxi-v4")
    assert env.spec.has_action_mask
    _, info = plain.reset(seed=np.random.SeedSequence(0).generate_state(1).tolist()[0])
    time_step = env.reset(0)
    for action in (0, 1, 2, 3, 4):
        np.testing.assert_array_equal(time_step.action_mask[0], info["action_mask"].astype(bool))
        time_step, (*_, info) = env.step(np.array([action])), plain.step(action)


def test_without_masks_there_is_none():
    env = envs.make(toys.Scripted)
    assert not env.spec.has_action_mask and env.reset(0).action_mask is None


def test_blackjacks_tuple_of_discretes_is_observed():
    env = envs.make("Blackjack-v1", num_envs=3)
    time_step = env.reset(0)
    assert [part.shape for part in time_step.obs] == [(3,)] * 3
    assert all(part.dtype == np.int32 for part in env.step(np.ones(3, np.int32)).obs)


def test_a_step_needs_a_reset_before_it_and_after_an_error():
    env = envs.make(lambda: toys.Faulty(at=2, answer=toys.raise_key_error))
    with pytest.raises(RuntimeError, match=r"Faulty.*reset\(\) must be called before"):
        envs.make(toys.Faulty).step(np.zeros(1, np.int32))
    env.reset(0)
    env.step(np.zeros(1, np.int32))
    with pytest.raises(KeyError):
        env.step(np.zeros(1, np.int32))
    with pytest.raises(RuntimeError, match="must be called before step"):
        env.step(np.zeros(1, np.int32))
    assert env.reset(0).first.all()


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (True, TypeError)])
def test_a_bad_seed_is_rejected(seed, error):
    with pytest.raises(error, match="reset: seed must be an integer >= 0"):
        envs.make(toys.Scripted).reset(seed)


def test_close_can_be_called_twice():
    env = envs.make(toys.Scripted, num_envs=2)
    env.reset(0)
    env.close()
    env.close()


def test_a_spec_of_a_tree_keeps_its_order_by_name():
    assert isinstance(envs.make(toys.Tree).spec.obs, Dict)
    assert list(envs.make(toys.Tree).spec.obs.spaces) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1"])
def test_a_closed_environment_says_so(name):
    env = envs.make(name, num_envs=2)
    action = env.spec.action.low[None].repeat(2, 0) if name == "Pendulum-v1" else np.zeros(2, np.int32)
    env.reset(0)
    snapshot = env.snapshot()
    env.close()
    for use in (lambda: env.reset(0), lambda: env.step(action), lambda: env.restore(snapshot)):
        with pytest.raises(RuntimeError, match=f"{name}: the environment is closed; create a new one"):
            use()
    assert env.snapshot() is None
