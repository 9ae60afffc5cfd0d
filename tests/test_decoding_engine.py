"""Stop rules, budgets, windows, thresholds, errors and counts of the engine, with a model that says what a script tells it."""

import logging
from collections import Counter

import pytest
from pydantic import ValidationError
from scripted_model import END_ID, MASK_ID, VOCAB_SIZE, ByteTokenizer, Script, ScriptedModel
from tiny_models import tiny_model

from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request, Result
from workers.errors import InputError


def make_engine(*scripts: Script, **changes) -> DecodingEngine:
    options = {
        "mask_token_id": MASK_ID,
        "end_ids": {END_ID},
        "block_size": 8,
        "num_slots": 4,
        "max_length": 64,
        "cache": "ragged",
    }
    return DecodingEngine(ScriptedModel(*scripts), ByteTokenizer(), **(options | changes))


def request_of(script: Script, row_id: str | int = "a", **changes) -> Request:
    return Request(row_id, script.prompt, RowDecodingSettings(**changes))


def decode_one(script: Script, *, cache: str = "ragged", **changes) -> Result:
    return make_engine(script, cache=cache).generate_all([request_of(script, **changes)])[0]


@pytest.mark.parametrize("cache", ["ragged", "none"])
def test_end_token_against_the_cap(cache):
    """Case 1: nothing behind the end token is kept, and the budget is not rounded up to a block."""
    ends = Script((9, 8), (11, 12, END_ID, 20, 21, 22))
    result = decode_one(ends, cache=cache, window=6, max_new_tokens=5)
    assert (result.token_ids, result.finish_reason, result.num_forwards) == ((11, 12, END_ID), "stop", 1)
    assert result.text == bytes([11, 12]).decode()
    runs_on = Script((9, 8), (11, 12, 13, 20, 21, 22, 23, 24))
    result = decode_one(runs_on, cache=cache, window=4, max_new_tokens=6)
    assert (result.token_ids, result.finish_reason, result.num_forwards) == ((11, 12, 13, 20, 21, 22), "length", 2)


def test_end_token_cap_and_window_swept_against_one_token_decoding():
    """Case 1, all of it: the model is sure of everything, so every window gives the text of one-token decoding."""
    scripts = [
        Script((10 + place, 8), tuple(20 + i for i in range(place)) + (END_ID,) + (40,) * 9) for place in range(8)
    ]
    for cap in range(1, 9):
        one_token = [
            request_of(script, place, mode="one_token", max_new_tokens=cap) for place, script in enumerate(scripts)
        ]
        expected = make_engine(*scripts).generate_all(one_token)
        for window in range(1, 9):
            tau = [request_of(script, place, window=window, max_new_tokens=cap) for place, script in enumerate(scripts)]
            for ours, theirs in zip(make_engine(*scripts).generate_all(tau), expected, strict=True):
                assert ours.token_ids == theirs.token_ids
                assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
                assert ours.num_forwards == -(-len(ours.token_ids) // window)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_prompt_that_ends_with_the_end_token(length):
    """Case 2: prompts around the block size, whose last token is the end token, get a normal answer."""
    script = Script((9,) + (5,) * (length - 2) + (END_ID,), (11, 12, 13, END_ID))
    result = decode_one(script, window=8)
    assert (result.token_ids, result.finish_reason) == ((11, 12, 13, END_ID), "stop")


@pytest.mark.parametrize("cache", ["ragged", "none"])
def test_padding_and_end_tokens_inside_a_prompt_are_ordinary_tokens(cache):
    """Case 5: padding is known from lengths, never from ids. The scripted model checks that each of them is seen."""
    scripts = [Script((9, 0, END_ID, 0, 5, 0), (11, 0, 0, 12, END_ID)), Script((8,) + (0,) * 11, (0, END_ID))]
    requests = [request_of(script, place, window=2) for place, script in enumerate(scripts)]
    results = make_engine(*scripts, cache=cache).generate_all(requests)
    assert [result.token_ids for result in results] == [script.tokens for script in scripts]


def test_finished_rows_do_not_shift_the_acceptance_of_the_rows_behind_them():
    """A fault of the published samplers: rows end at different steps, and the others keep what they alone accept."""
    scripts = [
        Script((10,), (11, END_ID), (1.0, 1.0)),
        Script((20,), tuple(range(21, 33)) + (END_ID,), (1.0, 0.5) * 6),
        Script((30, 31, 32), tuple(range(33, 53)) + (END_ID,), (1.0, 1.0, 1.0, 0.5) * 5),
        Script((40,), (41, 42, 43, 44, 45, END_ID), (0.5,) * 6),
    ]
    requests = [request_of(script, place, window=4, threshold=0.9) for place, script in enumerate(scripts)]
    for cache in ("ragged", "none"):
        results = make_engine(*scripts, cache=cache).generate_all(requests)
        assert [result.token_ids for result in results] == [script.tokens for script in scripts]
        # In one forward each: 2 of 2; pairs 1 of 2, then 1.0 opens the next pair; runs of 3 and a stop at each 0.5; one each.
        assert [result.num_forwards for result in results] == [1, 7, 6, 6]


def test_threshold_is_compared_with_the_draft_and_not_with_the_first_pick():
    """The first pick is kept however unsure; a draft at the threshold is kept, one below it and all behind it are not."""
    script = Script((9,), (11, 12, 13, 14, 15), (0.1, 0.8, 0.79, 1.0, 1.0))
    assert decode_one(script, window=5, threshold=0.8 - 1e-6, max_new_tokens=5).num_forwards == 2
    assert decode_one(script, window=5, threshold=0.8 + 1e-6, max_new_tokens=5).num_forwards == 3


@pytest.mark.parametrize(("score", "threshold"), [("probability", 1.0), ("margin", 1.0), ("entropy", 0.0)])
def test_threshold_that_means_one_token_per_forward(score, threshold):
    """Case 14: the float32 softmax of the top token is exactly 1.0 and its entropy exactly 0."""
    script = Script((9,), tuple(range(11, 19)))
    engine = make_engine(script)
    result = engine.generate_all([request_of(script, score=score, threshold=threshold, max_new_tokens=8)])[0]
    assert result.num_forwards == 8
    # The prompt and seven tokens: placeholders that cannot be kept are not even shown to the model.
    assert engine.statistics.num_query_tokens == 8
    nearly = 1e-6 if score == "entropy" else 1 - 1e-6
    assert decode_one(script, score=score, threshold=nearly, max_new_tokens=8).num_forwards == 1


def test_a_single_end_token():
    """Case 15: an empty answer is an answer."""
    result = decode_one(Script((9,), (END_ID,)))
    assert (result.text, result.finish_reason, result.token_ids) == ("", "stop", (END_ID,))
    assert result.error is None


def test_every_row_has_its_own_window_mode_threshold_and_budget():
    answer = tuple(range(20, 40))
    scripts = [Script((10 + place,), answer, (1.0, 1.0, 0.6) * 7) for place in range(5)]
    options = [
        {"mode": "one_token", "max_new_tokens": 6},
        {"window": 2, "max_new_tokens": 6},
        {"window": 8, "threshold": 0.5, "max_new_tokens": 20},
        {"window": 3, "threshold": 0.9, "max_new_tokens": 7},
        {"max_new_tokens": 3},
    ]
    requests = [
        request_of(script, place, **row) for place, (script, row) in enumerate(zip(scripts, options, strict=True))
    ]
    results = make_engine(*scripts).generate_all(requests)
    assert [result.token_ids for result in results] == [answer[: row["max_new_tokens"]] for row in options]
    assert [result.num_forwards for result in results] == [6, 4, 3, 3, 2]


def test_several_end_tokens():
    scripts = [Script((10,), (20, 21, 3)), Script((11,), (22, END_ID))]
    requests = [request_of(script, place) for place, script in enumerate(scripts)]
    results = make_engine(*scripts, end_ids={END_ID, 3}).generate_all(requests)
    assert [result.token_ids for result in results] == [(20, 21, 3), (22, END_ID)]


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
def test_stop_strings_end_a_row_where_one_token_at_a_time_would(window):
    """A stop string may span tokens and steps; the text ends before it, the tokens with the one that completes it."""
    text = "one, two, three"
    script = Script((9,), tuple(byte - 60 if byte > 63 else byte for byte in text.encode()))
    said = "".join(chr(token) for token in script.tokens)
    stop = said[5:8]
    result = decode_one(script, window=window, stop=(said[7:11], stop, "?"))
    assert (result.text, result.finish_reason) == (said[:5], "stop")
    assert result.token_ids == script.tokens[:8]


def test_a_stop_string_just_before_the_end_token_comes_first():
    script = Script((9,), (20, 21, 22, END_ID))
    result = decode_one(script, stop=(chr(22),))
    assert (result.token_ids, result.text, result.finish_reason) == ((20, 21, 22), chr(20) + chr(21), "stop")


def test_context_never_exceeds_max_length():
    script = Script((9, 8, 7), tuple(range(20, 40)))
    result = make_engine(script, max_length=10).generate_all([request_of(script, window=4)])[0]
    assert (result.token_ids, result.finish_reason) == (tuple(range(20, 27)), "length")


def test_bad_requests_give_errors_and_cost_no_other_row():
    good = Script((9,), (20, END_ID))
    requests = [
        Request("empty", (), RowDecodingSettings()),
        request_of(good, "first"),
        Request("long", (9,) * 64, RowDecodingSettings()),
        Request("mask", (9, MASK_ID), RowDecodingSettings()),
        Request("range", (9, VOCAB_SIZE), RowDecodingSettings()),
        Request("negative", (-1,), RowDecodingSettings()),
        request_of(good, "second"),
    ]
    engine = make_engine(good, num_slots=1)
    results = engine.generate_all(requests)
    assert [result.id for result in results] == [request.id for request in requests]
    codes = [None if result.error is None else result.error.code for result in results]
    assert codes == [
        "empty_prompt",
        None,
        "prompt_too_long",
        "mask_in_prompt",
        "token_out_of_range",
        "token_out_of_range",
        None,
    ]
    assert results[1].token_ids == results[6].token_ids == (20, END_ID)
    assert (results[2].token_ids, results[2].finish_reason, results[2].num_prompt_tokens) == ((), None, 64)
    assert (engine.statistics.num_rows, engine.statistics.num_errors) == (2, 5)


def test_an_empty_stop_string_is_refused_by_the_settings():
    """It would end every answer at once."""
    with pytest.raises(ValidationError, match="at least 1 character"):
        RowDecodingSettings(stop=("",))


def test_results_come_as_rows_finish_and_requests_are_taken_as_slots_become_free():
    scripts = [Script((10 + place,), (20,) * length + (END_ID,)) for place, length in enumerate((9, 1, 5, 1, 1, 1))]
    taken = []

    def source():
        for place, script in enumerate(scripts):
            taken.append(place)
            yield request_of(script, place, mode="one_token")

    engine = make_engine(*scripts, num_slots=2)
    finished = []
    for result in engine.generate(source()):
        finished.append(result.id)
        assert len(taken) <= len(finished) + 4
    assert sorted(finished) == [0, 1, 2, 3, 4, 5]
    assert finished[0] == 1
    assert not engine.has_work


def test_a_reader_that_stops_early_leaves_the_engine_usable():
    script = Script((9,), (20, 21, END_ID))
    engine = make_engine(script, num_slots=2)
    results = engine.generate([request_of(script, place) for place in range(5)])
    next(results)
    results.close()
    assert not engine.has_work
    assert engine.generate_all([request_of(script)])[0].token_ids == (20, 21, END_ID)


def test_duplicate_ids_are_two_rows():
    scripts = [Script((9,), (20, END_ID)), Script((8,), (30, 31, END_ID))]
    results = make_engine(*scripts).generate_all([request_of(script, "same") for script in scripts])
    assert [result.token_ids for result in results] == [(20, END_ID), (30, 31, END_ID)]


def test_statistics():
    scripts = [Script((10, 11), (20, 21, 22, END_ID)), Script((12,), (30, END_ID, 31, 32))]
    engine = make_engine(*scripts, block_size=3)
    engine.generate_all([request_of(script, place) for place, script in enumerate(scripts)])
    counts = engine.statistics
    # Prefill of both rows with windows of 3: 3 and 2 kept; then the first row alone: 3 pending tokens, 2 placeholders, 1 kept.
    assert (counts.num_model_calls, counts.num_row_forwards, counts.num_kept_tokens) == (2, 3, 6)
    assert (counts.num_query_tokens, counts.num_padding_tokens) == (4 + 3 + 5, 1)
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
    engine = make_engine(*scripts, block_size=3)
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
    engine = make_engine(script)
    before = engine._backbone.num_calls
    engine.generate_all([request_of(script, window=4, max_new_tokens=20)])
    assert engine._backbone.num_calls - before == 5 == engine.statistics.num_model_calls


def test_window_beyond_the_block_size_is_warned_of_once(caplog):
    script = Script((9,), (20, END_ID))
    engine = make_engine(script, block_size=4)
    with caplog.at_level(logging.WARNING):
        engine.generate_all([request_of(script, place, window=6) for place in range(3)])
    assert [record.getMessage() for record in caplog.records] == [
        "window 6 is larger than the block size 4 that the model was trained with"
    ]


def test_lengths_and_attention_that_the_model_does_not_have_are_refused():
    with pytest.raises(InputError, match=r"decoding\.max_length: found 300; expected at most 256"):
        make_engine(max_length=300)
    assert make_engine(max_length=None).max_length == 256
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2"):
        DecodingEngine(
            model,
            ByteTokenizer(),
            mask_token_id=40,
            end_ids={1},
            block_size=4,
            num_slots=1,
            max_length=32,
            cache="none",
        )
