"""Flags of the replays."""

import dataclasses
from collections.abc import Collection
from typing import Annotated, Any, Literal

import tyro

from polyak.cli.agent_flags import SCHEDULE
from polyak.cli.flags import UsageError, default_hint, hide
from polyak.presets.preset import make_replay, with_length

REPLAY_DEFAULT = "the preset's, else"


@tyro.conf.configure(tyro.conf.DisallowNone)
@dataclasses.dataclass(frozen=True)
class ReplayFlags:
    """The replay and its sampling."""

    replay: Annotated[
        Literal["uniform", "prioritized", "sequence"] | None,
        default_hint(f"{REPLAY_DEFAULT} uniform", "{uniform,prioritized,sequence}"),
    ] = None
    (
        "draw transitions uniformly; or in proportion to (|TD error| + eps)^alpha, with importance weights; or (DQN only) draw "
        "sequences, the default with a recurrent network"
    )
    capacity: Annotated[int | None, default_hint(f"{REPLAY_DEFAULT} 100,000, of actor-critics 1,000,000", "INT")] = None
    """number of transitions in the replay, over all environments and devices"""
    priority_alpha: Annotated[float | None, default_hint(f"{REPLAY_DEFAULT} 0.6", "FLOAT")] = None
    """alpha of --replay prioritized; 0 draws uniformly"""
    priority_beta: Annotated[Any, SCHEDULE, default_hint(f"{REPLAY_DEFAULT} from 0.4 to 1 over 1,000,000 steps")] = None
    """beta of --replay prioritized, whose importance weights are proportional to probability^-beta"""
    priority_eps: Annotated[float | None, default_hint(f"{REPLAY_DEFAULT} 1e-06", "FLOAT")] = None
    """eps of --replay prioritized"""
    frame_stack: Annotated[int | None, default_hint(f"{REPLAY_DEFAULT} 1", "INT")] = None
    """number of frames of an observation, stacked along its first axis, oldest first; the replay stores each frame once"""
    frame_padding: Annotated[Literal["zero", "first"] | None, default_hint(f"{REPLAY_DEFAULT} zero", "{zero,first}")] = None
    """content of a stack before the first frame of a game: zero (Atari), or the first frame"""
    sequence_length: Annotated[int | None, default_hint("16", "INT")] = None
    """number of time steps of a sequence for --network lstm or gru"""
    burn_in: Annotated[int | None, default_hint("0", "INT")] = None
    """number of first time steps of a sequence that only refresh the stored recurrent state"""


OF_DISTRIBUTIONS = {"num_atoms", "num_quantiles", "num_tau"}
"""Settings of agents that learn distributions of returns, from transitions alone."""


def replay_flags_in_help(settings: Collection[str]) -> type[ReplayFlags]:
    """Return `ReplayFlags` without the flags that an agent with these settings rejects."""
    if "replay" not in settings:
        return hide(ReplayFlags, {field.name for field in dataclasses.fields(ReplayFlags)})
    takes_sequences = "epsilon" in settings and not OF_DISTRIBUTIONS & set(settings)
    return hide(ReplayFlags, set() if takes_sequences else {"sequence_length", "burn_in"})


FIELDS = {"priority_alpha": "alpha", "priority_beta": "beta", "priority_eps": "eps"}
"""The fields of replays that have another name than their flags."""


def changed_replay(replay: Any, flags: ReplayFlags, kind: str | None, env_steps: int) -> Any:
    """Return the replay of an agent with the settings that flags change.

    Args:
        kind: kind of replay that the network needs, if `--replay` is not set; None keeps the kind of the agent's replay.
        env_steps: length of training.

    Raises:
        UsageError: a flag is for another replay.
    """
    changes = {f.name: value for f in dataclasses.fields(flags) if (value := getattr(flags, f.name)) is not None}
    is_asked = "replay" in changes
    kind = changes.pop("replay", None if replay.draws_sequences else kind)
    changes = {FIELDS.get(name, name): value for name, value in changes.items()}
    wanted = replay if kind is None else make_replay({"kind": kind}, env_steps)
    names = {field.name for field in dataclasses.fields(wanted)}
    if unknown := [flag_name(name) for name in changes if name not in names]:
        raise UsageError(f"{', '.join(unknown)}: {type(wanted).__name__} has no such setting; it belongs to another --replay")
    usual = type(replay)()
    lost = [
        f.name for f in dataclasses.fields(replay) if f.name not in names and getattr(replay, f.name) != getattr(usual, f.name)
    ]
    if lost and not is_asked:
        raise UsageError(
            f"a recurrent network needs a {type(wanted).__name__}, without the {', '.join(lost)} of {replay!r}; "
            "--replay sequence leaves them out"
        )
    kept = {field.name: getattr(replay, field.name) for field in dataclasses.fields(replay) if field.name in names}
    return type(wanted)(**kept | {name: with_length(value, env_steps) for name, value in changes.items()})


def flag_name(name: str) -> str:
    """Return the flag of a field of a replay."""
    flags = {field: flag for flag, field in FIELDS.items()}
    return f"--{flags.get(name, name).replace('_', '-')}"
