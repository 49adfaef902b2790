"""From a command line to values: tyro, with the flags of an agent taken from its fields."""

import contextlib
import dataclasses
import math
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from polyak.core.types import Scalar
from polyak.networks.layers import Activation
from polyak.ops.schedules import Linear, Schedule

T = TypeVar("T")


class UsageError(Exception):
    """The command line is wrong: what was got, what was wanted."""


def parse(kind: type[T], arguments: Sequence[str], *, prog: str, description: str) -> T:
    """An instance of `kind` from the arguments. Wrong ones leave with exit code 2, after one message with the nearest flag.

    Raises:
        UsageError: a flag is given twice.
    """
    flags = [_canonical(argument) for argument in arguments if argument.startswith("--")]
    twice = sorted({flag for flag in flags if flags.count(flag) > 1})
    if twice:
        raise UsageError(f"{', '.join(twice)} is given more than once")
    # Every flag has its docstring; comments would be looked for in whole files, which takes a third of the time.
    how = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
    return tyro.cli(kind, args=list(arguments), prog=prog, description=description, config=how)


def _canonical(argument: str) -> str:
    """The flag that an argument sets: `--num_envs=8` is `--num-envs`, `--no-normalize-obs` is `--normalize-obs`."""
    return "--" + argument.split("=")[0].removeprefix("--").replace("_", "-").removeprefix("no-")


PRESET = "the preset's, else found from the spaces"


def by_default(what: str, metavar: str) -> Any:
    """How help names the default of a flag that is None until the rest is known."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {what})")


@dataclasses.dataclass(frozen=True)
class NetworkFlags:
    """The built-in network."""

    hidden: Annotated[tuple[int, ...] | None, by_default(PRESET, "INT [INT ...]")] = None
    """Widths of the dense layers."""
    activation: Annotated[Activation | None, by_default(PRESET, "{tanh,relu,elu,gelu,silu}")] = None
    """Between the layers."""
    shared_torso: Annotated[bool | None, by_default(PRESET, "{True,False}")] = None
    """Actor and critic share all but the last layer."""
    log_std: Annotated[float | None, by_default(PRESET, "FLOAT")] = None
    """Initial logarithm of the standard deviation of Box actions."""
    squash_mean: Annotated[bool | None, by_default(PRESET, "{True,False}")] = None
    """The mean of Box actions goes through tanh into their bounds."""
    value_hidden: Annotated[tuple[int, ...] | None, by_default(PRESET, "INT [INT ...]")] = None
    """Widths of the critic's dense layers, where they are others than the actor's."""
    value_activation: Annotated[Activation | None, by_default(PRESET, "{tanh,relu,elu,gelu,silu}")] = None
    """Between the critic's layers, where it is another than between the actor's."""

    def given(self) -> dict[str, Any]:
        """Those that were given."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}


@dataclasses.dataclass(frozen=True)
class LinearText:
    """`linear:START` or `linear:START:END`, before it is known how long the training is."""

    start: Scalar
    end: Scalar = 0.0


def agent_flags(agent_class: type, defaults: Mapping[str, Any]) -> type:
    """A dataclass with one flag for each field of the agent that is a number or a switch, with these defaults."""
    hints = typing.get_type_hints(agent_class)
    described = _attribute_texts(agent_class.__doc__ or "")
    fields = []
    for field in dataclasses.fields(agent_class):
        if field.name in ("spec", "network"):
            continue
        kind = _flag_type(hints[field.name])
        default = _as_text(defaults.get(field.name, field.default))
        help_text = described.get(field.name, "")
        fields.append((field.name, Annotated[kind, tyro.conf.arg(help=help_text)], dataclasses.field(default=default)))
    return dataclasses.make_dataclass(f"{agent_class.__name__}Flags", fields, frozen=True)


def with_horizon(value: Any, env_steps: int) -> Any:
    """A flag's value for the agent: a schedule gets the length of the training."""
    return Linear(value.start, value.end, env_steps) if isinstance(value, LinearText) else value


def numbers_by_name(flag: str, words: Sequence[str]) -> dict[str, bool | int | float]:
    """What `frameskip=2 episodic_life=False` says.

    Raises:
        UsageError: there is no word, one has another form or is not finite, or a name comes twice.
    """
    wanted = f"{flag} takes NAME=VALUE, each name once, a value being a finite number, True or False; got"
    if not words:
        raise UsageError(f"{wanted} nothing")
    settings: dict[str, bool | int | float] = {}
    for word in words:
        name, equals, text = word.partition("=")
        value = _number_or_switch(text)
        if not (name.isidentifier() and equals) or value is None or name in settings:
            raise UsageError(f"{wanted} {word!r}")
        settings[name] = value
    return settings


def _number_or_switch(text: str) -> bool | int | float | None:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            return None if isinstance(value, float) and not math.isfinite(value) else value
    return None


def _as_text(value: Any) -> Any:
    return LinearText(value.start, value.end) if isinstance(value, Linear) else value


def _flag_type(hint: Any) -> Any:
    if hint in (Schedule, Schedule | None):
        return Annotated[Any, OPTIONAL_SCHEDULE if hint == Schedule | None else SCHEDULE]
    if hint == Scalar:
        return float
    if hint == Scalar | None:
        return float | None
    return hint


def _schedule(words: list[str]) -> Any:
    """A number, or `linear:START[:END]`."""
    name, *numbers = words[0].split(":")
    if not numbers:
        return float(name)
    ends = [float(number) for number in numbers]
    if name != "linear" or len(ends) > 2 or not all(map(math.isfinite, ends)):
        raise ValueError(f"a schedule is a number or linear:START[:END], got {words[0]!r}")
    return LinearText(*ends)


def _schedule_words(value: Any) -> list[str]:
    if not isinstance(value, LinearText):
        return [str(value)]
    return [f"linear:{value.start:g}" + (f":{value.end:g}" if value.end else "")]


SCHEDULE: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="FLOAT|linear:START[:END]",
    instance_from_str=_schedule,
    is_instance=lambda value: isinstance(value, float | int | LinearText),
    str_from_instance=_schedule_words,
)


OPTIONAL_SCHEDULE: PrimitiveConstructorSpec[Any] = dataclasses.replace(
    SCHEDULE,
    metavar="{None}|FLOAT|linear:START[:END]",
    instance_from_str=lambda words: None if words == ["None"] else _schedule(words),
    is_instance=lambda value: value is None or isinstance(value, float | int | LinearText),
)


def _attribute_texts(docstring: str) -> dict[str, str]:
    """The one-line descriptions under `Attributes:` of a docstring."""
    lines = iter(docstring.splitlines())
    texts: dict[str, str] = {}
    for line in lines:
        if line.strip() == "Attributes:":
            break
    for line in lines:
        name, colon, text = line.strip().partition(": ")
        if not line.strip() or line.startswith("    Raises"):
            break
        if colon and name.isidentifier():
            texts[name] = text
        elif texts:
            last = next(reversed(texts))
            texts[last] += " " + line.strip()
    return texts


def usage(text: str, arguments: Sequence[str]) -> int:
    """Print how a command is used, because it was asked for or because it was not known; the exit code to leave with."""
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    print(f"usage: {text}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def fail(message: object, code: int = 2) -> int:
    """Print the error, and the exit code to leave with."""
    print(f"error: {message}", file=sys.stderr)
    return code
