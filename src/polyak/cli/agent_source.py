"""The source of an agent's class, read without importing it: that would start JAX, which takes most of a second."""

import ast
import functools
import importlib.util
from pathlib import Path


def agent_summary(agent: str) -> str:
    """The first line of the docstring of a `"module:Class"`."""
    return (ast.get_docstring(class_source(agent)) or "").partition("\n")[0]


@functools.cache
def class_source(agent: str) -> ast.ClassDef:
    """The definition of a `"module:Class"`.

    Raises:
        ImportError: there is no such module, or it defines no such class.
    """
    module, _, name = agent.partition(":")
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no module {module!r}, which should hold the agent {name!r}", name=module)
    for node in ast.parse(Path(found.origin).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ImportError(f"the module {module!r} defines no class {name!r}")
