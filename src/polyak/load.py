"""`polyak.load_policy`: a greedy policy from a run directory, a pack or an exported file, which needs no training code."""

import os
from pathlib import Path
from typing import Any

from polyak.core.types import Agent, PredictingPolicy
from polyak.export.exported_policy import load_exported
from polyak.storage.pack import is_pack, unpack
from polyak.storage.run_directory import BEST, CONFIG, Run, RunError, directory_path

ACTING = {"network", "actor", "squash", "normalize_obs", "clip_obs", "num_atoms", "v_min", "v_max", "num_policy_tau"}
"""Settings on which the greedy policy depends."""


def load_policy(path: str | os.PathLike[str], *, agent: Agent | None = None) -> PredictingPolicy:
    """Load a greedy policy, ready to `predict(obs)`, without an environment.

    Loading a run whose agent is stored imports no training loops. Loading an exported file imports neither Flax, Optax nor
    Gymnasium. Symbolic links to a run or a file are followed.

    A StableHLO file is a program, which JAX reads, compiles and runs; the form for a stranger's policy is NumPy, which is data.
    A program that this user has not written or read before is first read in another process, which takes about a second.

    Args:
        path: a run directory, its subdirectory `best` (see `eval_every`), a file of `polyak pack`, or a stablehlo or numpy file
            of `polyak export`.
        agent: an agent with the settings of the trained agent, for a run whose network is user-defined and so not stored.

    Raises:
        RunError, ConfigError, CheckpointError, ExportError: a file is missing or damaged; the message names the file.
        TypeError: `agent` is passed for a file.
        ValueError: the policy of `agent` would act differently than the run's policy.
    """
    is_best = directory_path(path).name == BEST and os.path.lexists(Path(path).parent / CONFIG)
    if not os.path.lexists(path) and not is_best:
        raise RunError(f"{path}: there is no such run directory or exported file")
    if Path(path).is_file():
        if is_pack(Path(path)):
            with unpack(Path(path)) as directory:
                return load_policy(directory, agent=agent)
        if agent is not None:
            raise TypeError(f"load_policy: {path} is a file, which contains its network; agent is for a run directory")
        return load_exported(os.path.realpath(path))
    if agent is not None and not isinstance(agent, Agent):
        raise TypeError(f"load_policy: agent must be an agent with the settings of the trained agent, got {agent!r:.80}")
    from polyak.runs import open_checkpoints, read_config, restore_policy

    run, checkpoints = open_checkpoints(Path(path))
    policy: Any = restore_policy(checkpoints, read_config(run).agent if agent is None else agent)[0]
    if agent is not None:
        _check_acts_alike(run, agent)
    return policy


def _check_acts_alike(run: Run, agent: Agent) -> None:
    """Check that an agent whose arrays fit a run also has the run's settings, as far as the policy depends on these."""
    stored = run.read_config().get("agent")
    # A run directory of another program may have any config.
    if not isinstance(stored, dict) or "spec" not in stored:
        return
    from polyak.core.spec_difference import difference
    from polyak.runs import config_classes
    from polyak.storage.config import from_json
    from polyak.train.agent_settings import find_changes

    acting = ACTING if getattr(agent, "normalize_obs", False) else ACTING - {"clip_obs"}
    changes = [text for path, text in find_changes(run, agent).items() if path.split(".")[0] in acting]
    if found := difference(from_json(stored["spec"], config_classes()), agent.spec):
        changes.append(f"{found[0]} {found[2]} (the run has {found[1]})")
    if changes:
        raise ValueError(f"load_policy: agent must have the settings of {run.directory}, got {', '.join(changes)}")
