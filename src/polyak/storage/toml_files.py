"""TOML files of settings: spaces of studies, and presets of `polyak train --preset`."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyak.storage.files import read_bytes, write_file

MAX_BYTES = 2**20

NONE = "None"
"""Text of None, which TOML lacks; flags have the same."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; tables that group settings, such as `[network]`, stay nested.

    Raises:
        ValueError: the file is missing, cannot be read, is no TOML, or is empty.
    """
    try:
        values = tomllib.loads(read_bytes(path, limit=MAX_BYTES).decode())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: must be a TOML file: {error}") from None
    if not values:
        raise ValueError(f"{path}: must have at least one setting, got none")
    return values


def write_toml(path: Path, values: Mapping[str, Any], comment: str) -> None:
    """Replace a file atomically by numbers, texts, booleans, None and lists of these, after a comment of one line."""
    lines = [f"# {comment}", *(f"{name} = {_to_toml(value)}" for name, value in values.items())]
    write_file(path, ("\n".join(lines) + "\n").encode())


def _to_toml(value: Any) -> str:
    # Texts of JSON are texts of TOML but for pairs of surrogates.
    return json.dumps(NONE if value is None else value, ensure_ascii=False, allow_nan=False)
