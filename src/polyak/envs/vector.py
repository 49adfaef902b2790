"""A Gymnasium vector environment as a batch with next-step autoreset, from any autoreset mode."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeReward

from polyak.core.space_check import ArraySpec
from polyak.core.warn import add_note
from polyak.envs import snapshots
from polyak.envs.env_batch import RawStep
from polyak.envs.env_options import (
    EnvOptions,
    UnreadableMask,
    adapt,
    layers_of,
    warn_of_running_statistics,
    warn_of_unused_masks,
)
from polyak.envs.info_reader import info_of_env, read_info, stack_info
from polyak.envs.masks import Flags, check_maskable, mask_of_env, mask_widths, read_masks
from polyak.envs.obs_reader import obs_leaves, read_obs


class ResetOptions(dict[str, Any]):
    """Options of `reset` that keep their `reset_mask` for the wrappers of a vector environment.

    Gymnasium's vector environments and wrappers remove `reset_mask` from the dict, so that the next outer wrapper, such as
    `RecordEpisodeStatistics`, would take a reset of some environments for a reset of all.
    """

    def pop(self, key: str, *default: Any) -> Any:
        """Return a value without removing it."""
        return self.get(key, *default)


class CopiedObs(list[Any]):
    """Copies of the observations that the environments of a `SyncVectorEnv` returned.

    It stacks them after all its environments have run, so environments that return one array would get equal observations.
    """

    def __setitem__(self, index: Any, obs: Any) -> None:
        super().__setitem__(index, copy.deepcopy(obs))


class ResetOnce:
    """An environment of a `SyncVectorEnv` that `VectorBatch` resets twice after an episode, with a step that is discarded.

    The first reset is the environment's; the step and the second reset return its observation and info again.
    """

    def __init__(self, env: Any) -> None:
        self._env, self._has_ended = env, False
        self._first: tuple[Any, dict[str, Any]] | None = None

    def step(self, action: Any) -> Any:
        """Step the environment, unless it has just been reset after an episode."""
        if self._first is not None:
            obs, info = self._first
            return obs, 0.0, False, False, info
        result = self._env.step(action)
        self._has_ended = bool(result[2] or result[3])
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment, unless it has just been reset after an episode."""
        first, self._first = self._first, None
        if first is not None and seed is None:
            return first
        result = self._env.reset(seed=seed, options=options)
        self._first = (copy.deepcopy(result[0]), result[1]) if self._has_ended and seed is None else None
        self._has_ended = False
        return result


class MaskedResets(VectorWrapper):  # without type arguments, which Gymnasium's vector wrappers do not take when running
    """Converts `ResetOptions` to a plain dict, whose rest a vector environment passes on to its environments.

    While they run, the environments of a `SyncVectorEnv` are `ResetOnce`.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._envs = list(map(ResetOnce, env.envs)) if isinstance(env, SyncVectorEnv) else None

    def step(self, actions: Any) -> Any:
        """Step the environments."""
        with self._reset_once():
            return self.env.step(actions)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments."""
        with self._reset_once():
            return self.env.reset(seed=seed, options=None if options is None else dict(options))

    @contextlib.contextmanager
    def _reset_once(self) -> Iterator[None]:
        env: Any = self.env
        if self._envs is None:
            yield
            return
        env.envs, envs = self._envs, env.envs
        try:
            yield
        finally:
            env.envs = envs


class VectorBatch:
    """A batch of a vector environment.

    NEXT_STEP needs no conversion. A vector environment steps all its environments together, so in the other modes an
    environment whose episode ended takes the next step with the others (its action is ignored) and is then reset by
    `options={"reset_mask": ...}`; the result of that step is discarded. In SAME_STEP the environment was already reset once,
    and its final observation is read from `info["final_obs"]`. In DISABLED the environment is still in its final state, where
    some environments raise when stepped, so it is also reset before that step. `MaskedResets` omits the step and one of the
    two resets in a wrapped `SyncVectorEnv`.

    Raises:
        ValueError: the environment's metadata has no autoreset mode, or a wrapper needs NEXT_STEP; in `step`, the environment
            ignores `reset_mask`, returns no `final_obs`, or returns arrays of the wrong shape.
        TypeError: the environment returns arrays of the wrong dtype.
    """

    def __init__(self, env: "VectorEnv[Any, Any, Any]", name: str, options: EnvOptions) -> None:
        self.form = "vector"
        env = adapt(env, options, name)
        self.env: VectorEnv[Any, Any, Any] = env
        self.name = name
        self.info_metrics = options.info_metrics
        self.num_envs = int(env.num_envs)
        self.obs_space: Any = env.single_observation_space
        self.action_space: Any = env.single_action_space
        try:
            self.mode = AutoresetMode(env.metadata["autoreset_mode"])
        except (KeyError, ValueError):
            modes = " or ".join(f"AutoresetMode.{mode.name}" for mode in AutoresetMode)
            got = env.metadata.get("autoreset_mode")
            raise ValueError(f"{name}: metadata['autoreset_mode'] must be {modes}, got {got!r}") from None
        self._check_wrappers()
        layers = layers_of(env)
        if isinstance(layers[-1], SyncVectorEnv):
            layers[-1]._env_obs = CopiedObs([None] * self.num_envs)
        self._is_wrapped = len(layers) > 1 and self.mode is not AutoresetMode.NEXT_STEP
        # Below the wrappers, which read the mask after the reset; only once if `make` is called twice for an environment.
        if self._is_wrapped and not isinstance(layers[-2], MaskedResets):
            layers[-2].env = MaskedResets(layers[-1])
        self._report_state = snapshots.StateWarning(name)
        self.has_mask = False
        self._is_direct = False
        self.steps = 0
        self.seed = 0
        self._leaves: list[ArraySpec] = []
        self._batched: list[ArraySpec] = []
        self._no_env = np.zeros(self.num_envs, bool)

    def location(self) -> str:
        """Return environment and step, the prefix of errors."""
        return f"{self.name}: step {self.steps}"

    def probe(self) -> bool:
        """Reset once and return whether there are action masks."""
        # Not in the constructor, as the space is known to be supported only now.
        self._leaves = obs_leaves(self.obs_space)
        self._batched = [dataclasses.replace(leaf, shape=(self.num_envs, *leaf.shape)) for leaf in self._leaves]
        self.has_mask = "action_mask" in self._call("reset", seed=0)[1]
        check_maskable(self.has_mask, self.action_space, self.name)
        if not self.has_mask:
            warn_of_unused_masks(self.env, self.name)
        warn_of_running_statistics(self.env, self.name)
        self.save()  # warns of an unusable `get_state()` before training begins
        self._is_direct = self.mode is AutoresetMode.NEXT_STEP and not self.has_mask
        return self.has_mask

    def seeds(self, seed: int) -> list[int]:
        """One seed for all environments."""
        return [seed]

    def take_part(self, start: int, total: int) -> None:
        """Raise an error unless the part is the complete batch: a vector environment has a single random generator.

        Raises:
            ValueError: the part is smaller than the batch.
        """
        if (start, total) != (0, self.num_envs):
            raise ValueError(
                f"{self.name}: a vector environment cannot be split into parts; pass the name of an environment with "
                "vectorization='sync', or a function that creates one environment"
            )

    def reset(self, seed: int) -> RawStep:
        """Start a new episode in every environment."""
        self.steps, self.seed = 0, seed
        obs, info = self._call("reset", seed=seed)
        none = self._no_env.copy()
        return RawStep(self._read(obs), np.zeros(self.num_envs), none, none.copy(), self._masks(info, self._no_env))

    def step(self, action: Any, reset_mask: Flags) -> RawStep:
        """Step every environment; where `reset_mask` is set, reset it instead."""
        self.steps += 1
        resets = np.count_nonzero(reset_mask) > 0
        if resets and self.mode is AutoresetMode.DISABLED:
            self._reset_envs(reset_mask)
        result = self._call("step", action)
        arrays, reward = self._read(result[0]), self._rewards(result[1])
        terminated, truncated = self._flags("terminated", result[2]), self._flags("truncated", result[3])
        if resets:
            reward[reset_mask] = 0.0
            terminated &= ~reset_mask
            truncated &= ~reset_mask
        is_last = terminated | truncated
        values = self._read_info(result[4], is_last, reset_mask)
        if self._is_direct and "action_mask" not in result[4]:
            return RawStep(arrays, reward, terminated, truncated, info=values)
        masks = self._complete(arrays, is_last, result[4], reset_mask)
        return RawStep(arrays, reward, terminated, truncated, masks, info=values)

    def goal_env(self) -> Any:
        """Return the first environment of a `SyncVectorEnv`, else the vector environment."""
        inner = layers_of(self.env)[-1]
        return inner.envs[0] if isinstance(inner, SyncVectorEnv) else self.env

    def render(self) -> tuple[Any, float | None]:
        """Return the image of the first environment, and its frames per second or None.

        Raises:
            ValueError: the environment was not created to return images.
        """
        mode = getattr(self.env, "render_mode", None)
        if mode != "rgb_array":
            raise ValueError(f"{self.name} draws no images: its render_mode must be 'rgb_array', got {mode!r}")
        images: Any = self.env.render()
        return images[0], self.env.metadata.get("render_fps")

    def save(self) -> list[Any] | None:
        """Return a snapshot as plain data, or None if the state cannot be read."""
        state = snapshots.save_layer(self.env, self._report_state) if self.env is self.env.unwrapped else None
        return None if state is None else [{"env": state, "steps": self.steps, "seed": self.seed}]

    def load(self, snapshots_: list[Any]) -> None:
        """Restore a snapshot."""
        (snapshot,) = snapshots_
        snapshots.load_layer(self.env, snapshot["env"])
        self.steps, self.seed = int(snapshot["steps"]), int(snapshot["seed"])

    def close(self) -> None:
        """Close the vector environment."""
        self.env.close()

    def _complete(self, arrays: list[Any], is_last: Flags, info: dict[str, Any], reset_mask: Flags) -> list[Flags] | None:
        """Read the action masks; in other modes than NEXT_STEP, also put the right observations into `arrays`."""
        converts = self.mode is not AutoresetMode.NEXT_STEP
        masks = self._masks(info, is_last | reset_mask if converts else is_last)
        if converts and np.count_nonzero(reset_mask):
            self._insert_first_obs(arrays, masks, reset_mask)
        if self.mode is AutoresetMode.SAME_STEP and np.count_nonzero(is_last):
            self._insert_final_obs(arrays, info, is_last)
        return masks

    def _check_wrappers(self) -> None:
        """Check that no wrapper clears the state of all environments at a partial reset, which only NEXT_STEP avoids."""
        if self.mode is AutoresetMode.NEXT_STEP or not any(isinstance(layer, NormalizeReward) for layer in layers_of(self.env)):
            return
        raise ValueError(
            f"{self.name}: NormalizeReward must be of a vector environment with AutoresetMode.NEXT_STEP, got {self.mode}: its "
            "reset clears the returns of all environments; change the mode, or set normalize_reward of the agent instead"
        )

    def _call(
        self, method: Literal["step", "reset"], *args: Any, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        try:
            result = self.env.step(*args) if method == "step" else self.env.reset(seed=seed, options=options)
        except UnreadableMask as error:
            raise ValueError(f"{self.location()}: {error}") from None
        except Exception as error:
            add_note(error, f"{self.location()}: raised in {method}() of {type(self.env.unwrapped).__name__}; seed {self.seed}")
            raise
        length = 5 if method == "step" else 2
        if type(result) is tuple and len(result) == length and not isinstance(result[-1], dict):
            advice = "; leave out the wrapper DictInfoToList" if isinstance(result[-1], list) else ""
            got = type(result[-1]).__name__
            raise TypeError(f"{self.location()}: {method}() must return info as a dict of arrays, got {got}{advice}")
        if type(result) is not tuple or len(result) != length:
            names = "(obs, info)" if length == 2 else "(obs, reward, terminated, truncated, info)"
            got = f"{len(result)} values" if isinstance(result, tuple | list) else repr(result)
            raise TypeError(f"{self.location()}: {method}() must return {names}, got {got}")
        return result

    def _read(self, obs: Any) -> list[npt.NDArray[Any]]:
        return read_obs(self._batched, obs, self.location)

    def _rewards(self, value: Any) -> npt.NDArray[Any]:
        array = self._vector("the reward", value, "fiub", "numbers")
        return array if array.dtype.kind == "f" else array.astype(np.float64)

    def _flags(self, name: str, value: Any) -> Flags:
        return self._vector(name, value, "b", "bools")

    def _vector(self, name: str, value: Any, kinds: str, expected: str) -> npt.NDArray[Any]:
        array = np.array(value)
        if array.shape != (self.num_envs,) or array.dtype.kind not in kinds or np.ma.is_masked(value):
            got = f"{'masked ' if np.ma.is_masked(value) else ''}{array.dtype} of shape {array.shape}"
            raise TypeError(f"{self.location()}: {name} must be {self.num_envs} {expected}, got {got}")
        return array

    def _masks(self, info: dict[str, Any], skip: Flags) -> list[Flags] | None:
        """Return the action masks; all ones for the environments to `skip`."""
        if not self.has_mask:
            if "action_mask" in info:
                raise ValueError(f"{self.location()}: info must not have an action_mask, as the first reset returned none")
            return None
        masks = [np.ones((self.num_envs, width), bool) for width in mask_widths(self.action_space)]
        has_mask = info.get("_action_mask", np.full(self.num_envs, "action_mask" in info))
        for i in np.flatnonzero(~skip).tolist():
            location = self._location_of(i)
            own = mask_of_env(self.action_space, info["action_mask"], i, self.num_envs, location) if has_mask[i] else None
            if own is None:
                raise ValueError(f"{location}: info must have an action_mask, as the first reset returned one; got none")
            for mask, flags in zip(masks, read_masks(self.action_space, own, location), strict=True):
                mask[i] = flags
        return masks

    def _read_info(self, info: dict[str, Any], is_last: Flags, reset_mask: Flags) -> dict[str, npt.NDArray[np.float64]]:
        """Return the values of `info` that loops report; without `info_metrics`, only values at the end of episodes."""
        reads = ~reset_mask if self.info_metrics else is_last
        if not info or not np.count_nonzero(reads):
            return {}
        values: list[dict[str, float]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(reads).tolist():
            own = info_of_env(info, self.info_metrics, i, self._location_of(i))
            values[i] = read_info(own, self.info_metrics, bool(is_last[i]), lambda i=i: self._location_of(i))  # type: ignore[misc]
        return stack_info(values)

    def _location_of(self, env: int) -> str:
        return f"{self.name}: env {env}, step {self.steps}"

    def _reset_envs(self, reset_mask: Flags) -> tuple[Any, dict[str, Any]]:
        result: tuple[Any, dict[str, Any]]
        options = (ResetOptions if self._is_wrapped else dict)(reset_mask=reset_mask.copy())
        result = self._call("reset", options=options)
        return result

    def _insert_first_obs(self, arrays: list[Any], masks: list[Flags] | None, reset_mask: Flags) -> None:
        """Reset environments, and replace the observations of their discarded step by the first observations."""
        obs, info = self._reset_envs(reset_mask)
        for array, fresh in zip(arrays, self._read(obs), strict=True):
            if not np.array_equal(array[~reset_mask], fresh[~reset_mask], equal_nan=array.dtype.kind == "f"):
                raise ValueError(
                    f"{self.location()}: {type(self.env.unwrapped).__name__}.reset() must reset only the environments of "
                    f"options['reset_mask'] in {self.mode}, got a reset of all; create it with AutoresetMode.NEXT_STEP"
                )
            array[reset_mask] = fresh[reset_mask]
        if masks is not None:
            for mask, new_mask in zip(masks, self._masks(info, ~reset_mask) or [], strict=True):
                mask[reset_mask] = new_mask[reset_mask]

    def _insert_final_obs(self, arrays: list[Any], info: dict[str, Any], is_last: Flags) -> None:
        """Replace the first observations of new episodes by the final observations of the episodes that ended."""
        final = info.get("final_obs")
        if final is None:
            raise ValueError(
                f"{self.location()}: info must have 'final_obs' where an episode ended (the mode is {self.mode}), got none"
            )
        if isinstance(final, dict):
            # One batch for each part; entries of environments whose episode goes on are arbitrary.
            for array, batch in zip(arrays, self._read(final), strict=True):
                array[is_last] = batch[is_last]
            return
        # `np.ndim` fails for a list of arrays and None.
        is_batch = isinstance(final, list | tuple) or np.ndim(final) > 0
        if not is_batch or len(final) != self.num_envs:
            raise ValueError(f"{self.location()}: info['final_obs'] must have {self.num_envs} entries, got {final!r:.80}")
        for i in np.flatnonzero(is_last).tolist():
            values = read_obs(self._leaves, final[i], lambda i=i: self._location_of(i))  # type: ignore[misc]
            for array, value in zip(arrays, values, strict=True):
                array[i] = value
