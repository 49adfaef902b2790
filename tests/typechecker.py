"""The run-time type checker of the tests: beartype, with an int where a float is asked for, as type checkers have it."""

import inspect

import jaxtyping
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))

_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Check the signatures of polyak, but for functions within functions and the constructors of structs.

    The first would be prepared anew at each call of the outer function, which took two thirds of the time of all tests. The
    arrays of a struct have more axes than it says where it holds a sequence or a batch of them.
    """
    jaxtyping.jaxtyped = _jaxtyped_at_top
    jaxtyping.install_import_hook("polyak", "tests.typechecker.check")


def _jaxtyped_at_top(*, typechecker):
    checked = _jaxtyped(typechecker=typechecker)

    def decorate(decorated):
        is_local = "<locals>" in getattr(decorated, "__qualname__", "")
        is_struct = inspect.isclass(decorated) and "__wrapped__" in getattr(decorated.__init__, "__dict__", {})
        return decorated if is_local or is_struct else checked(decorated)

    return decorate
