"""The table of deliberate faults fits the source and the tests; `python tests/mutations.py` makes them."""

from tests.mutations import problems


def test_every_fault_has_its_place_in_the_source_and_its_tests():
    assert not problems()
