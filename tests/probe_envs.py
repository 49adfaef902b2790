"""Environments so small that the right value and action are known: each isolates one thing an agent must get right."""

from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.envs.autoreset import AutoReset
from polyak.loops.compiled_loop import iteration, start_compiled
from polyak.loops.loop import update_on

OBS = Box(np.array([-1.0], np.float32), np.array([1.0], np.float32))
SEES = ("nothing", "sign", "step")
PAYS = ("always", "at the end", "sign", "action", "agreement")


@struct
class Probe:
    """`length` steps an episode; all fields are arrays, so that trainings in many of them are one program.

    Attributes:
        sees: which of `SEES` the obs shows: 0, a sign drawn anew each episode, or the step's number.
        pays: which of `PAYS` the reward is: 1 at every step or only at the last, the sign, ±1 for the action, or for action and
            sign agreeing.
        length: steps of an episode.
        terminates: by a terminal state, else by a time limit.
    """

    sees: Any
    pays: Any
    length: Any
    terminates: Any

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(OBS, Discrete(2), "probe")

    def reset(self, key: Any, num_envs: int) -> Any:
        sign = jnp.where(jax.random.bernoulli(key, 0.5, (num_envs,)), 1.0, -1.0)
        return sign, jnp.zeros(num_envs, jnp.int32)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        sign, steps = state
        steps = steps + 1
        chosen = jnp.where(action == 1, 1.0, -1.0)
        over = steps >= self.length
        rewards = jnp.stack([jnp.ones_like(sign), jnp.where(over, 1.0, 0.0), sign, chosen, sign * chosen])
        return (sign, steps), rewards[self.pays], over & self.terminates, over & ~self.terminates

    def observe(self, state: Any) -> Any:
        sign, steps = state
        return jnp.stack([jnp.zeros_like(sign), sign, steps.astype(jnp.float32)])[self.sees][:, None]


def settings(sees: str = "nothing", pays: str = "always", length: int = 1, terminates: bool = True) -> Probe:
    return Probe(np.int32(SEES.index(sees)), np.int32(PAYS.index(pays)), np.int32(length), np.bool_(terminates))


def train_in(agent: Any, probes: Any, num_envs: int, iterations: int) -> list[Any]:
    """The agent's state after training in each of the probes, all in one program: to compile it costs most."""

    # What runs for seconds is worth optimising, unlike the tests' other programs.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 2})
    @jax.vmap
    def learn(dynamics: Probe) -> Any:
        env = AutoReset(dynamics, num_envs)
        body = partial(iteration, agent, env, update_on(None))
        once = lambda state, _: (body(state)[0], None)  # noqa: E731
        return jax.lax.scan(once, start_compiled(agent, env, jax.random.key(0)), length=iterations)[0].agent

    states = learn(jax.tree.map(lambda *leaves: jnp.stack(leaves), *probes))
    return [jax.tree.map(itemgetter(i), states) for i in range(len(probes))]


def probe(num_envs: int, **fields: Any) -> AutoReset:
    return AutoReset(settings(**fields), num_envs)
