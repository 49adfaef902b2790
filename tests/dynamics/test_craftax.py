"""Craftax' environments, where it is installed: its steps, our resets, its time limit as truncation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import envs, train
from polyak.agents.ppo import PPO
from polyak.dynamics.foreign import own_promotion
from polyak.envs.rendered_env import single_copy
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.networks.feedforward import MLP
from tests.dynamics.library_steps import steps_beside

pytest.importorskip("craftax")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow, pytest.mark.timeout(900)]

NAME, LENGTH, NUM_ENVS = "Craftax-Classic-Symbolic-v1", 5, 3


def make(num_envs=NUM_ENVS):
    return envs.make(f"craftax/{NAME}", num_envs=num_envs, env_kwargs={"max_timesteps": LENGTH, "map_size": (16, 16)})


def library_env():
    from craftax.craftax_classic.envs.craftax_symbolic_env import CraftaxClassicSymbolicEnv

    env = CraftaxClassicSymbolicEnv(CraftaxClassicSymbolicEnv.default_static_params().replace(map_size=(16, 16)))
    return env, env.default_params.replace(max_timesteps=LENGTH)


def test_every_step_is_the_librarys_own_to_the_time_limit():
    env, (theirs, params) = make(), library_env()
    assert env.reset_pool == 1

    def step(key, state, action):
        obs, after, reward, done, _ = theirs.step_env(key, state, action, params)
        return after, obs, reward, done & (after.player_health <= 0), done & (after.player_health > 0)

    steps = steps_beside(env, step, 3 * (LENGTH + 1))
    # The library's step is the one after the limit has been counted up to.
    assert steps.truncated.sum() == 3 * NUM_ENVS and not steps.terminated.any()


def test_death_is_terminal_also_at_the_time_limit():
    env = make()
    state, _ = env.init(jax.random.key(0))
    step = jax.jit(env.step)
    world = state.dynamics.state
    dead = world.replace(
        player_health=world.player_health.at[0].set(-5),
        timestep=world.timestep.at[:2].set(LENGTH - 1),
        achievements=world.achievements.at[:, 4].set(True),
    )
    state = dataclasses.replace(state, dynamics=dataclasses.replace(state.dynamics, state=dead))
    after, time_step = step(state, jnp.zeros(NUM_ENVS, jnp.int32), jax.random.key(1))
    assert time_step.terminated.tolist() == [True, False, False] and time_step.truncated.tolist() == [False, True, False]
    # At the end of an episode, what the library reports, in its own names.
    from craftax.craftax_classic.envs.common import compute_score

    with own_promotion("craftax"):
        scores = jax.vmap(compute_score)(after.dynamics.state, time_step.last)
    reported = {f"env/{name}": value for name, value in scores.items()}
    assert set(reported) - set(time_step.info) == {"env/score"}
    for name, value in time_step.info.items():
        np.testing.assert_array_equal(value[:2], reported[name][:2])
        assert np.isnan(value[2])
    assert sum(float(value[0]) for value in time_step.info.values()) == 100.0


def test_objects_are_taken_and_names_and_settings_checked():
    given = envs.make(library_env(), num_envs=2)
    assert given.spec.id == "craftax/CraftaxClassicSymbolicEnv" and given.spec.obs == make().spec.obs
    assert envs.make(library_env()[0]).dynamics.settings.max_timesteps == 10_000
    assert envs.names()["craftax"] == [
        f"craftax/Craftax-{kind}-v1" for kind in sorted(("Classic-Pixels", "Classic-Symbolic", "Pixels", "Symbolic"))
    ]
    with pytest.raises(ValueError, match=r"'craftax/Craftax-Symbolik-v1'; did you mean 'craftax/Craftax-Symbolic-v1'\?"):
        envs.make("craftax/Craftax-Symbolik-v1")
    with pytest.raises(TypeError, match="max_timestepps"):
        envs.make(f"craftax/{NAME}", env_kwargs={"max_timestepps": 3})


def test_the_compiled_loop_trains():
    env = make(2)
    agent = PPO(env.spec, network=MLP((8,)), num_steps=8, num_minibatches=1, num_epochs=1)
    result = train.run(agent, env, env_steps=64, key=jax.random.key(0), progress=False)
    assert result.progress.env_steps >= 64 and np.isfinite(result.metrics["train/loss"])


def test_images_follow_the_state():
    env = JaxEnvOnHost(
        single_copy(envs.make("craftax/Craftax-Classic-Symbolic-v1", num_envs=2, env_kwargs={"map_size": (16, 16)})),
        jax.random.key(0),
    )
    env.reset(0)
    first, _ = env.render()
    for t in range(4):
        env.step(np.full(1, t % 4 + 1, np.int32))
    later, _ = env.render()
    assert first.dtype == np.uint8 and first.shape == later.shape == (144, 144, 3) and first.std() > 10
    assert (first != later).any()
