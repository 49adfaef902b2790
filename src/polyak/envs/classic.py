"""Classic control in JAX: the dynamics of Gymnasium's CartPole, Pendulum, Acrobot and MountainCar, batched.

Gymnasium computes in float64, this in float32: from an equal state, one step agrees within 1e-5.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import static, struct
from polyak.envs.autoreset import Dynamics
from polyak.envs.classic_images import RENDER_FPS, draw_classic

Step = tuple[Any, Float[Array, " B"], Bool[Array, " B"], Bool[Array, " B"]]


def uniform(key: PRNGKeyArray, shape: tuple[int, ...], low: float, high: float) -> Float[Array, "..."]:
    """Uniform floats in [low, high) from a hash of the position and the key's words.

    Autoreset draws initial states for all environments in every step. For 2048 environments of four numbers
    `jax.random.uniform` takes 100 µs, this 9, and for few environments XLA fuses it with the step.

    Source: the hash is Wellons 2018, "hash prospector" (two rounds of multiply and shift, bias 0.11).
    """
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    for word in jax.random.key_data(key):
        x = x ^ word
        x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
        x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
        x = x ^ (x >> 15)
    # The upper 23 bits become the mantissa of a float in [1, 2).
    unit = jax.lax.bitcast_convert_type((x >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
    return low + (high - low) * unit


def _wrap_angle(angle: Array) -> Array:
    """The angle in [-π, π]."""
    return angle - 2 * math.pi * jnp.round(angle / (2 * math.pi))


@struct
class CartPoleState:
    """Cart position (m) and velocity, pole angle (rad) and velocity, each `[B]`, and the steps taken."""

    x: Any
    x_dot: Any
    theta: Any
    theta_dot: Any
    steps: Any


@struct
class CartPole:
    """Balance a pole on a cart by pushing it left (0) or right (1): 1 a step, until it tilts by 12° or leaves ±2.4 m.

    Source: Barto, Sutton and Anderson 1983; the equations as in Gymnasium's CartPole-v1.
    """

    max_episode_steps: int = static(default=500)

    def __post_init__(self) -> None:
        check_integer("CartPole", "max_episode_steps", self.max_episode_steps)

    @property
    def spec(self) -> EnvSpec:
        """The spaces of jax/CartPole-v1."""
        high = np.array([4.8, np.inf, 24 * 2 * math.pi / 360, np.inf], np.float32)
        return EnvSpec(Box(-high, high), Discrete(2), "jax/CartPole-v1")

    def reset(self, key: PRNGKeyArray, num_envs: int) -> CartPoleState:
        """All four within ±0.05."""
        x, x_dot, theta, theta_dot = uniform(key, (4, num_envs), -0.05, 0.05)
        return CartPoleState(x, x_dot, theta, theta_dot, jnp.zeros(num_envs, jnp.int32))

    def step(self, state: CartPoleState, action: Int32[Array, " B"], key: PRNGKeyArray) -> Step:
        """One Euler step of 0.02 s under ±10 N."""
        gravity, cart, pole, half_length, dt = 9.8, 1.0, 0.1, 0.5, 0.02
        total = cart + pole
        sin, cos = jnp.sin(state.theta), jnp.cos(state.theta)
        force = jnp.where(action == 1, 10.0, -10.0)
        push = (force + pole * half_length * state.theta_dot**2 * sin) / total
        theta_acc = (gravity * sin - cos * push) / (half_length * (4.0 / 3.0 - pole * cos**2 / total))
        x_acc = push - pole * half_length * theta_acc * cos / total
        after = CartPoleState(
            x=state.x + dt * state.x_dot,
            x_dot=state.x_dot + dt * x_acc,
            theta=state.theta + dt * state.theta_dot,
            theta_dot=state.theta_dot + dt * theta_acc,
            steps=state.steps + 1,
        )
        terminated = (jnp.abs(after.x) > 2.4) | (jnp.abs(after.theta) > 12 * 2 * math.pi / 360)
        return after, jnp.ones_like(after.x), terminated, after.steps >= self.max_episode_steps

    def observe(self, state: CartPoleState) -> Float[Array, "B 4"]:
        """Return the four quantities."""
        return jnp.stack([state.x, state.x_dot, state.theta, state.theta_dot], axis=-1)

    @property
    def render_fps(self) -> float:
        """Frames per second of Gymnasium's environment."""
        return RENDER_FPS["CartPole-v1"]

    def render(self, state: CartPoleState) -> Any:
        """Return the image of the state of one environment."""
        return draw_classic("CartPole-v1", state.x, state.x_dot, state.theta, state.theta_dot)


@struct
class PendulumState:
    """Angle from upright (rad, in [-π, π]) and angular velocity, each `[B]`, and the steps taken."""

    theta: Any
    theta_dot: Any
    steps: Any


@struct
class Pendulum:
    """Swing a pendulum up and hold it with a torque within ±2: -(θ² + 0.1 θ̇² + 0.001 u²) for every step; never terminates.

    Source: the equations as in Gymnasium's Pendulum-v1.
    """

    max_episode_steps: int = static(default=200)

    def __post_init__(self) -> None:
        check_integer("Pendulum", "max_episode_steps", self.max_episode_steps)

    @property
    def spec(self) -> EnvSpec:
        """The spaces of jax/Pendulum-v1."""
        high = np.array([1.0, 1.0, 8.0], np.float32)
        return EnvSpec(Box(-high, high), Box([-2.0], [2.0]), "jax/Pendulum-v1")

    def reset(self, key: PRNGKeyArray, num_envs: int) -> PendulumState:
        """Any angle, velocity within ±1."""
        theta, theta_dot = uniform(key, (2, num_envs), -1.0, 1.0)
        return PendulumState(math.pi * theta, theta_dot, jnp.zeros(num_envs, jnp.int32))

    def step(self, state: PendulumState, action: Float[Array, "B 1"], key: PRNGKeyArray) -> Step:
        """One semi-implicit Euler step of 0.05 s; velocity within ±8."""
        gravity, mass, length, dt = 10.0, 1.0, 1.0, 0.05
        torque = action[:, 0]
        reward = -(state.theta**2 + 0.1 * state.theta_dot**2 + 0.001 * torque**2)
        acceleration = 3 * gravity / (2 * length) * jnp.sin(state.theta) + 3.0 / (mass * length**2) * torque
        theta_dot = jnp.clip(state.theta_dot + acceleration * dt, -8.0, 8.0)
        # Gymnasium lets the angle grow and wraps it where it is used; wrapped in the state, float32 keeps its precision.
        after = PendulumState(_wrap_angle(state.theta + theta_dot * dt), theta_dot, state.steps + 1)
        return after, reward, jnp.zeros_like(reward, bool), after.steps >= self.max_episode_steps

    def observe(self, state: PendulumState) -> Float[Array, "B 3"]:
        """Return cos θ, sin θ and θ̇."""
        return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot], axis=-1)

    @property
    def render_fps(self) -> float:
        """Frames per second of Gymnasium's environment."""
        return RENDER_FPS["Pendulum-v1"]

    def render(self, state: PendulumState) -> Any:
        """Return the image of the state of one environment."""
        return draw_classic("Pendulum-v1", state.theta, state.theta_dot)


@struct
class AcrobotState:
    """Angle of the first link from hanging, of the second from the first (rad), their velocities, and the steps taken."""

    theta1: Any
    theta2: Any
    velocity1: Any
    velocity2: Any
    steps: Any


@struct
class Acrobot:
    """Swing two links up by a torque of -1, 0 or 1 on the joint between: -1 a step, until the tip is a link above the pivot.

    Source: Sutton 1996; the equations ("book" variant) as in Gymnasium's Acrobot-v1.
    """

    max_episode_steps: int = static(default=500)

    def __post_init__(self) -> None:
        check_integer("Acrobot", "max_episode_steps", self.max_episode_steps)

    @property
    def spec(self) -> EnvSpec:
        """The spaces of jax/Acrobot-v1."""
        high = np.array([1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi], np.float32)
        return EnvSpec(Box(-high, high), Discrete(3), "jax/Acrobot-v1")

    def reset(self, key: PRNGKeyArray, num_envs: int) -> AcrobotState:
        """All four within ±0.1."""
        theta1, theta2, velocity1, velocity2 = uniform(key, (4, num_envs), -0.1, 0.1)
        return AcrobotState(theta1, theta2, velocity1, velocity2, jnp.zeros(num_envs, jnp.int32))

    def step(self, state: AcrobotState, action: Int32[Array, " B"], key: PRNGKeyArray) -> Step:
        """One Runge-Kutta step of 0.2 s; velocities within ±4π and ±9π."""
        torque, dt = (action - 1).astype(jnp.float32), 0.2
        y = jnp.stack([state.theta1, state.theta2, state.velocity1, state.velocity2])
        k1 = _acrobot_derivative(y, torque)
        k2 = _acrobot_derivative(y + dt / 2 * k1, torque)
        k3 = _acrobot_derivative(y + dt / 2 * k2, torque)
        k4 = _acrobot_derivative(y + dt * k3, torque)
        theta1, theta2, velocity1, velocity2 = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        theta1, theta2 = _wrap_angle(theta1), _wrap_angle(theta2)
        velocity1 = jnp.clip(velocity1, -4 * math.pi, 4 * math.pi)
        velocity2 = jnp.clip(velocity2, -9 * math.pi, 9 * math.pi)
        terminated = -jnp.cos(theta1) - jnp.cos(theta2 + theta1) > 1.0
        after = AcrobotState(theta1, theta2, velocity1, velocity2, state.steps + 1)
        return after, jnp.where(terminated, 0.0, -1.0), terminated, after.steps >= self.max_episode_steps

    def observe(self, state: AcrobotState) -> Float[Array, "B 6"]:
        """Cosine and sine of both angles, and the velocities."""
        cos1, sin1, cos2, sin2 = jnp.cos(state.theta1), jnp.sin(state.theta1), jnp.cos(state.theta2), jnp.sin(state.theta2)
        return jnp.stack([cos1, sin1, cos2, sin2, state.velocity1, state.velocity2], axis=-1)

    @property
    def render_fps(self) -> float:
        """Frames per second of Gymnasium's environment."""
        return RENDER_FPS["Acrobot-v1"]

    def render(self, state: AcrobotState) -> Any:
        """Return the image of the state of one environment."""
        return draw_classic("Acrobot-v1", state.theta1, state.theta2, state.velocity1, state.velocity2)


def _acrobot_derivative(y: Float[Array, "4 B"], torque: Float[Array, " B"]) -> Float[Array, "4 B"]:
    # Both links: mass, length and moment of inertia 1, centre of mass at 1/2.
    theta1, theta2, velocity1, velocity2 = y
    sin2, cos2, gravity = jnp.sin(theta2), jnp.cos(theta2), 9.8
    d1 = 0.25 + (1 + 0.25 + cos2) + 2
    d2 = 0.25 + 0.5 * cos2 + 1
    # cos(x - π/2) of the original is sin x.
    phi2 = 0.5 * gravity * jnp.sin(theta1 + theta2)
    phi1 = -0.5 * velocity2**2 * sin2 - velocity2 * velocity1 * sin2 + 1.5 * gravity * jnp.sin(theta1) + phi2
    acceleration2 = (torque + d2 / d1 * phi1 - 0.5 * velocity1**2 * sin2 - phi2) / (0.25 + 1 - d2**2 / d1)
    acceleration1 = -(d2 * acceleration2 + phi1) / d1
    return jnp.stack([velocity1, velocity2, acceleration1, acceleration2])


@struct
class MountainCarState:
    """Position and velocity along the valley, each `[B]`, and the steps taken."""

    position: Any
    velocity: Any
    steps: Any


@struct
class MountainCar:
    """Rock a weak car out of a valley by pushing left (0), not (1) or right (2): -1 for every step until position 0.5.

    Source: Moore 1990; the equations as in Gymnasium's MountainCar-v0.
    """

    max_episode_steps: int = static(default=200)

    def __post_init__(self) -> None:
        check_integer("MountainCar", "max_episode_steps", self.max_episode_steps)

    @property
    def spec(self) -> EnvSpec:
        """The spaces of jax/MountainCar-v0."""
        return EnvSpec(Box([-1.2, -0.07], [0.6, 0.07]), Discrete(3), "jax/MountainCar-v0")

    def reset(self, key: PRNGKeyArray, num_envs: int) -> MountainCarState:
        """At rest between -0.6 and -0.4."""
        position = uniform(key, (num_envs,), -0.6, -0.4)
        return MountainCarState(position, jnp.zeros(num_envs), jnp.zeros(num_envs, jnp.int32))

    def step(self, state: MountainCarState, action: Int32[Array, " B"], key: PRNGKeyArray) -> Step:
        """One step; the left wall at -1.2 stops the car."""
        push = (action - 1).astype(jnp.float32) * 0.001
        velocity = jnp.clip(state.velocity + push - 0.0025 * jnp.cos(3 * state.position), -0.07, 0.07)
        position = jnp.clip(state.position + velocity, -1.2, 0.6)
        velocity = jnp.where((position <= -1.2) & (velocity < 0), 0.0, velocity)
        terminated = (position >= 0.5) & (velocity >= 0)
        after = MountainCarState(position, velocity, state.steps + 1)
        return after, -jnp.ones_like(position), terminated, after.steps >= self.max_episode_steps

    def observe(self, state: MountainCarState) -> Float[Array, "B 2"]:
        """Position and velocity."""
        return jnp.stack([state.position, state.velocity], axis=-1)

    @property
    def render_fps(self) -> float:
        """Frames per second of Gymnasium's environment."""
        return RENDER_FPS["MountainCar-v0"]

    def render(self, state: MountainCarState) -> Any:
        """Return the image of the state of one environment."""
        return draw_classic("MountainCar-v0", state.position, state.velocity)


DYNAMICS: dict[str, Callable[..., Dynamics]] = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
}
