"""A policy whose distribution is written down, with a memory that counts: what the tests of wrappers wrap."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from polyak.core.struct import static, struct
from polyak.core.types import PolicyStep, TimeStep
from polyak.ops.distributions import for_space

OBS = Box([-1.0, -1.0], [1.0, 1.0])
DISCRETE = EnvSpec(OBS, Discrete(4), has_action_mask=True)
CHOICES = EnvSpec(OBS, Dict({"a": Discrete(3), "b": MultiDiscrete((2, 3)), "c": MultiBinary((2,))}), has_action_mask=True)
BOX = EnvSpec(OBS, Box([-1.0, -2.0], [1.0, 0.5]))
RESCALED = EnvSpec(OBS, Box([-1.0, -2.0], [1.0, 0.5]), action_scaling="rescale")
TREE = EnvSpec(OBS, Dict({"go": BOX.action, "gear": Discrete(3)}))


@struct
class Inner:
    """Row i of a batch has row i of `params`; the carry counts the steps of the episode."""

    params: Any
    spec: EnvSpec = static()
    squash: bool = static(default=False)

    def initial_state(self, batch_size):
        return jnp.zeros(batch_size, jnp.int32)

    def distribution(self, time_step, carry):
        carry = jnp.where(time_step.first, 0, carry) + 1
        return for_space(self.spec.action, self.params, time_step.action_mask, squash=self.squash), carry

    def action(self, time_step, carry, key):
        distribution, carry = self.distribution(time_step, carry)
        return PolicyStep(distribution.sample(seed=key), carry, {"steps": carry})


def time_step(batch, *, first=False, last=False, mask=None):
    flags = [np.broadcast_to(np.asarray(flag), (batch,)) for flag in (last, False, first)]
    obs = np.zeros((batch, 2), np.float32)
    return TimeStep(obs, np.zeros(batch, np.float32), *flags, mask)


def normal(loc, log_scale=0.0):
    loc = jnp.asarray(loc, jnp.float32)
    return {"loc": loc, "log_scale": jnp.full(loc.shape, log_scale)}
