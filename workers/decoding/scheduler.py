"""Which rows run in the next forward, with how many of their tokens, and in which cache slots. Plain Python: no tensors.

Prompts are prefilled in chunks beside the rows that decode already, so that a long prompt holds nobody up. A freed slot goes to
the next waiting row, the lowest first; nothing ever moves from slot to slot.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from workers.decoding.row import Row


@dataclass(frozen=True)
class Turn:
    """A row's part in a step: its first `num_tokens` pending tokens. The row picks tokens when these are all."""

    row: Row
    num_tokens: int

    @property
    def picks(self) -> bool:
        """Whether the row has reached its last token, whose logits give the next one."""
        return self.num_tokens == self.row.num_pending


class Scheduler:
    """Waiting rows, running rows, and the slots of the cache.

    Args:
        num_slots: rows that run at the same time.
        prefill_chunk: prompt tokens of one step, of all rows together; None means whole prompts.
        cache_block: tokens of an answer that rows fill before they wait for each other; None means that no row ever waits.
    """

    def __init__(self, num_slots: int, *, prefill_chunk: int | None = None, cache_block: int | None = None) -> None:
        self.num_slots = num_slots
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
        for row in self._running:
            if row.ticket == ticket:
                self.release(row)
                return row
        for row in self._waiting:
            if row.ticket == ticket:
                self._waiting.remove(row)
                return row
        return None

    def clear(self) -> None:
        """Forgets all rows."""
        self._waiting.clear()
        self._running.clear()
        self._free_slots = list(range(self.num_slots))

    def next_turns(self) -> list[Turn]:
        """The rows of the next forward, in the order of their slots; empty when there is no work."""
        self._admit()
        if self._cache_block is not None and all(row.room == 0 for row in self._running):
            for row in self._running:
                assert row.border is not None
                row.border += self._cache_block
        turns = []
        num_left = self._prefill_chunk
        for row in self._running:  # in the order in which they came
            if row.room == 0:
                continue
            num_tokens = row.num_pending
            if row.is_new and num_left is not None:
                num_tokens = min(num_tokens, num_left)
                num_left -= num_tokens
            if num_tokens:
                turns.append(Turn(row, num_tokens))
        return sorted(turns, key=lambda turn: turn.row.slot)

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            row = self._waiting.popleft()
            row.slot = heapq.heappop(self._free_slots)
            self._running.append(row)
