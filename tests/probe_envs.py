"""Environments so small that the right value and the right action are known: each isolates one thing an agent must get right."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import static, struct
from polyak.envs.autoreset import AutoReset

OBS = Box(np.array([-1.0], np.float32), np.array([1.0], np.float32))


@struct
class Probe:
    """`length` steps an episode; the obs is `sign`, drawn anew each episode, or 0, or the step's number.

    Attributes:
        sees: what the obs shows.
        pays: what the reward is: 1 at every step or only at the last, the sign, ±1 for the action, or for action and sign agreeing.
        ends: by a terminal state, or by a time limit.
    """

    sees: str = static(default="nothing")
    pays: str = static(default="always")
    length: int = static(default=1)
    ends: str = static(default="terminated")

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(OBS, Discrete(2), f"probe/{self.sees}-{self.pays}-{self.length}-{self.ends}")

    def reset(self, key: Any, num_envs: int) -> Any:
        sign = jnp.where(jax.random.bernoulli(key, 0.5, (num_envs,)), 1.0, -1.0)
        return sign, jnp.zeros(num_envs, jnp.int32)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        sign, steps = state
        steps = steps + 1
        chosen = jnp.where(action == 1, 1.0, -1.0)
        over = steps >= self.length
        reward = {
            "always": jnp.ones_like(sign),
            "at the end": jnp.where(over, 1.0, 0.0),
            "sign": sign,
            "action": chosen,
            "agreement": sign * chosen,
        }[self.pays]
        never = jnp.zeros_like(over)
        return ((sign, steps), reward, over, never) if self.ends == "terminated" else ((sign, steps), reward, never, over)

    def observe(self, state: Any) -> Any:
        sign, steps = state
        obs = {"nothing": jnp.zeros_like(sign), "sign": sign, "step": steps.astype(jnp.float32)}[self.sees]
        return obs[:, None]


def probe(num_envs: int, **settings: Any) -> AutoReset:
    return AutoReset(Probe(**settings), num_envs)
