"""The space of a study: the settings that vary, each with its range or its list of values."""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from polyak.agents import AGENTS, agent_class
from polyak.core.suggestions import unknown_name
from polyak.networks.feedforward import MLP
from polyak.presets.preset import LinearOverTraining, parse_schedule
from polyak.presets.spaces import SPACES
from polyak.storage.toml_files import NONE, read_toml

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

NETWORK_SETTINGS = ("hidden", "activation")
"""Settings of the group `[network]`; they apply to every network of the agent."""

RND = "rnd"
"""Group of the settings of `polyak.RND` around the agent; in a study and in its best settings they are `rnd_NAME`."""

PARTS = (
    "spec", "network", "actor", "critics", "replay", "optimizer", "actor_obs", "critic_obs", "agent", "value", "random_network",
    "optimistic_actor",
)  # fmt: skip
"""Fields of agents that are objects."""

FLOAT_MAX = sys.float_info.max

SCHEDULE = "linear:"
"""Beginning of the text of a schedule."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers if both are, as `read_space` makes them for settings of integers.

    Attributes:
        low: the least number.
        high: the greatest number.
        log: draw the logarithm uniformly.
    """

    low: float
    high: float
    log: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest number."""
        return self.low, self.high

    @property
    def is_ordered(self) -> bool:
        """True: numbers have an order."""
        return True

    def distribution(self) -> "BaseDistribution":
        """Return Optuna's distribution."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def encode(self, value: Any) -> float:
        """Return the number that Optuna knows for a value.

        Raises:
            ValueError: the value is outside of the range.
        """
        is_integer = isinstance(self.low, int) and isinstance(self.high, int)
        if type(value) not in ((int,) if is_integer else (int, float)) or not self.low <= value <= self.high:
            raise ValueError(f"must be a number in [{self.low}, {self.high}], got {value!r:.80}")
        number: float = value
        return number

    def decode(self, number: Any) -> Any:
        """Return the value of a number of Optuna's."""
        return number

    def to_unit(self, number: float) -> float:
        """Return the position of a number in [0, 1]."""
        low, high, x = (math.log(v) if self.log else v for v in (self.low, self.high, number))
        return (x - low) / (high - low)

    def from_unit(self, position: float) -> float:
        """Return the number at a position in [0, 1]."""
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        x = low + position * (high - low)
        x = min(max(math.exp(x) if self.log else x, self.low), self.high)
        return round(x) if isinstance(self.low, int) and isinstance(self.high, int) else x

    def __str__(self) -> str:
        return f"{self.low} to {self.high}{' (log)' if self.log else ''}"


@dataclass(frozen=True)
class Choices:
    """Several values, which Optuna knows by their positions; increasing numbers are drawn as ordered positions.

    Attributes:
        values: the values.
    """

    values: tuple[Any, ...]

    @property
    def bounds(self) -> tuple[Any, ...]:
        """All values."""
        return self.values

    @property
    def is_ordered(self) -> bool:
        """True if the values are increasing numbers."""
        are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)
        return are_numbers and list(self.values) == sorted(self.values)

    def distribution(self) -> "BaseDistribution":
        """Return Optuna's distribution, of positions."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        last = len(self.values) - 1
        return IntDistribution(0, last) if self.is_ordered else CategoricalDistribution(range(last + 1))

    def encode(self, value: Any) -> int:
        """Return the position of a value.

        Raises:
            ValueError: it is not among the values.
        """
        texts = [json.dumps(one) for one in self.values]
        if json.dumps(value) not in texts:
            raise ValueError(f"must be one of {list(self.values)}, got {value!r:.80}")
        return texts.index(json.dumps(value))

    def decode(self, number: Any) -> Any:
        """Return the value at a position."""
        return self.values[number]

    def to_unit(self, number: float) -> float:
        """Return the middle of the part of [0, 1] that belongs to a position."""
        return (number + 0.5) / len(self.values)

    def from_unit(self, position: float) -> float:
        """Return the position to which a part of [0, 1] belongs."""
        return min(int(position * len(self.values)), len(self.values) - 1)

    def __str__(self) -> str:
        return " | ".join("None" if value is None else str(value).replace(" ", "") for value in self.values)


Dimension: TypeAlias = Range | Choices
Space: TypeAlias = Mapping[str, Dimension]


def read_space(algorithm: str, source: str | os.PathLike[str] | Mapping[str, Any]) -> Space:
    """Return the space in a TOML file or a mapping, or, for `"preset"`, the space of the algorithm that polyak ships.

    Each number at an end of a range and each value of a list is checked by the agent's own rule for the setting.

    Raises:
        ValueError: the file cannot be read, a setting is unknown, or its values are invalid.
    """
    if algorithm not in AGENTS:
        raise ValueError(unknown_name(algorithm, AGENTS, "algorithm"))
    if isinstance(source, Mapping):
        name, table = "space", dict(source)
    elif os.fspath(source) == "preset" and algorithm not in SPACES:
        raise ValueError(f"study: there is no space of {algorithm}; pass a TOML file, or use one of {', '.join(SPACES)}")
    elif os.fspath(source) == "preset":
        name, table = "space", dict(SPACES[algorithm])
    else:
        name, table = str(source), read_toml(Path(source))
    fields_of: dict[str, Mapping[str, Any]] = {"network": dict.fromkeys(NETWORK_SETTINGS), RND: _fields(RND)}
    space: dict[str, Dimension] = {}
    for key, value in table.items():
        is_group = key in fields_of and isinstance(value, Mapping)
        for setting, values in (value if is_group else {key: value}).items():
            known = fields_of[key] if is_group else _fields(algorithm)
            if setting not in known:
                hint = f"; {setting} belongs to the group [network]" if setting in NETWORK_SETTINGS else ""
                raise ValueError(f"{name}: {unknown_name(setting, known, 'setting')}{hint}")
            field = known[setting]
            dimension = _parse(f"{name}: {setting}", values)
            if isinstance(dimension, Range) and not (field is not None and takes_integers(field)):
                dimension = Range(float(dimension.low), float(dimension.high), dimension.log)
            _check_bounds(name, field, setting, dimension)
            space[f"{RND}_{setting}" if is_group and key == RND else setting] = dimension
    if not space:
        raise ValueError(f"{name}: must have at least one setting, got none")
    return space


def _fields(agent: str) -> dict[str, Any]:
    """The fields of an agent that a study can draw, by name."""
    return {field.name: field for field in dataclasses.fields(agent_class(agent)) if field.name not in PARTS}


def of_rnd(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the group `[rnd]`, by their names in `polyak.RND`."""
    return {name.removeprefix(f"{RND}_"): value for name, value in settings.items() if name.startswith(f"{RND}_")}


def takes_integers(field: Any) -> bool:
    """Return True for a field of an agent that is an integer or None."""
    return field.type in (int, int | None, "int", "int | None")


def typed(value: Any) -> Any:
    """Return the value of a setting for an agent: schedules for their texts, and tuples for lists."""
    if isinstance(value, str) and value.startswith(SCHEDULE):
        return parse_schedule(value)
    return tuple(value) if isinstance(value, list) else value


def to_json(space: Space) -> dict[str, Any]:
    """Return a space as JSON data."""
    return {name: dataclasses.asdict(values) for name, values in space.items()}


def _check_bounds(owner: str, field: Any, name: str, dimension: Dimension) -> None:
    """Check the ends or the values of a dimension as the agent does.

    Raises:
        ValueError: the agent would reject one of them.
    """
    check = None if field is None else field.metadata.get("check")
    try:
        for value in map(typed, dimension.bounds):
            if field is None:
                MLP(**{name: value})
            elif check is not None and not isinstance(value, LinearOverTraining):
                check(owner, name, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: {str(error).removeprefix(f'{owner}: ')}") from None


def _parse(name: str, values: Any) -> Dimension:
    if isinstance(values, Sequence) and not isinstance(values, str):
        return _parse_choices(name, [None if value == NONE else value for value in values])
    if not isinstance(values, Mapping) or not {"low", "high"} <= values.keys() <= {"low", "high", "log"}:
        raise ValueError(f"{name} must be a list of values or {{low = ..., high = ..., log = false}}, got {values!r:.80}")
    low, high, log = values["low"], values["high"], values.get("log", False)
    for bound in (low, high):
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not -FLOAT_MAX <= bound <= FLOAT_MAX:
            raise ValueError(f"{name}: low and high must be finite numbers, got {bound!r:.80}")
    if not isinstance(log, bool):
        raise ValueError(f"{name}: log must be true or false, got {log!r:.80}")
    if low >= high:
        raise ValueError(f"{name}: low must be below high, got low={low}, high={high}")
    if log and low <= 0:
        raise ValueError(f"{name}: low must be above 0 with log = true, got {low}")
    return Range(low, high, log)


def _parse_choices(name: str, values: list[Any]) -> Choices:
    try:
        texts = {json.dumps(value, allow_nan=False) for value in values}
    except (TypeError, ValueError):
        raise ValueError(f"{name} must have finite numbers, texts, booleans or lists of these, got {values!r:.80}") from None
    if not values:
        raise ValueError(f"{name} must have at least one value, got []")
    if len(texts) < len(values):
        raise ValueError(f"{name} must have different values, got {values!r:.80}")
    return Choices(tuple(values))
