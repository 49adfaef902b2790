"""The run-time shape checker of the tests: beartype, on the functions of polyak whose signatures have shapes."""

import inspect
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

# An int is accepted for a float, as by static type checkers.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))

_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Check the shapes in the signatures of polyak, but for functions within functions and the constructors of structs.

    Functions within functions would be prepared anew at each call. The arrays of a struct have more axes than its fields say
    where the struct holds a sequence or a batch. Types without shapes are mypy's: with them, importing polyak takes twice as
    long, and so does tracing a program.
    """
    jaxtyping.jaxtyped = _jaxtyped_where_shapes_are
    jaxtyping.install_import_hook("polyak", "tests.typechecker.check")


def _jaxtyped_where_shapes_are(*, typechecker):
    checked = _jaxtyped(typechecker=typechecker)

    def decorate(decorated):
        is_local = "<locals>" in getattr(decorated, "__qualname__", "")
        return checked(decorated) if not is_local and _has_shapes_in_signature(decorated) else decorated

    return decorate


def _has_shapes_in_signature(decorated):
    if isinstance(decorated, property):
        return _has_shapes_in_signature(decorated.fget)
    function = inspect.unwrap(getattr(decorated, "__func__", decorated))
    return inspect.isfunction(function) and any(map(_has_shape, function.__annotations__.values()))


def _has_shape(annotation):
    is_array = inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or any(map(_has_shape, typing.get_args(annotation)))
