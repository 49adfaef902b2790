"""Parameters of a test that the quick tests run, and the others, which only the slow tests run."""

import pytest


def quick(*names, of):
    """Parameters for `pytest.mark.parametrize`: these names are quick, the others of `of` are slow.

    Args:
        of: all names, or a dict from their names to the parameters' values.
    """
    values = of if isinstance(of, dict) else {name: name for name in of}
    assert set(names) <= set(values), "a quick parameter that the test does not have"
    return [pytest.param(value, id=name, marks=() if name in names else pytest.mark.slow) for name, value in values.items()]
