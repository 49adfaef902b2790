"""One environment in JAX as a `gymnasium.Env` with images."""

import sys
import types
from dataclasses import dataclass

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Progress
from polyak.envs.autoreset import AutoReset
from polyak.envs.rendered_env import RenderedEnv
from polyak.train import callbacks


@dataclass(frozen=True)
class Drawn:
    """Counts to 5 where the action is 1, and draws the count; action 0 is masked."""

    spec = EnvSpec(Box(0.0, 5.0, (1,)), Discrete(2), "Drawn", has_action_mask=True)

    def reset(self, key, num_envs):
        return jnp.zeros((num_envs, 1))

    def step(self, state, action, key):
        state = state + jnp.float32(action)[:, None]
        return state, 2.0, state[:, 0] == 5, False

    def observe(self, state):
        return state

    def action_mask(self, state):
        return jnp.tile(jnp.array([False, True]), (len(state), 1))

    def render(self, state):
        return np.full((4, 6, 3), int(state[0]), np.uint8)


ENV = AutoReset(Drawn(), num_envs=8)
AGENT = polyak.PPO(spec=ENV.spec, network=polyak.MLP((4,)))


class Watched(gymnasium.Wrapper):
    """Keeps a pixel of the image after each step."""

    def step(self, action):
        result = self.env.step(action)
        self.pixels = [*getattr(self, "pixels", []), int(self.env.render()[0, 0, 0])]
        return result


def test_an_episode_is_played_with_masks_and_drawn_once():
    env = Watched(RenderedEnv(ENV))
    callbacks.play_episode(AGENT.policy(AGENT.init(jax.random.key(0))), AGENT.spec, env)
    assert env.pixels == [1, 2, 3, 4, 5] and env.render().shape == (4, 6, 3)
    obs, info = env.reset(seed=0)
    assert env.observation_space.contains(obs) and info["action_mask"].tolist() == [False, True]
    assert env.step(1)[1:4] == (2.0, False, False) and env.render().max() == 1


def test_videos_take_an_environment_in_jax_that_has_images(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", object())
    recorded = []
    monkeypatch.setattr(callbacks, "_record_episode", lambda policy, spec, env, video: recorded.append(env.unwrapped))
    record = callbacks.record_videos(AGENT, ENV, tmp_path, every=10)
    record(Progress(10, 10, 1, 1.0, 1.0, 1.0), {}, types.SimpleNamespace(agent=AGENT.init(jax.random.key(0))))
    assert [type(env) for env in recorded] == [RenderedEnv]
    with pytest.raises(ValueError, match=r"jax/CartPole-v1 renders no images; its dynamics must have a function render"):
        callbacks.record_videos(AGENT, polyak.envs.make("jax/CartPole-v1"), tmp_path, every=10)
