"""Records videos of the greedy policy during training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from polyak.core.types import Agent, Env, HostEnv, Progress, PyTree
from polyak.core.warn import warn
from polyak.envs.rendered_env import make_rendered
from polyak.envs.source import source_of
from polyak.runs import RunConfig
from polyak.storage.run_directory import Run
from polyak.train.display import Display
from polyak.train.evaluation import close_envs, evaluation_key
from polyak.train.settings import RunSettings
from polyak.videos.encoder import find_ffmpeg
from polyak.videos.play import check_images, play
from polyak.videos.record import record_frames

MAX_STEPS_OF_A_VIDEO = 100_000
"""Maximum number of steps of a video; the longest games of Atari have 27,000."""


class PeriodicVideo:
    """A callback that records one episode of the greedy policy whenever a multiple of `every` env_steps has passed.

    The last policy is recorded too. A video that cannot be written costs one warning; training goes on.

    Args:
        owner: name of the caller in warnings.
        agent: the agent.
        env: a separate environment that draws images.
        folder: directory of the videos, `ENV_STEPS.mp4`.
        every: env_steps between videos.
        seed: determines the start of the episode.
        env_steps_done: env_steps before the resume.
        max_steps: maximum number of steps of an episode, which is then cut.
        display: shows that a video is recorded.
    """

    def __init__(
        self,
        owner: str,
        agent: Agent,
        env: Env | HostEnv,
        folder: Path,
        *,
        every: int,
        seed: int = 0,
        env_steps_done: int = 0,
        max_steps: int = MAX_STEPS_OF_A_VIDEO,
        display: Display | None = None,
    ) -> None:
        self._owner, self._agent, self._env, self._folder = owner, agent, env, folder
        self._every, self._seed, self._max_steps, self._display = every, seed, max_steps, display
        # Multiples of `every` passed, so that a late report delays no other video.
        self._passed = env_steps_done // every
        self._has_warned = False

    def __call__(self, progress: Progress, metrics: Mapping[str, float], state: PyTree) -> None:
        """Record a video if it is due."""
        passed = progress.env_steps // self._every
        if passed == self._passed and progress.env_steps < progress.target_env_steps:
            return
        self._passed = passed
        if self._display is not None:
            self._display.show_activity(progress, ["recording a video …"])
        # One device: the loop may have copies on several.
        policy: Any = jax.device_put(self._agent.policy(state.agent), jax.local_devices()[0])
        key = evaluation_key(self._seed)
        frames = play(self._owner, policy, self._env, key=key, episodes=1, max_steps=self._max_steps)
        path = self._folder / f"{progress.env_steps:012d}.mp4"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            record_frames(self._owner, path, frames)
        except Exception as error:  # Libraries that draw raise any exception.
            if not self._has_warned:
                self._has_warned = True
                warn(f"{self._owner}: {path} was not written: {type(error).__name__}: {error}; training goes on")


def check_videos(owner: str, env: Env | HostEnv, settings: RunSettings) -> None:
    """Check that videos of a training can be recorded, by drawing one image; nothing without `video_every`.

    Raises:
        ValueError: there is no run directory, or the environment draws no images or cannot be created again.
        VideoError, ImportError, RuntimeError: ffmpeg or a library that draws is missing.
    """
    if settings.video_every is None:
        return
    if settings.run_dir is None:
        raise ValueError(f"{owner}: video_every needs run_dir, where the videos are written")
    find_ffmpeg(owner)
    with video_env(owner, env) as drawn:
        check_images(owner, drawn)


@contextmanager
def video_env(owner: str, env: Env | HostEnv) -> Iterator[Env | HostEnv]:
    """Yield a copy of the training environment that draws images, closed at the end; one in JAX needs no copy.

    Raises:
        ValueError: the source of the environment is unknown.
    """
    if not isinstance(env, HostEnv):
        yield env
        return
    source = source_of(env)
    if source is None:
        raise ValueError(
            f"{owner}: video_every must be None: {env.spec.id} was given to polyak.envs.make as an object, so no second one "
            "can be made; pass callbacks=[polyak.train.callbacks.record_videos(agent, another_env, folder, every=...)]"
        )
    copy: Any = make_rendered(source)
    try:
        yield copy
    finally:
        close_envs(copy)


@contextmanager
def periodic_video(
    config: RunConfig, env: Env | HostEnv | None, run: Run | None, env_steps_done: int, display: Display
) -> Iterator[list[PeriodicVideo]]:
    """Yield a list with the callback that records videos during training, or an empty list without `video_every`."""
    if config.video_every is None or run is None or env is None:
        yield []
        return
    with video_env("train", env) as drawn:
        yield [
            PeriodicVideo(
                "train",
                config.agent,
                drawn,
                run.videos,
                every=config.video_every,
                seed=config.seed or 0,
                env_steps_done=env_steps_done,
                max_steps=min(config.eval_max_steps, MAX_STEPS_OF_A_VIDEO),
                display=display,
            )
        ]
