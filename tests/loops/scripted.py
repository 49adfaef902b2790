"""An environment outside JAX whose episodes are written down beforehand."""

import dataclasses

import jax
import numpy as np

from polyak.core.types import TimeStep
from tests.loops.setting import ENV


class Scripted:
    """Environment i repeats episodes of `lengths[i]` steps, each paying `rewards[i]`; they end by turns in the two ways."""

    # As the agent of the other tests knows it, so that its programs are compiled once.
    spec = dataclasses.replace(ENV.spec, id="scripted")

    def __init__(self, lengths, rewards):
        self.lengths = [list(each) for each in lengths]
        self.rewards = np.asarray(rewards, np.float32)
        self.num_envs = len(lengths)
        self.seeds, self.steps, self.closed = [], 0, False

    def reset(self, seed):
        self.seeds.append(seed)
        self.episode, self.step_in = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.last = np.zeros(self.num_envs, bool)
        no = np.zeros(self.num_envs, bool)
        return TimeStep(self._obs(), np.zeros(self.num_envs, np.float32), no, no, ~no)

    def step(self, action):
        assert action.shape == (self.num_envs,) and not isinstance(action, jax.Array)
        self.steps += 1
        first = self.last
        self.episode = np.where(first, self.episode + 1, self.episode)
        self.step_in = np.where(first, 0, self.step_in + 1)
        length = np.array([each[e % len(each)] for each, e in zip(self.lengths, self.episode, strict=True)])
        over = ~first & (self.step_in >= length)
        self.last = over
        reward = np.where(first, 0.0, self.rewards).astype(np.float32)
        odd = self.episode % 2 == 1
        return TimeStep(self._obs(), reward, over & ~odd, over & odd, first)

    def _obs(self):
        return np.repeat(self.step_in[:, None] / 10, 4, axis=1).astype(np.float32)

    def snapshot(self):
        return {"episode": self.episode.copy(), "step_in": self.step_in.copy(), "last": self.last.copy()}

    def restore(self, snapshot):
        for name, value in snapshot.items():
            setattr(self, name, value.copy())

    def close(self):
        self.closed = True
