"""polyak train ALGO [ENV] --data PATH: trains on a data set; ENV is for evaluation."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from polyak.agents import AGENTS, agent_class
from polyak.cli.agent_flags import agent_flags, explicit_settings
from polyak.cli.flags import TrainFlags, UsageError, default_hint, fail, field_names, parse, print_note, unknown_flags
from polyak.cli.imports import find_env_module
from polyak.cli.network_flags import NetworkFlags, network_flags_in_help
from polyak.core.suggestions import unknown_name
from polyak.presets import preset
from polyak.tracking.names import TrackerName

HELP = {"-h", "--help"}
EPISODES = 100
RESUME_FLAGS = {"user", "env_steps", "eval_episodes", "force", "compilation_cache"}


@tyro.conf.configure(tyro.conf.DisallowNone)
@dataclasses.dataclass(frozen=True)
class OfflineFlags:
    """Options of a training on a data set."""

    data: str
    """data set: minari:NAME, a file .npz, .hdf5 or .h5, or a run directory, whose replay it is"""
    gradient_steps: int = 100_000
    """number of gradient steps"""
    seed: int = 0
    """seed of all randomness"""
    run_dir: Annotated[Path | None, default_hint("runs/ALGO-DATA-SEED-TIME", "PATH")] = None
    """new directory for everything that the run writes"""
    eval_episodes: Annotated[int | None, default_hint(f"{EPISODES} with ENV", "INT")] = None
    """number of episodes of the evaluation after training, in ENV; 0 skips the evaluation"""
    eval_max_steps: int = 1_000_000
    """maximum number of steps of each environment, after which an unfinished evaluation is skipped"""
    report_every: Annotated[int | None, default_hint("a hundredth of all, or a shorter interval that is set", "INT")] = None
    """gradient steps between reports"""
    eval_every: Annotated[int | None, default_hint("only at the end", "INT")] = None
    """gradient steps between evaluations of the greedy policy in ENV; the best checkpoint is kept in best/"""
    checkpoint_every: Annotated[int | None, default_hint("a tenth of all, at most 100,000", "INT")] = None
    """gradient steps between checkpoints, which are saved at reports"""
    track: Annotated[TrackerName | None, default_hint("none", "{wandb,mlflow,trackio,tensorboard}")] = None
    """tracker that logs settings, metrics and checkpoints; needs polyak[TRACKER]"""
    compilation_cache: bool = True
    """keep compiled programs in the user's cache directory, which shortens later starts"""


def train_on_data(arguments: Sequence[str], owners: Callable[[str], Sequence[str]]) -> int:
    """Run the command; returns the exit code.

    Args:
        arguments: the words after `polyak train`.
        owners: see `parse`.
    """
    try:
        algorithm, env_id, flags = _parse(arguments, owners)
    except UsageError as error:
        return fail(error)
    return _train(algorithm, env_id, flags.training, explicit_settings(flags.algorithm, arguments), flags.network)


def _parse(arguments: Sequence[str], owners: Callable[[str], Sequence[str]]) -> tuple[str, str | None, Any]:
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    words, rest = list(arguments[:count]), list(arguments[count:])
    for flag in ("--agent", "--env"):
        if any(word.partition("=")[0] == flag for word in rest):
            raise UsageError(f"{flag} must be left out with --data; polyak.train.offline takes your own agent and environment")
    if not words:
        raise UsageError("an algorithm is missing, e.g.: polyak train iql --data DATA.npz")
    algorithm = words.pop(0).lower()
    if algorithm not in AGENTS:
        raise UsageError(unknown_name(algorithm, AGENTS, "algorithm"))
    env_id = words.pop(0) if words else None
    if words:
        raise UsageError(f"polyak train ALGO [ENV] --data DATA takes one ENV; got {' '.join([str(env_id), *words])}")
    find_env_module(env_id or "")
    defaults = preset(algorithm, env_id or "")
    others = [field.name for kind in (OfflineFlags, NetworkFlags) for field in dataclasses.fields(kind)]
    settings = agent_flags(AGENTS[algorithm], defaults.values, others)
    network = network_flags_in_help(AGENTS[algorithm]) if HELP & set(rest) else NetworkFlags
    groups: list[Any] = [
        ("training", OfflineFlags),
        ("algorithm", settings, dataclasses.field(default_factory=settings)),
        ("network", network, dataclasses.field(default_factory=network)),
    ]
    kind = dataclasses.make_dataclass("Flags", groups)
    for flag in unknown_flags(kind, rest):
        if flag.removeprefix("--").replace("-", "_") in field_names(TrainFlags):
            raise UsageError(_unused(flag, agent_class(algorithm)))
    where = "" if env_id is None else f" and evaluate in {env_id}"
    named = ", or the preset for the environment that the data name" if env_id is None else ""
    description = f"Train {algorithm} on a data set{where}. Defaults: {defaults.source}{named}."
    prog = " ".join(["polyak train", algorithm, *([] if env_id is None else [env_id]), "--data DATA"])
    return algorithm, env_id, parse(kind, rest, prog=prog, description=description, owners=owners)


def _unused(flag: str, learner: Any) -> str:
    """The error for a flag of a training in an environment."""
    only = "; on data alone one process trains one seed" if flag == "--seeds" else ""
    if isinstance(getattr(learner, "env_error", None), str):
        return f"{flag} must be left out, as {learner.__name__} learns from data alone{only}"
    return f"{flag} needs --env-steps N, to collect beside --data{only}"


def _train(
    algorithm: str, env_id: str | None, flags: OfflineFlags, settings: dict[str, Any], network_flags: NetworkFlags
) -> int:
    from polyak.cli.change_parts import change_parts
    from polyak.cli.new_run import run_directory
    from polyak.cli.replay_flags import ReplayFlags
    from polyak.cli.training_run import run_to_exit_code
    from polyak.core.checks import check_integer
    from polyak.runs import check_seed
    from polyak.storage.checkpoint import CheckpointError
    from polyak.storage.config import ConfigError
    from polyak.storage.run_directory import RunError
    from polyak.train.agent_data import check_class_learns_from_data, load_data
    from polyak.train.compilation_cache import compilation_cache
    from polyak.train.devices import choose_threads, dispatch_synchronously, start_jax
    from polyak.train.new_training import make_agent
    from polyak.train.offline import evaluation_envs, fit_to_data, prepare_offline, spec_for
    from polyak.train.settings import OfflineSettings, settings_from

    try:
        for name in ("gradient_steps", "eval_max_steps", "report_every", "checkpoint_every", "eval_every", "eval_episodes"):
            least = 0 if name == "eval_episodes" else 1
            check_integer("polyak train", f"--{name.replace('_', '-')}", getattr(flags, name), at_least=least, optional=True)
        check_seed("polyak train", "--seed", flags.seed)
        if env_id is None and (flags.eval_every or flags.eval_episodes):
            raise UsageError("--eval-every and --eval-episodes need ENV: polyak train ALGO ENV --data DATA")
        check_class_learns_from_data("polyak train", agent_class(algorithm))
        dispatch_synchronously()
        episodes = EPISODES if env_id is not None and flags.eval_episodes is None else flags.eval_episodes
        with evaluation_envs(algorithm, env_id, episodes) as (env, source):
            data = load_data("polyak train", flags.data, None if env is None else env.spec)
            made: Any = make_agent(algorithm, spec_for(algorithm, data, env), source, flags.gradient_steps, settings)
            made = change_parts(algorithm, made, network_flags, ReplayFlags(), flags.gradient_steps, settings)
            agent = fit_to_data(made, data)
            threads = choose_threads(agent, 1, 1)
            with compilation_cache(flags.compilation_cache, threads, print_note):
                start_jax(threads)
                directory = flags.run_dir or run_directory(algorithm, Path(flags.data).name, flags.seed)
                fields = settings_from(OfflineSettings, flags, {"run_dir": directory, "eval_episodes": episodes})
                training = prepare_offline(agent, data, env, source, fields, algorithm, threads)
                return run_to_exit_code(training)
    except (UsageError, ValueError, TypeError, ImportError, OSError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)


def check_resume_flags(flags: Any, directory: Path) -> None:
    """Check that flags of `polyak resume` for collecting, and for user-defined code, are left out.

    Raises:
        UsageError: such a flag is set.
    """
    for group in (flags.user, flags):
        for field in dataclasses.fields(group):
            if field.name not in RESUME_FLAGS and getattr(group, field.name) is not None:
                flag = f"--{field.name.replace('_', '-')}"
                where = "; polyak.resume takes your own agent and environment" if group is flags.user else ""
                raise UsageError(f"{flag} must be left out: {directory} learns from data{where}")


def resume_on_data(run: Any, config: Any, flags: Any) -> int:
    """Continue a run of `train_on_data` that is open for writing; returns the exit code."""
    from polyak.cli.training_run import run_to_exit_code
    from polyak.train.offline_resumption import offline_resumption

    with offline_resumption(run, config, None, None, flags.eval_episodes, flags.force) as training:
        return run_to_exit_code(training)
