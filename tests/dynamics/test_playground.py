"""MuJoCo Playground's environments, where it is installed: its dynamics, our resets, its time limit as truncation."""

import dataclasses
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import envs, train
from polyak.agents.ppo import PPO
from polyak.core.struct import struct
from polyak.dynamics.foreign import own_promotion
from polyak.dynamics.playground import dynamics_of
from polyak.envs.autoreset import AutoReset
from polyak.envs.rendered_env import single_copy
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.networks.feedforward import MLP

playground = pytest.importorskip("mujoco_playground")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

LENGTH, NUM_ENVS = 6, 3


@pytest.fixture(scope="module")
def env():
    return envs.make("playground/CartpoleBalance", num_envs=NUM_ENVS, env_kwargs={"episode_length": LENGTH})


def test_every_step_of_an_episode_is_the_librarys_own(env):
    theirs = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    step, their_step = jax.jit(env.step), jax.jit(jax.vmap(theirs.step))
    state, time_step = env.init(jax.random.key(0))
    for episode in range(2):
        their_state = state.dynamics.state.state
        assert bool(time_step.first.all())
        np.testing.assert_array_equal(time_step.obs, their_state.obs)
        for t in range(LENGTH):
            key = jax.random.key(100 * episode + t)
            action = jax.random.uniform(key, (NUM_ENVS, 1), minval=-1.0, maxval=1.0)
            state, time_step = step(state, action, key)
            with own_promotion("playground"):
                their_state = their_step(their_state, action)
            np.testing.assert_allclose(time_step.obs, their_state.obs, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(time_step.reward, their_state.reward, rtol=1e-5)
            assert set(time_step.info) == {f"env/{name}" for name in their_state.metrics}
            for name, value in their_state.metrics.items():
                np.testing.assert_allclose(time_step.info[f"env/{name}"], value, rtol=1e-5)
            assert not time_step.terminated.any() and bool((time_step.truncated == (t == LENGTH - 1)).all())
        state, time_step = step(state, action, jax.random.key(1000 + episode))
    assert len(np.unique(np.asarray(time_step.obs)[:, 0])) == NUM_ENVS


def test_rewards_of_a_repeated_action_are_summed(env):
    twice = envs.make(
        "playground/CartpoleBalance", num_envs=NUM_ENVS, env_kwargs={"episode_length": LENGTH, "action_repeat": 2}
    )
    action, key = jnp.full((NUM_ENVS, 1), 0.5), jax.random.key(1)
    state, _ = env.init(jax.random.key(0))
    rewards = []
    for _ in range(2):
        state, once = jax.jit(env.step)(state, action, key)
        rewards.append(np.asarray(once.reward))
    state, time_step = twice.init(jax.random.key(0))
    for t in range(LENGTH // 2):
        state, time_step = jax.jit(twice.step)(state, action, key)
        if t == 0:
            np.testing.assert_allclose(time_step.reward, sum(rewards), rtol=1e-6)
            np.testing.assert_allclose(time_step.obs, once.obs, rtol=1e-5, atol=1e-6)
    assert bool(time_step.truncated.all())


class Falling:
    """Terminates in the third control step, as Playground's environments do: `done` is that of the newest step."""

    action_size = 1

    @property
    def unwrapped(self):
        return self

    @property
    def _config(self):
        return {"episode_length": 100, "action_repeat": 2}

    def reset(self, rng):
        return Fallen(jnp.zeros(1), jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        steps = state.obs + 1
        return Fallen(steps, jnp.float32(10.0) ** steps[0], (steps[0] == 3).astype(jnp.float32))


@struct
class Fallen:
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    metrics: dict = dataclasses.field(default_factory=dict)


def test_an_action_is_repeated_up_to_the_step_that_terminates():
    env = AutoReset(dynamics_of(Falling(), "playground/Falling"), 2)
    state, _ = env.init(jax.random.key(0))
    flags, rewards = [], []
    for t in range(4):
        state, time_step = env.step(state, jnp.zeros((2, 1)), jax.random.key(t))
        flags.append(bool(time_step.terminated.all()))
        rewards.append(float(time_step.reward[0]))
    # The fourth control step is after the end, and its reward of 10,000 counts for nothing.
    assert flags == [False, True, False, False] and rewards == [110.0, 1000.0, 0.0, 110.0]


def test_an_environment_wrapped_for_brax_is_rejected():
    theirs = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    with pytest.raises(ValueError, match=r"must not be wrapped for Brax; pass the environment of registry\.load"):
        envs.make(playground.wrapper.wrap_for_brax_training(theirs), num_envs=2)


def test_objects_are_taken_and_names_and_settings_checked(env):
    given = envs.make(playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"}), num_envs=2)
    assert given.spec.id == "playground/Balance" and given.spec.obs == env.spec.obs and given.reset_pool == 1
    assert "playground/CheetahRun" in envs.names()["playground"]
    with pytest.raises(ValueError, match=r"unknown environment 'playground/CheetahRum'; did you mean 'playground/CheetahRun'"):
        envs.make("playground/CheetahRum")
    with pytest.raises(ValueError, match=r"env_kwargs\['episode_length'\] must be an integer >= 1, got 0"):
        envs.make("playground/CartpoleBalance", env_kwargs={"episode_length": 0})
    with pytest.raises(KeyError, match="lenght"):
        envs.make("playground/CartpoleBalance", env_kwargs={"lenght": 3})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (subprocess.CalledProcessError(128, "git", stderr="fatal: Could not resolve host: github.com\n"), "Could not resolve"),
        (subprocess.TimeoutExpired("git", 30), "timed out after 30 seconds"),
        (FileNotFoundError("No such file or directory: 'git'"), "No such file or directory: 'git'"),
    ],
)
def test_robots_that_cannot_be_downloaded_are_one_error(error, reason, tmp_path, monkeypatch):
    def run(command, **options):
        assert options["timeout"] == 30
        raise error

    monkeypatch.setattr("mujoco_playground._src.mjx_env.MENAGERIE_PATH", tmp_path / "mujoco_menagerie")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(
        ImportError, match=rf"playground/Go1JoystickFlatTerrain needs .*{reason}.* copy the folder to {tmp_path}"
    ):
        envs.make("playground/Go1JoystickFlatTerrain")


def test_the_compiled_loop_trains(env):
    agent = PPO(env.spec, network=MLP((8,)), num_steps=8, num_minibatches=1, num_epochs=1)
    result = train.run(agent, env, env_steps=64, seed=0, progress=False)
    assert result.progress.env_steps >= 64 and np.isfinite(result.metrics["rollout/ep_rew_mean"])
    assert 0 < result.metrics["env/reward/upright"] <= 1


def randomize_mass(model, keys):
    """As the functions of Playground: the masses of each copy times a number of its own."""
    factors = jax.vmap(lambda key: jax.random.uniform(key, (), minval=0.2, maxval=5.0))(keys)
    axes = jax.tree.map(lambda leaf: None, model).tree_replace({"body_mass": 0})
    return model.tree_replace({"body_mass": factors[:, None] * model.body_mass[None]}), axes


def test_each_episode_draws_a_model_with_which_the_librarys_wrapper_steps_alike():
    env = envs.make(
        "playground/CartpoleBalance",
        num_envs=NUM_ENVS,
        env_kwargs={"episode_length": 2, "randomization_fn": randomize_mass},
        reset_pool=1,
    )
    state, _ = env.init(jax.random.key(0))
    limited, action = state.dynamics.state, jnp.full((NUM_ENVS, 1), 0.5)
    ((_, masses),) = limited.model.items()
    assert len(np.unique(masses[:, 1])) == NUM_ENVS
    theirs = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    axes = randomize_mass(theirs.mjx_model, jax.random.split(jax.random.key(0)))[1]
    models = theirs.mjx_model.tree_replace({"body_mass": masses})
    wrapped = playground.wrapper.BraxDomainRandomizationVmapWrapper(theirs, lambda model: (models, axes))
    with own_promotion("playground"):
        expected = jax.jit(wrapped.step)(limited.state, action)
    step = jax.jit(env.step)
    state, time_step = step(state, action, jax.random.key(1))
    np.testing.assert_allclose(time_step.obs, expected.obs, rtol=1e-5, atol=1e-6)
    assert len(np.unique(np.asarray(time_step.obs)[:, 1])) == NUM_ENVS
    for t in range(2):
        state, time_step = step(state, action, jax.random.key(t))
    assert bool(time_step.first.all())
    (fresh,) = state.dynamics.state.model.values()
    assert not np.isin(fresh[:, 1], masses[:, 1]).any()


def test_a_randomization_of_the_librarys_own_must_exist():
    with pytest.raises(ValueError, match=r"CartpoleBalance has no randomization_fn of its own; pass a function"):
        envs.make("playground/CartpoleBalance", env_kwargs={"randomization_fn": True})


def test_images_follow_the_state():
    env = JaxEnvOnHost(single_copy(envs.make("playground/CartpoleBalance", num_envs=2)), jax.random.key(0))
    env.reset(0)
    try:
        first, _ = env.render()
    except RuntimeError as error:
        assert "MUJOCO_GL=egl" in str(error)
        pytest.skip("MuJoCo finds no OpenGL")
    for _ in range(20):
        env.step(np.ones((1, 1), np.float32))
    later, _ = env.render()
    assert first.dtype == np.uint8 and first.shape == later.shape == (240, 320, 3) and first.std() > 10
    assert (first != later).any()
