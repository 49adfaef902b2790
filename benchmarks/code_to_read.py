"""How much code there is to read to understand an algorithm from end to end, and how large the rooms are.

Run `python benchmarks/code_to_read.py`. Counted are lines of code (no docstrings, comments, blank lines or imports) of the
functions, methods and constants that an agent's `init`, `policy`, `collect_policy`, `update` and `diagnose` reach by name, in
three columns:

- mathematics: not followed is what stands behind an interface that a reader knows: `core` (spaces and types), networks,
  policies, kernels (each equal to a plain function), distributions, schedules, and `ops/updates`, whose
  `soft_update(online, target, tau)` stands where the peers call Optax; nor protocols, which have no code; nor what an algorithm
  works without: checks of inputs, histograms, normalization, options of the replay, workers, and gradients accumulated in the
  copies, which no agent does;
- with options: those are followed;
- everything: so are the interfaces and the checks.
"""

import argparse
import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1] / "src" / "polyak"
INTERFACES = ("core", "networks", "policies", "kernels", "ops/distributions", "ops/schedules", "ops/updates")
NOT_THE_ALGORITHM = (
    "copies/accumulated",
    "learning/check_rollout",
    "learning/histograms",
    "learning/normalizers",
    "learning/prefill",
    "learning/recurrent_replay",
    "replay/prioritized",
    "replay/frames",
    "replay/check_rows",
    "replay/drawn",
    "replay/sequences",
)
COLUMNS = ("mathematics", "with options", "everything")
ENTRIES = ("init", "policy", "collect_policy", "update", "diagnose")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Part: TypeAlias = tuple[str, str]
"""A module, such as `ops/losses`, and a name in it: `value_loss`, or `Guard.init`."""


@functools.cache
def source(module: str) -> tuple[str, ast.Module]:
    text = (ROOT / f"{module}.py").read_text()
    return text, ast.parse(text)


@functools.cache
def code_lines(file: Path) -> frozenset[int]:
    """The numbers of the lines with code on them."""
    text = file.read_text()
    documented = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Module, ast.ClassDef, *FUNCTIONS))]
    docstrings = [node.body[0] for node in documented if ast.get_docstring(node) is not None]
    is_docstring = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in no_code]
    return frozenset(line for token in tokens for line in range(token.start[0], token.end[0] + 1)) - is_docstring


def is_followed(module: str, name: str, column: str) -> bool:
    if column == "everything":
        return True
    is_check = name.rpartition(".")[2].lstrip("_").startswith("check_")
    is_option = column == "mathematics" and module in NOT_THE_ALGORITHM
    return not (module.startswith(INTERFACES) or is_option or is_check)


def is_defined(module: str, name: str) -> bool:
    return (ROOT / f"{module}.py").exists() and name in definitions(module)


@functools.cache
def definitions(module: str) -> dict[str, tuple[ast.AST, ...]]:
    """By name: functions, constants, and classes without their methods, which stand under `Class.method`."""
    found: dict[str, tuple[ast.AST, ...]] = {}
    for node in source(module)[1].body:
        if isinstance(node, FUNCTIONS):
            found[node.name] = (node,)
        elif isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, FUNCTIONS)]
            rest = [child for child in node.body if child not in methods]
            if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
                found |= {f"{node.name}.{method.name}": (method,) for method in methods}
            found[node.name] = (*node.decorator_list, *node.bases, *rest)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: (node,) for target in targets if isinstance(target, ast.Name)}
    return found


@functools.cache
def imports(module: str) -> dict[str, Part]:
    """What the names that a module imports from polyak stand for; an imported module has the name ``."""
    found: dict[str, Part] = {}
    for node in ast.walk(source(module)[1]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "polyak":
            home = "/".join((node.module or "").split(".")[1:])
            for alias in node.names:
                inner = f"{home}/{alias.name}" if home else alias.name
                is_module = (ROOT / f"{inner}.py").exists()
                found[alias.asname or alias.name] = (inner, "") if is_module else (home, alias.name)
    return found


def uses(module: str, name: str) -> Iterator[Part]:
    """What the definition of a name uses: names by themselves, and attributes as `("", attribute)`."""
    known, here = imports(module), definitions(module)
    for node in (inner for part in here[name] for inner in ast.walk(part)):
        if isinstance(node, ast.Name) and node.id in here:
            yield module, node.id
        elif isinstance(node, ast.Name) and node.id in known:
            yield known[node.id]
        elif isinstance(node, ast.Attribute):
            value = node.value
            if isinstance(value, ast.Name) and known.get(value.id, ("", "-"))[1] == "":
                yield known[value.id][0], node.attr
            yield "", node.attr


def reached(module: str, agent: str, column: str) -> set[Part]:
    """Everything that is read, from the agent's methods on."""
    found: set[Part] = set()
    attributes = set(ENTRIES)  # also those of bases
    waiting: list[Part] = [(module, agent), *((module, f"{agent}.{entry}") for entry in ENTRIES)]
    while waiting:
        home, name = waiting.pop()
        if home == "":
            attributes.add(name)
        elif (
            (home, name) not in found
            and is_followed(home, name, column)
            and (ROOT / f"{home}.py").exists()
            and name in definitions(home)
        ):
            found.add((home, name))
            waiting += uses(home, name)
        if not waiting:
            # Methods of the classes that were reached, by the names of attributes that are used somewhere.
            classes = {(home, name) for home, name in found if "." not in name}
            methods = [
                (home, method)
                for home in {home for home, _ in classes}
                for method in definitions(home)
                if (home, method.partition(".")[0]) in classes and method.partition(".")[2] in attributes
            ]
            waiting = [part for part in methods if part not in found and is_followed(*part, column)]
    return found


def lines_to_read(module: str, agent: str, column: str) -> dict[str, int]:
    """Lines of code by file, in one of `COLUMNS`."""
    lines: dict[str, set[int]] = {}
    for home, name in reached(module, agent, column):
        code = code_lines(ROOT / f"{home}.py")
        numbers = lines.setdefault(home, set())
        for node in definitions(home)[name]:
            numbers |= code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    return {home: len(numbers) for home, numbers in sorted(lines.items(), key=lambda item: -len(item[1]))}


def rooms() -> dict[str, tuple[int, int]]:
    """Files and lines of code (imports included) of each room, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0]
        files, lines = found.get(room, (0, 0))
        found[room] = files + 1, lines + len(code_lines(file))
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Code to read to understand an algorithm, and the sizes of the rooms.")
    parser.add_argument("--module", default="agents/ppo")
    parser.add_argument("--agent", default="PPO")
    arguments = parser.parse_args()
    for column in COLUMNS:
        by_file = lines_to_read(arguments.module, arguments.agent, column)
        print(f"{arguments.agent}, {column}: {len(by_file)} files, {sum(by_file.values())} lines of code")
        if column == "mathematics":
            for home, lines in by_file.items():
                print(f"  {home:28} {lines:5}")
    sizes = rooms()
    total = sum(lines for _, lines in sizes.values())
    print(f"\npolyak: {sum(files for files, _ in sizes.values())} files, {total} lines of code")
    for room, (files, lines) in sizes.items():
        print(f"  {room:28} {files:3} files {lines:6} {lines / total:6.1%}")


if __name__ == "__main__":
    main()
