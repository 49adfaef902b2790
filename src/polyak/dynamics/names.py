"""The names of other libraries' environments, read from their source: importing the libraries takes seconds."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

from polyak.core.suggestions import unknown_name

# Fails in its first step, as it indexes a scalar reward (gymnax 0.0.9).
BROKEN = ("SimpleBandit-bsuite",)


def gymnax_names() -> list[str]:
    """The names of gymnax's environments. Empty if it is not installed."""
    # The second name is that of gymnax 1.0.
    found = _assigned("gymnax", "registration.py", ("registered_envs", "_BUILTIN_ENV_IDS"))
    return [name for node in found for name in ast.literal_eval(node) if name not in BROKEN]


def brax_names() -> list[str]:
    """The names of Brax's environments. Empty if it is not installed."""
    return [ast.literal_eval(key) for node in _assigned("brax", "envs/__init__.py", ("_envs",)) for key in node.keys]


def jumanji_names() -> list[str]:
    """The names of Jumanji's environments. Empty if it is not installed."""
    calls = [node.value for node in _source("jumanji", "__init__.py") if isinstance(node, ast.Expr)]
    ids = [k.value for call in calls if isinstance(call, ast.Call) for k in call.keywords if k.arg == "id"]
    return sorted(ast.literal_eval(id) for id in ids)


def playground_names() -> list[str]:
    """The names of MuJoCo Playground's environments. Empty if it is not installed."""
    suites = ("dm_control_suite", "locomotion", "manipulation")
    found = [node for suite in suites for node in _assigned("mujoco_playground", f"_src/{suite}/__init__.py", ("_envs",))]
    return [ast.literal_eval(key) for node in found for key in node.keys]


def check_name(library: str, name: str, known: list[str]) -> None:
    """Check that a library has the environment.

    Raises:
        ValueError: it has none of this name.
    """
    if name not in known:
        raise ValueError(f"make: {unknown_name(f'{library}/{name}', [f'{library}/{each}' for each in known], 'environment')}")


def _source(package: str, file: str) -> list[ast.stmt]:
    """The statements of a package's file; none if it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return []
    return ast.parse((Path(found.origin).parent / file).read_text("utf-8")).body


def _assigned(package: str, file: str, names: tuple[str, ...]) -> list[Any]:
    """The literals that a file assigns to one of the names."""
    return [
        node.value
        for node in _source(package, file)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.List | ast.Dict)
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) in names
    ]
