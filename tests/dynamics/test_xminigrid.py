"""XLand-MiniGrid's environments, where it is installed: its steps, our resets, its time limit as truncation."""

import jax
import numpy as np
import pytest

from polyak import envs, train
from polyak.agents.ppo import PPO
from polyak.envs.rendered_env import single_copy
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.networks.feedforward import MLP
from tests.dynamics.library_steps import steps_beside

xminigrid = pytest.importorskip("xminigrid")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def step_of(env, params):
    def step(key, state, action):
        after = env.step(params, state, action)
        terminated = after.last() & (after.discount == 0)
        return after, after.observation, after.reward, terminated, after.last() & ~terminated

    return step


def test_every_step_is_the_librarys_own_to_the_goal_and_to_the_time_limit():
    env = envs.make("xminigrid/MiniGrid-EmptyRandom-5x5", num_envs=16, env_kwargs={"max_steps": 20, "view_size": 5})
    assert env.reset_pool == 2 and env.spec.obs.shape == (5, 5, 2) and env.spec.obs.high[0, 0].tolist() == [12, 11]
    steps = steps_beside(env, step_of(*xminigrid.make("MiniGrid-EmptyRandom-5x5", max_steps=20, view_size=5)), 60)
    assert steps.terminated.sum() > 4 < steps.truncated.sum()
    assert (steps.reward[steps.terminated] > 0).all() and not steps.reward[~steps.terminated].any()
    np.testing.assert_array_equal(steps.info["rollout/success_rate"][~steps.first], steps.terminated[~steps.first])


def test_a_pair_of_environment_and_parameters_is_taken():
    env, params = xminigrid.make("MiniGrid-Empty-5x5")
    made = envs.make((env, params.replace(max_steps=3)), num_envs=2)
    assert made.spec.id == "xminigrid/Empty"
    state, _ = made.init(jax.random.key(0))
    for t in range(3):
        state, time_step = made.step(state, jax.numpy.zeros(2, jax.numpy.int32), jax.random.key(t))
    assert time_step.truncated.all()
    same, other = (envs.make((env, params.replace(max_steps=n)), num_envs=2) for n in (3, 4))
    assert same == made and hash(same) == hash(made) and other != made


def test_rulesets_are_told_apart():
    env, params = xminigrid.make("XLand-MiniGrid-R1-9x9")
    ruleset = params.ruleset
    made = [envs.make((env, params.replace(ruleset=ruleset.replace(goal=ruleset.goal + n))), num_envs=2) for n in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_names_and_settings_are_checked():
    assert {"xminigrid/MiniGrid-DoorKey-8x8", "xminigrid/XLand-MiniGrid-R1-9x9"} <= set(envs.names()["xminigrid"])
    assert set(envs.names()["xminigrid"]) == {f"xminigrid/{name}" for name in xminigrid.registered_environments()}
    with pytest.raises(ValueError, match=r"'xminigrid/MiniGrid-DorKey-8x8'; did you mean 'xminigrid/MiniGrid-DoorKey-8x8'\?"):
        envs.make("xminigrid/MiniGrid-DorKey-8x8")
    with pytest.raises(TypeError, match="max_stepps"):
        envs.make("xminigrid/MiniGrid-Empty-5x5", env_kwargs={"max_stepps": 3})


def test_the_compiled_loop_trains():
    env = envs.make("xminigrid/MiniGrid-Empty-5x5", num_envs=2)
    agent = PPO(env.spec, network=MLP((8,)), num_steps=8, num_minibatches=1, num_epochs=1)
    result = train.run(agent, env, env_steps=64, key=jax.random.key(0), progress=False)
    assert result.progress.env_steps >= 64 and np.isfinite(result.metrics["train/loss"])


def test_images_follow_the_state():
    env = JaxEnvOnHost(single_copy(envs.make("xminigrid/MiniGrid-Empty-5x5", num_envs=2)), jax.random.key(0))
    env.reset(0)
    first, _ = env.render()
    for _ in range(3):
        env.step(np.zeros(1, np.int32))
    later, _ = env.render()
    assert first.dtype == np.uint8 and first.shape == later.shape == (160, 160, 3) and first.std() > 10
    assert (first != later).any()
