"""EnvPool's environments: Gymnasium's dynamics, next-step resets, seeds set by `reset`, batches sorted by environment."""

import itertools
import warnings

import gymnasium
import numpy as np
import pytest

from polyak import envs
from polyak.envs.envpool import SeededEnvPool

envpool = pytest.importorskip("envpool")


def make_envpool(name="CartPole-v1", num_envs=3, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bounds in float64
        env = envpool.make(name, env_type="gymnasium", num_envs=num_envs, **settings)
        assert env.observation_space  # created here
        return env


def play(env, seed, num_steps):
    steps, rng = [env.reset(seed)], np.random.default_rng(0)
    for _ in range(num_steps):
        steps.append(env.step(rng.integers(0, 2, env.num_envs)))
    return steps


def test_every_transition_is_that_of_gymnasium():
    env, reference = envs.make(make_envpool()), gymnasium.make("CartPole-v1").unwrapped
    reference.reset(seed=0)
    step, rng, ended = env.reset(0), np.random.default_rng(1), 0
    for _ in range(200):
        action, before = rng.integers(0, 2, 3), step
        step = env.step(action)
        for i in np.flatnonzero(~(before.terminated | before.truncated)):
            reference.state, reference.steps_beyond_terminated = before.obs[i].astype(np.float64), None
            obs, reward, terminated, _, _ = reference.step(int(action[i]))
            np.testing.assert_allclose(step.obs[i], obs, atol=1e-5)
            assert (step.reward[i], step.terminated[i]) == (reward, terminated)
            ended += terminated
    assert ended > 10


def test_an_episode_resets_on_the_step_after_its_end():
    steps = play(envs.make(make_envpool(max_episode_steps=5)), 0, 30)
    assert steps[0].first.all() and not steps[0].reward.any()
    for before, after in itertools.pairwise(steps):
        last = before.terminated | before.truncated
        np.testing.assert_array_equal(after.first, last)
        assert not after.reward[last].any() and np.abs(after.obs[last]).max(initial=0.0) <= 0.05
    assert any(step.truncated.any() for step in steps) and not any((s.truncated & s.terminated).any() for s in steps)


def test_equal_seeds_give_equal_episodes_and_others_do_not():
    env = envs.make(make_envpool(seed=7))
    first, again, other = (play(env, seed, 20) for seed in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.obs, b.obs)
    assert not np.array_equal(first[0].obs, other[0].obs)
    assert len({obs.tobytes() for obs in first[0].obs}) == 3


def test_batches_are_sorted_by_environment():
    class Shuffled:
        """Returns its environments in another order, as EnvPool's threads may."""

        def __init__(self, env):
            self.env, self.num_envs, self.config, self.metadata = env, env.num_envs, env.config, env.metadata
            self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space

        def step(self, actions):
            obs, reward, terminated, truncated, info = self.env.step(actions)
            order = np.array([2, 0, 1])
            shuffled = [part[order] for part in (obs, reward, terminated, truncated)]
            return *shuffled, info | {"env_id": info["env_id"][order]}

    plain, shuffled = make_envpool(seed=1), SeededEnvPool(Shuffled(make_envpool(seed=1)))
    plain.reset()
    shuffled.env.env.reset()
    for _ in range(20):
        for a, b in zip(plain.step(np.ones(3, np.int32))[:4], shuffled.step(np.ones(3, np.int32))[:4], strict=True):
            np.testing.assert_array_equal(a, b)


def test_box_actions_are_clipped_to_their_bounds():
    env = envs.make(make_envpool("Pendulum-v1", 2))
    env.reset(0)
    wide = env.step(np.full((2, 1), 100.0, np.float32))
    env.reset(0)
    np.testing.assert_array_equal(wide.obs, env.step(np.full((2, 1), 2.0, np.float32)).obs)


def test_it_has_a_name_and_no_snapshot():
    env = envs.make(make_envpool())
    env.reset(0)
    assert "CartPole" in env.spec.id and env.num_envs == 3 and env.snapshot() is None


def test_an_asynchronous_one_is_rejected():
    with pytest.raises(ValueError, match=r"EnvPool's batch_size=2 must be num_envs=4; create it with .*num_envs=2"):
        envs.make(make_envpool(num_envs=4, batch_size=2))
