"""Slots: dense, never shared, and refilled as rows finish; prompts of similar length run together."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import RowDecodingSettings
from workers.decoding.request import Request
from workers.decoding.scheduler import Row, Scheduler, similar_lengths


def row_of(ticket: int, length: int = 3) -> Row:
    prompt = tuple(range(length))
    request = Request(ticket, prompt, RowDecodingSettings())
    return Row(request, ticket, seed=0, window=1, max_tokens=100, token_ids=list(prompt))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    num_slots=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    seed=st.integers(0, 2**32),
)
def test_rows_hold_dense_slots_and_each_finishes_once(num_slots, lengths, seed):
    random = Random(seed)
    scheduler = Scheduler(num_slots)
    waiting = [row_of(ticket, length) for ticket, length in enumerate(lengths)]
    content: dict[int, int] = {}
    finished = []
    while waiting or scheduler.has_work:
        for _ in range(random.randint(0, 3)):
            if waiting:
                scheduler.submit(waiting.pop(0))
        if not scheduler.has_work:
            continue
        rows, moves = scheduler.next_group()
        for move in moves:
            content[move.target] = content.pop(move.source)
        slots = [row.slot for row in rows]
        assert slots == sorted(set(slots))
        assert max(slots) < num_slots
        if rows[0].num_forwards:
            assert slots == list(range(len(rows)))
            assert all(content[row.slot] == row.ticket for row in rows)
        for row in rows:
            content[row.slot] = row.ticket
            row.num_forwards += 1
            if random.random() < 0.5:
                finished.append(row.ticket)
                scheduler.release(row)
    assert sorted(finished) == list(range(len(lengths)))


def test_a_freed_slot_goes_to_the_next_row_and_nothing_moves():
    scheduler = Scheduler(2)
    rows = [row_of(ticket) for ticket in range(3)]
    for row in rows:
        scheduler.submit(row)
    first, _ = scheduler.next_group()
    for row in first:
        row.num_forwards = 1
    scheduler.release(first[0])
    group, moves = scheduler.next_group()
    assert ([row.ticket for row in group], [row.slot for row in group], moves) == ([2], [0], [])
    group[0].num_forwards = 1
    group, moves = scheduler.next_group()
    assert ([row.ticket for row in group], moves) == ([2, 1], [])


def test_the_last_row_moves_into_a_hole_when_the_queue_is_dry():
    scheduler = Scheduler(3)
    for ticket in range(3):
        scheduler.submit(row_of(ticket))
    rows, _ = scheduler.next_group()
    for row in rows:
        row.num_forwards, row.num_cached = 1, 7
    scheduler.release(rows[0])
    group, moves = scheduler.next_group()
    assert [(move.source, move.target, move.num_cached) for move in moves] == [(2, 0, 7)]
    assert [row.ticket for row in group] == [2, 1]


def test_prompts_of_similar_length_run_together():
    rows = [row_of(ticket, length) for ticket, length in enumerate((250, 8, 240, 9, 255, 10))]
    for slot, row in enumerate(rows):
        row.slot = slot
    assert [row.ticket for row in similar_lengths(rows)] == [0, 2, 4]
    assert [row.ticket for row in similar_lengths([rows[1], rows[3], rows[5]])] == [1, 3, 5]
