"""Answers beside those of one-token decoding: which rows are compared, and how far they agree."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_NUM_SHOWN = 5


def is_compared(row_id: str | int, share: float) -> bool:
    """Whether a row is one of the share, by a hash of its id: the same rows in every start, whatever the units and actors."""
    digest = hashlib.blake2b(f"compare:{type(row_id).__name__}:{row_id}".encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") < share * 2**64


@dataclass
class Comparison:
    """Sums over the rows that were decoded a second time, one token per forward.

    Attributes:
        num_rows, num_equal_rows: rows compared; those with the very tokens of one-token decoding.
        num_tokens: tokens of one-token decoding.
        num_agreeing_tokens: those before the first one that differs.
        differing_rows: where the first few rows that differ are in the input.
    """

    num_rows: int = 0
    num_equal_rows: int = 0
    num_tokens: int = 0
    num_agreeing_tokens: int = 0
    differing_rows: list[str] = field(default_factory=list)

    def add(self, other: "Comparison") -> None:
        """Counts the rows of another comparison."""
        self.num_rows += other.num_rows
        self.num_equal_rows += other.num_equal_rows
        self.num_tokens += other.num_tokens
        self.num_agreeing_tokens += other.num_agreeing_tokens
        self.differing_rows = sorted([*self.differing_rows, *other.differing_rows])[:_NUM_SHOWN]

    def facts(self) -> dict[str, Any]:
        """For tables and pages; nothing when no row was compared."""
        if not self.num_rows:
            return {}
        return {
            "compared with one token": self.num_rows,
            "of these the same": self.num_equal_rows / self.num_rows,
            "share of tokens before a difference": self.num_agreeing_tokens / max(1, self.num_tokens),
        }


def compare(rows: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> Comparison:
    """Compares rows of (location, tokens, tokens of one-token decoding)."""
    total = Comparison()
    for location, tokens, one_token in rows:
        is_equal = tuple(tokens) == tuple(one_token)
        places = range(min(len(tokens), len(one_token)))
        num_agreeing = next((place for place in places if tokens[place] != one_token[place]), len(places))
        total.add(Comparison(1, is_equal, len(one_token), num_agreeing, [] if is_equal else [location]))
    return total
