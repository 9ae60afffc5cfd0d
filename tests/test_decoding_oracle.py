"""Engine = naive loop, token for token, whatever stands beside a row and however it is cut up into steps.

Rules out the faults of published samplers: acceptance counts shifted by finished rows, mask ids left in slower rows, tokens
behind an end token, budgets rounded up to blocks, and prompt tokens dropped because they look like padding.
"""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_requests import (
    MODEL_TYPES,
    RandomChooser,
    engine_options,
    equals_naive,
    few_examples,
    make_engine,
    naive_answer,
    requests_of,
    run_with_late_requests,
)
from tiny_models import MASK_ID


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("cache", ["ragged", "block", "none"])
@few_examples(8)
@given(requests=requests_of(1, 9), options=engine_options(), seed=st.integers(0, 99), has_random_windows=st.booleans())
def test_engine_equals_the_naive_loop(model_type, cache, requests, options, seed, has_random_windows):
    engine = make_engine(model_type, cache=cache, **options)
    if has_random_windows:
        engine._windows._choosers["verified"] = RandomChooser(options["block_size"], Random(seed))
    results = run_with_late_requests(engine, requests, Random(seed))
    num_near_ties = 0
    for request, result in zip(requests, results, strict=True):
        answer = naive_answer(
            model_type,
            request,
            block_size=options["block_size"],
            max_length=options["max_length"],
            cache_block=options["cache_block"] if cache == "block" else None,
        )
        num_near_ties += not equals_naive(result, request, answer)
        assert MASK_ID not in result.token_ids
    assert num_near_ties <= 1
    counts = engine.statistics
    assert counts.num_rows == len(requests)
    assert counts.num_kept_tokens == sum(len(result.token_ids) for result in results)
    assert counts.num_row_forwards == sum(result.num_forwards for result in results)
    assert counts.num_query_tokens == sum(result.num_query_tokens for result in results)
    assert sorted(engine._scheduler._free_slots) == list(range(options["num_slots"]))


@pytest.mark.parametrize("cache", ["ragged", "none"])
@few_examples(20)
@given(requests=requests_of(2, 8, max_prompt=20), data=st.data())
def test_alone_batched_and_permuted_are_the_same(cache, requests, data):
    def by_id(results) -> dict:
        # Log-probabilities are sums of other orders; an automatic window may choose what it likes.
        return {
            result.id: (
                result.token_ids,
                result.text,
                result.finish_reason,
                None if is_automatic[result.id] else (result.num_query_tokens, result.kept_per_forward),
            )
            for result in results
        }

    is_automatic = {
        request.id: request.decoding.mode == "verified" and request.decoding.window in (None, "auto")
        for request in requests
    }
    batched = by_id(make_engine("llama", cache=cache).generate_all(requests))
    shuffled = data.draw(st.permutations(requests))
    num_slots, prefill_chunk = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 30))
    engine = make_engine("llama", cache=cache, num_slots=num_slots, prefill_chunk=prefill_chunk)
    assert by_id(engine.generate_all(shuffled)) == batched
    engine = make_engine("llama", cache=cache, num_slots=1)
    assert by_id([engine.generate_all([request])[0] for request in requests]) == batched


@few_examples(15)
@given(requests=requests_of(1, 6, max_prompt=20, modes=("verified",)), seed=st.integers(0, 99))
def test_verified_rows_say_what_one_token_rows_say(requests, seed):
    """In any cache, and for any window and branches from step to step."""
    expected = make_engine("qwen3", num_slots=2).generate_all(
        [
            type(request)(
                request.id,
                request.prompt_ids,
                request.decoding.model_copy(update={"mode": "one_token", "window": None, "draft_branches": None}),
            )
            for request in requests
        ]
    )
    for cache in ("ragged", "block", "none"):
        engine = make_engine("qwen3", cache=cache, cache_block=5)
        engine._windows._choosers["verified"] = RandomChooser(4, Random(seed))
        for ours, theirs in zip(engine.generate_all(requests), expected, strict=True):
            assert (ours.token_ids, ours.text, ours.finish_reason) == (
                theirs.token_ids,
                theirs.text,
                theirs.finish_reason,
            )
