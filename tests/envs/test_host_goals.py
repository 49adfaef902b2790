"""Functions of goals: of Gymnasium environments, called from compiled programs, and of dynamics in JAX."""

import copy
import dataclasses
import pickle
import warnings

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

import polyak
from polyak import DQN, MLP, HindsightReplay, PrioritizedReplay, UniformReplay
from polyak.core.spaces import EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.envs.bit_flipping import BitFlipping
from polyak.train.new_training import with_goals


class Plane(gymnasium.Env):
    """Walk on a plane to the goal; the achieved goal is the place, in float64."""

    def __init__(self, length=10):
        self.length, self.calls = length, []
        goal = Box(-np.inf, np.inf, (2,), np.float64)
        self.observation_space = Dict(observation=Box(-np.inf, np.inf, (1,), np.float64), achieved_goal=goal, desired_goal=goal)
        self.action_space = Discrete(4)

    def _obs(self):
        return {"observation": np.array([self.t / 10]), "achieved_goal": self.place.copy(), "desired_goal": self.goal}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.place = 0, np.zeros(2)
        self.goal = self.np_random.integers(-4, 5, 2).astype(float)
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        self.place[action // 2] += 2 * (action % 2) - 1
        reward = float(Plane.compute_reward(self, self.place, self.goal, {}))
        return self._obs(), reward, False, self.t >= self.length, {"is_success": reward == 0}

    def compute_reward(self, achieved_goal, desired_goal, info):
        self.calls.append((np.shape(achieved_goal), achieved_goal.dtype, info))
        return -(np.linalg.norm(achieved_goal - desired_goal, axis=-1) > 1.5).astype(np.float32)


class OneByOne(Plane):
    """A reward that does not take batches, and terminations from goals, neither."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return 0.0 if np.linalg.norm(achieved_goal - desired_goal) <= 1.5 else -1.0

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool(np.linalg.norm(achieved_goal - desired_goal) <= 0.5)


class Silent(Plane):
    """Sums over the batch: the shape is right, the numbers are not."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        distance = np.abs(achieved_goal - desired_goal)
        return -distance.sum(axis=-1) / distance.sum() if distance.sum() else distance.sum(axis=-1)


class NeedsInfo(Plane):
    def compute_reward(self, achieved_goal, desired_goal, info):
        return info["reward"]


class Constant(Plane):
    def compute_terminated(self, achieved_goal, desired_goal, info):
        return False


class EqualArrays(Plane):
    """Terminates at the goal, by a function that also answers for things that are no arrays."""

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return np.array_equal(achieved_goal, desired_goal)


class LastAxis(Plane):
    def compute_terminated(self, achieved_goal, desired_goal, info):
        return np.all(achieved_goal == desired_goal, axis=-1)


class Scaled(Plane):
    """Rewards that differ by an argument, which specs do not have."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def compute_reward(self, achieved_goal, desired_goal, info):
        return self.scale * super().compute_reward(achieved_goal, desired_goal, info)


class NoReward(Plane):
    compute_reward = None


GOALS = np.array([[0, 0], [1, 1], [3, 0], [0, 2], [-4, 0], [2, 2]], np.float32)
OTHERS = np.array([[0, 0], [2, 2], [3, 0], [0, 0], [-4, 1], [0, 0]], np.float32)


def outcomes(make):
    env = polyak.envs.make(make)
    goals = env.spec.goals
    goals.check()
    return jax.jit(goals.outcomes)(GOALS, OTHERS), goals._find_env()


def test_reward_is_computed_in_one_call_in_the_dtype_of_the_environment():
    new, env = outcomes(Plane)
    np.testing.assert_array_equal(new.reward, [0, 0, 0, -1, 0, -1])
    assert new.reward.dtype == jnp.float32 and new.terminated is None and new.truncated is None
    assert env.calls[-1] == ((6, 2), np.float64, {}) and len([shape for shape, *_ in env.calls if shape == (6, 2)]) == 2


def test_function_without_batches_is_called_one_by_one_with_a_warning():
    with pytest.warns(UserWarning, match="compute_.* is called once for each goal") as caught:
        new, _ = outcomes(OneByOne)
    assert len(caught) == 2
    np.testing.assert_array_equal(new.reward, [0, 0, 0, -1, 0, -1])
    np.testing.assert_array_equal(new.terminated, [True, False, True, False, False, False])


def test_function_with_other_numbers_for_batches_is_called_one_by_one():
    with pytest.warns(UserWarning, match="returned other numbers"):
        new, _ = outcomes(Silent)
    np.testing.assert_array_equal(new.reward, [0, -1, 0, -1, -1, -1])


def test_constant_flags_are_not_called():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, _ = outcomes(Constant)
    assert new.terminated is None


@pytest.mark.parametrize("kind", [EqualArrays, LastAxis])
def test_flags_that_compare_goals_are_called(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new, _ = outcomes(kind)
    np.testing.assert_array_equal(new.terminated, [True, False, True, False, False, False])


def test_a_replay_has_the_goals_of_the_spec_of_its_agent():
    one, other = (polyak.envs.make(lambda scale=scale: Scaled(scale)) for scale in (1.0, 100.0))
    agent = DQN(one.spec, MLP(hidden=(4,)), replay=HindsightReplay(100))
    assert agent.replay.goals is one.spec.goals
    assert dataclasses.replace(agent, spec=other.spec).replay.goals is other.spec.goals
    assert DQN(other.spec, MLP(hidden=(4,)), replay=agent.replay).replay.goals is other.spec.goals


def test_a_training_takes_the_goals_of_its_environment():
    one, other = (polyak.envs.make(lambda scale=scale: Scaled(scale)) for scale in (1.0, 100.0))
    agent = DQN(one.spec, MLP(hidden=(4,)), replay=HindsightReplay(100), learning_starts=8, batch_size=4)
    assert with_goals(agent, one.spec.goals) is agent
    assert with_goals(agent, other.spec.goals).replay.goals is other.spec.goals
    copied = copy.deepcopy(agent)
    result = polyak.train.run(copied, other, env_steps=20, progress=False)
    assert copied.spec.goals is None and result.agent.replay.goals is other.spec.goals


def test_function_of_a_wrapper_is_found_before_that_of_the_environment():
    class Doubled(gymnasium.Wrapper):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return 2 * self.env.compute_reward(achieved_goal, desired_goal, info)

    new, _ = outcomes(lambda: gymnasium.wrappers.TimeLimit(Doubled(Plane()), 5))
    np.testing.assert_array_equal(new.reward, [0, 0, 0, -2, 0, -2])


@pytest.mark.parametrize("vectorization", [pytest.param("async", marks=pytest.mark.slow), "sync"])
def test_functions_are_called_in_this_process(vectorization):
    env = polyak.envs.make(Plane, num_envs=2, vectorization=vectorization)
    env.spec.goals.check()
    np.testing.assert_array_equal(env.spec.goals.outcomes(GOALS, OTHERS).reward, [0, 0, 0, -1, 0, -1])
    env.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoReward, "needs a compute_reward"),
        (NeedsInfo, r"empty info, it raised KeyError: 'reward'; an info that steps return is not stored"),
    ],
)
def test_bad_functions_are_rejected_before_training(make, message, tmp_path):
    env = polyak.envs.make(make)
    agent = DQN(env.spec, MLP(hidden=(4,)), replay=HindsightReplay(100))
    with pytest.raises(ValueError, match=message):
        polyak.train.run(agent, env, env_steps=100, run_dir=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_environment_without_goals_is_rejected_by_the_agent():
    with pytest.raises(ValueError, match=r"DQN: HindsightReplay: the environment must have goals, .*CartPole-v1 has Box"):
        DQN(polyak.envs.make("jax/CartPole-v1").spec, replay=HindsightReplay(100))
    spec = BitFlipping(4).spec
    other = dataclasses.replace(spec, obs=polyak.envs.make(Plane).spec.obs)
    DQN(other, replay=HindsightReplay(100))
    mixed = {**spec.obs.spaces, "achieved_goal": other.obs.spaces["achieved_goal"]}
    with pytest.raises(ValueError, match="achieved_goal and desired_goal must have one space"):
        DQN(dataclasses.replace(spec, obs=type(spec.obs)(mixed)), replay=HindsightReplay(100))


def test_agent_of_a_spec_without_functions_acts_but_does_not_train():
    agent = DQN(BitFlipping(4).spec, MLP(hidden=(4,)), replay=HindsightReplay(100))
    assert agent.policy(agent.init(jax.random.key(0))).spec == agent.spec
    with pytest.raises(ValueError, match=r"the agent must be created with env\.spec"):
        agent.check(1)


def test_python_functions_run_on_one_device():
    agent = DQN(polyak.envs.make(Plane, num_envs=2).spec, MLP(hidden=(4,)), replay=HindsightReplay(100), batch_size=8)
    with pytest.raises(ValueError, match="compute_reward is Python, which runs on devices=1, got devices=2"):
        agent.check(1, 2)


class WrongReward(BitFlipping):
    def compute_reward(self, achieved_goal, desired_goal):
        return jnp.zeros((len(achieved_goal), 1))


def test_reward_in_jax_has_one_number_for_each_step():
    env = AutoReset(WrongReward(4), 2)
    with pytest.raises(ValueError, match=r"compute_reward must return floats \[2\], got float32\[2, 1\]"):
        DQN(env.spec, MLP(hidden=(4,)), replay=HindsightReplay(100)).check(2)


def test_equal_dynamics_have_equal_functions_which_are_neither_compared_nor_sent():
    one, other = (polyak.envs.make("jax/BitFlipping-v0", env_kwargs={"bits": 4}).spec for _ in range(2))
    assert one.goals == other.goals and hash(one.goals) == hash(other.goals)
    assert one == dataclasses.replace(one, goals=None)
    assert pickle.loads(pickle.dumps(polyak.envs.make(Plane).spec)).goals is None
    assert one.goals != polyak.envs.make("jax/BitFlipping-v0", env_kwargs={"bits": 5}).spec.goals
    assert isinstance(one, EnvSpec) and "goals" not in repr(one)


def plane_agent(env, replay):
    return DQN(
        env.spec, MLP(hidden=(32,)), replay=replay, gamma=0.9, learning_rate=3e-3, learning_starts=100, n_step=2,
        normalize_obs=True, epsilon=0.2, updates_per_step=0.5, target_period=50,
    )  # fmt: skip


@pytest.mark.slow
def test_dqn_reaches_the_goals_of_a_gymnasium_environment():
    env = polyak.envs.make(Plane, num_envs=4)
    agent = plane_agent(env, HindsightReplay(PrioritizedReplay(5_000)))
    result = polyak.train.run(agent, env, env_steps=6_000, eval_episodes=50, progress=False, seed=0)
    assert result.evaluation.success_rate > 0.8
    assert result.metrics["rollout/success_rate"] > 0.3


@pytest.mark.slow
def test_replay_in_host_memory_gives_the_numbers_of_one_on_the_device():
    parameters = []
    for replay_on in ("device", "host"):
        env = polyak.envs.make(Plane, num_envs=4)
        agent = plane_agent(env, HindsightReplay(5_000))
        result = polyak.train.run(agent, env, env_steps=240, replay_on=replay_on, progress=False, seed=0)
        assert result.metrics["train/n_updates"] > 50
        parameters.append(jax.tree.leaves(result.state.copies.online.params))
    assert all(map(np.array_equal, *parameters))


def test_uniform_replay_is_unchanged_in_environments_with_goals():
    spec = polyak.envs.make(Plane).spec
    assert DQN(spec, replay=UniformReplay(100)).replay == UniformReplay(100)
