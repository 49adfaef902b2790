"""A batch of environments: the interface, and a batch of single environments, in this process or in worker processes."""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium.spaces as gym
import numpy as np
import numpy.typing as npt

from polyak.core.space_check import ArraySpec
from polyak.envs.env_options import EnvOptions
from polyak.envs.info_reader import stack_info
from polyak.envs.masks import Flags
from polyak.envs.obs_reader import obs_leaves
from polyak.envs.single_env import SingleEnv, SingleStep


class RawStep(NamedTuple):
    """The result of a batch's `reset` and `step`: new arrays in the environment's dtypes, with unchecked values.

    Attributes:
        obs: the observation's arrays.
        masks: the action masks in the order of `mask_widths`, or None.
        record: the fields of a `polyak.core.types.EpisodeRecord`, for environments that record one.
        info: see `polyak.core.types.HostEnv`.
    """

    obs: list[npt.NDArray[Any]]
    reward: npt.NDArray[Any]
    terminated: Flags
    truncated: Flags
    masks: list[Flags] | None = None
    record: tuple[npt.NDArray[np.float32], Flags, Flags] | None = None
    info: Mapping[str, npt.NDArray[np.float64]] = MappingProxyType({})


@runtime_checkable
class Batch(Protocol):
    """A batch of Gymnasium environments."""

    form: str
    num_envs: int
    obs_space: Any
    action_space: Any

    def probe(self) -> bool:
        """Reset once and return whether there are action masks; called before anything else."""
        ...

    def seeds(self, seed: int) -> list[int]:
        """Return the seed of each environment, or the single seed that all share."""
        ...

    def reset(self, seed: int) -> RawStep:
        """Start a new episode in every environment."""
        ...

    def step(self, action: Any, reset_mask: Flags) -> RawStep:
        """Step every environment with its action, in the environment's units; where `reset_mask` is set, reset it instead."""
        ...

    def take_part(self, start: int, total: int) -> None:
        """Use the seeds of environments `start`, ... of a batch of `total`."""
        ...

    def render(self) -> tuple[Any, float | None]:
        """Return the image of the first environment, and its frames per second or None."""
        ...

    def goal_env(self) -> Any:
        """Return an environment in this process whose functions of goals can be called."""
        ...

    def save(self) -> list[Any] | None:
        """Return snapshots as plain data, or None if there are none."""
        ...

    def load(self, snapshots: list[Any]) -> None:
        """Restore snapshots."""
        ...

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        ...


@runtime_checkable
class EnvGroup(Protocol):
    """Several `SingleEnv`s, in this process or in worker processes, whose methods are called together."""

    spaces: list[tuple[Any, Any]]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every environment, each with its own arguments."""
        ...

    def goal_env(self) -> Any:
        """Return an environment in this process whose functions of goals can be called."""
        ...

    def close(self) -> None:
        """Close every environment."""
        ...


class InProcessEnvs:
    """An `EnvGroup` in this process, which calls one environment after another.

    Raises:
        ValueError: two environments are the same object.
    """

    def __init__(self, envs: Sequence[Any], name: str, options: EnvOptions) -> None:
        self.name = name
        self.envs = [SingleEnv(env, name, index, options) for index, env in enumerate(envs)]
        self._goal_env = self.envs[0].env  # also after `close`: functions of goals need no simulation
        _check_distinct([env.env.unwrapped for env in self.envs])
        self.spaces = [(env.env.observation_space, env.env.action_space) for env in self.envs]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every environment, each with its own arguments.

        Raises:
            RuntimeError: the environments are closed.
        """
        if not self.envs:
            raise RuntimeError(f"{self.name}: the environment is closed")
        return [getattr(env, method)(*args) for env, args in zip(self.envs, arguments, strict=True)]

    def goal_env(self) -> Any:
        """Return the first environment."""
        return self._goal_env

    def close(self) -> None:
        """Close every environment, even if one raises; then raise the first error."""
        envs, self.envs = self.envs, []
        errors = []
        for env in envs:
            try:
                env.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _check_distinct(envs: Sequence[Any]) -> None:
    """Check that no two environments are the same object, which would mix their episodes."""
    first: dict[int, int] = {}
    for index, env in enumerate(envs):
        if (other := first.setdefault(id(env), index)) != index:
            raise ValueError(
                f"make: every environment must be a separate object, got the same {type(env).__name__} as environments {other} "
                f"and {index}; create a new one in each call of the function"
            )


class SingleBatch:
    """A batch of single environments.

    In this process the batch is a faster `SyncVectorEnv` of Gymnasium whose errors name the environment. In worker processes
    equal environments return the same bits.

    Raises:
        ValueError: the environments' spaces differ, or only some return action masks.
    """

    def __init__(self, group: EnvGroup, name: str) -> None:
        # The format of snapshots is equal in this process and in workers.
        self.form = "single"
        self.group = group
        self.name = name
        self.num_envs = len(group.spaces)
        self.obs_space, self.action_space = group.spaces[0]
        for index, spaces in enumerate(group.spaces):
            if spaces != group.spaces[0]:
                raise ValueError(f"{name}: env {index} must have the spaces of env 0, {group.spaces[0]}, got {spaces}")
        self._no_arguments: list[tuple[Any, ...]] = [()] * self.num_envs
        self._start, self._total = 0, self.num_envs

    @functools.cached_property
    def leaves(self) -> list[ArraySpec]:
        """The arrays of an observation; valid only for supported spaces."""
        return obs_leaves(self.obs_space)

    def probe(self) -> bool:
        """Reset once and return whether there are action masks."""
        masks = self.group.call("probe", self._no_arguments)
        if any(masks) and not all(masks):
            raise ValueError(f"{self.name}: env {masks.index(False)} returns no action_mask, but env {masks.index(True)} does")
        return bool(masks[0])

    def seeds(self, seed: int) -> list[int]:
        """The seed of each environment."""
        return seeds_of(seed, self._total)[self._start : self._start + self.num_envs]

    def take_part(self, start: int, total: int) -> None:
        """Use the seeds of environments `start`, ... of a batch of `total`."""
        self._start, self._total = start, total
        self.group.call("set_index", [(start + i,) for i in range(self.num_envs)])

    def reset(self, seed: int) -> RawStep:
        """Start a new episode in every environment."""
        return stack_steps(self.leaves, self.group.call("reset", [(s,) for s in self.seeds(seed)]))

    def step(self, action: Any, reset_mask: Flags) -> RawStep:
        """Step every environment; where `reset_mask` is set, reset it instead."""
        arguments = list(zip(split_action(self.action_space, action), reset_mask.tolist(), strict=True))
        return stack_steps(self.leaves, self.group.call("step", arguments))

    def render(self) -> tuple[Any, float | None]:
        """Return the image of the first environment, and its frames per second or None."""
        picture: tuple[Any, float | None] = self.group.call("render", self._no_arguments)[0]
        return picture

    def goal_env(self) -> Any:
        """Return an environment in this process whose functions of goals can be called."""
        return self.group.goal_env()

    def save(self) -> list[Any] | None:
        """Return the environments' snapshots as plain data, or None if an environment has no snapshot."""
        snapshots = self.group.call("save", self._no_arguments)
        return None if any(snapshot is None for snapshot in snapshots) else snapshots

    def load(self, snapshots: list[Any]) -> None:
        """Restore snapshots."""
        if len(snapshots) != self.num_envs:
            raise ValueError(f"{self.name}: the snapshot must be of {self.num_envs} environments, got {len(snapshots)}")
        self.group.call("load", [(snapshot,) for snapshot in snapshots])

    def close(self) -> None:
        """Close every environment; worker processes end within two seconds."""
        self.group.close()


def seeds_of(seed: int, num_envs: int) -> list[int]:
    """Return a 32-bit seed for each environment.

    Gymnasium counts up from the seed, so that runs with seeds 0 and 1 share all environments but one; these runs share none.
    """
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs)]


def split_action(space: Any, action: Any) -> list[Any]:
    """Split a batch of actions into one action per environment, in the types that the space contains."""
    if isinstance(space, gym.Dict):
        parts = [split_action(space[key], action[key]) for key in action]
        return [dict(zip(action, row, strict=True)) for row in zip(*parts, strict=True)]
    if isinstance(space, gym.Tuple):
        return list(zip(*(split_action(part, a) for part, a in zip(space.spaces, action, strict=True)), strict=True))
    if isinstance(space, gym.Discrete):
        rows: list[Any] = action.tolist()
        return rows
    # Indexing a vector gives a scalar, but the space contains arrays, also of no dimensions.
    return [np.asarray(action[i]) for i in range(len(action))] if action.ndim == 1 else list(action)


def stack_steps(leaves: list[ArraySpec], steps: Sequence[SingleStep]) -> RawStep:
    """Stack the steps of single environments into arrays."""
    obs = []
    for j, leaf in enumerate(leaves):
        array = np.empty((len(steps), *leaf.shape), leaf.dtype)
        for i, step in enumerate(steps):
            array[i] = step[0][j]
        obs.append(array)
    _, rewards, terminated, truncated, masks, infos = zip(*steps, strict=True)
    stacked = None if masks[0] is None else [np.stack(parts) for parts in zip(*masks, strict=True)]
    flags = np.array(terminated), np.array(truncated)
    return RawStep(obs, np.array(rewards, np.float64), *flags, stacked, info=stack_info(infos))
