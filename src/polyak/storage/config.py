"""Settings to and from JSON: frozen dataclasses by class name, built only from classes that the caller allows."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple
from polyak.core.suggestions import unknown_name
from polyak.storage.json import decode, encode, reject

AS_AGENT = "as agent= (--agent in a shell)"

SPEC_CLASSES: dict[str, type] = {cls.__name__: cls for cls in (EnvSpec, Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple)}
"""Classes that the spaces in a file may use, by name."""


class ConfigError(ValueError):
    """A configuration cannot be read; the message has the path, the value, and the expected value."""


def to_json(obj: Any, *, on_unknown: Literal["error", "describe"] = "error") -> Any:
    """Convert settings to JSON data: `{"$class": "PPO", "gamma": 0.99, "spec": {"$class": "EnvSpec", ...}}`.

    Structs and other frozen dataclasses are written field by field under their class's name, plain data as in
    `polyak.storage.json` (scalar JAX arrays as numbers; what JSON lacks under a tag such as `{"$float": "nan"}`).

    Args:
        on_unknown: handling of an object that cannot be written (a function, for example): an error, or a description
            `{"$unsupported": "<function ...>"}`, which `from_json` rejects by name.

    Raises:
        TypeError: an object cannot be written; the message has the path of its field.

    >>> from polyak.core.spaces import Discrete
    >>> to_json({"action": Discrete(3), "seed": 1})
    {'action': {'$class': 'Discrete', 'n': 3, 'start': 0}, 'seed': 1}
    """

    def object_to_json(value: Any, path: str) -> Any:
        if _is_settings(value):
            fields = [field.name for field in dataclasses.fields(value) if _is_stored(field)]
            parts = {name: encode(getattr(value, name), f"{path}.{name}", object_to_json) for name in fields}
            return {"$class": type(value).__name__, **parts}
        return {"$unsupported": repr(value)[:200]} if on_unknown == "describe" else reject(value, path)

    return encode(obj, type(obj).__name__, object_to_json)


def from_json(data: Any, classes: Mapping[str, type], *, what: str = "config") -> Any:
    """Create the object that `to_json` wrote; only the given classes are built, and no name is imported.

    Args:
        data: JSON data from `to_json` or a file.
        classes: the dataclasses that may be built, by name.
        what: name of the data in errors, such as a file name.

    Raises:
        ConfigError: the data are malformed, a class is not in `classes`, a field does not exist (the message suggests the
            nearest), or a constructor fails.

    >>> from polyak.core.spaces import Discrete
    >>> from_json({"$class": "Discrete", "n": 3}, {"Discrete": Discrete})
    Discrete(n=3, start=0)
    """

    def object_from_json(content: dict[str, Any], path: str) -> Any:
        if "$unsupported" in content:
            described = str(content["$unsupported"])[:200]
            advice = f"rebuild it in Python and pass it again {AS_AGENT}"
            raise ConfigError(f"{path}: {described} could not be stored with the run; {advice}")
        return _build(content, path, classes)

    try:
        return decode(data, what, object_from_json)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(error)) from None


def _is_settings(value: Any) -> bool:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return bool(type(value).__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _is_stored(field: Any) -> bool:
    """Return False for a field that the object or its environment sets, such as the function of a reward."""
    return bool(field.init and field.metadata.get("stored", True))


def _build(content: dict[str, Any], path: str, classes: Mapping[str, type]) -> Any:
    name = content["$class"]
    if not isinstance(name, str) or name not in classes:
        raise ConfigError(f"{path}: unknown class name {str(name)[:80]!r}; pass a user-defined agent again {AS_AGENT}")
    cls = classes[name]
    known = tuple(field.name for field in dataclasses.fields(cls) if _is_stored(field))
    values = {key: value for key, value in content.items() if key != "$class"}
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: {name}: {unknown_name(key[:80], known, 'field')}")
    for field in dataclasses.fields(cls):
        if field.type is bool and not isinstance(values.get(field.name, False), bool | np.bool_):
            raise ConfigError(f"{path}.{field.name}: must be true or false, got {values[field.name]!r:.80}")
    try:
        return cls(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {error}") from None
