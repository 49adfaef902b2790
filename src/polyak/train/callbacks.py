"""Callbacks for `polyak.train.run`: early stopping, Weights & Biases, MLflow and videos of the greedy policy."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyak.core.checks import check_integer, check_number
from polyak.core.spaces import Discrete, EnvSpec, MultiDiscrete, map_space
from polyak.core.suggestions import unknown_name
from polyak.core.types import Agent, Callback, Env, Progress, PyTree
from polyak.core.warn import warn
from polyak.storage.writers import with_time

__all__ = ["log_to_mlflow", "log_to_wandb", "record_videos", "stop_at_reward", "stop_without_improvement"]

EVALUATED = "eval/mean_reward"

MAX_STEPS_OF_A_VIDEO = 100_000
"""Maximum number of steps of a video; the longest games of Atari have 27,000."""

MAX_VIDEO_BYTES = 2**31
"""Maximum bytes of the frames of a video: Gymnasium keeps all frames in memory until the video is written."""


def stop_at_reward(reward: float, tag: str = EVALUATED) -> Callback:
    """Stop when a metric reaches a value.

    Args:
        reward: the value.
        tag: the metric; `rollout/ep_rew_mean` needs no `eval_every`. A metric that is missing in all reports of the first fifth
            of the training gives a warning.
    """
    check_number("stop_at_reward", "reward", reward)
    warn_if_missing = _warns_if_missing("stop_at_reward", tag)

    def stop(progress: Progress, metrics: dict[str, float], state: PyTree) -> bool:
        warn_if_missing(progress, metrics)
        return metrics.get(tag, -np.inf) < reward

    return stop


def stop_without_improvement(evaluations: int, tag: str = EVALUATED) -> Callback:
    """Stop when a metric has not exceeded its maximum in the last `evaluations` reports that contain it.

    Args:
        evaluations: number of reports with the metric.
        tag: the metric. A metric that is missing in all reports of the first fifth of the training gives a warning.
    """
    check_integer("stop_without_improvement", "evaluations", evaluations)
    warn_if_missing = _warns_if_missing("stop_without_improvement", tag)
    best, since = -np.inf, 0

    def stop(progress: Progress, metrics: dict[str, float], state: PyTree) -> bool:
        nonlocal best, since
        warn_if_missing(progress, metrics)
        if tag in metrics:
            since = 0 if metrics[tag] > best else since + 1
            best = max(best, metrics[tag])
        return since < evaluations

    return stop


def _warns_if_missing(owner: str, tag: str) -> Callable[[Progress, Mapping[str, float]], None]:
    """Return a function that warns, at one report, if the metric is missing after a fifth of training and an evaluation."""
    is_known, start = False, None

    def warn_if_missing(progress: Progress, metrics: Mapping[str, float]) -> None:
        nonlocal is_known, start
        start, every = progress.env_steps if start is None else start, progress.eval_every
        is_evaluated = every is None or progress.env_steps // every > start // every
        if is_known or (tag not in metrics and not (is_evaluated and progress.env_steps >= progress.target_env_steps / 5)):
            return
        is_known = True
        if tag not in metrics:
            hint = "; evaluations need eval_every" if tag.startswith("eval/") else ""
            unknown = unknown_name(tag, sorted(metrics), "metric")
            warn(f"{owner} has had no effect so far: {unknown}{hint}")

    return warn_if_missing


def log_to_wandb(run: Any) -> Callback:
    """Log every metric to a Weights & Biases run, the result of `wandb.init(...)`, on the axis of env_steps.

    Raises:
        TypeError: `run` has no method `log`.
    """
    if not callable(getattr(run, "log", None)):
        raise TypeError(f"log_to_wandb: run must be the result of wandb.init(...), got {run!r:.80}")

    def log(progress: Progress, metrics: dict[str, float], state: PyTree) -> None:
        run.log(with_time(progress, metrics), step=progress.env_steps)

    return log


def log_to_mlflow() -> Callback:
    """Log every metric to MLflow's active run, on the axis of env_steps.

    Raises:
        ImportError: the package `mlflow` is not installed.
    """
    try:
        import mlflow
    except ModuleNotFoundError:
        raise ImportError("log_to_mlflow needs the package mlflow: pip install mlflow") from None

    def log(progress: Progress, metrics: dict[str, float], state: PyTree) -> None:
        mlflow.log_metrics(with_time(progress, metrics), step=progress.env_steps)

    return log


def record_videos(agent: Agent, env: Any, folder: str | Path, *, every: int, action_mask_key: str | None = None) -> Callback:
    """Record one episode of the greedy policy every `every` env_steps and at the last one, as `FOLDER/ENV_STEPS.mp4`.

    A longer episode is cut after 100,000 steps, with a warning.

    Args:
        agent: the agent that is trained.
        env: a separate `gymnasium.Env` with `render_mode="rgb_array"`, or an environment in JAX with images: of MuJoCo
            Playground, Brax, Craftax, NAVIX or XLand-MiniGrid, or one whose dynamics have a function `render`.
        folder: directory of the videos.
        every: env_steps between videos.
        action_mask_key: entry of the observation that is the action mask, as in `polyak.envs.make`; masks in
            `info["action_mask"]` and from a method `action_masks()` need no key.

    Raises:
        ImportError: the package `moviepy` is not installed.
        ValueError: the environment renders no images, or lacks the action masks of the agent's spec.
    """
    check_integer("record_videos", "every", every)
    if isinstance(env, Env):
        from polyak.envs.rendered_env import RenderedEnv

        env = RenderedEnv(env)
    mode = getattr(env, "render_mode", None)
    if mode != "rgb_array":
        raise ValueError(f"record_videos: env must have render_mode='rgb_array', got {mode!r}")
    try:
        import moviepy  # noqa: F401  (RecordVideo needs it at the end of an episode)
    except ModuleNotFoundError:
        raise ImportError("record_videos needs the package moviepy: pip install 'polyak[video]'") from None
    from polyak.envs.env_options import EnvOptions, adapt

    options = EnvOptions(drop_unsupported_obs=False, action_mask_key=action_mask_key)
    masked = adapt(env, options, agent.spec.id or type(env.unwrapped).__name__)
    if agent.spec.has_action_mask:
        _read_mask(agent.spec, masked.action_space, masked.reset(seed=0)[1])
    last = 0

    def record(progress: Progress, metrics: dict[str, float], state: PyTree) -> None:
        nonlocal last
        # Multiples of `every` passed, so that a late report delays no other video.
        passed = progress.env_steps // every
        if passed > last or progress.env_steps >= progress.target_env_steps:
            last = passed
            video = Path(folder) / f"{progress.env_steps:012d}.mp4"
            _record_episode(agent.policy(state.agent), agent.spec, masked, video)

    return record


def _record_episode(policy: Any, spec: EnvSpec, env: Any, video: Path) -> None:
    """Play one episode and write its video; the frames are in memory until the video is written."""
    import gymnasium

    env.reset(seed=0)
    max_steps = max(1, MAX_VIDEO_BYTES // max(1, np.asarray(env.render()).nbytes))
    video.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=video.parent) as directory:
        # A new folder: RecordVideo warns of an existing folder, whose files it might overwrite.
        recorder = gymnasium.wrappers.RecordVideo(env, f"{directory}/video", disable_logger=True)
        play_episode(policy, spec, recorder, max_steps=min(max_steps, MAX_STEPS_OF_A_VIDEO))
        recorder.stop_recording()
        shutil.move(next(Path(directory).glob("video/*.mp4")), video)


def play_episode(policy: Any, spec: EnvSpec, env: Any, *, max_steps: int = MAX_STEPS_OF_A_VIDEO) -> None:
    """Play one episode of the greedy policy in a `gymnasium.Env`, with action masks if the spec has them.

    Args:
        spec: spec of the agent.
        env: an environment with action masks in `info`, if any.
        max_steps: maximum number of steps; a longer episode is cut, with a warning.

    Raises:
        ValueError: the agent's spec has action masks, but the environment returns none.
    """
    obs, info = env.reset(seed=0)
    carry = None
    for _ in range(max_steps):
        mask = {"action_mask": _read_mask(spec, env.action_space, info)} if spec.has_action_mask else {}
        action, carry = policy.predict(obs, carry, **mask)
        obs, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            return
    warn(f"record_videos: the episode was cut after {max_steps:,} steps; give env a time limit")


def _read_mask(spec: EnvSpec, space: Any, info: Mapping[str, Any]) -> PyTree:
    """Read the mask in `info`, as a tree with the structure of the action space."""
    from polyak.envs.masks import read_masks

    if "action_mask" not in info:
        raise ValueError("record_videos: env must have action masks, as the agent's environment has; see action_mask_key")
    masks = iter(read_masks(space, info["action_mask"], "record_videos"))
    return map_space(lambda leaf: next(masks) if isinstance(leaf, Discrete | MultiDiscrete) else None, spec.action)
