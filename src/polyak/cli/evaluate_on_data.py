"""polyak evaluate RUN --data PATH: estimates the value of a run's greedy policy from a data set."""

import dataclasses
from contextlib import ExitStack
from typing import Annotated, Literal

from rich.console import Console

from polyak.cli.flags import UsageError, default_hint, fail, parse_for_run, print_note
from polyak.core.checks import check_integer, check_number
from polyak.core.spaces import Box, leaf_spaces
from polyak.data.loading import load
from polyak.off_policy_evaluation.fitted_q import FQE
from polyak.off_policy_evaluation.policy_value import OPTIONS, evaluate_offline
from polyak.runs import check_seed, open_checkpoints, read_config, restore_policy
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.config import ConfigError
from polyak.storage.pack import is_pack, unpack
from polyak.storage.run_directory import RunError, runs_in
from polyak.train.compilation_cache import compilation_cache
from polyak.train.devices import count_devices


@dataclasses.dataclass(frozen=True)
class EvaluateOnDataFlags:
    """Data set and estimator."""

    data: str
    """data set: minari:NAME, a file .npz, .hdf5 or .h5, or a run directory, whose replay it is"""
    method: Literal["fqe", "is", "wis", "dr"] = "fqe"
    """fqe learns Q; is, wis (importance sampling) and dr (doubly robust) need the array log_probs in --data, and
    actions that are no Boxes, where a greedy policy has no probabilities"""
    gamma: Annotated[float | None, default_hint("the agent's", "FLOAT")] = None
    """discount per step"""
    gradient_steps: Annotated[int | None, default_hint("5 / (0.05 (1 - gamma)), and at least 10,000", "INT")] = None
    """with --method fqe or dr: number of gradient steps of Q; at least 4 / (0.05 (1 - gamma))"""
    seed: int = 0
    """seed of all randomness"""
    compilation_cache: bool = True
    """keep compiled programs in the user's cache directory, which shortens later starts"""


def evaluate_on_data(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    description = "Estimate the expected discounted return of RUN's greedy policy from a data set, without an environment."
    try:
        directory, flags = parse_for_run(EvaluateOnDataFlags, arguments, command="evaluate", description=description)
        check_number("polyak evaluate", "--gamma", flags.gamma, at_least=0, at_most=1, optional=True)
        check_integer("polyak evaluate", "--gradient-steps", flags.gradient_steps, optional=True)
        if flags.gradient_steps is not None and flags.method not in OPTIONS["fqe"]:
            raise UsageError(f"--gradient-steps is for --method {' and '.join(OPTIONS['fqe'])}, got --method {flags.method}")
        check_seed("polyak evaluate", "--seed", flags.seed)
        with ExitStack() as stack:
            stack.enter_context(compilation_cache(flags.compilation_cache, None, print_note))
            count_devices()  # Raises if JAX does not start.
            if is_pack(directory):
                directory = stack.enter_context(unpack(directory))
            if inside := runs_in(directory):
                raise UsageError(f"--data is for one run; give one of {', '.join(map(str, inside))}")
            run, checkpoints = open_checkpoints(directory)
            config = read_config(run)
            policy, env_steps = restore_policy(checkpoints, config.agent)
            gamma = getattr(config.agent, "gamma", None) if flags.gamma is None else flags.gamma
            if gamma is None:
                raise UsageError(f"--gamma is missing: {config.algorithm} has none")
            boxes = [str(leaf) for _, leaf in leaf_spaces(config.agent.spec.action) if isinstance(leaf, Box)]
            if boxes and flags.method in OPTIONS["behavior"]:
                raise UsageError(f"--method {flags.method} is not for actions of {boxes[0]}; use --method fqe")
            data = load(flags.data, spec=config.agent.spec)
            fqe = FQE(gradient_steps=flags.gradient_steps) if flags.method in OPTIONS["fqe"] else None
            with Console(markup=False, emoji=False).status(f"evaluating {directory} on {flags.data} …"):
                estimate = evaluate_offline(policy, data, method=flags.method, gamma=float(gamma), fqe=fqe, seed=flags.seed)
    except (UsageError, ValueError, TypeError, ImportError, OSError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)
    except FloatingPointError as error:
        return fail(error, 1)
    print(f"{config.algorithm} {config.env} at {env_steps:,} {config.unit}: discounted return by {estimate}")
    return 0
