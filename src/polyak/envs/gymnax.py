"""Gymnax environments as dynamics: without gymnax's autoreset, and with time limits separate from terminal states."""

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.spaces import Box, Discrete, EnvSpec, Space
from polyak.core.struct import struct
from polyak.core.types import PyTree
from polyak.envs.available import gymnax_names

# Longer than any episode, and exact in float32, as some limits are floats.
NEVER = 2**30


@struct
class GymnaxState:
    """A state of gymnax and its observation."""

    state: PyTree
    obs: PyTree


class GymnaxDynamics:
    """A gymnax environment, batched.

    Gymnax sets `done` on a terminal state and after `max_steps_in_episode`. So every step is computed with the limit and
    without (XLA removes what both share): done without it is `terminated`, done only with it `truncated`. An environment that
    by design ends after a number of steps, such as a bandit, therefore truncates.

    Args:
        env: the environment of `gymnax.make`.
        params: its parameters.
        id: its name in errors and logs.
    """

    def __init__(self, env: Any, params: Any, id: str) -> None:
        self.env = env
        self.params = params
        self.unlimited = params.replace(max_steps_in_episode=type(params.max_steps_in_episode)(NEVER))
        with _gymnax_promotion(id):
            example, _ = jax.eval_shape(lambda key: env.reset_env(key, params), jax.random.key(0))
        obs_space = _obs_space(env.observation_space(params), example, id)
        self.obs_dtype = obs_space.dtype
        self.spec = EnvSpec(obs_space, _action_space(env.action_space(params), id), id)

    def __eq__(self, other: object) -> bool:
        # Loops reuse the programs of equal environments; gymnax's objects have no state.
        return isinstance(other, GymnaxDynamics) and (self.env, self.params) == (other.env, other.params)

    def __hash__(self) -> int:
        return hash((self.env, self.spec.id))

    def reset(self, key: PRNGKeyArray, num_envs: int) -> GymnaxState:
        """Initial states."""
        keys = jax.random.split(key, num_envs)
        with _gymnax_promotion(self.spec.id):
            obs, state = jax.vmap(lambda k: self.env.reset_env(k, self.params))(keys)
        # A weak type would change in the first step, which would compile twice.
        state = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)
        return GymnaxState(state, obs.astype(self.obs_dtype))

    def step(
        self, state: GymnaxState, action: PyTree, key: PRNGKeyArray
    ) -> tuple[GymnaxState, Float[Array, " B"], Bool[Array, " B"], Bool[Array, " B"]]:
        """Step every environment; see `Dynamics`."""
        num_envs = jax.tree.leaves(action)[0].shape[0]
        keys = jax.random.split(key, num_envs)

        def step_one(k: Any, s: Any, a: Any) -> Any:
            obs, after, reward, done, _ = self.env.step_env(k, s, a, self.params)
            terminated = self.env.step_env(k, s, a, self.unlimited)[3]
            return obs, after, jnp.asarray(reward, jnp.float32), jnp.asarray(done, bool), jnp.asarray(terminated, bool)

        with _gymnax_promotion(self.spec.id):
            obs, after, reward, done, terminated = jax.vmap(step_one)(keys, state.state, action)
        # The carry of a scan must keep its types, which some environments change.
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, state.state)
        reward, done, terminated = (x.reshape(num_envs) for x in (reward, done, terminated))
        return GymnaxState(after, obs.astype(self.obs_dtype)), reward, terminated, done & ~terminated

    def observe(self, state: GymnaxState) -> PyTree:
        """The observation."""
        return state.obs


def dynamics(name: str, settings: dict[str, Any]) -> GymnaxDynamics:
    """The dynamics of a gymnax environment.

    Args:
        settings: parameters of the environment (`max_steps_in_episode`, ...), else arguments of its constructor.

    Raises:
        ImportError: gymnax is not installed.
        ValueError: no such environment.
        TypeError: no such setting.
    """
    try:
        import gymnax
    except ModuleNotFoundError as error:
        raise ImportError(f"gymnax environments need gymnax: pip install 'polyak[gymnax]' ({error})") from error
    known = gymnax_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean 'gymnax/{near[0]}'? " if near else ""
        raise ValueError(f"make: unknown environment 'gymnax/{name}'; {hint}(gymnax has {', '.join(known)})")
    with _gymnax_promotion(f"gymnax/{name}"):
        fields = gymnax.make(name)[1].__dataclass_fields__
        env, params = gymnax.make(name, **{k: v for k, v in settings.items() if k not in fields})
        params = params.replace(**{k: v for k, v in settings.items() if k in fields})
    return GymnaxDynamics(env, params, f"gymnax/{name}")


@contextlib.contextmanager
def _gymnax_promotion(id: str) -> Iterator[None]:
    """Run gymnax under JAX's default promotion, on which it relies; a note marks errors of its code."""
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    except Exception as error:
        error.add_note(f"{id}: raised in gymnax's own code")
        raise


def _obs_space(space: Any, example: jax.ShapeDtypeStruct, id: str) -> Box:
    """The observation space; of floats if the space or the observations are (in some environments they differ)."""
    if type(space).__name__ != "Box":
        raise TypeError(f"{id}: observation space: {type(space).__name__} is not supported; supported is Box")
    if tuple(space.shape) != example.shape:
        raise ValueError(f"{id}: observation space: shape {tuple(space.shape)}, but observations have {example.shape}")
    floats = "f" in (np.dtype(space.dtype).kind, example.dtype.kind)
    low, high = (np.broadcast_to(np.asarray(bound, np.float32), example.shape) for bound in (space.low, space.high))
    return Box(low, high, np.float32 if floats else example.dtype)


def _action_space(space: Any, id: str) -> Space:
    match type(space).__name__:
        case "Discrete":
            return Discrete(int(space.n))
        case "Box":
            low, high = (np.broadcast_to(np.asarray(bound, np.float32), space.shape) for bound in (space.low, space.high))
            return Box(low, high)
        case kind:
            raise TypeError(f"{id}: action space: {kind} is not supported; supported are Discrete and Box")
