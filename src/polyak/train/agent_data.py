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
from polyak.loops.replay_memory import check_data, draws_data
from polyak.replay.mixed import MixedReplay
from polyak.replay.replay import ReplayState
from polyak.replay.sequences import SequenceReplay
from polyak.train.settings import TrainSettings

# Rows between streams and of frame stacks.
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
    if not isinstance(agent, LearnsOffline):
        raise _without_replay(owner, type(agent))


def check_class_learns_from_data(owner: str, agent_class: Any) -> None:
    """Check that agents of a class have a replay, before there is one and before the data are loaded.

    Raises:
        ValueError: they have none.
    """
    if "replay" not in {field.name for field in dataclasses.fields(agent_class)}:
        raise _without_replay(owner, agent_class)


def _without_replay(owner: str, agent_class: Any) -> ValueError:
    return ValueError(f"{owner}: {agent_class.__name__} has no replay to learn from data; use an agent with one, such as IQL")


def with_room(agent: Any, data: DataSet) -> Any:
    """The agent with a replay of as many rows as the data need, and of no other steps."""
    replay = agent.replay.replay if isinstance(agent.replay, MixedReplay) else agent.replay
    steps = agent.num_steps
    longest = replay.sequence_length if isinstance(replay, SequenceReplay) else agent.n_step
    rows = data.num_transitions + data.num_episodes + max(2, steps, longest) + SPARE_ROWS
    capacity = (-(-rows // steps) + 2) * steps
    return dataclasses.replace(agent, replay=replay.with_capacity(capacity))


def with_data(
    owner: str, agent: Agent, env: Env | HostEnv, settings: TrainSettings
) -> tuple[Agent, ReplayState | None, str | None]:
    """Return the agent with a `MixedReplay` around its replay, the filled replay of the data of the settings, and their name.

    Without data nothing changes.

    Raises:
        TypeError, ValueError: the agent has no replay, or one of sequences; the data are of another environment; an agent with
            a `MixedReplay` gets no data, or checkpoints would lack them.
    """
    data = settings.data
    learner: Any = agent
    if settings.resume_from is None:
        check_data(agent, data)
    if (data is not None or draws_data(agent)) and not settings.checkpoint_replay and settings.run_dir is not None:
        raise ValueError(f"{owner}: checkpoint_replay must be True with data, which a resumed run would lack")
    if data is None:
        return agent, None, None
    check_learns_from_data(owner, agent)
    if (weight := getattr(agent, "monte_carlo_weight", None)) is not None:
        raise ValueError(f"{owner}: data must be None with monte_carlo_weight={weight}; polyak.train.offline learns with both")
    replay = learner.replay.replay if isinstance(learner.replay, MixedReplay) else learner.replay
    mixed = MixedReplay(replay, share=settings.data_share)
    mixed.divide(learner.batch_size)  # before the data are loaded, which takes longer
    data_set = load_data(owner, data, env.spec)
    offline = with_room(learner, data_set)
    rollout = data_set.rollout(learner.spec, num_steps=learner.num_steps, pad=True)
    filled = jax.device_get(offline.add(offline.init(jax.random.key(0)), rollout).replay)
    mixed = dataclasses.replace(mixed, data_capacity=offline.replay.capacity)
    return dataclasses.replace(learner, replay=mixed), filled, data_set.name
