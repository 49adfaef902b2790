"""JSON documents with one value replaced at random, for tests of what reads them."""

import copy

from hypothesis import strategies as st


def mutated(document, junk, data):
    """A copy in which one value, at any depth, is one of the strategy `junk`; `data` is that of hypothesis."""
    document = place = copy.deepcopy(document)
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(junk)
            break
        place = place[key]
    return document
