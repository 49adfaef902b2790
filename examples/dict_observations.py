"""Trains on Dict observations, the pole's state and the time: `python examples/dict_observations.py`."""

import gymnasium
from gymnasium.wrappers import TimeAwareObservation

import polyak

env = polyak.envs.make(lambda: TimeAwareObservation(gymnasium.make("CartPole-v1"), flatten=False), num_envs=8)
print(polyak.train.run(polyak.PPO(spec=env.spec), env, env_steps=20_000))
