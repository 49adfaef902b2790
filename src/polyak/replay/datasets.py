"""Reads data sets of recorded episodes as rollouts, to fill a replay from."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.checks import check_integer
from polyak.core.space_check import ArraySpec, action_specs, obs_specs, read_leaves, to_array
from polyak.core.spaces import Discrete, EnvSpec, Leaf, MultiDiscrete, Space, check_env_spec, map_space, unflatten
from polyak.core.types import PyTree, Rollout, TimeStep


def from_minari(dataset: Any, spec: EnvSpec, *, num_envs: int = 1, num_steps: int = 1) -> Rollout:
    """The episodes of a Minari data set as one rollout `[T, num_envs]` of NumPy arrays, for `agent.add`.

    Each episode is appended to the shortest of `num_envs` streams, as environments that reset on the next step return them. All
    streams are cut to the shortest one, T a multiple of `num_steps`. An episode that neither terminated nor was truncated was
    cut off by the recording: it counts as truncated.

    Args:
        dataset: the name of a downloaded data set (`minari download`), such as `"D4RL/door/human-v2"`; or a data set that
            `minari.load_dataset` returned.
        spec: the environment's spaces; observations and actions are converted to the agent's. It must not have action masks,
            because data sets have none.
        num_envs: environments of the run that learns from the data set.
        num_steps: the agent's `num_steps`.

    Raises:
        ImportError: `dataset` is a name and minari is not installed.
        TypeError, ValueError: the arrays of `dataset` do not fit the spec, there are fewer episodes than
            environments, or streams shorter than `num_steps`.
    """
    check_env_spec("from_minari", spec)
    for name, value in (("num_envs", num_envs), ("num_steps", num_steps)):
        check_integer("from_minari", name, value)
    streams: list[list[tuple[TimeStep, PyTree]]] = [[] for _ in range(num_envs)]
    lengths = [0] * num_envs
    loaded = _load(dataset) if isinstance(dataset, str) else dataset
    for episode in loaded.iterate_episodes():
        shortest = int(np.argmin(lengths))
        steps, actions = _read_episode(episode, spec)
        streams[shortest].append((steps, actions))
        lengths[shortest] += len(steps.reward)
    total = (min(lengths) - 1) // num_steps * num_steps
    if total < 1:
        raise ValueError(
            f"from_minari: each of num_envs={num_envs} needs num_steps={num_steps} transitions, the shortest has "
            f"{max(0, min(lengths) - 1)}; use fewer environments"
        )
    columns = [jax.tree.map(lambda *x: np.concatenate(x)[: total + 1], *stream) for stream in streams]
    time_steps, actions = jax.tree.map(lambda *x: np.stack(x, axis=1), *columns)
    return Rollout(time_steps, jax.tree.map(lambda x: x[:-1], actions))


def _load(name: str) -> Any:
    try:
        import minari
    except ImportError as error:
        raise ImportError(f"from_minari: data sets need minari: pip install 'polyak[minari]' ({error})") from error
    return minari.load_dataset(name)


def _read_episode(episode: Any, spec: EnvSpec) -> tuple[TimeStep, PyTree]:
    """The T + 1 time steps of an episode, and T + 1 actions; the last action, which resets, is arbitrary."""
    terminated, truncated = (np.array(x, bool) for x in (episode.terminations, episode.truncations))
    length = terminated.size
    which = f"of an episode of {length} steps"
    for name, x in (("terminations", terminated), ("truncations", truncated), ("rewards", episode.rewards)):
        if np.shape(x) != (length,) or not length:
            raise ValueError(f"from_minari: {name} {which} must be [{max(length, 1)}], got {np.shape(x)}")
    truncated[-1] |= not terminated[-1]

    def after_first(x: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(1, dtype), np.asarray(x, dtype)])

    obs = _read(f"observations {which}", spec.obs, obs_specs(spec.obs), episode.observations, length + 1)
    time_steps = TimeStep(
        obs=map_space(_agent_obs, spec.obs, obs),
        reward=after_first(episode.rewards, np.float32),
        terminated=after_first(terminated, bool),
        truncated=after_first(truncated, bool),
        first=np.arange(length + 1) == 0,
    )
    native = _read(f"actions {which}", spec.action, action_specs(spec), episode.actions, length)
    actions = spec.agent_action(native)
    return time_steps, jax.tree.map(lambda x: np.concatenate([x, x[-1:]]), actions)


def _read(name: str, space: Space, specs: Sequence[ArraySpec], value: Any, length: int) -> PyTree:
    """The tree of a space, of arrays with a leading axis of this length."""
    leaves = zip(specs, read_leaves(f"from_minari: {name}", specs, value), strict=True)
    return unflatten(
        space, [to_array(spec.name(f"from_minari: {name}"), x, (length, *spec.shape), spec.dtype) for spec, x in leaves]
    )


def _agent_obs(space: Leaf, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Integers counted from 0, in the dtype of the agent's observations."""
    start = np.asarray(space.start) if isinstance(space, Discrete | MultiDiscrete) else 0
    return (obs - start).astype(space.dtype)
