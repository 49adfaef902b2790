"""polyak train ALGO ENV: parses the flags before JAX is imported, so that --help and usage errors appear at once."""

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from polyak.agents import AGENTS
from polyak.cli.agent_flags import agent_flags, explicit_settings, setting_names
from polyak.cli.agent_source import class_source
from polyak.cli.flags import TrainFlags, UsageError, fail, parse, print_usage
from polyak.cli.imports import find_modules_here
from polyak.cli.intrinsic_flags import GROUP, intrinsic_flags, intrinsic_flags_in_help
from polyak.cli.network_flags import NetworkFlags, network_flags_in_help
from polyak.cli.preset_file import flags_from
from polyak.cli.replay_flags import ReplayFlags, replay_flags_in_help
from polyak.cli.user_flags import UserFlags, UserGroup
from polyak.core.suggestions import unknown_name
from polyak.presets import Preset, preset

HELP = {"-h", "--help"}

PLACEHOLDER = "ENV"
"""Stands for the environment in help without one; it has no preset, so the algorithm's defaults are shown."""


def train(arguments: list[str], *, is_own_process: bool = False) -> int:
    """Run the command; returns the exit code.

    Args:
        is_own_process: no other code runs in this process.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        names = f"ALGO: {', '.join(AGENTS)}; ENV: see `polyak list`."
        user = "User-defined code in place of ALGO or ENV: --agent MODULE:NAME, --env MODULE:NAME."
        data = "From a data set: polyak train ALGO [ENV] --data DATA, where ENV is for evaluation; with --env-steps, from both."
        shows = "`polyak train ppo CartPole-v1 --help` shows every flag."
        text = f"polyak train ALGO ENV [flags]\n\n{names}\n{user}\n{data}\n{shows}"
        return print_usage(text, arguments)
    given = {word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}
    collects = given & {"--env-steps", "--data-share"}
    if collects and {"--data", "--gradient-steps"} <= given:
        return fail(f"{min(collects)} collects steps beside --data, --gradient-steps trains on the data alone; remove one")
    if "--data" in given and not collects:
        with without_garbage_collection(is_own_process=is_own_process):
            from polyak.cli.offline import train_on_data
        return train_on_data(arguments, _algorithms_with)
    arguments = _move_user_flags_last(arguments)
    user_agent, user_env = _value_of("--agent", arguments), _value_of("--env", arguments)
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    words, rest = arguments[:count], arguments[count:]
    for flag, value, name in (("--agent", user_agent, "ALGO"), ("--env", user_env, "ENV")):
        if value is not None and len(words) > (user_agent is None) + (user_env is None):
            return fail(f"{flag} {value} takes the place of {name}; got {' '.join(words)} too")
    algorithm = None if user_agent else words.pop(0) if words else None
    if algorithm is None and user_agent is None:
        return fail("an algorithm is missing, e.g.: polyak train ppo CartPole-v1, or --agent MODULE:NAME for your own")
    algorithm = algorithm and algorithm.lower()
    if algorithm is not None and algorithm not in AGENTS:
        meant = words[0].lower() if words else "ppo"
        hint = f"; the algorithm comes first: polyak train {meant} {arguments[0]}" if meant in AGENTS else ""
        return fail(unknown_name(arguments[0], AGENTS, "algorithm") + hint)
    env_id = user_env if user_env else words.pop(0) if words else None
    if env_id is None and HELP & set(rest):
        env_id = PLACEHOLDER
    if env_id is None and "--data" in given:
        return fail(f"{min(collects)} needs an environment; without it, --gradient-steps trains on the data alone")
    if env_id is None:
        first, behind = (algorithm, "the flags") if algorithm else ("--agent MODULE:NAME", "the other flags")
        return fail(f"an environment is missing; it comes before {behind}: polyak train {first} CartPole-v1")
    try:
        flags, settings, intrinsic = _parse(algorithm, user_agent, env_id, [*words, *rest])
    except UsageError as error:
        return fail(error)
    try:
        with without_garbage_collection(is_own_process=is_own_process):
            from polyak.cli.new_run import train_new_run
    except ValueError as error:  # JAX's, about an environment variable such as JAX_ENABLE_X64
        return fail(error)

    network, replay = vars(flags).get("network", NetworkFlags()), vars(flags).get("replay", ReplayFlags())
    return train_new_run(algorithm or "", env_id, flags.training, flags.user, settings, network, replay, intrinsic)


@contextmanager
def without_garbage_collection(*, is_own_process: bool) -> Iterator[None]:
    """Disable the garbage collector during an import; in a process of the command, also exempt the imported objects for good.

    Modules are never freed, so collecting their objects is useless, and takes 0.3 s of the first five seconds, during the
    import and while programs are traced.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_own_process:
            gc.freeze()
        if was_enabled:
            gc.enable()


def _move_user_flags_last(arguments: list[str]) -> list[str]:
    """Move `--agent A --env E` from the beginning to the end, so that the other arguments begin with names."""
    count = 0
    while arguments[count : count + 1] in (["--agent"], ["--env"]):
        count += 2
    return [*arguments[count:], *arguments[:count]]


def _value_of(flag: str, arguments: list[str]) -> str | None:
    """Return the value of a flag on which the set of flags depends."""
    for i, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else next(iter(arguments[i + 1 :]), None)
    return None


def _defaults(preset: Preset) -> TrainFlags:
    return TrainFlags(preset.env_steps, preset.num_envs, loop=preset.loop, workers=preset.workers)


def _is_class(user_agent: str) -> bool:
    """Return True if `--agent` names a class: its settings are flags, the settings of a function's agent are not."""
    find_modules_here()
    try:
        return bool(class_source(user_agent))
    except (ImportError, ValueError, SyntaxError):
        return False


def _algorithms_with(name: str) -> list[str]:
    return [algorithm for algorithm, source in AGENTS.items() if name in setting_names(source)]


def _parse(
    algorithm: str | None, user_agent: str | None, env_id: str, arguments: list[str]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the flags, the settings of the agent that are set, and the flags of an intrinsic reward that are set."""
    defaults = preset(algorithm or "", env_id)
    groups: list[Any] = [
        ("training", TrainFlags, dataclasses.field(default=_defaults(defaults))),
        ("user", UserGroup, dataclasses.field(default=UserFlags())),
    ]
    source = AGENTS[algorithm] if algorithm else user_agent if user_agent and _is_class(user_agent) else None
    # Only help hides flags: an error can then say why the algorithm rejects a flag.
    is_help = bool(HELP & set(arguments))
    intrinsic = intrinsic_flags_in_help(algorithm) if is_help else intrinsic_flags()
    if source:
        kinds: tuple[Any, ...] = (TrainFlags, UserFlags, NetworkFlags, ReplayFlags, intrinsic)
        others = [field.name for kind in kinds for field in dataclasses.fields(kind)]
        agent = agent_flags(source, defaults.values, others)
        network = network_flags_in_help(source) if is_help else NetworkFlags
        replay = replay_flags_in_help(source) if is_help else ReplayFlags
        groups += [
            ("algorithm", agent, dataclasses.field(default_factory=agent)),
            ("network", network, dataclasses.field(default_factory=network)),
            ("replay", replay, dataclasses.field(default_factory=replay)),
        ]
    groups.append(("intrinsic", Annotated[intrinsic, GROUP], dataclasses.field(default_factory=intrinsic)))
    name = algorithm or "a user-defined agent"
    description = f"Train {name} in {env_id}. Defaults: {defaults.source}."
    if env_id == PLACEHOLDER:
        description += " An environment's name in place of ENV shows its preset, if it has one (`polyak list`)."
    prog = f"polyak train {algorithm or '--agent MODULE:NAME'} {env_id}"
    kind = dataclasses.make_dataclass("Flags", groups)
    if (file := _value_of("--preset", arguments)) is not None:
        arguments = [*arguments, *flags_from(file, kind, arguments)]
    flags: Any = parse(kind, arguments, prog=prog, description=description, owners=_algorithms_with)
    settings = explicit_settings(flags.algorithm, arguments) if source else {}
    return flags, settings, explicit_settings(flags.intrinsic, arguments)
