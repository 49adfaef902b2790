"""A JAX environment stepped from the host, with the same keys as in the compiled loop."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray, UInt32

from polyak.core.printing import short_repr
from polyak.core.spaces import EnvSpec
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Env, PyTree, TimeStep
from polyak.loops.loop import env_reset_key, env_step_key
from polyak.loops.program_cache import cached_per_env, jitted_init


@short_repr("spec", "num_envs")
class JaxEnvOnHost:
    """A `HostEnv` that wraps an `Env`: stores its state, and derives the key of step n from `env_key` and n.

    Results equal the compiled loop's results for the same run key. `reset` folds a nonzero seed into the key.

    Attributes:
        state: state of the environment, or None before `reset`.
    """

    def __init__(self, env: Env, env_key: PRNGKeyArray) -> None:
        self._env, self._env_key, self._key = env, env_key, env_key
        self._init, self._step = jitted_init(env), _jitted_step(env)
        self.state: PyTree = None
        self._number = np.uint32(0)

    @property
    def spec(self) -> EnvSpec:
        """The spaces of one environment."""
        return self._env.spec

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return self._env.num_envs

    @suggest_arguments("env.reset")
    def reset(self, seed: int) -> TimeStep:
        """Start a new episode in every environment."""
        self._key = jax.random.fold_in(self._env_key, seed) if seed else self._env_key
        self._number = np.uint32(0)
        self.state, time_step = self._init(env_reset_key(self._key))
        return jax.tree.map(np.asarray, time_step)

    def step(self, action: PyTree) -> TimeStep:
        """Step every environment."""
        self.state, time_step = self._step(self.state, action, self._key, self._number)
        self._number = self._number + np.uint32(1)
        return jax.tree.map(np.asarray, time_step)

    def render(self) -> tuple[Any, float | None]:
        """Return the image of the first environment, and its frames per second or None.

        Raises:
            ValueError: the environment draws no images.
        """
        draw = getattr(self._env, "render", None)
        if draw is None:
            raise ValueError(f"{self.spec.id} draws no images; it must have a function render(state)")
        picture: tuple[Any, float | None] = draw(self.state)
        return picture

    def snapshot(self) -> dict[str, Any]:
        """Return the state's arrays, the key and the number of steps."""
        leaves = [np.asarray(jax.device_get(leaf)) for leaf in jax.tree.leaves(self.state)]
        return {"state": leaves, "key": np.asarray(jax.random.key_data(self._key)), "number": int(self._number)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot.

        Raises:
            ValueError: the snapshot is of another environment.
        """
        shapes = jax.eval_shape(self._env.init, self._key)[0]
        expected = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)]
        got = [(leaf.shape, leaf.dtype) for leaf in snapshot.get("state", ())]
        if expected != got:
            raise ValueError(
                f"{self.spec.id}: snapshot arrays must be {expected}, got {got}; restore a snapshot of the same environment"
            )
        self.state = jax.tree.unflatten(jax.tree.structure(shapes), [jax.numpy.asarray(leaf) for leaf in snapshot["state"]])
        self._key = jax.random.wrap_key_data(jax.numpy.asarray(snapshot["key"]), impl=jax.random.key_impl(self._key))
        self._number = np.uint32(snapshot["number"])

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


@cached_per_env
def _jitted_step(env: Env) -> Callable[..., tuple[PyTree, TimeStep]]:
    def step(state: PyTree, action: PyTree, env_key: PRNGKeyArray, number: UInt32[Array, ""]) -> tuple[PyTree, TimeStep]:
        return env.step(state, action, env_step_key(env_key, number))

    return jax.jit(step)
