"""Flags from the fields of an agent's class, read from its source: an import would import JAX, which takes most of a second.

A field is a flag if its type is `bool`, `int`, `float`, `str`, `Scalar`, `Schedule`, a `Literal`, or a union of these or with
None, and its default is a literal. Other fields are set in Python.
"""

import ast
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from polyak.cli.agent_source import class_sources
from polyak.cli.flags import flag_of, set_flags
from polyak.core.docstrings import attribute_texts
from polyak.presets.preset import LINEAR, LinearOverTraining, parse_schedule


def agent_flags(agent: str, defaults: Mapping[str, Any], others: Collection[str] = (), *, prefix: str = "") -> type:
    """Create a dataclass with a flag for each field of `agent`, a `"module:Class"`.

    Args:
        others: names of other flags; fields with these names are set in Python.
        prefix: beginning of the name of each flag.
    """
    texts: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for declaration in class_sources(agent):
        texts = attribute_texts(ast.get_docstring(declaration) or "") | texts
        for name, node in _declared(declaration).items():
            kind, default = _flag_type(ast.unparse(node.annotation)), _default(node.value)
            if kind is not None and default is not dataclasses.MISSING and name not in {*fields, *others}:
                fields[name] = kind, defaults.get(name, default)
    described = [
        (prefix + name, Annotated[kind, tyro.conf.arg(help=texts.get(name, ""))], dataclasses.field(default=default))
        for name, (kind, default) in fields.items()
    ]
    return dataclasses.make_dataclass("AgentFlags", described, frozen=True)


def explicit_settings(flags: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings of an `agent_flags` object that arguments set, also those set to their defaults."""
    given = set_flags(arguments)
    values = {f.name: (getattr(flags, f.name), f.default) for f in dataclasses.fields(flags)}
    return {name: x for name, (x, default) in values.items() if x != default or flag_of(f"--{name}") in given}


def setting_names(agent: str) -> list[str]:
    """Return the names of all fields of a `"module:Class"`."""
    return list({name: None for declaration in class_sources(agent) for name in _declared(declaration)})


def _declared(declaration: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    """Return the fields that a class declares, or whose default it changes."""
    nodes = [node for node in declaration.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    fields = {node.target.id: node for node in nodes if isinstance(node.target, ast.Name)}
    return {name: node for name, node in fields.items() if "ClassVar" not in ast.unparse(node.annotation)}


def _default(node: ast.expr | None) -> Any:
    """Return the default of a field, `= 1` or `= integer(default=1)`; MISSING without a default, or if it is no literal."""
    if isinstance(node, ast.Call):
        node = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
    try:
        return dataclasses.MISSING if node is None else ast.literal_eval(node)
    except ValueError:
        return dataclasses.MISSING


def _flag_type(annotation: str) -> Any:
    """Return the type that tyro parses for the annotation of a field; None if the field cannot be a flag."""
    if annotation in FLAG_TYPES:
        return FLAG_TYPES[annotation]
    if annotation.startswith("Literal[") and annotation.endswith("]"):
        return cast(Any, Literal)[ast.literal_eval(annotation.removeprefix("Literal[").removesuffix("]") + ",")]
    *first, last = annotation.split(" | ")
    if not first:
        return None
    kinds = _flag_type(" | ".join(first)), type(None) if last == "None" else _flag_type(last)
    return None if None in kinds else kinds[0] | kinds[1]


def _format_schedule(value: Any) -> list[str]:
    if not isinstance(value, LinearOverTraining):
        return [str(value)]
    if value.fraction != 1:
        return [f"linear:{value.start:g}:{value.end:g}:{value.fraction:g}"]
    return [f"linear:{value.start:g}" + (f":{value.end:g}" if value.end else "")]


SCHEDULE: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
    nargs=1,
    metavar=f"FLOAT|{LINEAR}",
    instance_from_str=lambda words: parse_schedule(words[0]),
    is_instance=lambda value: isinstance(value, float | int | LinearOverTraining),
    str_from_instance=_format_schedule,
)
FLAG_TYPES: dict[str, Any] = {
    "Entries": tuple[str, ...],
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "Scalar": float,
    "Schedule": Annotated[Any, SCHEDULE],
}
