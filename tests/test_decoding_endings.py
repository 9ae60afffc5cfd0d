"""Where answers end: end tokens, caps, stop strings, the end of a slot; and prompts that hold end and padding tokens."""

import pytest
from scripted_model import END_ID, Script, request_of, scripted_engine

from workers.decoding.request import Result


def decode_one(script: Script, *, cache: str = "ragged", **changes) -> Result:
    return scripted_engine(script, cache=cache).generate_all([request_of(script, **changes)])[0]


@pytest.mark.parametrize("cache", ["ragged", "block", "none"])
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
        expected = scripted_engine(*scripts).generate_all(one_token)
        for window in range(1, 9):
            tau = [request_of(script, place, window=window, max_new_tokens=cap) for place, script in enumerate(scripts)]
            for ours, theirs in zip(scripted_engine(*scripts).generate_all(tau), expected, strict=True):
                assert ours.token_ids == theirs.token_ids
                assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
                assert ours.num_forwards == -(-len(ours.token_ids) // window)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_prompt_that_ends_with_the_end_token(length):
    """Case 2: prompts around the block size, whose last token is the end token, get a normal answer."""
    script = Script((9,) + (5,) * (length - 2) + (END_ID,), (11, 12, 13, END_ID))
    result = decode_one(script, window=8)
    assert (result.token_ids, result.finish_reason) == ((11, 12, 13, END_ID), "stop")


@pytest.mark.parametrize("cache", ["ragged", "block", "none"])
def test_padding_and_end_tokens_inside_a_prompt_are_ordinary_tokens(cache):
    """Case 5: padding is known from lengths, never from ids. The scripted model checks that each of them is seen."""
    scripts = [Script((9, 0, END_ID, 0, 5, 0), (11, 0, 0, 12, END_ID)), Script((8,) + (0,) * 11, (0, END_ID))]
    requests = [request_of(script, place, window=2) for place, script in enumerate(scripts)]
    results = scripted_engine(*scripts, cache=cache).generate_all(requests)
    assert [result.token_ids for result in results] == [script.tokens for script in scripts]


def test_a_single_end_token():
    """Case 15: an empty answer is an answer."""
    result = decode_one(Script((9,), (END_ID,)))
    assert (result.text, result.finish_reason, result.token_ids) == ("", "stop", (END_ID,))
    assert result.error is None


def test_several_end_tokens():
    scripts = [Script((10,), (20, 21, 3)), Script((11,), (22, END_ID))]
    requests = [request_of(script, place) for place, script in enumerate(scripts)]
    results = scripted_engine(*scripts, end_ids={END_ID, 3}).generate_all(requests)
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
    result = scripted_engine(script, max_length=10).generate_all([request_of(script, window=4)])[0]
    assert (result.token_ids, result.finish_reason) == (tuple(range(20, 27)), "length")


@pytest.mark.parametrize("mode", ["one_token", "tau", "verified"])
def test_tokens_behind_a_stop_string_take_their_log_probabilities_along(mode):
    script = Script((9,), tuple(b"1234567890"))
    window = {} if mode == "one_token" else {"window": 4}
    result = decode_one(script, mode=mode, stop=("56",), logprobs=True, max_new_tokens=10, **window)
    assert result.token_ids == tuple(b"123456")
    assert result.logprobs == pytest.approx([0.0] * 6)
