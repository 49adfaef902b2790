import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyak.storage.files import (
    MAX_DEPTH,
    append,
    dump_json,
    new_file,
    open_regular,
    parse_json,
    read_bytes,
    write_file,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(), part, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_json_survives_a_round_trip(value):
    assert parse_json(dump_json(value, "x"), "x") == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"NaN", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"1e400", "too large"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested more than 64 deep"),
        (b"[" * 1_000_000, "nested more than 64 deep"),
        (b'{"a":' * 200_000, "nested more than 64 deep"),
        (b"9" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"1 2", "not valid JSON"),
    ],
)
def test_loose_or_hostile_json_is_an_error_that_names_the_file(text, reason):
    with pytest.raises(ValueError, match=reason) as error:
        parse_json(text, "config.json")
    assert str(error.value).startswith("config.json: ")


def test_brackets_inside_strings_do_not_count_as_depth():
    value = {"[" * 200: "\\" + '"' + "{" * 200}
    assert parse_json(dump_json(value, "x"), "x") == value


def test_json_that_could_not_be_read_back_is_not_written():
    deep = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(ValueError, match=r"x\.json: nested more"):
        dump_json(deep, "x.json")
    with pytest.raises(ValueError, match=r"x\.json: cannot be written as JSON"):
        dump_json([float("nan")], "x.json")
    with pytest.raises(TypeError, match=r"x\.json: .* set is not JSON"):
        dump_json({1}, "x.json")


def test_only_plain_files_are_read(tmp_path):
    (tmp_path / "plain").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "plain", limit=4) == b"data"
    with pytest.raises(ValueError, match="link is a symbolic link"):
        open_regular(tmp_path / "link")
    with pytest.raises(ValueError, match="pipe is not a plain file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a plain file"):
        open_regular(tmp_path)
    with pytest.raises(ValueError, match="4 bytes; at most 3 are read"):
        read_bytes(tmp_path / "plain", limit=3)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", limit=3)


def test_new_files_are_for_their_owner_and_never_through_a_link(tmp_path):
    old = os.umask(0)
    try:
        write_file(tmp_path / "a", b"x")
        append(tmp_path / "b", b"x")
    finally:
        os.umask(old)
    assert [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in "ab"] == [0o600, 0o600]
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        append(tmp_path / "link", b"more")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "a").read_bytes() == b"x", "the link was followed"
    with pytest.raises(FileExistsError), new_file(tmp_path / "a"):
        pass


def test_a_full_disk_leaves_the_old_file_and_nothing_aside(tmp_path, full_disk):
    path = tmp_path / "a"
    write_file(path, b"old")
    with full_disk(1000), pytest.raises(OSError, match="too large"):
        write_file(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_append_writes_all_or_nothing(tmp_path, full_disk):
    path = tmp_path / "a"
    append(path, b"x" * 900)
    with full_disk(1000), pytest.raises(OSError, match="too large"):
        append(path, b"y" * 200)
    assert path.read_bytes() == b"x" * 900
    append(path, b"z")
    assert path.read_bytes() == b"x" * 900 + b"z"


def test_two_writers_of_one_file_never_put_an_unfinished_one_in_place(tmp_path, monkeypatch):
    path, replace = tmp_path / "a", os.replace

    def second_writer_begins(aside, place):
        monkeypatch.setattr(os, "replace", failing)
        with pytest.raises(OSError, match="killed"):
            write_file(path, b"unfinished", shared=True)
        replace(aside, place)

    def failing(aside, place):
        raise OSError("killed")

    monkeypatch.setattr(os, "replace", second_writer_begins)
    write_file(path, b"whole", shared=True)
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["a"]


def test_write_succeeds_after_a_killed_write(tmp_path):
    (tmp_path / ".a.aside").write_bytes(b"half")
    write_file(tmp_path / "a", b"whole")
    assert sorted(os.listdir(tmp_path)) == ["a"]
