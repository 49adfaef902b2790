"""Reads the source of an agent's class without an import, which would import JAX and take most of a second."""

import ast
import functools
import importlib.util
from pathlib import Path

import polyak


def agent_summary(agent: str) -> str:
    """Return the first line of the docstring of a `"module:Class"`."""
    return (ast.get_docstring(class_source(agent)) or "").partition("\n")[0]


def class_sources(agent: str) -> list[ast.ClassDef]:
    """Return the definitions of a `"module:Class"` and of its bases, in method resolution order.

    A base is found in the same module, in the module from which it is imported by name, also through a package, or as
    `polyak.SAC`. A base that is not found is skipped: its fields are no flags.

    Raises:
        ImportError: there is no such module, or the module defines no such class.
    """
    order: list[ast.ClassDef] = []
    visited: set[ast.ClassDef] = set()

    def visit(module: str, node: ast.ClassDef) -> None:
        if node in visited:
            return
        visited.add(node)
        for base in reversed(node.bases):
            if (found := _find_base(module, node, ast.unparse(base))) is not None:
                visit(*found)
        order.append(node)

    visit(agent.partition(":")[0], class_source(agent))
    return order[::-1]


def class_source(agent: str) -> ast.ClassDef:
    """Return the definition of a `"module:Class"`.

    Raises:
        ImportError: there is no such module, or it defines no such class.
    """
    module, _, name = agent.partition(":")
    for node in _tree_of(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ImportError(f"the module {module!r} defines no class {name!r}")


def takes_sequences(agent: str) -> bool:
    """Return the class variable `takes_sequences` of a `"module:Class"`; False without one."""
    for node in (node for declaration in class_sources(agent) for node in declaration.body):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if "takes_sequences" in map(ast.unparse, targets):
            return ast.unparse(node).endswith("True")
    return False


def _find_base(module: str, node: ast.ClassDef, base: str) -> tuple[str, ast.ClassDef] | None:
    """The module and the definition of a base of a class."""
    if base.startswith("polyak."):
        return _find_class("polyak", base.removeprefix("polyak."), frozenset())
    for other in _tree_of(module).body:
        if isinstance(other, ast.ClassDef) and other.name == base and other is not node:
            return module, other
    return _find_import(module, base, frozenset())


def _find_class(module: str, name: str, visited: frozenset[tuple[str, str]]) -> tuple[str, ast.ClassDef] | None:
    """Find the module and the definition of a class that a module defines or imports."""
    if module == "polyak":
        module = next((f"polyak.{inner}" for inner, names in polyak._MODULES.items() if name in names), module)
    if (module, name) in visited:
        return None
    try:
        return module, class_source(f"{module}:{name}")
    except ImportError:
        return _find_import(module, name, visited | {(module, name)})


def _find_import(module: str, name: str, visited: frozenset[tuple[str, str]]) -> tuple[str, ast.ClassDef] | None:
    try:
        body = _tree_of(module).body
    except ImportError:
        return None
    for node in (node for node in body if isinstance(node, ast.ImportFrom)):
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return _find_class(_imported_module(module, node), alias.name, visited)
    return None


def _imported_module(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module in a `from ... import` of a module."""
    if not node.level:
        return node.module or ""
    found = importlib.util.find_spec(module)
    is_package = found is not None and found.submodule_search_locations is not None
    package = module if is_package else module.rpartition(".")[0]
    return importlib.util.resolve_name("." * node.level + (node.module or ""), package)


@functools.cache
def _tree_of(module: str) -> ast.Module:
    """Parse the syntax tree of a module.

    Raises:
        ImportError: there is no such module, or the module has no Python source.
    """
    found = importlib.util.find_spec(module) if module else None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise ModuleNotFoundError(f"no module {module!r}, which should hold an agent", name=module)
    return ast.parse(Path(found.origin).read_text("utf-8"))
