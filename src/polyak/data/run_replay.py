"""The data set of a run: the transitions in the replay of its newest checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from polyak.core.spaces import EnvSpec
from polyak.core.types import HasReplay
from polyak.data.arrays import insert_final
from polyak.data.content import create_data_set
from polyak.data.data_set import DataSet, same_spaces
from polyak.replay.hindsight import HindsightReplay
from polyak.replay.mixed import MixedReplay
from polyak.replay.prioritized import PrioritizedReplay
from polyak.replay.replay import ReplayState
from polyak.replay.sequences import SequenceReplay
from polyak.replay.uniform import UniformReplay
from polyak.runs import read_config
from polyak.storage.checkpoint import restore
from polyak.storage.run_directory import open_run

ROWS_AT_ONCE = 100_000


def read_run(owner: str, path: Path, spec: EnvSpec | None) -> DataSet:
    """Read the replay of a run, in the environment's units, with its spaces or those of an equal environment.

    Of a `MixedReplay` these are the environment's steps. Episodes are in the order in which each environment has played them;
    the oldest may lack their beginnings (see `DataSet.has_beginning`), and the newest are cut short.

    Raises:
        ValueError: the run's agent has no replay, its checkpoints lack it, or it is of another environment.
        RunError, ConfigError, CheckpointError: the run directory cannot be read.
    """
    run = open_run(path)
    agent: Any = read_config(run).agent
    has_replay = isinstance(agent, HasReplay)
    if not has_replay:
        raise ValueError(f"{owner}: {path}: {type(agent).__name__} has no replay; use polyak.data.collect with its policy")
    stored = same_spaces(owner, agent.spec, spec, path.name)
    like = getattr(jax.eval_shape(agent.init, jax.random.key(0)), agent.replay_field)
    prefix = f".agent.{agent.replay_field}"
    restored = restore(run.checkpoints, like, prefix=prefix, optional=prefix)
    if not restored.is_complete:
        raise ValueError(
            f"{owner}: {path}: the checkpoints have no replay, as the run was trained with checkpoint_replay=False"
        )
    spec = dataclasses.replace(stored, action_scaling=agent.spec.action_scaling)
    return read_replay(owner, getattr(agent, "replay", None), restored.tree, spec, path.name)


def read_replay(owner: str, replay: Any, state: ReplayState, spec: EnvSpec, name: str) -> DataSet:
    """The data set of the transitions in a replay.

    Args:
        owner: the function that reads, for errors.
        replay: the settings of the replay.
        state: its rows.
        spec: the spec of the agent.
        name: the source.

    Raises:
        ValueError: the replay is empty, or the caller's own.
    """
    rows = _rows_of(replay)
    if rows is None or not isinstance(state, ReplayState):
        raise ValueError(f"{owner}: {name}: the rows of {type(replay).__name__} cannot be read")
    slots, num_envs, _ = np.asarray(state.layout).tolist()
    size, position = int(state.size), int(state.position)
    if not size or slots != state.num_slots(num_envs):
        raise ValueError(f"{owner}: {name}: the replay is empty, or of a run on several devices")
    # Rows of each environment from the oldest to the newest transition.
    order = (position - size + np.arange(size)) % slots
    index = (order[None] * num_envs + np.arange(num_envs)[:, None]).reshape(-1).astype(np.int32)

    @jax.jit
    def transitions(index: npt.NDArray[Any]) -> Any:
        return rows.transitions(state, jnp.asarray(index), num_envs=num_envs, gamma=1.0)

    chunks = [jax.device_get(transitions(part)) for part in _chunks(index)]
    batch = jax.tree.map(lambda *x: np.concatenate(x)[: len(index)], *chunks)
    is_transition = batch.weight > 0
    # A transition ends an episode if the next row of its environment is none: an episode's last row only resets.
    following = np.concatenate([is_transition[1:], [False]])
    following[size - 1 :: size] = False
    ends = (is_transition & ~following)[is_transition]
    obs, action, reward, next_obs, discount = jax.tree.map(
        lambda x: x[is_transition], (batch.obs, batch.action, batch.reward, batch.next_obs, batch.discount)
    )
    last = np.flatnonzero(ends)
    lengths = np.diff(last, prepend=-1)
    final = jax.tree.map(lambda x: x[last], next_obs)
    # The row before an episode only resets; the one before the oldest row of a full ring is overwritten.
    follows_step = np.insert(np.asarray(state.rows.valid)[index][:-1], 0, True)
    follows_step[::size] = size == slots - 1
    data = create_data_set(
        f"{owner}: {name}",
        spec,
        obs=spec.native_obs(insert_final(spec.obs, obs, final, lengths)),
        action=spec.native_action(action),
        reward=reward,
        lengths=lengths,
        terminated=discount[last] == 0,
        name=name,
    )
    return dataclasses.replace(data, has_beginning=~follows_step[is_transition][last - lengths + 1])


def _rows_of(replay: Any) -> UniformReplay | None:
    """The replay that stores rows as this one does, with their own goals; None for a replay of the caller's."""
    if isinstance(replay, MixedReplay | HindsightReplay):
        return _rows_of(replay.replay)
    if isinstance(replay, PrioritizedReplay):
        return UniformReplay(replay.capacity, replay.frame_stack, replay.frame_padding)
    if isinstance(replay, SequenceReplay):
        return UniformReplay(replay.capacity)
    return replay if isinstance(replay, UniformReplay) else None


def _chunks(index: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
    """Parts of equal length, so that one program reads all; the last is filled with the first row."""
    count = min(ROWS_AT_ONCE, len(index))
    padded = np.concatenate([index, np.full(-len(index) % count, index[0], np.int32)])
    return list(padded.reshape(-1, count))
