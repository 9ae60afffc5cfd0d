"""Verified mode with a model that says what a script tells it: which drafts are checked, which kept, and what nobody may read.

The model itself asserts what every query token sees: each position up to its own once, the right tokens there, and drafts nowhere
but behind the tokens of the answer. Behind a wrong draft it says nonsense.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_model import CONFUSED_ID, END_ID, MASK_ID, Script, request_of, scripted_engine

from workers.config import RowDecodingSettings
from workers.decoding.request import Request

ANSWER = tuple(range(11, 31))


def kept_by_rule(num_tokens: int, wrong: frozenset[int], window: int, *, has_branches: bool) -> list[int]:
    """Tokens kept by each forward, from the rule alone: the agreeing prefix of the drafts and one more."""
    kept: list[int] = []
    num_drafts = 0
    while sum(kept) < num_tokens:
        num_left = num_tokens - sum(kept)
        num_checked = min(num_drafts, min(window, num_left) - 1)
        places = [sum(kept) + place for place in range(num_checked)]
        num_accepted = next((number for number, place in enumerate(places) if place in wrong), num_checked)
        is_known = has_branches or num_accepted == num_checked
        num_drafts = max(min(window - 1, num_left - 2), 0) if is_known else 0
        kept.append(num_accepted + 1)
    return kept


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    wrong=st.frozensets(st.integers(0, 19), max_size=8),
    window=st.integers(1, 8),
    has_branches=st.booleans(),
    cap=st.integers(1, 20),
    cache=st.sampled_from(["ragged", "none"]),
)
def test_kept_tokens_follow_the_rule(wrong, window, has_branches, cap, cache):
    script = Script((9, 8), ANSWER, wrong_drafts=wrong)
    request = request_of(script, mode="verified", window=window, draft_branches=has_branches, max_new_tokens=cap)
    result = scripted_engine(script, cache=cache).generate_all([request])[0]
    expected = kept_by_rule(cap, wrong, window, has_branches=has_branches)
    assert (result.token_ids, result.finish_reason) == (ANSWER[:cap], "length")
    assert result.num_forwards == len(expected)
    assert result.kept_per_forward == Counter(expected)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 14),
            st.frozensets(st.integers(0, 14), max_size=6),
            st.sampled_from([1, 2, 3, 5, 8, "auto"]),
            st.sampled_from([None, True, False]),
            st.integers(1, 15),
        ),
        min_size=1,
        max_size=6,
    ),
    cache=st.sampled_from(["ragged", "none", "block"]),
    cache_block=st.integers(1, 9),
    prefill_chunk=st.integers(1, 12),
)
def test_wrong_drafts_never_reach_an_answer(rows, cache, cache_block, prefill_chunk):
    scripts, requests = [], []
    for place, (num_tokens, wrong, window, branches, cap) in enumerate(rows):
        prompt = (10 + place, *range(20, 20 + 2 * place))
        scripts.append(Script(prompt, (*ANSWER[:num_tokens], END_ID, 40, 41), wrong_drafts=wrong))
        options = {"window": window, "draft_branches": branches, "max_new_tokens": cap}
        requests.append(request_of(scripts[-1], place, mode="verified", **options))
    engine = scripted_engine(*scripts, cache=cache, cache_block=cache_block, prefill_chunk=prefill_chunk, num_slots=3)
    results = engine.generate_all(requests)
    for script, request, result in zip(scripts, requests, results, strict=True):
        answer = script.tokens[: script.tokens.index(END_ID) + 1][: request.decoding.max_new_tokens]
        assert result.token_ids == answer
        assert result.finish_reason == ("stop" if answer[-1] == END_ID else "length")


def test_drafts_that_are_all_wrong_cost_forwards_and_no_token():
    script = Script((9,), ANSWER, wrong_drafts=frozenset(range(20)))
    for has_branches in (True, False):
        request = request_of(script, mode="verified", window=4, draft_branches=has_branches, max_new_tokens=20)
        result = scripted_engine(script).generate_all([request])[0]
        assert (result.token_ids, result.num_forwards) == (ANSWER, 20)
        assert CONFUSED_ID not in result.token_ids


def test_branches_keep_drafting_after_a_rejection():
    """Every other draft is wrong: a run behind the last draft only is of no use after a rejection."""
    script = Script((9,), ANSWER, wrong_drafts=frozenset(range(2, 20, 3)))
    forwards = {}
    for has_branches in (True, False):
        request = request_of(script, mode="verified", window=4, draft_branches=has_branches, max_new_tokens=20)
        result = scripted_engine(script).generate_all([request])[0]
        assert result.token_ids == ANSWER
        forwards[has_branches] = result.num_forwards
    assert forwards[True] < forwards[False]


@pytest.mark.parametrize(("has_branches", "most"), [(False, 2 * 4 - 1), (True, 4 * 4)])
def test_query_tokens_of_a_step(has_branches, most):
    """m + W of them without branches, (m + 1) W with."""
    script = Script((9,), ANSWER)
    engine = scripted_engine(script)
    request = request_of(script, mode="verified", window=4, draft_branches=has_branches, max_new_tokens=20)
    result = engine.generate_all([request])[0]
    assert engine._model._backbone.most_query_tokens == most
    # One forward without drafts, four in which all three are right, and one for the rest.
    assert result.kept_per_forward == {1: 1, 4: 4, 3: 1}


def test_an_end_token_among_the_drafts_ends_the_row():
    """Nothing behind it is kept, in any window, although the drafts behind it are right as well."""
    for window in (2, 3, 4, 8):
        for num_tokens in range(8):
            script = Script((9,), (*ANSWER[:num_tokens], END_ID, 40, 41, 42, 43))
            result = scripted_engine(script).generate_all([request_of(script, mode="verified", window=window)])[0]
            assert (result.token_ids, result.finish_reason) == (script.tokens[: num_tokens + 1], "stop")


def test_stop_strings_among_the_drafts():
    script = Script((9,), tuple(b"1234567890"))
    for window in (1, 2, 3, 8, "auto"):
        request = request_of(script, mode="verified", window=window, stop=("56",), max_new_tokens=9)
        result = scripted_engine(script).generate_all([request])[0]
        assert (result.text, result.token_ids, result.finish_reason) == ("1234", tuple(b"123456"), "stop")


def test_the_default_is_verified_and_exact():
    script = Script((9,), ANSWER, wrong_drafts=frozenset({3, 11}))
    result = scripted_engine(script).generate_all([Request("a", (9,), RowDecodingSettings(max_new_tokens=20))])[0]
    assert RowDecodingSettings().mode == "verified"
    assert result.token_ids == ANSWER
    assert MASK_ID not in result.token_ids


def test_drafts_stay_inside_the_positions_of_a_slot():
    """At the end of a slot nothing looks past its last token; placeholders that nobody reads stand at the last position."""
    script = Script((9, 8, 7), tuple(range(20, 40)))
    for has_branches in (True, False):
        for max_length in range(5, 16):
            request = request_of(script, mode="verified", window=6, draft_branches=has_branches)
            result = scripted_engine(script, max_length=max_length).generate_all([request])[0]
            assert (result.token_ids, result.finish_reason) == (script.tokens[: max_length - 3], "length")
