"""A griffe extension for the API reference.

Doctests become code blocks, jaxtyping's shapes stay as they are written, an entry for several arguments becomes one for each,
and the attributes of settings, the inherited ones too, state their defaults.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import griffe

from polyak.core.docstrings import with_inherited

# A prompt and the lines after it, up to the next empty line.
DOCTEST = re.compile(r"^( *)(>>> .*(?:\n(?! *$).*)*)", re.MULTILINE)
SHAPE = re.compile(r"\[\w+, '")
# A section of a docstring, and an entry of it: a name or several, and the text with its continuation lines.
SECTION = re.compile(r"^(?:Args|Attributes):\n(?: +.*(?:\n|\Z))+", re.MULTILINE)
ENTRY = re.compile(r"^ {4}((?:\*{0,2}\w+)(?:, \w+)*): (.*(?:\n {5,}.*)*)", re.MULTILINE)
FIELDS = ("choice", "dataclasses.field", "field", "integer", "number", "setting", "static")


class ApiReference(griffe.Extension):
    """Adapts docstrings and annotations."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put each doctest of a docstring into a fenced block, and split entries such as `low, high: the bounds`."""
        if obj.docstring is not None:
            text = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value)
            obj.docstring.value = in_entries(text, one_by_one)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Add the inherited attributes to a class, and append its default to each attribute."""
        for cls in classes_of(pkg):
            if cls.docstring is not None and (bases := bases_of(cls)):
                texts = [base.docstring.value for base in bases if base.docstring is not None]
                names = [name for kind in (cls, *bases) for name in defaults_of(kind)]
                cls.docstring.value = with_inherited(cls.docstring.value, texts, dict.fromkeys(names), indent=4)
        for cls in classes_of(pkg):
            if cls.docstring is not None:
                defaults = {name: x for kind in (*reversed(bases_of(cls)), cls) for name, x in defaults_of(kind).items()}

                def with_default(name: str, text: str, defaults: dict[str, str] = defaults) -> list[tuple[str, str]]:
                    if name not in defaults:
                        return [(name, text)]
                    return [(name, f"{text.rstrip('.')}. Default: `{defaults[name]}`.")]

                cls.docstring.value = in_entries(cls.docstring.value, with_default)

    def on_function_instance(self, *, node: Any, func: griffe.Function, **kwargs: Any) -> None:
        """Keep `Float[Array, "T *B"]`, which griffe would show as a product, and show fields that are keyword arguments."""
        if any(ast.unparse(decorator).startswith("runs_") for decorator in node.decorator_list):
            func.parameters["fields"].kind = griffe.ParameterKind.var_keyword
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            if argument.annotation is not None and SHAPE.search(text := ast.unparse(argument.annotation)):
                func.parameters[argument.arg].annotation = text.replace("'", '"')
        if node.returns is not None and SHAPE.search(text := ast.unparse(node.returns)):
            func.returns = text.replace("'", '"')

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Keep the shapes of fields and properties too."""
        annotation = getattr(node, "returns" if isinstance(node, ast.FunctionDef) else "annotation", None)
        if annotation is not None and SHAPE.search(text := ast.unparse(annotation)):
            attr.annotation = text.replace("'", '"')


def in_entries(docstring: str, change: Callable[[str, str], list[tuple[str, str]]]) -> str:
    """The docstring with each entry of its arguments or attributes replaced by those that `change(names, text)` returns."""

    def entry(match: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {text}" for name, text in change(match[1], match[2]))

    return SECTION.sub(lambda section: ENTRY.sub(entry, section[0]), docstring)


def one_by_one(names: str, text: str) -> list[tuple[str, str]]:
    """The entries of several names: the text stands at the first, to which the others refer."""
    first, *others = names.split(", ")
    return [(first, text), *((name, f"see `{first}`.") for name in others)]


def classes_of(module: griffe.Module) -> Iterator[griffe.Class]:
    """The classes that are defined in a package, in its modules and theirs."""
    for member in module.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from classes_of(member)


def bases_of(cls: griffe.Class) -> list[griffe.Class]:
    """The bases of a class in this package, the nearest first."""
    try:
        return [base for base in cls.mro() if base.path.startswith("polyak.")]
    except ValueError:  # bases of elsewhere, which are not loaded
        return []


def defaults_of(cls: griffe.Class) -> dict[str, str]:
    """The defaults of a class's fields, as they stand in its source: of `gamma: float = number(default=0.99)` it is 0.99."""
    defaults = {}
    for name, member in cls.members.items():
        value = member.value if isinstance(member, griffe.Attribute) else None
        if isinstance(value, griffe.ExprCall) and str(value.function) in FIELDS:
            options = {
                argument.name: argument.value for argument in value.arguments if isinstance(argument, griffe.ExprKeyword)
            }
            value = options.get("default")
        if value is not None:
            defaults[name] = str(value)
    return defaults
