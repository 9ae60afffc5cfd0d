"""The rows of a set that stand out: those that took longest and those with the longest answers."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NUM_SHOWN = 5


@dataclass(frozen=True)
class RowFigures:
    """One answered row.

    Attributes:
        location: where it is in the input.
        seconds: from its first tokens to its last.
    """

    location: str
    seconds: float
    num_tokens: int
    num_forwards: int


def slowest(rows: Iterable[RowFigures]) -> list[RowFigures]:
    """The first few by seconds."""
    return heapq.nlargest(NUM_SHOWN, rows, key=lambda row: (row.seconds, row.location))


def longest(rows: Iterable[RowFigures]) -> list[RowFigures]:
    """The first few by tokens."""
    return heapq.nlargest(NUM_SHOWN, rows, key=lambda row: (row.num_tokens, row.location))


def from_json(rows: Iterable[Any]) -> list[RowFigures]:
    """Rows as `dataclasses.asdict` has made them."""
    return [RowFigures(**row) for row in rows]
