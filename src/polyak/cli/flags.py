"""Parses the arguments of a command with tyro."""

import contextlib
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro

from polyak.cli.flag_values import VALUE_RULES, parse_value
from polyak.cli.parse_errors import ParseError, one_sentence
from polyak.core.suggestions import escape_control, find_replacement
from polyak.tracking.names import TrackerName

T = TypeVar("T")


class UsageError(Exception):
    """The command line is invalid; the message has the flag, its value, and the expected value."""


def parse(
    kind: type[T],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    owners: Callable[[str], Sequence[str]] = lambda name: (),
) -> T:
    """Parse arguments into an instance of the dataclass `kind`; prints the help for `--help` and exits.

    Args:
        owners: the algorithms that have an unknown flag, by its field.

    Raises:
        UsageError: a flag is unknown, set twice, or a flag of another library or algorithm, or its value is invalid.
    """
    if "output" in field_names(kind):
        # As one flag, so that both together are an error.
        arguments = ["--output" if word == "-o" else re.sub("^-o=?", "--output=", word) for word in arguments]
    flags = set_flags(arguments)
    repeated = sorted({flag for flag in flags if flags.count(flag) > 1})
    if repeated:
        raise UsageError(f"{', '.join(repeated)} is set more than once")
    unknown = unknown_flags(kind, arguments)
    for flag in unknown:
        if (name_here := _name_in_polyak(f"--{_without_path(flag)}", tuple(field_names(kind)))) is not None:
            raise UsageError(f"in polyak {flag} is {name_here}")
        # The settings of all algorithms take 0.1 s to read, which `--help` and a misspelt flag need not wait for.
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        # A name with a prefix, as rnd_gae_lambda, is another setting.
        names = [field for field in field_names(kind) if not field.endswith(f"_{name}")]
        is_misspelt = difflib.get_close_matches(name, [*names, "help"], n=1, cutoff=0.8)
        if not is_misspelt and (others := owners(name)):
            of_rnd = f"rnd_{name}" in field_names(kind) and "--intrinsic-reward" in flags
            here = f", or --rnd-{flag.removeprefix('--')}" if of_rnd else ""
            raise UsageError(f"{flag} is a setting of {', '.join(others)} only; polyak train {others[0]} has it{here}")
    # Every flag has a docstring; the search for comments in files would take a third of the time.
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
    asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    try:
        with VALUE_RULES, contextlib.nullcontext() if asks_for_help else one_sentence():
            return tyro.cli(kind, args=list(arguments), prog=prog, description=description, config=config)
    except ParseError as error:
        if not unknown:
            raise UsageError(str(error)) from None
        names = [f"--{name.replace('_', '-')}" for name in (*field_names(kind), "help")]
        nearest = difflib.get_close_matches(f"--{_without_path(unknown[0])}", names, n=1)
        typed = next(word for word in arguments if word.startswith("--") and flag_of(word) == unknown[0]).partition("=")[0]
        meant = f"did you mean {'--no-' if typed.startswith('--no-') else '--'}{nearest[0][2:]}? " if nearest else ""
        raise UsageError(f"unknown flag {typed}; {meant}`{prog} --help` shows the flags") from None


def parse_for_run(kind: type[T], arguments: Sequence[str], *, command: str, description: str) -> tuple[Path, T]:
    """Parse `polyak COMMAND RUN [flags]` into the directory and the flags; `--help` needs no directory.

    Raises:
        UsageError: there is no directory, or more than one; see `parse` for others.
    """
    is_named = len(arguments) > 0 and not arguments[0].startswith("-")
    if not is_named and not {"-h", "--help"} & set(arguments):
        raise UsageError(f"a run directory is missing: polyak {command} RUN [flags]; `polyak {command} --help` shows the flags")
    directory, *flags = arguments if is_named else ["RUN", *arguments]
    others = list(takewhile(lambda word: not word.startswith("-"), flags))
    if others:
        several = ", or the directory of several" if command == "evaluate" else ""
        raise UsageError(f"polyak {command} takes one RUN{several}; got {' '.join([directory, *others])}")
    return Path(directory), parse(kind, flags, prog=f"polyak {command} {directory}", description=description)


def parse_for_runs(kind: type[T], arguments: Sequence[str], *, command: str, description: str) -> tuple[list[Path], T]:
    """Parse `polyak COMMAND RUN... [flags]` into the directories and the flags; `--help` needs no directory.

    Raises:
        UsageError: there is no directory; see `parse` for others.
    """
    directories = list(takewhile(lambda word: not word.startswith("-"), arguments))
    if not directories and not {"-h", "--help"} & set(arguments):
        raise UsageError(
            f"a run directory is missing: polyak {command} RUN... [flags]; `polyak {command} --help` shows the flags"
        )
    flags = arguments[len(directories) :]
    return [Path(name) for name in directories], parse(kind, flags, prog=f"polyak {command} RUN...", description=description)


def unknown_flags(kind: Any, arguments: Sequence[str]) -> list[str]:
    """Return the flags for which the dataclass `kind` has no field."""
    own = {flag_of(f"--{name}") for name in field_names(kind)}
    return [flag for flag in set_flags(arguments) if flag not in own]


def _without_path(flag: str) -> str:
    """The name of a flag, of `--agent.learning-rate` too."""
    return flag.removeprefix("--").rpartition(".")[2]


OTHER_NAMES = {
    **dict.fromkeys(("--n-timesteps", "--timesteps", "--steps"), "--env-steps"),
    "--lr": "--learning-rate",
    "--eval-freq": "--eval-every",
    "--save-freq": "--checkpoint-every",
    "--n-eval-episodes": "--eval-episodes",
    **dict.fromkeys(("--log-dir", "--log-folder", "--output"), "--run-dir"),
    "--device": "the environment variable JAX_PLATFORMS",
    **dict.fromkeys(("--policy", "--policy-kwargs"), "--network, --hidden and --activation"),
}
"""Flags of other libraries' scripts that do not follow from the arguments of Stable-Baselines3."""


def _name_in_polyak(flag: str, fields: tuple[str, ...]) -> str | None:
    """Return polyak's flag for a flag of another library, if it is in `fields`; None if there is no counterpart."""
    found = OTHER_NAMES.get(flag)
    if found is None:
        _, replacement = find_replacement(flag.removeprefix("--").replace("-", "_"), fields, "field") or ("", "")
        setting = re.fullmatch(r"(\w+)(?:=polyak\.\w+\(.*?\))? of (?:the \w+|[\w.]+)(.*)", replacement)
        found = f"--{setting[1].replace('_', '-')}{setting[2]}" if setting else None
    name = re.match(r"--([\w-]+)", found or "")
    return None if name and name[1].replace("-", "_") not in fields else found


def field_names(kind: Any) -> list[str]:
    """Return the names of all fields of a dataclass and of nested dataclasses."""
    return list(field_types(kind))


def field_types(kind: Any) -> dict[str, Any]:
    """Return the types of all fields of a dataclass and of nested dataclasses, by name."""
    types: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
        types |= field_types(hint) if dataclasses.is_dataclass(hint) else {field.name: hint}
    return types


def set_flags(arguments: Sequence[str]) -> list[str]:
    """Return the flags that arguments set, in one spelling."""
    return [flag_of(argument) for argument in arguments if argument.startswith("--")]


def flag_of(argument: str) -> str:
    """Return the flag that an argument sets: `--num-envs` for `--num_envs=8`, `--normalize-obs` for `--no-normalize-obs`."""
    return "--" + argument.split("=")[0].removeprefix("--").replace("_", "-").removeprefix("no-")


def default_hint(text: str, metavar: str | None = None) -> Any:
    """Set the default that `--help` shows for a flag that is None until the environment is known."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {text})")


def hide(flags: type[T], names: Collection[str]) -> type[T]:
    """Create a dataclass of flags in which `--help` hides the given names."""
    hidden: Any = tyro.conf.Suppress
    fields = [
        (field.name, hidden[field.type], dataclasses.field(default=field.default))
        for field in dataclasses.fields(flags)  # type: ignore[arg-type]
        if field.name in names
    ]
    shown = dataclasses.make_dataclass(flags.__name__, fields, bases=(flags,), frozen=True)
    return tyro.conf.configure(tyro.conf.DisallowNone)(shown)


EVAL_EPISODES = 100


# The help of a flag is the text below it. Long texts are joined from strings, as tyro keeps the line breaks of a docstring.
@tyro.conf.configure(tyro.conf.DisallowNone)
@dataclasses.dataclass(frozen=True)
class TrainFlags:
    """Options of a training run."""

    env_steps: int
    """environment steps to train for, over all environments"""
    num_envs: int
    """number of copies of the environment"""
    seed: int = 0
    """seed of all randomness"""
    seeds: int = 1
    """number of seeds to train, from --seed on: in parallel in the compiled loop, else one after another"""
    run_dir: Annotated[Path | None, default_hint("runs/ALGO-ENV-SEED-TIME-PID", "PATH")] = None
    """run directory; must be new or empty"""
    preset: Annotated[Path | None, default_hint("none", "FILE")] = None
    """TOML file with values of these flags, such as best.toml of a study; overrides the preset of ALGO and ENV, as flags do"""
    loop: Literal["auto", "compiled", "host", "distributed", "asynchronous"] = "auto"
    (
        "compiled: agent and environment as one program, for environments in JAX; host: the environment steps in Python; "
        "distributed: the environment steps in --workers processes; asynchronous: the workers push gradients (A3C)"
    )
    workers: Annotated[int | None, default_hint("none: the environments step in this process", "INT")] = None
    """number of processes over which the environments are split equally; needs polyak[ray]"""
    lag: int = 0
    """maximum age of a rollout's policy in updates: 0 waits for each update, 1 collects while the agent learns"""
    shared_optimizer: bool = True
    """in the asynchronous loop: use one optimizer for the gradients of all workers, instead of one per worker"""
    max_staleness: Annotated[int | None, default_hint("any", "INT")] = None
    """in the asynchronous loop: drop gradients for weights that are older than this many steps"""
    ray_address: Annotated[str | None, default_hint("this machine", "ADDRESS")] = None
    """Ray cluster for the workers or learners; auto finds the cluster of this machine"""
    worker_timeout: float = 60.0
    """maximum seconds of a rollout, after which its worker is replaced"""
    worker_start_timeout: float = 300.0
    """maximum seconds of a worker's start, after which the start is retried"""
    worker_restarts: int = 100
    """maximum number of worker restarts, after which training ends with an error"""
    on_env_error: Literal["raise", "restart"] = "raise"
    (
        "raise: an exception of an environment in a worker ends training; restart: the worker starts new episodes, which "
        "counts as a restart"
    )
    min_workers: Annotated[int | None, default_hint("all", "INT")] = None
    """continue without failing workers while at least this many workers are left; lost environments have weight 0"""
    learners: int = 1
    (
        "number of processes that train together in the compiled loop, over which --devices are split; if one dies, all "
        "restart from the newest checkpoint"
    )
    devices: Annotated[
        int | None,
        default_hint("two cores for rollouts of images on the host and for 64 or more JAX environments; else one", "INT"),
    ] = None
    """number of devices (on a CPU: cores) over which the environments are split"""
    data: Annotated[str | None, default_hint("none", "DATA")] = None
    """with --env-steps: data set that stays beside the replay, from which a share of each batch is drawn"""
    data_share: float = 0.5
    """share of --data in each batch"""
    replay_on: Literal["device", "host"] = "device"
    """memory of the agent's replay: the training device, or the host (not in the compiled loop)"""
    eval_episodes: int = EVAL_EPISODES
    """number of episodes of the evaluation after training; 0 skips the evaluation"""
    eval_max_steps: int = 1_000_000
    """maximum number of steps of each environment, after which an unfinished evaluation is skipped"""
    report_every: Annotated[int | None, default_hint("a hundredth of all, or a shorter interval that is set", "INT")] = None
    """env_steps between reports"""
    eval_every: Annotated[int | None, default_hint("only at the end", "INT")] = None
    """env_steps between evaluations of the greedy policy during training; the best checkpoint is kept in best/"""
    video_every: Annotated[int | None, default_hint("none", "INT")] = None
    """env_steps between videos of the greedy policy, in videos/ of the run; needs polyak[video]"""
    track: Annotated[TrackerName | None, default_hint("none", "{wandb,mlflow,trackio,tensorboard}")] = None
    """tracker that logs settings, metrics, videos and checkpoints; needs polyak[TRACKER]"""
    checkpoint_every: Annotated[int | None, default_hint("a tenth of all, at most 100,000", "INT")] = None
    """env_steps between checkpoints, which are saved at reports"""
    checkpoint_replay: bool = True
    """save the agent's replay in checkpoints; without it, a resumed run refills the replay before learning, and is not exact"""
    action_scaling: Annotated[
        Literal["clip", "rescale"] | None, default_hint("what the algorithm needs, else clip", "{clip,rescale}")
    ] = None
    """clip Box actions to the bounds, or rescale them to the bounds from [-1, 1]"""
    compilation_cache: bool = True
    """keep compiled programs in the user's cache directory, which shortens later starts"""


def parse_settings(flag: str, words: Sequence[str]) -> dict[str, bool | int | float | str]:
    """Parse `frameskip=2 episodic_life=False xml_file=mine.xml`.

    Raises:
        UsageError: there is no word, a word is not `NAME=VALUE`, a value is not finite, or a name is repeated.
    """
    expected = f"{flag} takes NAME=VALUE, each name once, a value being a finite number, True, False or a text; got"
    if not words:
        raise UsageError(f"{expected} nothing")
    settings: dict[str, bool | int | float | str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        value = parse_value(text)
        if not (name.isidentifier() and equals) or value is None or name in settings:
            raise UsageError(f"{expected} {word!r}")
        settings[name] = value
    return settings


def print_usage(text: str, arguments: Sequence[str]) -> int:
    """Print the usage of a command, to stdout if `--help` asks for it, else to stderr; returns the exit code."""
    is_help = bool(arguments) and arguments[0] in ("-h", "--help")
    print(f"usage: {text}", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


def print_note(text: str) -> None:
    """Print a note to stderr."""
    print(f"note: {text}", file=sys.stderr)


def fail(message: object, code: int = 2) -> int:
    """Print an error; returns the exit code."""
    # The user of the command line has not called `polyak.envs.make`.
    print(f"error: {escape_control(str(message).removeprefix('make: '))}", file=sys.stderr)
    return code
