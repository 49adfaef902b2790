"""One Gymnasium environment, reset on the step after an episode's end, with everything that it hands out checked.

No JAX here: this also runs in worker processes.
"""

import functools
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from polyak.core.space_check import ArraySpec
from polyak.envs import snapshots
from polyak.envs.leaves import obs_leaves, read_obs
from polyak.envs.masks import Flags, check_maskable, read_masks

Row: TypeAlias = tuple[list[Any], float, bool, bool, list[Flags] | None]
"""Observation leaves, reward, terminated, truncated, action masks."""


class SingleEnv:
    """One environment of a batch.

    An exception that the environment raises goes on as it is, with a note that says where: index, step, seed, action.

    Raises:
        TypeError: `env` is no environment; it hands out something of the wrong kind.
        ValueError: it hands out something of the wrong shape, or a bad action mask.

    Args:
        env: a `gymnasium.Env`; its spaces must be supported.
        name: how errors call it.
        index: its place in the batch.
    """

    def __init__(self, env: Any, name: str, index: int) -> None:
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"{name}: env {index} must be a gymnasium.Env, got {type(env).__name__}")
        self.env = env
        self.name = name
        self.index = index
        self.has_mask = False
        self.steps = 0
        self.seed: int | None = None

    @functools.cached_property
    def leaves(self) -> list[ArraySpec]:
        """The arrays of an observation; asked for only after the spaces were found to be supported."""
        return obs_leaves(self.env.observation_space)

    def where(self) -> str:
        """Which environment and step, as errors begin."""
        return f"{self.name}: env {self.index}, step {self.steps}"

    def probe(self) -> bool:
        """Reset once and see whether the environment hands out action masks."""
        self.has_mask = "action_mask" in self._reset(0)[1]
        check_maskable(self.has_mask, self.env.action_space, self.name)
        return self.has_mask

    def reset(self, seed: int | None) -> Row:
        """Begin an episode; with a seed, also the count of steps."""
        if seed is not None:
            self.seed, self.steps = seed, 0
        obs, info = self._reset(seed)
        return read_obs(self.leaves, obs, self.where), 0.0, False, False, self._mask(info, False)

    def step(self, action: Any, due: bool) -> Row:
        """One step, or the reset that is due because the episode ended on the last one."""
        self.steps += 1
        if due:
            return self.reset(None)
        try:
            answer = self.env.step(action)
        except Exception as error:
            error.add_note(f"{self.where()}: raised in step(); seed {self.seed}, last action {action!r}")
            raise
        if type(answer) is not tuple or len(answer) != 5:
            got = f"{len(answer)} values" if isinstance(answer, tuple | list) else repr(answer)
            raise TypeError(f"{self.where()}: step() must return (obs, reward, terminated, truncated, info), got {got}")
        obs, reward, terminated, truncated, info = answer
        if type(reward) is not float and type(reward) is not np.float64:
            reward = self._reward(reward)
        if type(terminated) is not bool or type(truncated) is not bool:
            terminated, truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        if type(info) is not dict:
            self._check_info("step", info)
        mask = self._mask(info, terminated or truncated)
        return read_obs(self.leaves, obs, self.where), reward, terminated, truncated, mask

    def save(self) -> dict[str, Any] | None:
        """A snapshot in plain data, or None where the environment's state cannot be had."""
        state = snapshots.save(self.env)
        if state is None:
            return None
        return {"env": state, "steps": self.steps, "seed": -1 if self.seed is None else self.seed}

    def load(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot."""
        snapshots.load(self.env, snapshot["env"])
        self.steps = int(snapshot["steps"])
        self.seed = None if snapshot["seed"] < 0 else int(snapshot["seed"])

    def close(self) -> None:
        """Close the environment."""
        try:
            self.env.close()
        except Exception as error:
            error.add_note(f"{self.where()}: raised in close()")
            raise

    def _reset(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        try:
            answer = self.env.reset(seed=seed)
        except Exception as error:
            error.add_note(f"{self.where()}: raised in reset(seed={seed})")
            raise
        if type(answer) is not tuple or len(answer) != 2:
            raise TypeError(f"{self.where()}: reset() must return (obs, info), got {type(answer).__name__} {answer!r:.80}")
        self._check_info("reset", answer[1])
        return answer

    def _check_info(self, method: str, info: Any) -> None:
        if not isinstance(info, dict):
            raise TypeError(f"{self.where()}: the info of {method}() must be a dict, got {info!r:.80}")

    def _reward(self, reward: Any) -> float:
        array = np.asarray(reward) if not isinstance(reward, str) else None
        if array is None or array.dtype.kind not in "fiub" or array.shape != ():
            raise TypeError(f"{self.where()}: the reward must be one number, got {type(reward).__name__} {reward!r:.80}")
        return float(array)

    def _flag(self, name: str, flag: Any) -> bool:
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{self.where()}: {name} must be a bool, got {type(flag).__name__} {flag!r:.80}")
        return bool(flag)

    def _mask(self, info: dict[str, Any], over: bool) -> list[Flags] | None:
        if not self.has_mask:
            if "action_mask" in info:
                raise ValueError(f"{self.where()}: info has an action_mask, but that of the first reset had none")
            return None
        mask = info.get("action_mask")
        # No action is chosen where the episode is over.
        if mask is None and not over:
            raise ValueError(f"{self.where()}: info has no action_mask, but that of the first reset had one")
        return read_masks(self.env.action_space, mask, self.where(), over=over)
