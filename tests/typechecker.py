"""The run-time shape checker of the tests: beartype, on the functions of polyak whose signatures have shapes."""

import inspect
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

# An int is accepted for a float, as by static type checkers.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))

_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Check the shapes in the signatures of polyak, but for functions within functions and constructors.

    Functions within functions would be prepared anew at each call. The arrays of a struct have more axes than its fields say
    where the struct holds a sequence or a batch. Signatures without shapes are left to mypy, which sees no value that comes
    from an `Any`: to check them too, importing polyak takes twice as long, and so does tracing a program.
    """
    jaxtyping.jaxtyped = _check_signatures_with_shapes
    jaxtyping.install_import_hook("polyak", "tests.typechecker.check")


def _check_signatures_with_shapes(*, typechecker):
    checked = _jaxtyped(typechecker=typechecker)

    def decorate(decorated):
        is_local = "<locals>" in getattr(decorated, "__qualname__", "")
        return checked(decorated) if not is_local and _has_shapes(decorated) else decorated

    return decorate


def _has_shapes(decorated):
    return inspect.isfunction(decorated) and any(map(_has_shape, decorated.__annotations__.values()))


def _has_shape(annotation):
    is_array = inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or any(map(_has_shape, typing.get_args(annotation)))
