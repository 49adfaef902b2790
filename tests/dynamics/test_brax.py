"""Brax's environments, where Brax is installed: its dynamics, our resets, time limits told from terminal states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import envs, loops, train
from polyak.agents.ppo import PPO
from polyak.dynamics.foreign import own_promotion
from polyak.envs.rendered_env import single_copy
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.networks.feedforward import MLP

brax = pytest.importorskip("brax.envs")
training = pytest.importorskip("brax.envs.wrappers.training")

# Brax warns of itself, and of values that it casts.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def play(env, num_steps, action):
    state, time_step = env.init(jax.random.key(0))
    step, steps = jax.jit(env.step), [time_step]
    for t in range(num_steps):
        state, time_step = step(state, jnp.full((env.num_envs, *env.spec.action.shape), action), jax.random.key(t))
        steps.append(time_step)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *steps)


def test_a_time_limit_truncates():
    env = envs.make("brax/fast", num_envs=3, env_kwargs={"episode_length": 5})
    steps = play(env, 12, 0.5)
    assert not steps.terminated.any()
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated[:, 0]), [5, 11])
    np.testing.assert_array_equal(steps.first[1:], steps.last[:-1])


def test_a_fall_terminates_as_in_brax():
    env = envs.make("brax/inverted_pendulum", num_envs=2, env_kwargs={"backend": "generalized"})
    steps = play(env, 40, 1.0)
    assert steps.terminated.any() and not steps.truncated.any()
    angle = np.abs(steps.obs[..., 1])
    np.testing.assert_array_equal(steps.terminated, angle > 0.2)


def test_metrics_of_brax_are_reported():
    steps = play(envs.make("brax/reacher", num_envs=2), 3, 0.5)
    assert set(steps.info) == {"env/reward_ctrl", "env/reward_dist"}
    np.testing.assert_allclose((steps.info["env/reward_ctrl"] + steps.info["env/reward_dist"])[1:], steps.reward[1:], rtol=1e-5)


def randomize_gravity(system, keys):
    axes = jax.tree.map(lambda leaf: None, system).tree_replace({"opt.gravity": 0})
    gravity = jax.vmap(lambda key: jax.random.uniform(key, (3,), minval=-20.0, maxval=-1.0))(keys)
    return system.tree_replace({"opt.gravity": gravity}), axes


def test_each_episode_draws_a_model():
    env = envs.make(
        "brax/inverted_pendulum", num_envs=2, env_kwargs={"episode_length": 2, "randomization_fn": randomize_gravity}
    )
    state, _ = env.init(jax.random.key(0))
    ((_, gravity),) = state.dynamics.state[1].items()
    theirs = brax.get_environment("inverted_pendulum")
    systems, axes = (
        theirs.sys.tree_replace({"opt.gravity": gravity}),
        randomize_gravity(theirs.sys, jnp.zeros((2, 2), jnp.uint32))[1],
    )
    wrapped = training.DomainRandomizationVmapWrapper(theirs, lambda system: (systems, axes))
    step, action = jax.jit(env.step), jnp.full((2, 1), 0.5)
    with own_promotion("brax"):
        expected = jax.jit(wrapped.step)(state.dynamics.state[0], action)
    state, time_step = step(state, action, jax.random.key(1))
    np.testing.assert_allclose(time_step.obs, expected.obs, rtol=1e-5, atol=1e-6)
    for t in range(2):
        state, _ = step(state, action, jax.random.key(t))
    (fresh,) = state.dynamics.state[1].values()
    assert len(np.unique(np.concatenate([gravity, fresh])[:, 2])) == 4


@pytest.mark.parametrize("make", [brax.get_environment, lambda name: brax.create(name, episode_length=7)])
def test_environment_objects_are_taken_without_braxs_resets(make):
    env = envs.make(make("fast"), num_envs=2)
    assert env.spec.id == "brax/Fast" and env.spec.action.bounded
    length = 7 if make is not brax.get_environment else 1000
    assert int(play(env, 16, 0.0).truncated.sum()) == (4 if length == 7 else 0)


def test_a_batch_of_brax_is_rejected_with_the_way_out():
    with pytest.raises(ValueError, match="must not be batched by Brax; create it without batch_size and pass num_envs to make"):
        envs.make(brax.create("fast", batch_size=4))


def test_names_are_listed_and_settings_checked():
    assert "brax/ant" in envs.names()["brax"]
    with pytest.raises(ValueError, match=r"unknown environment 'brax/aunt'; did you mean 'brax/ant'\?"):
        envs.make("brax/aunt")
    with pytest.raises(ValueError, match="episode_length"):
        envs.make("brax/fast", env_kwargs={"episode_length": 0})


def test_ppo_trains_in_a_brax_environment():
    env = envs.make("brax/fast", num_envs=4, env_kwargs={"episode_length": 10})
    agent = PPO(env.spec, network=MLP((8,)), num_steps=16, num_minibatches=1, num_epochs=1)
    result = loops.compiled(agent, env, env_steps=256, key=jax.random.key(0))
    assert np.isfinite(result.metrics["train/loss"]) and result.metrics["rollout/ep_len_mean"] == 10


def test_evaluation_while_training_uses_copies_and_leaves_the_training_as_it_is():
    settings = {"network": MLP((8,)), "num_steps": 16, "num_minibatches": 1, "num_epochs": 1}
    options = {"env_steps": 128, "settings": settings, "progress": False}
    env = envs.make("brax/fast", num_envs=4, env_kwargs={"episode_length": 10})
    plain = train.run("ppo", env, **options)
    result = train.run("ppo", env, eval_every=64, eval_episodes=3, **options)
    assert len(result.evaluations) == 2 and result.evaluation is result.evaluations[result.progress.env_steps]
    assert {evaluation.mean_length for evaluation in result.evaluations.values()} == {10.0}
    jax.tree.map(np.testing.assert_array_equal, plain.state.copies.online.params, result.state.copies.online.params)


def test_images_follow_the_state():
    env = JaxEnvOnHost(single_copy(envs.make("brax/inverted_pendulum", num_envs=2)), jax.random.key(0))
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


def test_a_randomization_that_cannot_work_is_named():
    def nothing(system, keys):
        return system, jax.tree.map(lambda leaf: None, system)

    make = functools.partial(envs.make, "brax/inverted_pendulum", num_envs=2)
    with pytest.raises(ValueError, match="in_axes of randomization_fn must be 0 for some arrays, None for others, got"):
        make(env_kwargs={"randomization_fn": nothing})
    with pytest.raises(TypeError, match="randomization_fn must be a function"):
        make(env_kwargs={"randomization_fn": True})
    with pytest.raises(ValueError, match="randomization_fn must be None for Fast, which has no physics"):
        envs.make("brax/fast", env_kwargs={"randomization_fn": nothing})
    with pytest.raises(TypeError, match="make: a pair must be an environment of gymnax, craftax, xminigrid and its parameters"):
        envs.make((brax.get_environment("fast"), None))
