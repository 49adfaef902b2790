"""SuperSuit's vector environments of agents that share a policy, as a Gymnasium vector environment with NEXT_STEP mode."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from polyak.envs.env_batch import seeds_of


class SuperSuitEnv(VectorEnv[Any, Any, Any]):
    """A `MarkovVectorEnv`, or several in a `ConcatVecEnv`: each row is one agent of a PettingZoo environment.

    SuperSuit resets a group of agents in the step that ends their episode. With this class, that step returns the final
    observations, and the next step of the group returns the first observations of the new episode.

    Raises:
        ValueError: the environment runs in processes, which do not return final observations.
        RuntimeError: in `step`, only some agents of a group ended.
    """

    def __init__(self, env: Any) -> None:
        kind = type(env).__name__
        if kind not in ("ConcatVecEnv", "MarkovVectorEnv"):
            raise ValueError(f"make: SuperSuit's {kind} is not supported; create it with concat_vec_envs_v1(..., num_cpus=0)")
        self.env = env
        self.metadata = env.metadata | {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = int(env.num_envs)
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, self.num_envs)
        self.action_space = batch_space(env.action_space, self.num_envs)
        self._groups: list[Any] = env.vec_envs if kind == "ConcatVecEnv" else [env]
        self._fresh: list[Any] = [None] * len(self._groups)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in every group."""
        seeds = [None] * len(self._groups) if seed is None else seeds_of(seed, len(self._groups))
        self._fresh = [None] * len(self._groups)
        results = [group.reset(seed=each, options=options) for group, each in zip(self._groups, seeds, strict=True)]
        return self._concatenate([self._rows(obs) for obs, _ in results]), self._merge([info for _, info in results])

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every group; groups whose episode ended return the first observations of the next episode instead."""
        results: list[Any] = []
        action_rows = list(iterate(self.action_space, actions))
        for i, group in enumerate(self._groups):
            own_actions, action_rows = action_rows[: group.num_envs], action_rows[group.num_envs :]
            results.append(self._step_group(i, group, own_actions))
        obs, rewards, terminated, truncated, infos = zip(*results, strict=True)
        flags = (np.concatenate(parts).astype(bool) for parts in (terminated, truncated))
        return self._concatenate(obs), np.concatenate(rewards), *flags, self._merge(infos)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        self.env.close()

    def _step_group(self, index: int, group: Any, actions: list[Any]) -> tuple[list[Any], Any, Any, Any, list[Any]]:
        if self._fresh[index] is not None:
            (rows, infos), self._fresh[index] = self._fresh[index], None
            none = np.zeros(group.num_envs)
            return rows, none, none, none, infos
        obs, reward, terminated, truncated, infos = group.step(_stack(group.action_space, actions))
        rows = self._rows(obs)
        last = np.asarray(terminated, bool) | np.asarray(truncated, bool)
        if last.any():
            if not last.all():
                raise RuntimeError(
                    f"agents {np.flatnonzero(last).tolist()} of {group.par_env} ended before the others; polyak trains groups "
                    "whose agents end together"
                )
            # SuperSuit's infos are from the last step, updated by the reset.
            self._fresh[index] = rows, infos
            rows = [info["terminal_observation"] for info in infos]
        return rows, reward, terminated, truncated, infos

    def _rows(self, obs: Any) -> list[Any]:
        return list(iterate(self.observation_space, obs))

    def _concatenate(self, groups: Sequence[list[Any]]) -> Any:
        return _stack(self.single_observation_space, [row for rows in groups for row in rows])

    def _merge(self, infos: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
        """Merge the infos of all agents into the form of Gymnasium's vector environments."""
        merged: dict[str, Any] = {}
        for i, info in enumerate(each for group in infos for each in group):
            merged = self._add_info(merged, {k: v for k, v in info.items() if k != "terminal_observation"}, i)
        return merged


def _stack(space: Any, rows: Sequence[Any]) -> Any:
    out: Any = create_empty_array(space, len(rows))
    return concatenate(space, rows, out)
