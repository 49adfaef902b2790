"""polyak video RUN and polyak watch RUN: the greedy policy of a run in a file or in a window."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

from polyak.cli.flags import UsageError, default_hint, fail, parse_for_run, print_note
from polyak.cli.imports import ImportFlag
from polyak.cli.user_code import read_user_run, with_agent
from polyak.cli.user_flags import UserGroupOfRun
from polyak.core.types import Env, HostEnv, Policy
from polyak.envs.rendered_env import make_rendered
from polyak.loops.loop import check_spec
from polyak.runs import RunConfig, restore_policy
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.config import ConfigError
from polyak.storage.run_directory import Run, RunError
from polyak.train.compilation_cache import compilation_cache
from polyak.train.devices import count_devices
from polyak.train.evaluation import close_envs
from polyak.train.run_video import Playback, check_path, open_policies
from polyak.train.settings import settings_from
from polyak.videos.encoder import VideoError
from polyak.videos.play import Number, check_images
from polyak.videos.window import check_window

SHOW_DEFAULT = "(default: nothing)"
OUTPUT_DEFAULT = "(default: videos/ENV_STEPS.mp4 in the run)"
OutputFlag: TypeAlias = Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint=OUTPUT_DEFAULT)]
ShowFlag: TypeAlias = Annotated[tuple[Number, ...], tyro.conf.arg(help_behavior_hint=SHOW_DEFAULT)]

ERRORS = (UsageError, TypeError, ValueError, ImportError, RunError, ConfigError, CheckpointError, VideoError)
"""Reasons for which a run cannot be shown."""


@dataclasses.dataclass(frozen=True)
class WatchFlags:
    """The episodes, and how they are shown."""

    user: UserGroupOfRun

    episodes: Annotated[int | None, default_hint("until the window is closed", "INT")] = None
    """number of episodes"""
    best: bool = False
    """play the best policy of the evaluations (--eval-every) instead of the newest"""
    seed: int = 0
    """seed of the environment"""
    fps: Annotated[float | None, default_hint("the environment's real speed", "FLOAT")] = None
    """frames per second"""
    show: ShowFlag = ()
    """numbers below the images; value is the policy's estimate of the discounted return from here"""
    max_steps: Annotated[int | None, default_hint("the run's --eval-max-steps", "INT")] = None
    """maximum number of steps of an episode, which is then cut"""
    imports: ImportFlag = None
    """module of an environment `MODULE:Name-v0`; without this flag the module is not imported"""
    compilation_cache: bool = True
    """keep compiled programs in the user's cache directory, which shortens later starts"""


@dataclasses.dataclass(frozen=True)
class VideoFlags(WatchFlags):
    """The episodes, and the file."""

    episodes: int = 1
    """number of episodes, one after another"""
    output: OutputFlag = None
    """file to write, which ends with .mp4 or .gif and is replaced if it exists"""


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """A run, and what is played of it."""

    run: Run
    config: RunConfig
    policy: Policy
    env_steps: int
    env: Env | HostEnv


def video(arguments: list[str]) -> int:
    """Run `polyak video`; returns the exit code."""
    description = "Write a video of the greedy policy of RUN, a run directory or its subdirectory `best`."
    try:
        directory, flags = parse_for_run(VideoFlags, arguments, command="video", description=description)
        playback = settings_from(Playback, flags, {"owner": "polyak video"})
        with _loaded("polyak video", directory, flags) as loaded:
            path = check_path("polyak video", loaded.run, loaded.env_steps, flags.output)
            print(f"wrote {playback.record(path, loaded.policy, loaded.env, loaded.config)}")
    except ERRORS as error:
        return fail(error)
    return 0


def watch(arguments: list[str]) -> int:
    """Run `polyak watch`; returns the exit code."""
    description = (
        "Show the greedy policy of RUN, a run directory or its subdirectory `best`, in a window. Escape or Q closes it, the "
        "space bar pauses."
    )
    try:
        directory, flags = parse_for_run(WatchFlags, arguments, command="watch", description=description)
        playback = settings_from(Playback, flags, {"owner": "polyak watch"})
        check_window("polyak watch")
        with _loaded("polyak watch", directory, flags) as loaded:
            playback.show_window(loaded.policy, loaded.env, loaded.config)
    except ERRORS as error:
        return fail(error)
    return 0


@contextmanager
def _loaded(owner: str, directory: Path, flags: WatchFlags) -> Iterator[_Loaded]:
    """Load the policy and create its environment, which is closed at the end."""
    with compilation_cache(flags.compilation_cache, None, print_note):
        count_devices()  # Raises if JAX does not start.
        run, checkpoints = open_policies(directory, best=flags.best)
        user_run = read_user_run(run, flags.user, flags.imports)
        env = make_rendered(user_run.source)
        try:
            config = with_agent(run, user_run.config, flags.user, env.spec)
            check_spec(owner, config.agent.spec, env.spec)
            check_images(owner, env)
            policy, env_steps = restore_policy(checkpoints, config.agent)
            yield _Loaded(run, config, policy, env_steps, env)
        finally:
            close_envs(env)
