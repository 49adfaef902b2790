"""The source of an agent's class, read without importing it: that would start JAX, which takes most of a second."""

import ast
import functools
import importlib.util
from pathlib import Path

import polyak


def agent_summary(agent: str) -> str:
    """The first line of the docstring of a `"module:Class"`."""
    return (ast.get_docstring(class_source(agent)) or "").partition("\n")[0]


def class_sources(agent: str) -> list[ast.ClassDef]:
    """The definitions of a `"module:Class"` and of its bases, in the order in which Python looks up their attributes.

    A base is found if it stands in the same module, or is imported by name from another one or as `polyak.SAC`.

    Raises:
        ImportError: as of `class_source`.
    """
    module, _, _ = agent.partition(":")
    declaration = class_source(agent)
    homes = _imports(module)
    names = [ast.unparse(base) for base in declaration.bases]
    of_bases = [source for name in names if name in homes for source in class_sources(f"{homes[name]}:{name.split('.')[-1]}")]
    # A class comes before its bases, also where it is a base of several.
    ordered = {source: None for source in reversed(of_bases)}
    return [declaration, *reversed(ordered)]


@functools.cache
def _imports(module: str) -> dict[str, str]:
    """The modules of the names that a module defines or imports, and of all names of `polyak`, such as `polyak.SAC`."""
    public = {name: f"polyak.{inner}" for inner, names in polyak._MODULES.items() for name in names}
    homes = {f"polyak.{name}": home for name, home in public.items()}
    for node in _tree_of(module).body:
        if isinstance(node, ast.ClassDef):
            homes[node.name] = module
        elif isinstance(node, ast.ImportFrom) and node.module == "polyak":
            homes |= {alias.name: public[alias.name] for alias in node.names if alias.name in public}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level and node.module != "abc":
            homes |= {alias.name: node.module for alias in node.names if alias.asname is None}
    return homes


@functools.cache
def _tree_of(module: str) -> ast.Module:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no module {module!r}, which should hold an agent", name=module)
    return ast.parse(Path(found.origin).read_text("utf-8"))


@functools.cache
def class_source(agent: str) -> ast.ClassDef:
    """The definition of a `"module:Class"`.

    Raises:
        ImportError: there is no such module, or it defines no such class.
    """
    module, _, name = agent.partition(":")
    for node in _tree_of(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ImportError(f"the module {module!r} defines no class {name!r}")
