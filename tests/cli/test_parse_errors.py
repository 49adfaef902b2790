"""Errors of tyro as one sentence, as they are printed in a terminal, with colors and a frame, and elsewhere."""

import os
import sys

import pytest

from polyak.cli.parse_errors import ParseError, one_sentence

FRAMED = """\x1b[31m╭─ Value error ──────────────────────────────────────╮\x1b[0m
\x1b[31m│\x1b[0m \x1b[91;1mError\x1b[0m\x1b[91;1m parsing\x1b[0m --num-envs: must be an integer, got '8,5' \x1b[31m│\x1b[0m
│ ────────────────────────────────────────────────── │
│ Argument helptext:                                 │
│     --num-envs INT                                 │
╰────────────────────────────────────────────────────╯
"""
PLAIN = """Missing argument
 ------------------------------------------------------------
  Missing value for argument '-o/--output'. Expected 1 values.
  -----------------------------------------------------------
  For full helptext, run polyak export r --help
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (FRAMED, "--num-envs: must be an integer, got '8,5'"),
        (PLAIN, "--output needs a value"),
        ("A title\n Another error,\n of two lines.\n", "Another error, of two lines."),
    ],
)
def test_an_error_is_one_sentence_without_frame_and_colors(text, sentence):
    with pytest.raises(ParseError) as error, one_sentence():
        print(text, file=sys.stderr)
        sys.exit(2)
    assert str(error.value) == sentence


@pytest.mark.parametrize("columns", [None, "70"])
def test_warnings_and_the_width_of_the_terminal_stay(columns, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    with one_sentence():
        print("warning: old", file=sys.stderr)
    assert capsys.readouterr().err == "warning: old\n" and os.environ.get("COLUMNS") == columns
    with pytest.raises(KeyError), one_sentence():
        print("warning: old", file=sys.stderr)
        raise KeyError
    assert capsys.readouterr().err == "warning: old\n"
    with pytest.raises(SystemExit), one_sentence():
        sys.exit(0)
