"""A griffe extension for the API reference: doctests become code blocks, and jaxtyping's shapes stay as they are written."""

import ast
import re
from typing import Any

import griffe

# A prompt and the lines after it, up to the next empty line.
DOCTEST = re.compile(r"^( *)(>>> .*(?:\n(?! *$).*)*)", re.MULTILINE)
SHAPE = re.compile(r"\[\w+, '")


class ApiReference(griffe.Extension):
    """Adapts docstrings and annotations."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put each doctest of a docstring into a fenced block."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", obj.docstring.value)

    def on_function_instance(self, *, node: Any, func: griffe.Function, **kwargs: Any) -> None:
        """Keep `Float[Array, "T *B"]`, which griffe would show as a product."""
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            if argument.annotation is not None and SHAPE.search(text := ast.unparse(argument.annotation)):
                func.parameters[argument.arg].annotation = text.replace("'", '"')
        if node.returns is not None and SHAPE.search(text := ast.unparse(node.returns)):
            func.returns = text.replace("'", '"')
