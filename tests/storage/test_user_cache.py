"""The user's cache directory: where it is, and which directories are rejected."""

import os
import sys
from pathlib import Path

import pytest

from polyak.storage.user_cache import cache_directory, open_directory


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_enter_is_rejected(mode, tmp_path):
    directory = tmp_path / "polyak"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(
        PermissionError, match="must be a directory that you own, with mode 0700, as its files are trusted; got d"
    ):
        open_directory(directory)


def test_a_link_and_a_directory_of_another_user_are_rejected(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(PermissionError, match="got l"):
        open_directory(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="of user"):
        open_directory(tmp_path / "mine")


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", "/var/cache/me", "/var/cache/me/polyak"),
        ("linux", "relative", "/home/me/.cache/polyak"),
        ("linux", "", "/home/me/.cache/polyak"),
        ("darwin", "", "/home/me/Library/Caches/polyak"),
    ],
)
def test_the_directory_follows_the_platform(platform, variable, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_directory() == Path(expected)
