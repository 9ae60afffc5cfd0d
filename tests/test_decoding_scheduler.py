"""Slots are never shared and refilled from the lowest; prompts share steps with rows that decode; blocks are waited for."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import RowDecodingSettings
from workers.decoding.request import Request
from workers.decoding.row import Row
from workers.decoding.scheduler import Scheduler, Turn


def row_of(ticket: int, length: int = 3, max_new_tokens: int = 100) -> Row:
    prompt = tuple(1000 * ticket + place for place in range(length))
    request = Request(ticket, prompt, RowDecodingSettings())
    return Row(request, ticket, seed=0, window=1, max_tokens=length + max_new_tokens, token_ids=list(prompt))


def advance(turn: Turn, num_kept: int, cache_block: int | None = None) -> None:
    """What the engine does with a row after a step."""
    row = turn.row
    if cache_block is None or row.num_cached < row.num_prompt or turn.num_tokens == cache_block:
        row.num_cached += turn.num_tokens
    if num_kept:
        row.token_ids += [7] * num_kept
        row.num_forwards += 1


def tickets_and_tokens(turns: list[Turn]) -> list[tuple[int, int]]:
    return [(turn.row.ticket, turn.num_tokens) for turn in turns]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    num_slots=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    prefill_chunk=st.sampled_from([None, 1, 7, 40]),
    cache_block=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 2**32),
)
def test_any_run_gives_each_row_its_slot_and_its_tokens(num_slots, lengths, prefill_chunk, cache_block, seed):
    """Rows come, go, are cancelled and finish at random; each step holds what the rules say."""
    random = Random(seed)
    scheduler = Scheduler(num_slots, prefill_chunk=prefill_chunk, cache_block=cache_block)
    waiting = [row_of(ticket, length, random.randint(1, 12)) for ticket, length in enumerate(lengths)]
    ended: list[int] = []
    while waiting or scheduler.has_work:
        for _ in range(random.randint(0, 3)):
            if waiting:
                scheduler.submit(waiting.pop(0))
        if random.random() < 0.1:
            row = scheduler.cancel(random.randrange(len(lengths)))
            if row is not None:
                ended.append(row.ticket)
        if not scheduler.has_work:
            continue
        turns, copies = scheduler.next_turns()
        assert turns and not copies
        slots = [turn.row.slot for turn in turns]
        assert slots == sorted(set(slots)) and slots[0] >= 0 and slots[-1] < num_slots
        assert scheduler.num_running == num_slots or scheduler.num_waiting == 0
        if prefill_chunk is not None:
            assert sum(turn.num_tokens for turn in turns if turn.row.is_new) <= prefill_chunk
        for turn in turns:
            row = turn.row
            assert 1 <= turn.num_tokens <= row.num_pending and row.room > 0
            assert turn.picks == (turn.num_tokens == row.num_pending)
            assert turn.picks or row.is_new
            num_kept = random.randint(1, row.room) if turn.picks else 0
            advance(turn, num_kept, cache_block)
            if row.num_left == 0 or (num_kept and random.random() < 0.1):
                ended.append(row.ticket)
                scheduler.release(row)
    assert sorted(ended) == list(range(len(lengths)))
    assert sorted(scheduler._free_slots) == list(range(num_slots))


def test_a_freed_slot_goes_to_the_next_row_the_lowest_first_and_no_row_moves():
    scheduler = Scheduler(3)
    rows = [row_of(ticket) for ticket in range(6)]
    for row in rows:
        scheduler.submit(row)
    for turn in scheduler.next_turns()[0]:
        advance(turn, 1)
    scheduler.release(rows[2])
    scheduler.release(rows[0])
    turns, _ = scheduler.next_turns()
    assert [(turn.row.ticket, turn.row.slot) for turn in turns] == [(3, 0), (1, 1), (4, 2)]
    assert (rows[0].slot, rows[2].slot, scheduler.num_waiting) == (-1, -1, 1)


def test_a_prompt_in_chunks_shares_its_steps_with_rows_that_decode():
    scheduler = Scheduler(3, prefill_chunk=4)
    scheduler.submit(row_of(0, 3))
    (turn,), _ = scheduler.next_turns()
    advance(turn, 1)
    scheduler.submit(row_of(1, 10))
    scheduler.submit(row_of(2, 2))
    steps = []
    for _ in range(4):
        turns, _ = scheduler.next_turns()
        steps.append(tickets_and_tokens(turns))
        for turn in turns:
            advance(turn, 1 if turn.picks else 0)
    # Row 0 decodes one token in each step; 4 prompt tokens run beside it, those of row 2 as soon as row 1 leaves some over.
    assert steps == [[(0, 1), (1, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 2)], [(0, 1), (1, 1), (2, 1)]]


def test_pending_tokens_of_rows_that_decode_are_no_prompt():
    """Several tokens kept at once, or a row whose block is recomputed, take nothing of the prompts' budget."""
    scheduler = Scheduler(2, prefill_chunk=2)
    scheduler.submit(row_of(0, 2))
    (turn,), _ = scheduler.next_turns()
    advance(turn, 5)
    scheduler.submit(row_of(1, 2))
    turns, _ = scheduler.next_turns()
    assert tickets_and_tokens(turns) == [(0, 5), (1, 2)]


def test_rows_that_have_filled_their_block_wait_for_the_others():
    """Blocks of 4: the fast row stops at 4; a finished row leaves; a row that joins is waited for as well; then all go on."""
    scheduler = Scheduler(3, cache_block=4)
    fast, slow, short, late = rows = [row_of(0), row_of(1), row_of(2, max_new_tokens=2), row_of(3)]
    for row in rows:
        scheduler.submit(row)

    def step(**kept: int) -> list[str]:
        names = {0: "fast", 1: "slow", 2: "short", 3: "late"}
        turns, _ = scheduler.next_turns()
        for turn in turns:
            advance(turn, kept[names[turn.row.ticket]], cache_block=4)
            if turn.row.num_left == 0:
                scheduler.release(turn.row)
        return [names[turn.row.ticket] for turn in turns]

    assert [row.room for row in rows] == [4, 4, 2, 4]
    assert step(fast=4, slow=1, short=2) == ["fast", "slow", "short"]
    assert fast.room == 0
    assert step(slow=3, late=1) == ["slow", "late"]
    assert step(late=3) == ["late"]
    # All three stand at their border: the forward that commits the block is also the first of the next one.
    assert step(fast=2, slow=1, late=1) == ["fast", "slow", "late"]
    assert [row.num_cached for row in (fast, slow, late)] == [3 + 4] * 3
    assert [row.room for row in (fast, slow, late)] == [2, 3, 3]
    assert late.slot == 2 and short.slot == -1


def test_rows_do_not_wait_for_one_that_is_taken_back():
    scheduler = Scheduler(2, cache_block=2)
    for ticket in range(2):
        scheduler.submit(row_of(ticket))
    for turn in scheduler.next_turns()[0]:
        advance(turn, 2 - turn.row.ticket, cache_block=2)
    assert [turn.row.ticket for turn in scheduler.next_turns()[0]] == [1]
    assert scheduler.cancel(1).ticket == 1
    assert [turn.row.ticket for turn in scheduler.next_turns()[0]] == [0]


def test_cancelling_a_row_that_waits_runs_or_is_unknown():
    scheduler = Scheduler(1)
    rows = [row_of(ticket) for ticket in range(3)]
    for row in rows:
        scheduler.submit(row)
    scheduler.next_turns()
    assert scheduler.cancel(1) is rows[1]
    assert scheduler.cancel(0) is rows[0]
    assert scheduler.cancel(0) is None
    assert scheduler.cancel(9) is None
    turns, _ = scheduler.next_turns()
    assert [(turn.row.ticket, turn.row.slot) for turn in turns] == [(2, 0)]
    scheduler.clear()
    assert not scheduler.has_work
    assert scheduler.next_turns() == ([], [])


def shared_prefix_rows() -> list[Row]:
    common = tuple(range(40))
    rows = []
    for ticket in range(3):
        request = Request(ticket, (*common, 100 + ticket, 7), RowDecodingSettings())
        rows.append(Row(request, ticket, seed=0, window=1, max_tokens=60, token_ids=list(request.prompt_ids)))
    return rows


def test_rows_that_wait_for_a_common_beginning_do_not_wait_for_a_row_that_is_gone():
    scheduler = Scheduler(3, prefill_chunk=16, shares_prefixes=True)
    for row in shared_prefix_rows():
        scheduler.submit(row)
    turns, copies = scheduler.next_turns()
    assert (tickets_and_tokens(turns), copies) == ([(0, 16)], [])
    advance(turns[0], 0)
    scheduler.cancel(0)
    turns, copies = scheduler.next_turns()
    assert (turns[0].row.ticket, turns[0].num_tokens, copies) == (1, 16, [])


def test_copies_of_a_common_beginning_are_made_once_it_is_there():
    scheduler = Scheduler(3, prefill_chunk=20, shares_prefixes=True)
    for row in shared_prefix_rows():
        scheduler.submit(row)
    for _ in range(2):
        (turn,), copies = scheduler.next_turns()
        assert (turn.row.ticket, copies) == (0, [])
        advance(turn, 0)
    turns, copies = scheduler.next_turns()
    assert [(copy.source, copy.target, copy.num_tokens) for copy in copies] == [(0, 1, 40), (0, 2, 40)]
    assert tickets_and_tokens(turns) == [(0, 2), (1, 2), (2, 2)]
