"""Resumes runs of `polyak.train.offline`, whose checkpoints have the data."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax

from polyak.core.types import Env, HostEnv
from polyak.loops.loop import check_spec
from polyak.loops.offline_loop import start_offline
from polyak.runs import RunConfig, run_key
from polyak.storage.checkpoint import restore
from polyak.storage.progress import check_unchanged_settings, read_progress
from polyak.storage.run_directory import Run
from polyak.train.agent_settings import store_agent_settings
from polyak.train.evaluation import make_again
from polyak.train.new_training import close_if_made
from polyak.train.training import Start, Training


def check_offline(owner: str, **arguments: Any) -> None:
    """Check that arguments for collecting are left out.

    Raises:
        ValueError: an argument is set.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{owner}: {name} must be left out for a run that learns from data, got {value!r:.80}")


@contextmanager
def offline_resumption(
    run: Run, config: RunConfig, env: Any, eval_env: Env | HostEnv | None, eval_episodes: int | None, force: bool
) -> Iterator[Training]:
    """Yield the training that continues a run from its newest checkpoint, which has the data; drops metrics that are newer.

    Environments for evaluation are created unless they are given; created ones are closed at the end.

    Args:
        eval_episodes: episodes of the evaluation at the end; None is the run's number.
        force: resume even if the checkpoint was trained with other settings than the run's config.json.

    Raises:
        CheckpointError: no checkpoint is valid, or it belongs to another agent, or to other settings.
        ValueError: the environment has other spaces than the agent, or is user-defined and not given.
    """
    given = env if eval_env is None else eval_env
    episodes = config.episodes_at_end(0) if eval_episodes is None else eval_episodes
    is_evaluated = given is not None or episodes > 0 or config.eval_every is not None
    made = make_again(run, config, given, config.num_envs) if is_evaluated else None
    try:
        if made is not None:
            check_spec("polyak.resume", config.agent.spec, made.spec)
        key = run_key(config.seed or 0)
        restored = restore(run.checkpoints, jax.eval_shape(partial(start_offline, config.agent, data=None), key))
        saved = read_progress(run, restored)
        if not force:
            check_unchanged_settings(run, saved)
        run.change_config(env_steps=config.env_steps)
        store_agent_settings(run, config.agent)
        run.rewind(saved.env_steps)
        start = Start(restored.tree, saved.env_steps, saved.episodes, is_own=True)
        yield Training(config, made, key, start, run, eval_env=made, eval_episodes=episodes)
    finally:
        if made is not None:
            close_if_made(made, given)
