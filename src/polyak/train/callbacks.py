"""Callbacks for `polyak.train.run`: early stopping, Weights & Biases, MLflow, Trackio and videos of the greedy policy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyak.core.checks import check_integer, check_number
from polyak.core.suggestions import unknown_name
from polyak.core.types import Agent, Callback, Env, HostEnv, Progress, PyTree
from polyak.core.warn import warn
from polyak.envs.constructors import make
from polyak.loops.loop import check_spec
from polyak.tracking.to_mlflow import tracker_of
from polyak.tracking.to_trackio import TrackioTracker
from polyak.tracking.to_wandb import WandbTracker
from polyak.train.tracking import TrackedRun
from polyak.train.video_callback import PeriodicVideo
from polyak.videos.encoder import find_ffmpeg
from polyak.videos.play import check_images

__all__ = ["log_to_mlflow", "log_to_trackio", "log_to_wandb", "record_videos", "stop_at_reward", "stop_without_improvement"]

EVALUATED = "eval/mean_reward"


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
        # A return that is NaN does not stop the training.
        return not metrics.get(tag, -np.inf) >= reward

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
    """Log settings, metrics and videos to a run of Weights & Biases, the result of `wandb.init(...)`, on the axis of env_steps.

    `track="wandb"` of `polyak.train.run` creates the run, logs checkpoints too, and continues it where the training is resumed.

    Raises:
        TypeError: `run` has no method `log`.
    """
    if not callable(getattr(run, "log", None)):
        raise TypeError(f"log_to_wandb: run must be the result of wandb.init(...), got {run!r:.80}")
    return TrackedRun("log_to_wandb", WandbTracker(run))


def log_to_mlflow() -> Callback:
    """Log settings, metrics and videos to MLflow's active run, which is started if there is none, on the axis of env_steps.

    `track="mlflow"` of `polyak.train.run` logs checkpoints too, and continues the run where the training is resumed.

    Raises:
        ImportError: the package `mlflow` is not installed.
    """
    try:
        import mlflow
    except ModuleNotFoundError:
        raise ImportError("log_to_mlflow needs the package mlflow: pip install 'polyak[mlflow]'") from None
    run = mlflow.active_run() or mlflow.start_run()
    return TrackedRun("log_to_mlflow", tracker_of(mlflow.MlflowClient(), run.info.run_id))


def log_to_trackio(run: Any) -> Callback:
    """Log settings, metrics and videos to a run of Trackio, the result of `trackio.init(...)`, on the axis of env_steps.

    `track="trackio"` of `polyak.train.run` creates the run, logs checkpoints too, and continues it in resumed trainings.

    Raises:
        TypeError: `run` has no method `log`.
    """
    if not callable(getattr(run, "log", None)):
        raise TypeError(f"log_to_trackio: run must be the result of trackio.init(...), got {run!r:.80}")
    return TrackedRun("log_to_trackio", TrackioTracker(run))


def record_videos(agent: Agent, env: Any, folder: str | Path, *, every: int, action_mask_key: str | None = None) -> Callback:
    """Record one episode of the greedy policy every `every` env_steps and at the last one, as `FOLDER/ENV_STEPS.mp4`.

    `video_every` of `polyak.train.run` does so for environments that polyak creates. A longer episode is cut after 100,000
    steps, with a warning.

    Args:
        agent: the agent that is trained.
        env: a separate `gymnasium.Env` with `render_mode="rgb_array"`, or an environment in JAX with images: `jax/...`, of
            MuJoCo Playground, Brax, Craftax, NAVIX or XLand-MiniGrid, or one whose dynamics have a function `render`.
        folder: directory of the videos.
        every: env_steps between videos.
        action_mask_key: entry of the observation that is the action mask, as in `polyak.envs.make`; masks in
            `info["action_mask"]` and from a method `action_masks()` need no key.

    Raises:
        ImportError: the package `imageio-ffmpeg` is not installed.
        ValueError: the environment draws no images, or has other spaces or masks than the agent.
    """
    check_integer("record_videos", "every", every)
    if not isinstance(env, Env | HostEnv):
        scaling = agent.spec.action_scaling
        env = make(env, drop_unsupported_obs=False, action_mask_key=action_mask_key, action_scaling=scaling)
    check_images("record_videos", env)
    check_spec("record_videos: env", agent.spec, env.spec)
    find_ffmpeg("record_videos")
    return PeriodicVideo("record_videos", agent, env, Path(folder), every=every)
