"""Tables as lines of text, for a terminal."""

from collections.abc import Sequence

NOTHING = "—"
"""Text of a missing value."""


def align_table(rows: Sequence[Sequence[str]], *, texts: int) -> list[str]:
    """Format rows as lines: the first `texts` columns are aligned to the left, the other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust] * texts + [str.rjust] * (len(widths) - texts)
    return ["  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)) for row in rows]
