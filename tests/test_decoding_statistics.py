"""The counts of a run and of each row, and where the time went."""

import time
from collections import Counter

from scripted_model import END_ID, Script, request_of, scripted_engine


def test_statistics():
    scripts = [Script((10, 11), (20, 21, 22, END_ID)), Script((12,), (30, END_ID, 31, 32))]
    engine = scripted_engine(*scripts, block_size=3)
    engine.generate_all([request_of(script, place) for place, script in enumerate(scripts)])
    counts = engine.statistics
    # Prefill of both rows with windows of 3: 3 and 2 kept; then the first row alone: 3 pending tokens, 2 placeholders, 1 kept.
    assert (counts.num_model_calls, counts.num_row_forwards, counts.num_kept_tokens) == (2, 3, 6)
    assert counts.num_query_tokens == 4 + 3 + 5
    assert counts.kept_per_forward == {3: 1, 2: 1, 1: 1}
    assert counts.tokens_per_forward == 2.0
    assert counts.query_tokens_per_token == 2.0
    counts.add(counts)
    assert (counts.num_kept_tokens, counts.tokens_per_forward) == (12, 2.0)


def test_every_result_carries_the_counts_of_its_row():
    scripts = [
        Script((10, 11), (20, 21, 22, 23, END_ID)),
        Script((12,), (30, END_ID)),
        Script((13,), (40, 41, 42, 43, 44, END_ID)),
    ]
    engine = scripted_engine(*scripts, block_size=3)
    stop = {2: {"stop": (chr(41),)}}
    results = engine.generate_all(
        [request_of(script, place, **stop.get(place, {})) for place, script in enumerate(scripts)]
    )
    # The first row: two prompt tokens and two placeholders, 3 kept; then three pending tokens and two placeholders, 2 kept. The
    # last row keeps three tokens and loses the one behind its stop string.
    assert [result.kept_per_forward for result in results] == [{3: 1, 2: 1}, {2: 1}, {2: 1}]
    assert [result.num_query_tokens for result in results] == [4 + 5, 3, 3]
    assert sum(result.num_query_tokens for result in results) == engine.statistics.num_query_tokens
    assert sum((result.kept_per_forward for result in results), Counter()) == engine.statistics.kept_per_forward


def test_one_forward_of_the_model_per_step():
    script = Script((9,), tuple(range(20, 40)))
    engine = scripted_engine(script)
    before = engine._model._backbone.num_calls
    engine.generate_all([request_of(script, window=4, max_new_tokens=20)])
    assert engine._model._backbone.num_calls - before == 5 == engine.statistics.num_model_calls


def test_steps_that_could_not_give_a_token_are_no_forwards():
    """A prompt of 10 in chunks of 4: two steps give nothing, the third gives the first token; the answer takes two more."""
    script = Script((9,) + (8,) * 9, (20, 21, END_ID))
    engine = scripted_engine(script, prefill_chunk=4)
    result = engine.generate_all([request_of(script, mode="one_token")])[0]
    counts = engine.statistics
    assert (counts.num_model_calls, counts.num_row_forwards, result.num_forwards) == (5, 3, 3)
    assert counts.tokens_per_forward == 1.0
    assert counts.num_query_tokens == result.num_query_tokens == 10 + 2


def test_slot_occupancy_is_the_share_of_the_slots_that_hold_a_row():
    """Two slots; answers of 2 and 4 tokens, one a step: both slots for two steps, one of them for two more."""
    scripts = [Script((10,), (20, END_ID)), Script((11,), (30, 31, 32, END_ID))]
    engine = scripted_engine(*scripts, num_slots=2)
    engine.generate_all([request_of(script, place, mode="one_token") for place, script in enumerate(scripts)])
    counts = engine.statistics
    assert (counts.num_slots_in_use, counts.num_slot_steps) == (6, 8)
    assert counts.slot_occupancy == 0.75


def test_seconds_of_model_and_engine_are_those_of_the_steps():
    script = Script((9,), tuple(range(20, 40)))
    engine = scripted_engine(script)
    forward = engine._model._backbone.forward

    def slow_forward(*args, **kwargs):
        time.sleep(0.01)
        return forward(*args, **kwargs)

    engine._model._backbone.forward = slow_forward
    began = time.perf_counter()
    engine.generate_all([request_of(script, place, max_new_tokens=20) for place in range(6)])
    wall = time.perf_counter() - began
    counts = engine.statistics
    assert counts.model_seconds >= 0.01 * counts.num_model_calls
    assert counts.engine_seconds > 0
    assert counts.model_seconds + counts.engine_seconds <= wall


def test_measurements_of_the_automatic_window_are_time_of_the_model():
    """They take place inside a step, so they must not be taken for work of the engine."""
    script = Script((9,), tuple(range(20, 40)))
    engine = scripted_engine(script)
    measured = []
    measure = engine._model.measure

    def slow_measure(*sizes):
        began = engine._model.seconds
        seconds = measure(*sizes)
        measured.append(engine._model.seconds - began)
        return seconds

    engine._windows._choosers["verified"]._costs._measure = slow_measure
    engine.generate_all([request_of(script, mode="verified", max_new_tokens=20)])
    assert measured
    assert engine.statistics.model_seconds >= sum(measured) > 0


def test_rows_that_are_taken_back_leave_their_forwards_and_no_answer():
    scripts = [Script((10 + place,), tuple(range(20, 40))) for place in range(2)]
    engine = scripted_engine(*scripts)
    tickets = [
        engine.submit(request_of(script, place, window=2, max_new_tokens=8))[0] for place, script in enumerate(scripts)
    ]
    told = engine.step()
    assert engine.cancel(tickets[0])
    while engine.has_work:
        told += engine.step()
    counts = engine.statistics
    assert counts.num_rows == 1
    assert counts.num_row_forwards == 1 + 4 == sum(counts.kept_per_forward.values())
    assert counts.num_kept_tokens == 2 + 8 == sum(len(each.token_ids) for each in told)


def test_query_tokens_of_the_block_cache():
    """A block's tokens run again and again until it is full; the forward that has all of them commits it, and only that one."""
    script = Script((9, 8, 7), tuple(range(20, 27)))
    engine = scripted_engine(script, cache="block", cache_block=3)
    result = engine.generate_all([request_of(script, mode="one_token", max_new_tokens=7)])[0]
    assert (result.token_ids, result.num_forwards) == (script.tokens, 7)
    assert result.num_query_tokens == 3 + (1 + 2 + 3) + (1 + 2 + 3)


def test_windows_of_the_block_cache_end_at_its_borders():
    """Blocks of 5 and windows of 3: 3 and 2 tokens, 3 and 2 tokens, and what is left."""
    script = Script((9, 8, 7), tuple(range(20, 32)))
    engine = scripted_engine(script, cache="block", cache_block=5)
    result = engine.generate_all([request_of(script, window=3, max_new_tokens=12)])[0]
    assert (result.token_ids, result.num_forwards) == (script.tokens, 5)
    assert result.kept_per_forward == {3: 2, 2: 3}
