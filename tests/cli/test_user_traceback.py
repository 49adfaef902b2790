"""Which frames of a traceback are a person's own."""

import functools
import sysconfig
from pathlib import Path

import numpy as np

import polyak
from polyak.cli import user_traceback
from polyak.cli.user_traceback import is_user_code, print_user_traceback


def test_files_of_polyak_and_of_installed_libraries_are_not_ones_own():
    package = Path(polyak.__file__).parent
    assert is_user_code(__file__)
    for name in (f"{package}/cli/user_code.py", np.__file__, f"{sysconfig.get_path('stdlib')}/json/decoder.py", "<string>"):
        assert not is_user_code(name)


def test_a_package_whose_name_begins_with_polyak_is_ones_own(monkeypatch):
    monkeypatch.setattr(user_traceback, "LIBRARIES", ("/home/me/polyak/",))
    assert is_user_code("/home/me/polyak_envs/mine.py") and not is_user_code("/home/me/polyak/envs/mine.py")


def test_each_error_of_a_chain_begins_at_ones_own_frame(capsys):
    def fail(_):
        try:
            np.zeros(2).reshape(3)
        except ValueError as error:
            raise KeyError("mine") from error

    try:
        functools.reduce(lambda _, x: np.apply_along_axis(fail, 0, x), [np.ones(1), np.ones(1)])
    except KeyError as error:
        error.__traceback__ = error.__traceback__.tb_next.tb_next  # into NumPy, which calls `fail`
        print_user_traceback(error)
    err = capsys.readouterr().err
    assert "cannot reshape" in err and err.rstrip().endswith("KeyError: 'mine'")
    first, second = (part.splitlines()[1] for part in err.split("Traceback (most recent call last):")[1:])
    assert "in fail" in first and "in fail" in second
