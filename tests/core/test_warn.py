import inspect
import warnings

from polyak.core.warn import warn


def function_of(module, source, **names):
    """The function `f` of a module of that name."""
    namespace = {"__name__": module, **names}
    exec(source, namespace)
    return namespace["f"]


def test_a_warning_points_at_the_line_that_called_the_package():
    inner = function_of("polyak.storage.inner", "def f():\n    warn('careful')", warn=warn)
    theirs = function_of("callbacks_of_a_user", "def f():\n    inner()", inner=inner)
    outer = function_of("polyak.train.outer", "def f():\n    theirs()", theirs=theirs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        outer()
        theirs()
    assert [(str(one.message), one.category, one.filename) for one in caught] == [
        ("careful", UserWarning, __file__),
        ("careful", UserWarning, "<string>"),
    ]
    assert caught[0].lineno == line
