"""Acceptance of a whole batch equals a loop over rows and tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import RowDecodingSettings
from workers.decoding.acceptance import accepts_by_score, batch_thresholds, count_accepted, count_matching

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_accepted_counts_equal_a_loop(accepted):
    for row, count in zip(accepted, count_accepted(torch.tensor(accepted)).tolist(), strict=True):
        expected = 0
        while expected < 4 and row[expected]:
            expected += 1
        assert count == expected


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_matching_counts_equal_a_loop(data):
    """Drafts beyond a row's own number never count, even where they are right."""
    num_rows, most = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
    drafts, clean = (
        data.draw(
            st.lists(st.lists(st.integers(0, 1), min_size=size, max_size=size), min_size=num_rows, max_size=num_rows)
        )
        for size in (most, most + 1)
    )
    num_drafts = data.draw(st.lists(st.integers(0, most), min_size=num_rows, max_size=num_rows))
    counts_B = count_matching(
        torch.tensor(drafts).reshape(num_rows, most), torch.tensor(clean), torch.tensor(num_drafts)
    )
    for row in range(num_rows):
        expected = 0
        while expected < num_drafts[row] and drafts[row][expected] == clean[row][expected]:
            expected += 1
        assert counts_B[row] == expected


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(
        st.builds(
            RowDecodingSettings,
            score=st.sampled_from(["probability", "margin", "entropy"]),
            threshold=st.floats(0, 1.2),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 10**6),
)
def test_scores_equal_a_loop(rows, seed):
    """Of the draft, not of the likeliest token; the mask id (logit -inf) takes no part."""
    generator = torch.Generator().manual_seed(seed)
    logits_BKV = torch.randn(len(rows), 3, 6, generator=generator) * 2
    logits_BKV[..., 5] = -torch.inf
    draft_BK = torch.randint(0, 5, (len(rows), 3), generator=generator)
    accepted_BK = accepts_by_score(logits_BKV, draft_BK, batch_thresholds(rows, CPU))
    for row, options in enumerate(rows):
        for place in range(3):
            weights = [math.exp(logit) for logit in logits_BKV[row, place].tolist()]
            probabilities = [weight / sum(weights) for weight in weights]
            first, second = sorted(probabilities, reverse=True)[:2]
            score = {
                "probability": probabilities[draft_BK[row, place]],
                "margin": first - second,
                "entropy": -sum(p * math.log(p) for p in probabilities if p > 0),
            }[options.score]
            if abs(score - options.threshold) < 1e-5:
                continue
            if options.score == "entropy":
                assert accepted_BK[row, place] == (0 < score <= options.threshold)
            else:
                assert accepted_BK[row, place] == (score >= options.threshold and options.threshold < 1)


@pytest.mark.parametrize(
    ("score", "threshold", "is_accepted"),
    [
        ("probability", 1.0, False),
        ("probability", 0.999, True),
        ("probability", 1.5, False),
        ("margin", 1.0, False),
        ("margin", 0.999, True),
        ("entropy", 0.0, False),
        ("entropy", 0.001, True),
    ],
)
def test_a_saturated_softmax_against_the_outermost_thresholds(score, threshold, is_accepted):
    """Case 14: the probability is exactly 1.0 and the entropy exactly 0, yet the outermost threshold accepts nothing."""
    logits_BKV = torch.tensor([[[1000.0, 0.0, -torch.inf]]])
    assert logits_BKV.softmax(-1)[0, 0, 0] == 1.0
    batch = batch_thresholds([RowDecodingSettings(score=score, threshold=threshold)], CPU)
    assert accepts_by_score(logits_BKV, torch.tensor([[0]]), batch).tolist() == [[is_accepted]]
