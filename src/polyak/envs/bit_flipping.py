"""Bit flipping, the toy problem of hindsight experience replay, in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int8, Int32, PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.spaces import Dict, Discrete, EnvSpec, MultiBinary
from polyak.core.struct import static, struct


@struct
class BitFlippingState:
    """The bits and the desired bits, each `[B, bits]`, and the steps taken `[B]`."""

    bits: Any
    goal: Any
    steps: Any


@struct
class BitFlipping:
    """Flip one of n bits in each step until they equal the goal: -1 a step, 0 at the goal, where the episode terminates.

    Without it, the episode is cut off after n steps. Bits and goal are random: by chance 2^-n of the states are the goal.

    Source: Andrychowicz et al. 2017, arXiv:1707.01495, section 3.1.
    """

    bits: int = static(default=15)

    def __post_init__(self) -> None:
        check_integer("BitFlipping", "bits", self.bits, at_most=1_000)

    @property
    def spec(self) -> EnvSpec:
        """The spaces of jax/BitFlipping-v0."""
        bits = MultiBinary((self.bits,))
        obs = Dict({"observation": bits, "achieved_goal": bits, "desired_goal": bits})
        return EnvSpec(obs, Discrete(self.bits), "jax/BitFlipping-v0")

    def reset(self, key: PRNGKeyArray, num_envs: int) -> BitFlippingState:
        """Random bits and goals, which may be equal."""
        bits, goal = jax.random.bernoulli(key, shape=(2, num_envs, self.bits)).astype(jnp.int8)
        return BitFlippingState(bits, goal, jnp.zeros(num_envs, jnp.int32))

    def step(
        self, state: BitFlippingState, action: Int32[Array, " B"], key: PRNGKeyArray
    ) -> tuple[BitFlippingState, Float[Array, " B"], Bool[Array, " B"], Bool[Array, " B"]]:
        """Flip one bit."""
        bits = state.bits ^ (jnp.arange(self.bits)[None] == action[:, None]).astype(jnp.int8)
        steps = state.steps + 1
        terminated = self.compute_terminated(bits, state.goal)
        truncated = ~terminated & (steps >= self.bits)
        return BitFlippingState(bits, state.goal, steps), self.compute_reward(bits, state.goal), terminated, truncated

    def observe(self, state: BitFlippingState) -> dict[str, Int8[Array, "B bits"]]:
        """The bits, which are also the achieved goal, and the desired goal."""
        return {"observation": state.bits, "achieved_goal": state.bits, "desired_goal": state.goal}

    def info(self, state: BitFlippingState) -> dict[str, Bool[Array, " B"]]:
        """`is_success`: the bits equal the goal."""
        return {"is_success": self.compute_terminated(state.bits, state.goal)}

    def compute_reward(self, achieved_goal: Int8[Array, "B bits"], desired_goal: Int8[Array, "B bits"]) -> Float[Array, " B"]:
        """0 at the goal, else -1."""
        return jnp.where(self.compute_terminated(achieved_goal, desired_goal), 0.0, -1.0)

    def compute_terminated(
        self, achieved_goal: Int8[Array, "B bits"], desired_goal: Int8[Array, "B bits"]
    ) -> Bool[Array, " B"]:
        """All bits are equal."""
        return jnp.all(achieved_goal == desired_goal, axis=-1)
