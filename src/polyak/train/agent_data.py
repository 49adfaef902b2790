"""Data sets in the replays of agents: alone, or beside the steps of an environment."""

import dataclasses
from typing import Any

import jax

from polyak.core.spaces import EnvSpec
from polyak.core.types import Agent, Env, HostEnv
from polyak.data.content import check_spaces
from polyak.data.data_set import DataSet
from polyak.data.loading import load
from polyak.loops.offline_loop import LearnsOffline
from polyak.replay.mixed import MixedReplay
from polyak.replay.sequences import SequenceReplay

# Rows between streams, and those that n-step sums and sequences read, take some more than the data.
SPARE_ROWS = 128


def load_data(owner: str, data: Any, spec: EnvSpec | None) -> DataSet:
    """Return the data set, loaded if needed, with these spaces or its own; all its values are checked, once.

    Raises:
        TypeError, ValueError: the data are invalid, or of another environment.
    """
    if isinstance(data, DataSet):
        return check_spaces(owner, data, data.spec if spec is None else spec)
    return load(data, spec=spec)


def check_learns_from_data(owner: str, agent: Any) -> None:
    """Check that an agent has a replay that data can fill.

    Raises:
        ValueError: the agent has none.
    """
    has_data_methods = isinstance(agent, LearnsOffline)
    if not has_data_methods:
        raise ValueError(
            f"{owner}: {type(agent).__name__} has no replay to learn from data; use an agent with one, such as IQL"
        )


def with_room(agent: Any, data: DataSet) -> Any:
    """The agent with a replay of as many rows as the data need."""
    steps = agent.num_steps
    longest = agent.replay.sequence_length if isinstance(agent.replay, SequenceReplay) else 0
    rows = data.num_transitions + data.num_episodes + max(2, steps, longest) + SPARE_ROWS
    capacity = (-(-rows // steps) + 2) * steps
    return dataclasses.replace(agent, replay=agent.replay.with_capacity(capacity))


def with_data(owner: str, agent: Agent, data: Any, env: Env | HostEnv, share: float) -> tuple[Agent, str | None]:
    """Return the agent with a `MixedReplay`, of its replay and a data set, and the data set's name.

    Args:
        owner: the function that trains, for errors.
        data: a data set, or the first argument of `polyak.data.load`; None changes nothing.
        share: share of the data in each batch.

    Raises:
        TypeError, ValueError: the agent has no replay, or one of sequences, or the data are of another environment.
    """
    if data is None:
        return agent, None
    check_learns_from_data(owner, agent)
    known: Any = agent
    # Before the data are loaded, which takes longer.
    mixed = MixedReplay(known.replay, share=share)
    mixed.divide(known.batch_size)
    data_set = load_data(owner, data, env.spec)
    alone = with_room(known, data_set)
    rollout = data_set.rollout(known.spec, num_steps=known.num_steps, pad=True)
    filled = jax.device_get(alone.add(alone.init(jax.random.key(0)), rollout).replay)
    mixed = dataclasses.replace(mixed, data_capacity=alone.replay.capacity, data=lambda: filled)
    return dataclasses.replace(known, replay=mixed), data_set.name
