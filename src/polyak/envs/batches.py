"""Several single environments as one batch: in a loop in this process, or each in a process of its own."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium.spaces as gym
import numpy as np
import numpy.typing as npt

from polyak.core.space_check import ArraySpec
from polyak.envs.leaves import obs_leaves
from polyak.envs.masks import Flags
from polyak.envs.single import Row, SingleEnv


class RawStep(NamedTuple):
    """What a batch hands out. The arrays are fresh, in the environment's own dtypes, and nobody has looked at their values.

    Attributes:
        obs: the leaves of the observation.
        masks: the action's masks as `mask_widths` has them, or None.
        score: the fields of a `polyak.core.types.Score`, for environments that keep one.
    """

    obs: list[npt.NDArray[Any]]
    reward: npt.NDArray[Any]
    terminated: Flags
    truncated: Flags
    masks: list[Flags] | None = None
    score: tuple[npt.NDArray[np.float32], Flags, Flags] | None = None


@runtime_checkable
class Batch(Protocol):
    """B environments of Gymnasium's, whichever way they are stepped."""

    form: str
    num_envs: int
    obs_space: Any
    action_space: Any

    def probe(self) -> bool:
        """Reset once and see whether there are action masks; before anything else."""
        ...

    def seeds(self, seed: int) -> list[int]:
        """The seed that each environment gets, or the one that all share."""
        ...

    def reset(self, seed: int) -> RawStep:
        """Fresh episodes everywhere."""
        ...

    def step(self, action: Any, due: npt.NDArray[np.bool_]) -> RawStep:
        """One step of every environment by the batched action in its units; the rows that are `due` reset instead."""
        ...

    def save(self) -> list[Any] | None:
        """Snapshots in plain data, or None."""
        ...

    def load(self, snapshots: list[Any]) -> None:
        """Go on from snapshots."""
        ...

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        ...


@runtime_checkable
class Members(Protocol):
    """Several `SingleEnv`, here or elsewhere, to be asked for the answers of one of its methods."""

    spaces: list[tuple[Any, Any]]

    def ask(self, question: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method of every environment, each with its own arguments."""
        ...

    def close(self) -> None:
        """Close every environment."""
        ...


class Here:
    """Members in this process, asked one after the other."""

    def __init__(self, envs: Sequence[Any], name: str) -> None:
        self.envs = [SingleEnv(env, name, index) for index, env in enumerate(envs)]
        self.spaces = [(env.env.observation_space, env.env.action_space) for env in self.envs]

    def ask(self, question: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method of every environment, each with its own arguments."""
        return [getattr(env, question)(*its) for env, its in zip(self.envs, arguments, strict=True)]

    def close(self) -> None:
        """Close every environment, the others too where one raises."""
        envs, self.envs = self.envs, []
        errors = []
        for env in envs:
            try:
                env.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class SingleBatch:
    """A batch of single environments.

    In this process it does what Gymnasium's `SyncVectorEnv` does, in less time, and knows which environment an error is of;
    in processes of their own the same members give the same numbers, bit for bit.

    Raises:
        ValueError: the members' spaces differ, or only some hand out action masks.
    """

    def __init__(self, members: Members, name: str) -> None:
        # Here or in processes, a snapshot is the same.
        self.form = "single"
        self.members = members
        self.name = name
        self.num_envs = len(members.spaces)
        self.obs_space, self.action_space = members.spaces[0]
        for index, spaces in enumerate(members.spaces):
            if spaces != members.spaces[0]:
                raise ValueError(f"{name}: env {index} has the spaces {spaces}, env 0 {members.spaces[0]}; they must be equal")
        self._no_arguments: list[tuple[Any, ...]] = [()] * self.num_envs

    @functools.cached_property
    def leaves(self) -> list[ArraySpec]:
        """The arrays of an observation; asked for only after the spaces were found to be supported."""
        return obs_leaves(self.obs_space)

    def probe(self) -> bool:
        """Reset once and see whether there are action masks."""
        masks = self.members.ask("probe", self._no_arguments)
        if any(masks) and not all(masks):
            raise ValueError(f"{self.name}: env {masks.index(False)} hands out no action_mask, env {masks.index(True)} does")
        return bool(masks[0])

    def seeds(self, seed: int) -> list[int]:
        """The seed that each environment gets."""
        return seeds_of(seed, self.num_envs)

    def reset(self, seed: int) -> RawStep:
        """Fresh episodes everywhere."""
        return stack(self.leaves, self.members.ask("reset", [(s,) for s in self.seeds(seed)]))

    def step(self, action: Any, due: npt.NDArray[np.bool_]) -> RawStep:
        """One step of every environment; the rows that are `due` reset instead."""
        arguments = list(zip(split_action(self.action_space, action), due.tolist(), strict=True))
        return stack(self.leaves, self.members.ask("step", arguments))

    def save(self) -> list[Any] | None:
        """Snapshots in plain data, or None where one cannot be had."""
        snapshots = self.members.ask("save", self._no_arguments)
        return None if any(snapshot is None for snapshot in snapshots) else snapshots

    def load(self, snapshots: list[Any]) -> None:
        """Go on from snapshots."""
        if len(snapshots) != self.num_envs:
            raise ValueError(f"{self.name}: the snapshot is of {len(snapshots)} environments, wanted {self.num_envs}")
        self.members.ask("load", [(snapshot,) for snapshot in snapshots])

    def close(self) -> None:
        """Close every environment; processes end within two seconds."""
        self.members.close()


def seeds_of(seed: int, num_envs: int) -> list[int]:
    """A seed of 32 bits for each environment.

    Gymnasium counts up from the seed, so that runs with seeds 0 and 1 share all environments but one; these do not.
    """
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs)]


def split_action(space: Any, action: Any) -> list[Any]:
    """The actions of a batch, one for each environment, as its space wants them."""
    if isinstance(space, gym.Dict):
        parts = [split_action(space[key], action[key]) for key in action]
        return [dict(zip(action, row, strict=True)) for row in zip(*parts, strict=True)]
    if isinstance(space, gym.Tuple):
        return list(zip(*(split_action(part, a) for part, a in zip(space.spaces, action, strict=True)), strict=True))
    if isinstance(space, gym.Discrete):
        rows: list[Any] = action.tolist()
        return rows
    # An index takes a number out of a batch of numbers, but its space wants an array, also of no dimensions.
    return [np.asarray(action[i]) for i in range(len(action))] if action.ndim == 1 else list(action)


def stack(leaves: list[ArraySpec], rows: Sequence[Row]) -> RawStep:
    """Rows as arrays."""
    obs = []
    for j, leaf in enumerate(leaves):
        array = np.empty((len(rows), *leaf.shape), leaf.dtype)
        for i, row in enumerate(rows):
            array[i] = row[0][j]
        obs.append(array)
    _, rewards, terminated, truncated, masks = zip(*rows, strict=True)
    stacked = None if masks[0] is None else [np.stack(parts) for parts in zip(*masks, strict=True)]
    return RawStep(obs, np.array(rewards, np.float64), np.array(terminated), np.array(truncated), stacked)
