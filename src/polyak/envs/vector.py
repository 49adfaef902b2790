"""A vector environment of Gymnasium's, or a user's, as a batch that resets on the next step, whatever its own mode."""

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv

from polyak.core.space_check import ArraySpec
from polyak.envs import snapshots
from polyak.envs.batches import RawStep
from polyak.envs.leaves import obs_leaves, read_obs
from polyak.envs.masks import Flags, check_maskable, mask_of_row, mask_widths, read_masks


class VectorBatch:
    """A vector environment.

    NEXT_STEP is what we want. A vector environment cannot step some rows and hold others, so in the other modes a row that is
    to reset takes the step with all others, on the ignored action, and is then reset by `options={"reset_mask": ...}`: what it
    did in that step is never seen, and its episode begins as any other. (SAME_STEP has already reset it once; its final
    observation comes from `info["final_obs"]`. DISABLED leaves it where its episode ended, where some environments refuse to be
    stepped, so it is reset before that step too.)

    Raises:
        ValueError: the environment does not say how it resets; in `step`, it ignores `reset_mask`, hands out no `final_obs`, or
            arrays of the wrong shape.
        TypeError: arrays of the wrong dtype.
    """

    def __init__(self, env: "VectorEnv[Any, Any, Any]", name: str) -> None:
        self.form = "vector"
        self.env = env
        self.name = name
        self.num_envs = int(env.num_envs)
        self.obs_space: Any = env.single_observation_space
        self.action_space: Any = env.single_action_space
        try:
            self.mode = AutoresetMode(env.metadata["autoreset_mode"])
        except (KeyError, ValueError):
            modes = ", ".join(f"AutoresetMode.{mode.name}" for mode in AutoresetMode)
            got = env.metadata.get("autoreset_mode")
            raise ValueError(f"{name}: metadata['autoreset_mode'] must be one of {modes}, got {got!r}") from None
        self.has_mask = False
        self.plain = False
        self.steps = 0
        self.seed = 0
        self._leaves: list[ArraySpec] = []
        self._batched: list[ArraySpec] = []
        self._nobody = np.zeros(self.num_envs, bool)

    def where(self) -> str:
        """Which environment and step, as errors begin."""
        return f"{self.name}: step {self.steps}"

    def probe(self) -> bool:
        """Reset once and see whether there are action masks."""
        # Here and not above: by now the space was found to be supported.
        self._leaves = obs_leaves(self.obs_space)
        self._batched = [dataclasses.replace(leaf, shape=(self.num_envs, *leaf.shape)) for leaf in self._leaves]
        self.has_mask = "action_mask" in self._call("reset", seed=0)[1]
        check_maskable(self.has_mask, self.action_space, self.name)
        self.plain = self.mode is AutoresetMode.NEXT_STEP and not self.has_mask
        return self.has_mask

    def seeds(self, seed: int) -> list[int]:
        """One seed for all."""
        return [seed]

    def reset(self, seed: int) -> RawStep:
        """Fresh episodes everywhere."""
        self.steps, self.seed = 0, seed
        obs, info = self._call("reset", seed=seed)
        nobody = self._nobody.copy()
        return RawStep(self._read(obs), np.zeros(self.num_envs), nobody, nobody.copy(), self._masks(info, self._nobody))

    def step(self, action: Any, due: npt.NDArray[np.bool_]) -> RawStep:
        """One step of every environment; the rows that are `due` reset instead."""
        self.steps += 1
        resets = np.count_nonzero(due) > 0
        if resets and self.mode is AutoresetMode.DISABLED:
            self._reset_rows(due)
        answer = self._call("step", action)
        arrays, reward = self._read(answer[0]), self._rewards(answer[1])
        terminated, truncated = self._flags("terminated", answer[2]), self._flags("truncated", answer[3])
        if resets:
            reward[due] = 0.0
            terminated &= ~due
            truncated &= ~due
        if self.plain and "action_mask" not in answer[4]:
            return RawStep(arrays, reward, terminated, truncated)
        masks = self._complete(arrays, terminated | truncated, answer[4], due)
        return RawStep(arrays, reward, terminated, truncated, masks)

    def save(self) -> list[Any] | None:
        """The snapshot in plain data, or None."""
        state = snapshots.save_layer(self.env) if self.env is self.env.unwrapped else None
        return None if state is None else [{"env": state, "steps": self.steps, "seed": self.seed}]

    def load(self, snapshots_: list[Any]) -> None:
        """Go on from a snapshot."""
        (snapshot,) = snapshots_
        snapshots.load_layer(self.env, snapshot["env"])
        self.steps, self.seed = int(snapshot["steps"]), int(snapshot["seed"])

    def close(self) -> None:
        """Close the vector environment."""
        self.env.close()

    def _complete(
        self, arrays: list[Any], ended: npt.NDArray[np.bool_], info: dict[str, Any], due: npt.NDArray[np.bool_]
    ) -> list[Flags] | None:
        """The action masks; and in the modes that reset otherwise, the observations that belong in the arrays."""
        converts = self.mode is not AutoresetMode.NEXT_STEP
        masks = self._masks(info, ended | due if converts else ended)
        if converts and np.count_nonzero(due):
            self._replace_due(arrays, masks, due)
        if self.mode is AutoresetMode.SAME_STEP and np.count_nonzero(ended):
            self._replace_ended(arrays, info, ended)
        return masks

    def _call(
        self, method: Literal["step", "reset"], *args: Any, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        try:
            answer = self.env.step(*args) if method == "step" else self.env.reset(seed=seed, options=options)
        except Exception as error:
            error.add_note(f"{self.where()}: raised in {method}() of {type(self.env.unwrapped).__name__}; seed {self.seed}")
            raise
        length = 5 if method == "step" else 2
        if type(answer) is not tuple or len(answer) != length or not isinstance(answer[-1], dict):
            names = "(obs, info)" if length == 2 else "(obs, reward, terminated, truncated, info)"
            got = f"{len(answer)} values" if isinstance(answer, tuple | list) else repr(answer)
            raise TypeError(f"{self.where()}: {method}() must return {names}, info a dict; got {got}")
        return answer

    def _read(self, obs: Any) -> list[npt.NDArray[Any]]:
        """The observation's arrays, copied: the environment may write into its own."""
        leaf = self._batched[0]
        if type(obs) is np.ndarray and obs.shape == leaf.shape and obs.dtype == leaf.dtype and not leaf.keys:
            return [obs.copy()]
        return [np.array(array) for array in read_obs(self._batched, obs, self.where)]

    def _rewards(self, value: Any) -> npt.NDArray[Any]:
        array = np.array(value)
        if array.shape != (self.num_envs,) or array.dtype.kind not in "fiub":
            raise TypeError(f"{self.where()}: reward must be {self.num_envs} numbers, got {array.dtype} of shape {array.shape}")
        return array if array.dtype.kind == "f" else array.astype(np.float64)

    def _flags(self, name: str, value: Any) -> npt.NDArray[np.bool_]:
        array = np.array(value)
        if array.shape != (self.num_envs,) or array.dtype.char != "?":
            raise TypeError(f"{self.where()}: {name} must be {self.num_envs} bools, got {array.dtype} of shape {array.shape}")
        return array

    def _masks(self, info: dict[str, Any], needless: Flags) -> list[Flags] | None:
        """The action masks, all ones for the rows that need none."""
        if not self.has_mask:
            if "action_mask" in info:
                raise ValueError(f"{self.where()}: info has an action_mask, but that of the first reset had none")
            return None
        masks = [np.ones((self.num_envs, width), bool) for width in mask_widths(self.action_space)]
        given = info.get("_action_mask", np.full(self.num_envs, "action_mask" in info))
        for i in np.flatnonzero(~needless).tolist():
            where = f"{self.name}: env {i}, step {self.steps}"
            row = mask_of_row(self.action_space, info["action_mask"], i, self.num_envs, where) if given[i] else None
            if row is None:
                raise ValueError(f"{where}: info has no action_mask, but that of the first reset had one")
            for mask, flags in zip(masks, read_masks(self.action_space, row, where), strict=True):
                mask[i] = flags
        return masks

    def _reset_rows(self, rows: npt.NDArray[np.bool_]) -> tuple[Any, dict[str, Any]]:
        answer: tuple[Any, dict[str, Any]]
        answer = self._call("reset", options={"reset_mask": rows.copy()})
        return answer

    def _replace_due(self, arrays: list[Any], masks: list[Flags] | None, due: npt.NDArray[np.bool_]) -> None:
        """Reset the rows that were due and put their first observations where their unseen step's stood."""
        obs, info = self._reset_rows(due)
        for array, fresh in zip(arrays, self._read(obs), strict=True):
            if not np.array_equal(array[~due], fresh[~due], equal_nan=array.dtype.kind == "f"):
                raise ValueError(
                    f"{self.where()}: {type(self.env.unwrapped).__name__}.reset() ignores options['reset_mask'], so "
                    f"{self.mode} cannot be turned into next-step resets; make it with AutoresetMode.NEXT_STEP"
                )
            array[due] = fresh[due]
        if masks is not None:
            for mask, its in zip(masks, self._masks(info, ~due) or [], strict=True):
                mask[due] = its[due]

    def _replace_ended(self, arrays: list[Any], info: dict[str, Any], ended: npt.NDArray[np.bool_]) -> None:
        """Put the final observations where those of the episodes after them stood."""
        final = info.get("final_obs")
        if final is None:
            raise ValueError(f"{self.where()}: an episode ended, and info has no 'final_obs' (the mode is {self.mode})")
        for i in np.flatnonzero(ended):
            row = read_obs(self._leaves, final[i], lambda i=i: f"{self.name}: env {i}, step {self.steps}")  # type: ignore[misc]
            for array, value in zip(arrays, row, strict=True):
                array[i] = value
