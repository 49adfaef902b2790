"""`polyak.video` and `polyak.watch`: the greedy policy of a run in a file or a window."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from polyak.core.checks import check_integer
from polyak.core.printing import format_number
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Agent, Env, HostEnv, Policy
from polyak.envs.rendered_env import make_rendered
from polyak.loops.loop import check_spec
from polyak.runs import RunConfig, check_seed, open_checkpoints, read_config, restore_policy
from polyak.storage.run_directory import BEST, Run, directory_path, is_run_file
from polyak.train.evaluation import close_envs, evaluation_key, run_source
from polyak.videos.encoder import check_output
from polyak.videos.play import Frame, Number, check_images, check_numbers, play
from polyak.videos.record import DEFAULT_FPS, Video, check_fps, record_frames
from polyak.videos.window import check_window, show_frames


@dataclass(frozen=True)
class Playback:
    """The settings of episodes that are played for a video or a window.

    Attributes:
        owner: name of the caller in errors.
        episodes: number of episodes; None plays until the window is closed.
        seed: determines the starts of the episodes.
        fps: frames per second; None is the environment's.
        show: numbers below the images, of `polyak.videos.play.NUMBERS`.
        max_steps: maximum number of steps of an episode; None is the run's `eval_max_steps`.
    """

    owner: str
    episodes: int | None = 1
    seed: int = 0
    fps: float | None = None
    show: Sequence[Number] = ()
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_integer(self.owner, "episodes", self.episodes, optional=True)
        check_seed(self.owner, "seed", self.seed)
        check_integer(self.owner, "max_steps", self.max_steps, optional=True)
        check_fps(self.owner, self.fps)
        object.__setattr__(self, "show", check_numbers(self.owner, self.show))

    def frames(self, policy: Policy, env: Env | HostEnv, config: RunConfig) -> Iterator[Frame]:
        """Play the episodes."""
        return play(
            self.owner,
            policy,
            env,
            key=evaluation_key(self.seed),
            episodes=self.episodes,
            max_steps=self.max_steps or config.eval_max_steps,
            has_value="value" in self.show,
        )

    def record(self, path: Path, policy: Policy, env: Env | HostEnv, config: RunConfig) -> Video:
        """Write the episodes to a file."""
        return record_frames(self.owner, path, self.frames(policy, env, config), fps=self.fps, show=self.show)

    def show_window(self, policy: Policy, env: Env | HostEnv, config: RunConfig) -> None:
        """Show the episodes in a window, and print their returns."""
        frames = self.frames(policy, env, config)
        first = next(frames)
        show_frames(
            self.owner,
            chain([first], frames),
            title=f"{config.algorithm} {config.env}",
            fps=self.fps or first.fps or DEFAULT_FPS,
            show=self.show,
            on_end=lambda frame: print(
                f"episode {frame.episode + 1}: return {format_number(frame.total)}, {frame.step:,} steps", flush=True
            ),
        )


@suggest_arguments("polyak.video")
def video(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    episodes: int = 1,
    best: bool = False,
    env: Any = None,
    agent: Agent | None = None,
    seed: int = 0,
    fps: float | None = None,
    show: Sequence[Number] = (),
    max_steps: int | None = None,
) -> Video:
    """Write a video of the greedy policy of a run, as `polyak video` does; a notebook shows the result.

    MuJoCo draws without a display too: the environment variable MUJOCO_GL is set to `egl` or `osmesa` if it is not set.

    Args:
        run: a run directory, or its subdirectory `best`.
        output: the file, which ends with `.mp4` or `.gif` and is replaced if it exists; None is `RUN/videos/ENV_STEPS.mp4`.
        episodes: number of episodes, one after another.
        best: play the best policy of the evaluations (`eval_every`) instead of the newest.
        env: the environment, as for `polyak.envs.make`, for a user-defined one, which a run does not store: a function gets
            `render_mode="rgb_array"` if it takes this argument.
        agent: the agent, if its class or its network is user-defined.
        seed: determines the starts of the episodes.
        fps: frames per second; None is the environment's real speed.
        show: numbers below the images: `"step"`, `"reward"`, `"return"`, and `"value"` of the policy.
        max_steps: maximum number of steps of an episode; None is the run's `eval_max_steps`.

    Raises:
        RunError, ConfigError, CheckpointError: the run, or a policy in it, is missing or damaged.
        ValueError: the suffix is unknown, the environment draws no images, or the policy has no value.
        VideoError: the file cannot be written.
        ImportError: a package is missing; the message says how to install it.
    """
    playback = Playback("polyak.video", episodes, seed, fps, show, max_steps)
    check_integer("polyak.video", "episodes", episodes)
    with _loaded("polyak.video", run, env, agent, best=best) as (stored, policy, made, env_steps, config):
        path = check_path("polyak.video", stored, env_steps, None if output is None else Path(output))
        return playback.record(path, policy, made, config)


@suggest_arguments("polyak.watch")
def watch(
    run: str | os.PathLike[str],
    *,
    episodes: int | None = None,
    best: bool = False,
    env: Any = None,
    agent: Agent | None = None,
    seed: int = 0,
    fps: float | None = None,
    show: Sequence[Number] = (),
    max_steps: int | None = None,
) -> None:
    """Show the greedy policy of a run in a window, until it is closed: by its button, Escape or Q. The space bar pauses.

    Args:
        run: see `video`.
        episodes: number of episodes; None plays until the window is closed.
        best: see `video`.
        env: see `video`.
        agent: see `video`.
        seed: see `video`.
        fps: see `video`.
        show: see `video`.
        max_steps: see `video`.

    Raises:
        VideoError: there is no display.
        RunError, ConfigError, CheckpointError, ValueError, ImportError: see `video`.
    """
    playback = Playback("polyak.watch", episodes, seed, fps, show, max_steps)
    check_window("polyak.watch")
    with _loaded("polyak.watch", run, env, agent, best=best) as (_, policy, made, _, config):
        playback.show_window(policy, made, config)


def check_path(owner: str, run: Run, env_steps: int, output: Path | None) -> Path:
    """Return the path of a video, by default in the run, after a check that it can be written.

    Raises:
        ValueError: the suffix is unknown, or the path is a file of the run.
        VideoError, ImportError: see `check_output`.
    """
    path = run.videos / f"{env_steps:012d}.mp4" if output is None else output
    if output is not None and is_run_file(output):
        raise ValueError(f"{owner}: the output must be a separate file, not a file of the run, got {output}")
    check_output(owner, path)
    return path


def open_policies(path: Path, *, best: bool) -> tuple[Run, Path]:
    """Open a run; returns the run and the directory of its newest policies, or of the best.

    Raises:
        RunError: the path is no run, or the run has no best policy.
    """
    return open_checkpoints(path / BEST if best and path.name != BEST else path)


@contextmanager
def _loaded(
    owner: str, run: str | os.PathLike[str], env: Any, agent: Agent | None, *, best: bool
) -> Iterator[tuple[Run, Policy, Env | HostEnv, int, RunConfig]]:
    """Yield the run, its policy, its environment, the policy's env_steps, and the config; closes the environment."""
    stored, checkpoints = open_policies(directory_path(run), best=best)
    config = read_config(stored, agent)
    if env is None and config.is_user_env:
        raise ValueError(
            f"{owner}: env must be passed: {config.env!r} of {stored.directory} is a user-defined environment, which a run "
            "does not store"
        )
    policy, env_steps = restore_policy(checkpoints, config.agent)
    with ExitStack() as stack:
        made = env if isinstance(env, Env | HostEnv) else make_rendered(run_source(config, env))
        if made is not env:
            stack.callback(close_envs, made)
        check_spec(owner, config.agent.spec, made.spec)
        check_images(owner, made)
        yield stored, policy, made, env_steps, config
