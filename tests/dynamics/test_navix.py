"""NAVIX' environments, where it is installed: its steps, our resets, its time limit as truncation."""

import jax
import numpy as np
import pytest

from polyak import envs, train
from polyak.agents.ppo import PPO
from polyak.envs.rendered_env import single_copy
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.networks.feedforward import MLP
from tests.dynamics.library_steps import steps_beside

navix = pytest.importorskip("navix")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def step_of(env):
    from navix.rendering.cache import RenderingCache

    def step(key, state, action):
        grid = state.state
        after = env.step(state.replace(state=grid.replace(cache=RenderingCache.init(grid.grid))), action)
        flags = after.is_termination(), after.is_truncation()
        return after.replace(state=after.state.replace(cache=None)), after.observation, after.reward, *flags

    return step


def test_every_step_is_the_librarys_own_to_the_goal_and_to_the_time_limit():
    env = envs.make("navix/Navix-Empty-Random-5x5-v0", num_envs=16, env_kwargs={"max_steps": 12})
    assert env.reset_pool is None and (env.spec.obs.low == 0).all() and (env.spec.obs.high == 10).all()
    steps = steps_beside(env, step_of(navix.make("Navix-Empty-Random-5x5-v0", max_steps=12)), 40)
    assert steps.terminated.sum() > 4 < steps.truncated.sum() and (steps.reward[steps.terminated] == 1).all()
    assert steps.obs.max() == 10
    np.testing.assert_array_equal(steps.info["rollout/success_rate"][~steps.first], steps.terminated[~steps.first])


def test_moving_obstacles_are_the_librarys_own():
    env = envs.make(navix.make("Navix-Dynamic-Obstacles-5x5-v0"), num_envs=4)
    assert env.spec.id == "navix/DynamicObstacles"
    steps_beside(env, step_of(navix.make("Navix-Dynamic-Obstacles-5x5-v0")), 20)
    first = envs.make("navix/Navix-Empty-5x5-v0", num_envs=4)
    assert first == first and len({first, env}) == 2


def test_an_observation_is_set_by_its_name_or_its_function():
    by_name, by_function = (
        envs.make("navix/Navix-Empty-5x5-v0", num_envs=2, env_kwargs={"observation_fn": observation})
        for observation in ("rgb", navix.observations.rgb)
    )
    assert by_name.spec.obs == by_function.spec.obs and by_name.spec.obs.shape == (40, 40, 3)
    assert (by_name.spec.obs.high == 255).all()
    _, time_step = by_name.init(jax.random.key(0))
    assert time_step.obs.max() > 100
    categorical = envs.make("navix/Navix-Empty-5x5-v0", env_kwargs={"observation_fn": "categorical"})
    assert (categorical.spec.obs.low == -1).all() and categorical.init(jax.random.key(0))[1].obs.min() == -1


def test_names_and_settings_are_checked():
    assert set(envs.names()["navix"]) == {f"navix/{name}" for name in navix.registry()}
    with pytest.raises(ValueError, match=r"'navix/Navix-Emty-5x5-v0'; did you mean 'navix/Navix-Empty-5x5-v0'\?"):
        envs.make("navix/Navix-Emty-5x5-v0")
    with pytest.raises(AttributeError, match="rbg"):
        envs.make("navix/Navix-Empty-5x5-v0", env_kwargs={"observation_fn": "rbg"})


def test_the_compiled_loop_trains():
    env = envs.make("navix/Navix-Empty-5x5-v0", num_envs=2)
    agent = PPO(env.spec, network=MLP((8,)), num_steps=8, num_minibatches=1, num_epochs=1)
    result = train.run(agent, env, env_steps=64, key=jax.random.key(0), progress=False)
    assert result.progress.env_steps >= 64 and np.isfinite(result.metrics["train/loss"])


def test_images_follow_the_state():
    env = JaxEnvOnHost(single_copy(envs.make("navix/Navix-Empty-5x5-v0", num_envs=2)), jax.random.key(0))
    env.reset(0)
    first, _ = env.render()
    for _ in range(3):
        env.step(np.full(1, 2, np.int32))
    later, _ = env.render()
    assert first.dtype == np.uint8 and first.shape == later.shape == (160, 160, 3) and first.std() > 10
    assert (first != later).any()
