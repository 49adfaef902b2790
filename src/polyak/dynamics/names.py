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
    return sorted(_registered("jumanji", "__init__.py"))


def playground_names() -> list[str]:
    """The names of MuJoCo Playground's environments. Empty if it is not installed."""
    suites = ("dm_control_suite", "locomotion", "manipulation")
    found = [node for suite in suites for node in _assigned("mujoco_playground", f"_src/{suite}/__init__.py", ("_envs",))]
    return [ast.literal_eval(key) for node in found for key in node.keys]


def craftax_names() -> list[str]:
    """The names of Craftax's environments, which `make` creates without autoreset. Empty if it is not installed."""
    texts = {getattr(node, "value", None) for part in _source("craftax", "craftax_env.py") for node in ast.walk(part)}
    return sorted(str(text) for text in texts if str(text).endswith("-v1") and "AutoReset" not in str(text))


def navix_names() -> list[str]:
    """The names of NAVIX's environments. Empty if it is not installed."""
    return _registered("navix", "environments/*.py")


def xminigrid_names() -> list[str]:
    """The names of XLand-MiniGrid's environments. Empty if it is not installed."""
    return _registered("xminigrid", "__init__.py")


def pgx_names() -> list[str]:
    """The names of Pgx' games of one player. Empty if it is not installed."""
    literals = [node.value for node in _source("pgx", "core.py") if isinstance(node, ast.Assign)]
    games = [ast.literal_eval(node.slice) for node in literals if isinstance(node, ast.Subscript)]
    return [name for names in games for name in names if name == "2048" or name.startswith("minatar-")]


def check_name(library: str, name: str, known: list[str]) -> None:
    """Check that a library has the environment.

    Raises:
        ValueError: it has none of this name.
    """
    if name not in known:
        raise ValueError(f"make: {unknown_name(f'{library}/{name}', [f'{library}/{each}' for each in known], 'environment')}")


def _source(package: str, pattern: str) -> list[ast.stmt]:
    """The statements of the files of a package that match a pattern; none if it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return []
    files = sorted(Path(found.origin).parent.glob(pattern))
    return [statement for file in files for statement in ast.parse(file.read_text("utf-8")).body]


def _registered(package: str, pattern: str) -> list[str]:
    """The names that calls in a package's files register, as the argument `id` or the first one."""
    values = [node.value for node in _source(package, pattern) if isinstance(node, ast.Expr)]
    calls = [call for call in values if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("register")]
    ids = [[k.value for k in call.keywords if k.arg == "id"] or call.args[:1] for call in calls]
    return [ast.literal_eval(id) for (id,) in ids]


def _assigned(package: str, file: str, names: tuple[str, ...]) -> list[Any]:
    """The literals that a file assigns to one of the names."""
    return [
        node.value
        for node in _source(package, file)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.List | ast.Dict)
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) in names
    ]
