"""Reads data sets of recorded episodes as rollouts, to fill a replay from."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.checks import check_integer
from polyak.core.spaces import Discrete, EnvSpec, Leaf, MultiDiscrete, check_env_spec, map_space
from polyak.core.types import PyTree, Rollout, TimeStep


def from_minari(dataset: Any, spec: EnvSpec, *, num_envs: int = 1, num_steps: int = 1) -> Rollout:
    """The episodes of a Minari data set as one rollout `[T, num_envs]` of NumPy arrays, for `agent.add`.

    Each episode is appended to the shortest of `num_envs` streams, as environments that reset on the next step return them. The
    streams end with the shortest one, T a multiple of `num_steps`; what the others have more is left out. An episode that
    neither terminated nor was truncated was cut off by the recording: it counts as truncated.

    Args:
        dataset: its name, such as `"D4RL/door/human-v2"`, which must have been downloaded (`minari download`); or what
            `minari.load_dataset` returned.
        spec: of the environment, whose actions and observations are converted to the agent's.
        num_envs: environments of the run that is to learn from it.
        num_steps: the agent's `num_steps`.

    Raises:
        ImportError: `dataset` is a name and minari is not installed.
        ValueError: there are fewer episodes than environments, or streams shorter than `num_steps`.
    """
    check_env_spec("from_minari", spec)
    for name, value in (("num_envs", num_envs), ("num_steps", num_steps)):
        check_integer("from_minari", name, value)
    streams: list[list[tuple[TimeStep, PyTree]]] = [[] for _ in range(num_envs)]
    lengths = [0] * num_envs
    for episode in (_load(dataset) if isinstance(dataset, str) else dataset).iterate_episodes():
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
    """The T + 1 time steps of an episode, and as many actions: the last, which resets, is any one."""
    terminated, truncated = (np.array(x, bool) for x in (episode.terminations, episode.truncations))
    truncated[-1] |= not terminated[-1]

    def after_first(x: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(1, dtype), np.asarray(x, dtype)])

    time_steps = TimeStep(
        obs=map_space(_agent_obs, spec.obs, episode.observations),
        reward=after_first(episode.rewards, np.float32),
        terminated=after_first(terminated, bool),
        truncated=after_first(truncated, bool),
        first=np.arange(len(terminated) + 1) == 0,
    )
    actions = spec.agent_action(jax.tree.map(np.asarray, episode.actions))
    return time_steps, jax.tree.map(lambda x: np.concatenate([x, x[-1:]]), actions)


def _agent_obs(space: Leaf, obs: Any) -> npt.NDArray[Any]:
    """Integers counted from 0, in the dtype of the agent's observations."""
    start = np.asarray(space.start) if isinstance(space, Discrete | MultiDiscrete) else 0
    return (np.asarray(obs) - start).astype(space.dtype)
