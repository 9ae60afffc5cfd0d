"""Which rows run in the next forward, with how many of their tokens, and in which cache slots. Plain Python: no tensors.

Prompts are prefilled in chunks beside the rows that decode already, so that a long prompt holds nobody up. A prompt that begins
like another running row takes the keys and values of that beginning over, instead of computing them again. A freed slot goes to the
next waiting row, the lowest first; rows never change their slot.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from workers.decoding.row import Prefix, Row

# Below this, a copy saves too little to wait for another row.
_SHORTEST_PREFIX = 32


@dataclass(frozen=True)
class Turn:
    """A row's part in a step: its first `num_tokens` pending tokens. The row picks tokens when these are all."""

    row: Row
    num_tokens: int

    @property
    def picks(self) -> bool:
        """Whether the row has reached its last token, whose logits give the next one."""
        return self.num_tokens == self.row.num_pending


@dataclass(frozen=True)
class Copy:
    """The first `num_tokens` places of slot `source` must be in slot `target` before the forward."""

    source: int
    target: int
    num_tokens: int


class Scheduler:
    """Waiting rows, running rows, and the slots of the cache.

    Args:
        num_slots: rows that run at the same time.
        prefill_chunk: prompt tokens of one step, of all rows together; None means whole prompts.
        cache_block: tokens of an answer that rows fill before they wait for each other; None means that no row ever waits.
        shares_prefixes: whether what one row has computed is good for another.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        prefill_chunk: int | None = None,
        cache_block: int | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self._shares_prefixes = shares_prefixes
        self._prefill_chunk, self._cache_block = prefill_chunk, cache_block
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._free_slots = list(range(num_slots))

    @property
    def num_waiting(self) -> int:
        """Rows that have no slot yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Rows that have a slot."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self._waiting or self._running)

    def submit(self, row: Row) -> None:
        """Puts a row at the end of the queue."""
        if self._cache_block is not None:
            row.border = row.num_prompt + self._cache_block
        self._waiting.append(row)

    def release(self, row: Row) -> None:
        """Takes a running row out; its slot is free for the next one."""
        self._running.remove(row)
        heapq.heappush(self._free_slots, row.slot)
        row.slot = -1

    def cancel(self, ticket: int) -> Row | None:
        """Takes the row of a ticket out, wherever it is; None if it is nowhere."""
        row = self.find(ticket)
        if row is not None and row.slot >= 0:
            self.release(row)
        elif row is not None:
            self._waiting.remove(row)
        return row

    def find(self, ticket: int) -> Row | None:
        """The row of a ticket while it waits or runs."""
        return next((row for row in (*self._running, *self._waiting) if row.ticket == ticket), None)

    def clear(self) -> None:
        """Forgets all rows."""
        self._waiting.clear()
        self._running.clear()
        self._free_slots = list(range(self.num_slots))

    def next_turns(self) -> tuple[list[Turn], list[Copy]]:
        """The rows of the next forward, in the order of their slots, and the copies before it; no rows when there is no work."""
        self._admit()
        if self._cache_block is not None and all(row.room == 0 for row in self._running):
            for row in self._running:
                assert row.border is not None
                row.border += self._cache_block
        turns: list[Turn] = []
        copies: list[Copy] = []
        num_left = self._prefill_chunk
        for row in self._running:  # in the order in which they came
            if row.room == 0:
                continue
            if row.prefix is not None and not self._take_over(row, row.prefix, copies):
                continue
            num_tokens = row.num_pending
            if row.is_new and num_left is not None:
                num_tokens = min(num_tokens, num_left)
                num_left -= num_tokens
            if num_tokens:
                turns.append(Turn(row, num_tokens))
        return sorted(turns, key=lambda turn: turn.row.slot), copies

    def _take_over(self, row: Row, prefix: Prefix, copies: list[Copy]) -> bool:
        """Copies the prefix of a row if its source has it; False while the row has to wait for that."""
        source = prefix.source
        if source.slot >= 0 and source.num_cached < prefix.num_tokens:
            return False
        if source.slot >= 0:
            copies.append(Copy(source.slot, row.slot, prefix.num_tokens))
            row.num_cached = prefix.num_tokens
        row.prefix = None
        return True

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            row = self._waiting.popleft()
            row.slot = heapq.heappop(self._free_slots)
            if self._shares_prefixes:
                row.prefix = self._longest_prefix(row)
            self._running.append(row)

    def _longest_prefix(self, row: Row) -> Prefix | None:
        """The running row whose prompt has most of its beginning in common; the last token of a prompt runs in any case."""
        lengths = [
            (num_shared(row.request.prompt_ids, other.request.prompt_ids, row.num_prompt - 1), other)
            for other in self._running
        ]
        num_tokens, source = max(lengths, key=lambda item: item[0], default=(0, row))
        return Prefix(source, num_tokens) if num_tokens >= _SHORTEST_PREFIX else None


def num_shared(tokens: Sequence[int], others: Sequence[int], most: int) -> int:
    """How many of the first `most` tokens two sequences have in common."""
    pairs = zip(tokens[:most], others, strict=False)
    return next((place for place, (token, other) in enumerate(pairs) if token != other), min(most, len(others)))
