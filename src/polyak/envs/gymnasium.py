"""Gymnasium environments, single or vectorized, as a `HostEnv` with next-step autoreset."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt

from polyak.core.checks import check_choice, check_integer
from polyak.core.goals import has_goals
from polyak.core.gymnasium_spaces import from_gymnasium
from polyak.core.printing import short_repr
from polyak.core.spaces import Discrete, EnvSpec, Leaf, MultiDiscrete, leaf_keys, leaf_spaces, map_space, unflatten
from polyak.core.suggestions import suggest_arguments, suggest_attributes
from polyak.core.types import EpisodeRecord, PyTree, TimeStep
from polyak.core.warn import warn
from polyak.envs.env_batch import Batch, RawStep
from polyak.envs.host_goals import HostGoals
from polyak.envs.images import read_image
from polyak.envs.keyboard import keys_to_action
from polyak.envs.masks import Flags
from polyak.envs.obs_reader import obs_leaves
from polyak.envs.source import EnvSource
from polyak.envs.value_checks import ActionReader, ObsCheck, check_reward


@suggest_attributes
@short_repr("spec", "num_envs")
class GymnasiumEnv:
    """A batch of Gymnasium environments, in NumPy.

    Agents get observations in the environment's dtype (float64 as float32, indices as int32 from 0), rewards as float32, and
    `terminated` and `truncated` as the environment returns them (both may be set). Environments get actions counted from their
    `start`, clipped or rescaled to their bounds, in their dtype. All return values are checked; an error names the
    environment's index and its step since `reset`. After an error in `step`, call `reset`.

    Args:
        batch: the environments.
        id: the environment's name.
        action_scaling: see `EnvSpec`.
        nonfinite: NaN and infinity in observations and rewards raise (`"error"`) or are passed to the agent (`"pass"`).
        out_of_bounds: finite observations outside the bounds of a Box raise (`"error"`), are clipped (`"clip"`), or give one
            warning (`"warn"`, as several of Gymnasium's own environments leave their bounds).
        source: creates equal environments for evaluation; None if this is not possible.

    Raises:
        TypeError: a space is not supported.
        ValueError: an option is unknown, or the bounds of an action are not finite and `"rescale"` is set.
    """

    def __init__(
        self,
        batch: Batch,
        id: str,
        *,
        action_scaling: Literal["clip", "rescale"] = "clip",
        nonfinite: Literal["error", "pass"] = "error",
        out_of_bounds: Literal["warn", "error", "clip"] = "warn",
        source: EnvSource | None = None,
    ) -> None:
        check_choice("make", "nonfinite", nonfinite, ("error", "pass"))
        check_choice("make", "out_of_bounds", out_of_bounds, ("warn", "error", "clip"))
        self._batch = batch
        self.source = source
        self._nonfinite = nonfinite
        try:
            obs = from_gymnasium(batch.obs_space, f"{id}: observation space")
        except TypeError as error:
            if not isinstance(batch.obs_space, gymnasium.spaces.Dict):
                raise
            raise TypeError(
                f"{error}; wrap it with gymnasium.wrappers.FilterObservation, or pass drop_unsupported_obs=True"
            ) from None
        action = from_gymnasium(batch.action_space, f"{id}: action space", is_action=True)
        EnvSpec(obs, action, id, action_scaling)
        spec = EnvSpec(obs, action, id, action_scaling, has_action_mask=batch.probe())
        goals = HostGoals(spec, batch.obs_space, batch.goal_env) if has_goals(spec) else None
        self.spec = dataclasses.replace(spec, goals=goals)
        self.num_envs = batch.num_envs
        self._read_action = ActionReader(self.spec, batch.action_space, self.num_envs)
        _warn_of_masks_in_obs(self.spec)
        leaves = zip(obs_leaves(batch.obs_space), leaf_spaces(obs), strict=True)
        self._check_obs = [ObsCheck(leaf, space, self.num_envs, nonfinite, out_of_bounds) for leaf, (_, space) in leaves]
        self._single_leaf = len(self._check_obs) == 1 and self._check_obs[0].leaf.path == ""
        self._seed = self._start = 0
        self._steps = 0
        self._is_closed = False
        self._last: npt.NDArray[np.bool_] | None = None
        self.info: Mapping[str, npt.NDArray[np.float64]] = {}

    def take_part(self, start: int, total: int) -> None:
        """Use the seeds of environments `start`, ... of a batch of `total`.

        Raises:
            ValueError: the environment is a vector environment, which has no parts.
        """
        self._batch.take_part(start, total)
        self._start = start

    @suggest_arguments("env.reset")
    def reset(self, seed: int) -> TimeStep:
        """Start a new episode in every environment; the same seed gives the same episodes.

        Raises:
            TypeError, ValueError: the seed is not an integer, or negative.
            TypeError, InvalidValue: the environment returned an invalid value; the second is a ValueError.
            RuntimeError: the environment is closed.
        """
        if isinstance(seed, np.integer):
            seed = int(seed)
        check_integer(f"{self.spec.id}: reset", "seed", seed, at_least=0)
        self._check_open()
        self._last, self._seed, self._steps = None, seed, 0
        raw = self._batch.reset(seed)
        return self._time_step(raw, np.ones(self.num_envs, bool))

    def step(self, action: PyTree) -> TimeStep:
        """Step every environment; environments whose last time step was `last` reset instead.

        Raises:
            RuntimeError: `reset` must be called first.
            TypeError, ValueError: the action is invalid (no environment was stepped), or an action mask.
            TypeError, InvalidValue: a value that an environment returned is invalid; the second is a ValueError.
            Exception: an exception of an environment, with a note that names environment and step.
        """
        native = self._read_action(action)
        if self._last is None:
            self._check_open()
            raise RuntimeError(f"{self.spec.id}: reset() must be called before step(), and after an error")
        first, self._last = self._last, None
        self._steps += 1
        return self._time_step(self._batch.step(native, first), first)

    def keys_to_action(self) -> Mapping[Any, Any] | None:
        """Return actions by tuples of keys, if the environment defines them; see `polyak.envs.keyboard`."""
        return keys_to_action(self._batch.goal_env())

    def render(self) -> tuple[npt.NDArray[np.uint8], float | None]:
        """Return the image of the first environment, `[H, W, 3]`, and its frames per second or None.

        Raises:
            ValueError: the environment was not created with `render_mode="rgb_array"`, or returns no image.
            RuntimeError: the environment is closed.
        """
        self._check_open()
        image, fps = self._batch.render()
        return read_image(self.spec.id or "env", image), fps

    def snapshot(self) -> dict[str, Any] | None:
        """Return the complete state of the environments as plain data, or None if it cannot be read exactly.

        The state is available for Gymnasium's classic control, toy text and MuJoCo environments, and for environments with
        `get_state()` and `set_state(state)` of plain data; wrappers must be Gymnasium's or have these two methods. Methods of
        these names with another meaning give no snapshot.
        """
        if self._last is None:
            return None
        batch = self._batch.save()
        if batch is None:
            return None
        head = {"id": self.spec.id, "num_envs": self.num_envs, "form": self._batch.form}
        return {**head, "seed": self._seed, "steps": self._steps, "last": self._last.copy(), "batch": batch}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a snapshot of an equal environment, exactly.

        Raises:
            ValueError: the snapshot is invalid, or is of another environment.
            RuntimeError: the environment is closed.
        """
        self._check_open()
        expected = {"id": self.spec.id, "num_envs": self.num_envs, "form": self._batch.form}
        got = {name: snapshot.get(name) for name in expected}
        if got != expected:
            raise ValueError(f"{self.spec.id}: the snapshot must be of {expected}, got {got}")
        try:
            last = np.array(snapshot["last"], bool).reshape(self.num_envs)
            seed, steps = int(snapshot["seed"]), int(snapshot["steps"])
            self._last = None
            self._batch.load(snapshot["batch"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.spec.id}: the snapshot is invalid: {error!r}") from error
        self._seed, self._steps, self._last = seed, steps, last

    def close(self) -> None:
        """Close the environments and end worker processes within two seconds; a second call does nothing."""
        if not self._is_closed:
            self._is_closed, self._last = True, None
            self._batch.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self.spec.id}: the environment is closed; create a new one")

    def _location(self, env: int) -> str:
        seeds = self._batch.seeds(self._seed)
        # A vector environment has a single seed.
        seed = f"seed {seeds[env]}" if len(seeds) == self.num_envs else f"seed {seeds[0]} of all"
        return f"{self.spec.id}: env {self._start + env}, step {self._steps} ({seed})"

    def _time_step(self, raw: RawStep, first: npt.NDArray[np.bool_]) -> TimeStep:
        leaves, reward, terminated, truncated, masks, record, self.info = raw
        if self._single_leaf:
            obs: PyTree = self._check_obs[0](leaves[0], self._location)
        else:
            checked = [check(array, self._location) for check, array in zip(self._check_obs, leaves, strict=True)]
            obs = unflatten(self.spec.obs, checked)
        reward = check_reward(reward, self._nonfinite, self._location)
        self._last = terminated | truncated
        mask = None if masks is None else self._mask_tree(masks)
        return TimeStep(obs, reward, terminated, truncated, first, mask, None if record is None else EpisodeRecord(*record))

    def _mask_tree(self, masks: list[Flags]) -> PyTree:
        arrays = iter(masks)

        def of_leaf(leaf: Leaf) -> Flags | None:
            return next(arrays) if isinstance(leaf, Discrete | MultiDiscrete) else None

        return map_space(of_leaf, self.spec.action)


def _warn_of_masks_in_obs(spec: EnvSpec) -> None:
    """Warn of an entry `action_mask` of the observation that is not used as action mask."""
    keys = None if spec.has_action_mask else next((keys for keys, _ in leaf_keys(spec.obs) if "action_mask" in keys), None)
    if keys is None:
        return
    advice = "pass action_mask_key='action_mask'" if keys[0] == "action_mask" else "return info['action_mask']"
    entry = "".join(f"[{key!r}]" for key in keys[: keys.index("action_mask") + 1])
    warn(f"make: obs{entry} of {spec.id} is not used as an action mask; {advice}")
