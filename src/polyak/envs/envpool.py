"""EnvPool's environments (C++ threads) as a Gymnasium vector environment that `reset(seed=...)` seeds."""

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from polyak.envs.env_batch import seeds_of


class SeededEnvPool(VectorEnv[Any, Any, Any]):
    """An environment of `envpool.make(..., env_type="gymnasium")`.

    EnvPool resets on the next step, as polyak does, but takes a seed only at creation. So `reset(seed=...)` creates the pool
    again with a seed for each environment, which replaces the original `seed` and `env_seed`. Batches are sorted by
    `info["env_id"]`.

    Raises:
        ValueError: the pool is asynchronous, that is, steps only some of its environments at a time.
    """

    def __init__(self, env: Any) -> None:
        self.num_envs, batch_size = int(env.num_envs), int(env.config["batch_size"])
        if batch_size != self.num_envs:
            raise ValueError(
                f"make: EnvPool's batch_size={batch_size} must be num_envs={self.num_envs}; create it with "
                f"envpool.make(..., num_envs={batch_size})"
            )
        self.env = env
        self.metadata = env.metadata
        with warnings.catch_warnings():
            # EnvPool has bounds in float64, and Gymnasium warns of them whenever the spaces are created.
            warnings.simplefilter("ignore")
            self.single_observation_space = env.single_observation_space
            self.single_action_space = env.single_action_space

    def reset(self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start a new episode in every environment; equal seeds give equal episodes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(seed, int):
                self.env = self._create(seed)
            obs, info = self.env.reset()
        return self._sort(info["env_id"], obs), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step every environment; environments whose episode ended reset instead."""
        *arrays, info = self.env.step(actions)
        obs, reward, terminated, truncated = (self._sort(info["env_id"], part) for part in arrays)
        by_env = {name: part for name, part in info.items() if np.shape(part)[:1] == (self.num_envs,)}
        return obs, reward, terminated, truncated, self._sort(info["env_id"], by_env)

    def _create(self, seed: int) -> Any:
        # EnvPool accepts seeds of 31 bits.
        seeds = [env_seed >> 1 for env_seed in seeds_of(seed, self.num_envs)]
        spec_class: Any = type(self.env.spec)
        return type(self.env)(spec_class(spec_class.gen_config(**self.env.config | {"env_seed": seeds})))

    def _sort(self, env_id: npt.NDArray[Any], value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._sort(env_id, part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(self._sort(env_id, part) for part in value)
        return value if np.array_equal(env_id, np.arange(self.num_envs)) else value[np.argsort(env_id)]
