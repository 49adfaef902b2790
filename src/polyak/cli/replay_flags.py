"""Flags of the replays."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import tyro

from polyak.cli.agent_flags import SCHEDULE, setting_names
from polyak.cli.agent_source import takes_sequences
from polyak.cli.flags import UsageError, default_hint, hide
from polyak.presets.preset import make_replay, with_length

REPLAY_DEFAULT = "the preset's, else"


@tyro.conf.configure(tyro.conf.DisallowNone)
@dataclasses.dataclass(frozen=True)
class ReplayFlags:
    """The replay and its sampling."""

    replay: Annotated[
        Literal["uniform", "prioritized", "sequence", "hindsight"] | None,
        default_hint(f"{REPLAY_DEFAULT} uniform", "{uniform,prioritized,sequence,hindsight}"),
    ] = None
    (
        "draw transitions uniformly; or in proportion to (|TD error| + eps)^alpha, with importance weights; or draw "
        "sequences (agents with recurrent networks), the default with one; or draw transitions with goals that were achieved "
        "in their episodes, in environments with goals, uniformly or with a --priority flag in proportion"
    )
    capacity: Annotated[int | None, default_hint(f"{REPLAY_DEFAULT} 100,000, of actor-critics 1,000,000", "INT")] = None
    """number of transitions in the replay, over all environments and devices"""
    priority_alpha: Annotated[float | None, default_hint(f"{REPLAY_DEFAULT} 0.6", "FLOAT")] = None
    """alpha of --replay prioritized or hindsight; 0 draws uniformly"""
    priority_beta: Annotated[Any, SCHEDULE, default_hint(f"{REPLAY_DEFAULT} from 0.4 to 1 over a million steps")] = None
    """beta of --replay prioritized, whose importance weights are proportional to probability^-beta"""
    priority_eps: Annotated[float | None, default_hint(f"{REPLAY_DEFAULT} 1e-06", "FLOAT")] = None
    """eps of --replay prioritized"""
    goal_strategy: Annotated[
        Literal["future", "final", "episode"] | None, default_hint(f"{REPLAY_DEFAULT} future", "{future,final,episode}")
    ] = None
    """goals of --replay hindsight: achieved later in the episode, at its end, or anywhere in it"""
    goal_ratio: Annotated[float | None, default_hint(f"{REPLAY_DEFAULT} 0.8", "FLOAT")] = None
    """probability of another goal of --replay hindsight"""
    frame_stack: Annotated[int | None, default_hint(f"{REPLAY_DEFAULT} 1", "INT")] = None
    """number of frames of an observation, stacked along its first axis, oldest first; the replay stores each frame once"""
    frame_padding: Annotated[Literal["zero", "first"] | None, default_hint(f"{REPLAY_DEFAULT} zero", "{zero,first}")] = None
    """content of a stack before the first frame of a game: zero (Atari), or the first frame"""
    sequence_length: Annotated[int | None, default_hint("16", "INT")] = None
    """number of time steps of a sequence for --network lstm or gru"""
    burn_in: Annotated[int | None, default_hint("0", "INT")] = None
    """number of first time steps of a sequence that only refresh the stored recurrent state"""


def replay_flags_in_help(agent: str) -> type[ReplayFlags]:
    """Return `ReplayFlags` without the flags that an agent, a `"module:Class"`, rejects."""
    if "replay" not in setting_names(agent):
        return hide(ReplayFlags, {field.name for field in dataclasses.fields(ReplayFlags)})
    return hide(ReplayFlags, set() if takes_sequences(agent) else {"sequence_length", "burn_in"})


FIELDS = {
    "priority_alpha": "alpha",
    "priority_beta": "beta",
    "priority_eps": "eps",
    "goal_strategy": "strategy",
    "goal_ratio": "ratio",
}
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
    from polyak.replay.hindsight import HindsightReplay  # lazy, as it imports JAX

    if kind == "hindsight" or (kind is None and isinstance(replay, HindsightReplay)):
        outer = replay if isinstance(replay, HindsightReplay) else HindsightReplay(replay.capacity)
        return _changed_hindsight_replay(outer, getattr(replay, "replay", replay), changes, env_steps)
    if isinstance(replay, HindsightReplay):
        if not is_asked:
            raise UsageError(f"a recurrent network has no goals, as {replay!r} has; --replay sequence leaves them out")
        replay = replay.replay
    return _changed_replay(replay, changes, kind, env_steps, is_asked=is_asked)


def _changed_hindsight_replay(outer: Any, inner: Any, changes: Mapping[str, Any], env_steps: int) -> Any:
    """The outer replay around the inner one, which becomes prioritized if flags are for priorities."""
    own = {name: value for name, value in changes.items() if name in ("strategy", "ratio")}
    of_inner = {name: value for name, value in changes.items() if name not in own}
    kind = "prioritized" if of_inner.keys() & {"alpha", "beta", "eps"} else "uniform" if inner.draws_sequences else None
    return dataclasses.replace(outer, replay=_changed_replay(inner, of_inner, kind, env_steps, is_asked=True), **own)


def _changed_replay(replay: Any, changes: Mapping[str, Any], kind: str | None, env_steps: int, *, is_asked: bool) -> Any:
    """The replay, or one of another kind, with these fields.

    Args:
        is_asked: a flag sets the kind.
    """
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
