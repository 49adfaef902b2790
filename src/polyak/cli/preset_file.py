"""`polyak train --preset FILE`: values of flags from a TOML file."""

from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_origin

from polyak.cli.flags import UsageError, field_names, field_types, set_flags
from polyak.cli.user_flags import UserFlags
from polyak.core.suggestions import unknown_name

OF_THE_COMMAND_LINE = {"preset", "run_dir", "ray_address", "track", *field_names(UserFlags)}
"""Flags that a file cannot set: they name code, places and machines, and a file only changes numbers."""


def flags_from(file: str, kind: Any, arguments: Sequence[str]) -> list[str]:
    """Return the arguments for the values in a file, without the flags that are among `arguments`.

    Args:
        file: a TOML file of numbers, texts, booleans and lists by name; the group `[network]` has the flags of the network.
        kind: the dataclass of the flags.
        arguments: the command line.

    Raises:
        UsageError: the file cannot be read, or a name or a value is not one of a flag.
    """
    from polyak.storage.toml_files import read_toml

    try:
        values = read_toml(file)
    except ValueError as error:
        raise UsageError(f"--preset {error}") from None
    network = values.pop("network", {}) if isinstance(values.get("network"), dict) else {}
    if twice := sorted(values.keys() & network.keys()):
        raise UsageError(f"--preset {file}: {twice[0]} is set twice, at the top and in [network]")
    types = field_types(kind)
    known = [name for name in types if name not in OF_THE_COMMAND_LINE]
    given, found = set_flags(arguments), list[str]()
    for name, value in (values | network).items():
        if name not in known:
            raise UsageError(f"--preset {file}: {unknown_name(name, known, 'setting')}")
        flag = f"--{name.replace('_', '-')}"
        if flag in given:
            continue
        options = set(get_args(types[name]) or [types[name]])
        if isinstance(value, bool) and bool in options:
            found.append(flag if value else f"--no-{flag.removeprefix('--')}")
            continue
        if isinstance(value, bool) or options <= {bool, NoneType}:
            wanted = "must not be" if isinstance(value, bool) else "must be"
            raise UsageError(f"--preset {file}: {name} {wanted} true or false, got {value!r:.80}")
        items = value if isinstance(value, list) else [value]
        # A list is several arguments, of which none may be a flag.
        is_flag = len(items) > 1 and any(str(item).startswith("-") for item in items)
        has_no_list = len(items) > 1 and not any(get_origin(option) is tuple for option in (types[name], *options))
        if not items or is_flag or has_no_list or not all(isinstance(item, str | int | float) for item in items):
            wanted = "a number or a text" if has_no_list else "a number, a text, a boolean or a list"
            raise UsageError(f"--preset {file}: {name} must be {wanted}, got {value!r:.80}")
        # One argument, so that a negative number is no flag.
        found += [f"{flag}={items[0]}"] if len(items) == 1 else [flag, *map(str, items)]
    return found
