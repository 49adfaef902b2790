"""Imports without garbage collection."""

import gc
import weakref

import pytest

from polyak.cli.garbage import without_garbage_collection


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("is_own_process", [True, False])
def test_what_exists_is_exempt_in_a_process_of_the_commands_own_alone(is_own_process, monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with without_garbage_collection(is_own_process=is_own_process):
        assert not gc.isenabled()
    assert gc.isenabled() and frozen == [True] * is_own_process


def test_a_collector_that_was_off_stays_off_and_other_garbage_is_collected_later():
    gc.disable()
    try:
        with without_garbage_collection(is_own_process=False):
            cycle = weakref.ref(Cycle())
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.collect()
    assert cycle() is None
