"""Rows side by side, thresholds, windows, bad requests and the stream of results, with a model that says what a script tells it."""

import logging

import pytest
from pydantic import ValidationError
from scripted_model import END_ID, MASK_ID, VOCAB_SIZE, ByteTokenizer, Script, request_of, scripted_engine
from tiny_models import tiny_model

from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Request, Result
from workers.decoding.window import WindowChoice
from workers.errors import InputError


def decode_one(script: Script, *, cache: str = "ragged", **changes) -> Result:
    return scripted_engine(script, cache=cache).generate_all([request_of(script, **changes)])[0]


def test_finished_rows_do_not_shift_the_acceptance_of_the_rows_behind_them():
    """A fault of the published samplers: rows end at different steps, and the others keep what they alone accept."""
    scripts = [
        Script((10,), (11, END_ID), (1.0, 1.0)),
        Script((20,), tuple(range(21, 33)) + (END_ID,), (1.0, 0.5) * 6),
        Script((30, 31, 32), tuple(range(33, 53)) + (END_ID,), (1.0, 1.0, 1.0, 0.5) * 5),
        Script((40,), (41, 42, 43, 44, 45, END_ID), (0.5,) * 6),
    ]
    requests = [request_of(script, place, window=4, threshold=0.9) for place, script in enumerate(scripts)]
    for cache in ("ragged", "block", "none"):
        results = scripted_engine(*scripts, cache=cache).generate_all(requests)
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
    engine = scripted_engine(script)
    result = engine.generate_all([request_of(script, score=score, threshold=threshold, max_new_tokens=8)])[0]
    assert result.num_forwards == 8
    # The prompt and seven tokens: placeholders that cannot be kept are not even shown to the model.
    assert engine.statistics.num_query_tokens == 8
    nearly = 1e-6 if score == "entropy" else 1 - 1e-6
    assert decode_one(script, score=score, threshold=nearly, max_new_tokens=8).num_forwards == 1


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
    results = scripted_engine(*scripts).generate_all(requests)
    assert [result.token_ids for result in results] == [answer[: row["max_new_tokens"]] for row in options]
    assert [result.num_forwards for result in results] == [6, 4, 3, 3, 2]


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
    engine = scripted_engine(good, num_slots=1)
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

    engine = scripted_engine(*scripts, num_slots=2)
    finished = []
    for result in engine.generate(source()):
        finished.append(result.id)
        assert len(taken) <= len(finished) + 4
    assert sorted(finished) == [0, 1, 2, 3, 4, 5]
    assert finished[0] == 1
    assert not engine.has_work


def test_a_reader_that_stops_early_leaves_the_engine_usable():
    script = Script((9,), (20, 21, END_ID))
    engine = scripted_engine(script, num_slots=2)
    results = engine.generate([request_of(script, place) for place in range(5)])
    next(results)
    results.close()
    assert not engine.has_work
    assert engine.generate_all([request_of(script)])[0].token_ids == (20, 21, END_ID)


def test_duplicate_ids_are_two_rows():
    scripts = [Script((9,), (20, END_ID)), Script((8,), (30, 31, END_ID))]
    results = scripted_engine(*scripts).generate_all([request_of(script, "same") for script in scripts])
    assert [result.token_ids for result in results] == [(20, END_ID), (30, 31, END_ID)]


def test_window_beyond_the_block_size_is_warned_of_once(caplog):
    script = Script((9,), (20, END_ID))
    engine = scripted_engine(script, block_size=4)
    with caplog.at_level(logging.WARNING):
        engine.generate_all([request_of(script, place, window=6) for place in range(3)])
    assert [record.getMessage() for record in caplog.records] == [
        "window 6 is larger than the block size 4 that the model was trained with"
    ]


def test_lengths_and_attention_that_the_model_does_not_have_are_refused():
    with pytest.raises(InputError, match=r"decoding\.max_length: found 300; expected at most 256"):
        scripted_engine(max_length=300)
    assert scripted_engine(max_length=None).max_length == 256
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


def test_settings_that_leave_no_token_to_say_are_refused():
    good = Script((9,), (20, END_ID))
    all_but = {token: tuple(set(range(VOCAB_SIZE)) - {token}) for token in (END_ID, 20)}
    requests = [
        request_of(good, "all", forbidden_ids=tuple(range(VOCAB_SIZE))),
        request_of(good, "all but the placeholder", forbidden_ids=all_but[20][:MASK_ID] + (20,)),
        request_of(good, "outside", forbidden_ids=(VOCAB_SIZE,)),
        # The end token is all that is left, and it may not come yet.
        request_of(good, "end", forbidden_ids=all_but[END_ID], min_new_tokens=1),
        request_of(good, "end now", forbidden_ids=all_but[END_ID]),
        request_of(good, "one", forbidden_ids=all_but[20], max_new_tokens=2),
    ]
    results = scripted_engine(good).generate_all(requests)
    assert [result.error and result.error.code for result in results] == ["invalid_settings"] * 4 + [None] * 2
    assert [result.token_ids for result in results[4:]] == [(END_ID,), (20, 20)]


@pytest.mark.parametrize(("block_size", "widest"), [(1, 8), (8, 8), (12, 12)])
def test_branches_that_have_no_room_in_a_slot_are_refused(block_size, widest):
    script = Script((9,), tuple(range(11, 41)))
    requests = [
        request_of(script, window, mode="verified", window=window, draft_branches=True, max_new_tokens=30)
        for window in (widest, widest + 1)
    ]
    results = scripted_engine(script, block_size=block_size).generate_all(requests)
    assert results[0].token_ids == script.tokens
    assert results[1].error.code == "invalid_settings"
    assert f"window {widest + 1}; branches reach up to {widest}" in results[1].error.message


def test_a_window_of_64_has_room_at_the_end_of_a_slot():
    script = Script((9,), tuple(range(11, 61)))
    for branches in (None, False):
        request = request_of(script, mode="verified", window=64, draft_branches=branches, max_new_tokens=64)
        result = scripted_engine(script, max_length=51).generate_all([request])[0]
        assert result.token_ids == script.tokens


def test_requests_come_and_go_between_steps():
    """Rows that join, wait and are taken back leave the others as they are; tickets name them."""
    scripts = [Script((10 + place, 8), tuple(range(20, 30)) + (END_ID,)) for place in range(6)]
    engine = scripted_engine(*scripts, num_slots=2)
    submit = lambda place: engine.submit(request_of(scripts[place], place, window=3))[0]  # noqa: E731
    tickets = [submit(0), submit(1), submit(2)]
    told: dict[int, list[int]] = {}

    def step() -> None:
        for progress in engine.step():
            told.setdefault(progress.ticket, []).extend(progress.token_ids)
            if progress.result is not None:
                assert progress.result.token_ids == tuple(told[progress.ticket])

    step()
    assert set(told) == set(tickets[:2])
    assert engine.cancel(tickets[0])
    assert not engine.cancel(tickets[0])
    assert not engine.cancel(99)
    tickets += [submit(3), submit(4)]
    assert engine.cancel(tickets[3])
    step()
    tickets.append(submit(5))
    while engine.has_work:
        step()
    assert not engine.cancel(tickets[1])
    whole = list(scripts[0].tokens)
    assert told == {tickets[0]: whole[:3], **dict.fromkeys([tickets[1], tickets[2], tickets[4], tickets[5]], whole)}


def test_a_bad_request_has_its_result_at_once():
    script = Script((9,), (20, END_ID))
    engine = scripted_engine(script)
    ticket, result = engine.submit(Request("bad", (), RowDecodingSettings()))
    assert result.error.code == "empty_prompt"
    assert not engine.has_work
    assert not engine.cancel(ticket)


def test_an_automatic_window_in_tau_mode_keeps_what_the_threshold_lets_pass():
    """And says for each row which windows it had: with it the text may differ from run to run."""
    script = Script((9,), tuple(range(11, 41)), (1.0, 1.0, 0.5) * 10)
    engine = scripted_engine(script, block_size=4)
    engine._windows._choosers["tau"].choose = lambda num_rows, branches: WindowChoice(3, False)
    request = request_of(script, mode="tau", window="auto", threshold=0.9, max_new_tokens=30)
    result = engine.generate_all([request])[0]
    # 1.0 1.0 | 0.5 1.0 1.0 | 0.5 ...
    assert (result.token_ids, result.num_forwards) == (script.tokens, 11)
    assert result.forwards_per_window == {"3": 11}
