"""Which rows run in the next forward, and in which cache slots. Plain Python: no tensors.

Whenever all running rows take a step they hold the slots 0..n-1, so that the cache is read without gathering. A freed slot goes
to the next waiting row; when none waits, the row in the last slot moves into the hole, once.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.decoding.request import Request

# A prefill group may hold this share of padding, and this many padding tokens in any case: a forward has a price of its own.
_PADDING_SHARE = 0.25
_PADDING_TOKENS = 64


@dataclass(eq=False)
class Row:
    """One request while it waits and runs.

    `token_ids` is prompt and answer so far. The keys and values of its first `num_cached` tokens are in the cache, in the slot's
    places 0..num_cached-1; the others are pending. The counts are those of the row's result.
    """

    request: Request
    ticket: int
    seed: int
    window: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_forwards: int = 0
    num_query_tokens: int = 0
    kept_per_forward: Counter[int] = field(default_factory=Counter)
    slot: int = -1

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_left(self) -> int:
        """Tokens that the row may still emit."""
        return self.max_tokens - len(self.token_ids)


@dataclass(frozen=True)
class Move:
    """The cache of `source` must be put into slot `target`; its first `num_cached` tokens count."""

    source: int
    target: int
    num_cached: int


class Scheduler:
    """Waiting rows, running rows, and the slots of the cache."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._holes: list[int] = []

    @property
    def num_waiting(self) -> int:
        """Rows that have no slot yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any row waits or runs."""
        return bool(self._waiting or self._running)

    def submit(self, row: Row) -> None:
        """Puts a row at the end of the queue."""
        self._waiting.append(row)

    def release(self, row: Row) -> None:
        """Takes a running row out; its slot is free for the next one."""
        self._running.remove(row)
        self._holes.append(row.slot)
        row.slot = -1

    def clear(self) -> None:
        """Forgets all rows."""
        self._waiting.clear()
        self._running.clear()
        self._holes.clear()

    def next_group(self) -> tuple[list[Row], list[Move]]:
        """Rows of the next forward in the order of their slots, and the moves that the cache must do before it.

        New rows run first, in groups of their own with prompts of similar length; otherwise all rows run, in slots 0..n-1.
        """
        self._admit()
        new = [row for row in self._running if row.num_forwards == 0]
        if new:
            return similar_lengths(new), []
        moves = self._close_holes()
        return list(self._running), moves

    def _admit(self) -> None:
        self._holes.sort(reverse=True)
        while self._waiting and len(self._running) < self.num_slots:
            row = self._waiting.popleft()
            row.slot = self._holes.pop() if self._holes else len(self._running)
            self._running.append(row)
        self._running.sort(key=lambda row: row.slot)

    def _close_holes(self) -> list[Move]:
        moves = []
        num_running = len(self._running)
        targets = [slot for slot in sorted(self._holes) if slot < num_running]
        for row, target in zip(reversed(self._running), targets, strict=False):
            moves.append(Move(row.slot, target, row.num_cached))
            row.slot = target
        self._holes.clear()
        self._running.sort(key=lambda row: row.slot)
        assert [row.slot for row in self._running] == list(range(num_running))
        return moves


def similar_lengths(rows: Sequence[Row]) -> list[Row]:
    """The longest row and as many of the next longest as fit beside it with little padding, in the order of their slots."""
    by_length = sorted(rows, key=lambda row: len(row.token_ids), reverse=True)
    longest = len(by_length[0].token_ids)
    group: list[Row] = []
    num_tokens = 0
    for row in by_length:
        num_tokens += len(row.token_ids)
        num_padding = longest * (len(group) + 1) - num_tokens
        if num_padding > max(_PADDING_TOKENS, _PADDING_SHARE * num_tokens):
            break
        group.append(row)
    return sorted(group, key=lambda row: row.slot)
