"""A JAX environment stepped from the host, with the same keys as in the compiled loop."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray, UInt32

from polyak.core.spaces import EnvSpec
from polyak.core.types import Env, PyTree, TimeStep
from polyak.train.loop import cached_per_env, env_reset_key, env_step_key, jitted_init


class JaxEnvOnHost:
    """A `HostEnv` around an `Env`: keeps the state, and derives the key of step n from the key given and n.

    Its numbers are those of the compiled loop with the same run key. `reset`'s seed is folded into the key; 0 leaves it.
    """

    def __init__(self, env: Env, env_key: PRNGKeyArray) -> None:
        self._env, self._given_key, self._key = env, env_key, env_key
        self._init, self._step = jitted_init(env), _jitted_step(env)
        self._state: PyTree = None
        self._number = np.uint32(0)

    @property
    def spec(self) -> EnvSpec:
        """The inner environment's."""
        return self._env.spec

    @property
    def num_envs(self) -> int:
        """The inner environment's."""
        return self._env.num_envs

    def reset(self, seed: int) -> TimeStep:
        """Fresh episodes everywhere."""
        self._key = jax.random.fold_in(self._given_key, seed) if seed else self._given_key
        self._number = np.uint32(0)
        self._state, time_step = self._init(env_reset_key(self._key))
        return jax.tree.map(np.asarray, time_step)

    def step(self, action: PyTree) -> TimeStep:
        """One step of every environment."""
        self._state, time_step = self._step(self._state, action, self._key, self._number)
        self._number = self._number + np.uint32(1)
        return jax.tree.map(np.asarray, time_step)

    def snapshot(self) -> dict[str, Any]:
        """The state's arrays, the key and the number of steps."""
        leaves = [np.asarray(jax.device_get(leaf)) for leaf in jax.tree.leaves(self._state)]
        return {"state": leaves, "key": np.asarray(jax.random.key_data(self._key)), "number": int(self._number)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot.

        Raises:
            ValueError: it is of another environment.
        """
        shapes = jax.eval_shape(self._env.init, self._key)[0]
        wanted = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)]
        got = [(leaf.shape, leaf.dtype) for leaf in snapshot["state"]]
        if wanted != got:
            raise ValueError(f"{self.spec.id}: the snapshot has arrays {got}, the environment's state {wanted}")
        self._state = jax.tree.unflatten(jax.tree.structure(shapes), [jax.numpy.asarray(leaf) for leaf in snapshot["state"]])
        self._key = jax.random.wrap_key_data(jax.numpy.asarray(snapshot["key"]), impl=jax.random.key_impl(self._key))
        self._number = np.uint32(snapshot["number"])

    def close(self) -> None:
        """Nothing to free."""


@cached_per_env
def _jitted_step(env: Env) -> Callable[..., tuple[PyTree, TimeStep]]:
    def step(state: PyTree, action: PyTree, env_key: PRNGKeyArray, number: UInt32[Array, ""]) -> tuple[PyTree, TimeStep]:
        return env.step(state, action, env_step_key(env_key, number))

    return jax.jit(step)
