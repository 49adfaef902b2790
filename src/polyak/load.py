"""`polyak.load_policy`: a greedy policy from a run directory or an exported file; a file needs no training code."""

import os
from pathlib import Path
from typing import Any

from polyak.core.types import Agent, PredictingPolicy
from polyak.export.exported_policy import load_exported
from polyak.storage.run_directory import RunError


def load_policy(path: str | os.PathLike[str], *, agent: Agent | None = None) -> PredictingPolicy:
    """A greedy policy, ready to `predict(obs)`; needs neither its environment nor the training loops.

    An exported file needs neither Flax, Optax nor Gymnasium. A symbolic link to a run or a file is followed.

    Args:
        path: a run directory, the `best` in it (see `eval_every`), or a file that `polyak export` wrote as stablehlo or numpy.
        agent: an agent like the one that was trained, for a run whose network is user-defined and so not stored.

    Raises:
        RunError, ConfigError, CheckpointError, ExportError: what is missing or damaged, by name.
        TypeError: an agent for a file.
    """
    if not os.path.lexists(path):
        raise RunError(f"{path}: there is no such run directory or exported file")
    if Path(path).is_file():
        if agent is not None:
            raise TypeError(f"load_policy: {path} is a file, which contains its network; agent is for a run directory")
        return load_exported(os.path.realpath(path))
    if agent is not None and not isinstance(agent, Agent):
        raise TypeError(f"load_policy: agent must be an agent like the one that was trained, got {agent!r:.80}")
    from polyak.runs import open_checkpoints, read_config, restore_policy

    run, checkpoints = open_checkpoints(Path(path))
    # With an agent, the config is not read: a program may have stored anything there.
    policy: Any = restore_policy(checkpoints, read_config(run).agent if agent is None else agent)[0]
    return policy
