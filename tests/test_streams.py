"""Block cuts, phases, placeholders and packing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import MASK_ID, random_samples

from workers.objectives.attention import dense_visibility
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample, block_starts, even_bins, first_fit_decreasing, response_phases


def sample_of(token_ids: list[int], *responses: tuple[int, int], file: int = 0, row: int = 0, epoch: int = 0) -> Sample:
    return Sample(file, row, epoch, np.array(token_ids, dtype=np.int32), responses)


def fixed_cuts(block_size: int, ar_weight: float = 1.0, mask_weight: float = 1.0) -> MarsObjective:
    return MarsObjective(block_size, ar_weight, mask_weight, False, MASK_ID, seed=0)


@given(start=st.integers(1, 50), length=st.integers(1, 40), block_size=st.integers(1, 12), data=st.data())
def test_cuts_follow_the_offset(start: int, length: int, block_size: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, block_size - 1))
    begins = block_starts(start, start + length, block_size, offset)
    sizes = np.unique(begins, return_counts=True)[1].tolist()
    expected = [min(offset, length)] if offset else []
    while sum(expected) < length:
        expected.append(min(block_size, length - sum(expected)))
    assert sizes == expected
    assert begins[0] == start


def test_streams_of_a_small_document() -> None:
    """Response 12..16 behind a prompt of two; blocks of 3: (12 13 14)(15 16)."""
    document = fixed_cuts(3).document(sample_of([10, 11, 12, 13, 14, 15, 16, 17], (2, 7)))
    assert document.noisy_ids_M.tolist() == [MASK_ID] * 3
    assert document.noisy_position_M.tolist() == [2, 3, 5]
    assert document.noisy_block_M.tolist() == [1, 1, 2]
    assert document.noisy_limit_M.tolist() == [1, 1, 4]
    assert document.source_N.tolist() == [1, 2, 3, 4, 5, 8, 9, 10]
    assert document.label_N.tolist() == [12, 13, 14, 15, 16, 13, 14, 16]
    assert document.in_ar_loss_N.tolist() == [True] * 5 + [False] * 3
    assert document.in_mask_loss_N.tolist() == [True, False, False, True, False, True, True, True]
    assert document.num_response_tokens == 5


def test_no_head_positions_for_a_loss_of_weight_zero() -> None:
    sample = sample_of([10, 11, 12, 13, 14, 15, 16, 17], (2, 7))
    only_mask = fixed_cuts(3, ar_weight=0.0).document(sample)
    assert only_mask.source_N.tolist() == [1, 4, 8, 9, 10]
    assert only_mask.label_N.tolist() == [12, 15, 13, 14, 16]
    assert only_mask.in_mask_loss_N.all()
    assert not only_mask.in_ar_loss_N.any()
    only_ar = fixed_cuts(3, mask_weight=0.0).document(sample)
    assert len(only_ar.noisy_ids_M) == 0
    assert only_ar.source_N.tolist() == [1, 2, 3, 4, 5]
    assert only_ar.in_ar_loss_N.all()
    assert not only_ar.in_mask_loss_N.any()
    assert only_mask.num_response_tokens == only_ar.num_response_tokens == 5


def test_a_block_of_one_has_no_placeholder() -> None:
    assert len(fixed_cuts(4).document(sample_of([10, 11, 12, 13, 14, 15], (1, 6))).noisy_ids_M) == 3
    assert len(fixed_cuts(1).document(sample_of([10, 11, 12, 13, 14, 15], (1, 6))).noisy_ids_M) == 0


def test_a_response_at_position_zero_is_trained_on_from_its_second_token() -> None:
    document = fixed_cuts(3).document(sample_of([10, 11, 12, 13, 14], (0, 5)))
    assert document.source_N.min() == 0
    assert document.num_response_tokens == 4
    assert document.label_N.tolist() == [11, 12, 13, 14, 12, 13]
    alone = fixed_cuts(3).document(sample_of([10], (0, 1)))
    assert alone.num_response_tokens == len(alone.source_N) == 0


def test_a_mask_id_in_a_response_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="mask id"):
        fixed_cuts(3).document(sample_of([10, MASK_ID, 12], (1, 3)))


def test_phase_depends_on_identity_only() -> None:
    """Two samples with other tokens and lengths but the same name have the same phases; every part of the name counts."""
    seven = tuple((i, i + 1) for i in range(1, 15, 2))
    base = response_phases(5, sample_of([0] * 20, *seven), 2**20).tolist()
    assert base == response_phases(5, sample_of([1] * 40, *[(s + 5, e + 9) for s, e in seven]), 2**20).tolist()
    assert len(set(base)) == 7
    others = [response_phases(6, sample_of([0] * 20, *seven), 2**20)]
    for part in ("file", "row", "epoch"):
        others.append(response_phases(5, sample_of([0] * 20, *seven, **{part: 1}), 2**20))
    assert len({tuple(phases) for phases in [base, *(o.tolist() for o in others)]}) == 5
    swapped = [sample_of([0], (0, 1), file=1, row=2), sample_of([0], (0, 1), file=2, row=1)]
    assert response_phases(0, swapped[0], 2**20) != response_phases(0, swapped[1], 2**20)


def test_phases_are_spread_evenly_and_stay_what_they_are() -> None:
    phases = [int(response_phases(0, sample_of([0], (0, 1), row=row), 8)[0]) for row in range(8000)]
    counts = np.bincount(phases, minlength=8)
    assert counts.min() > 850
    assert counts.max() < 1150
    # A change of these values changes every training run: resume would mix two sets of cuts.
    assert phases[:12] == [6, 1, 5, 3, 1, 6, 2, 4, 2, 0, 2, 0]


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 12),
    seed=st.integers(0, 999),
    row_tokens=st.integers(1, 150),
    micro_batch_rows=st.integers(1, 4),
)
def test_packing_loses_and_repeats_nothing(count: int, seed: int, row_tokens: int, micro_batch_rows: int) -> None:
    objective = MarsObjective(4, 1.0, 1.0, True, MASK_ID, seed=0)
    samples = random_samples(count, seed=seed)
    batches = objective.pack(samples, row_tokens=row_tokens, micro_batch_rows=micro_batch_rows)
    clean, labels = [], []
    for batch in batches:
        num_rows, length = batch.token_ids_BL.shape
        assert num_rows <= micro_batch_rows
        assert batch.num_tokens + batch.num_padding == num_rows * length
        assert batch.num_padding == int((batch.document_BL == -1).sum())
        labels += batch.label_N.tolist()
        for row in range(num_rows):
            documents = batch.document_BL[row]
            used = int((documents >= 0).sum())
            assert used <= row_tokens or int(documents.max()) == 0
            for document in range(int(documents.max()) + 1):
                is_clean = (documents == document) & (batch.block_BL[row] == 0)
                clean.append(batch.token_ids_BL[row][is_clean].tolist())
                positions = batch.position_ids_BL[row][is_clean]
                assert positions.tolist() == list(range(len(positions)))
    assert sorted(clean) == sorted(sample.token_ids.tolist() for sample in samples)
    expected = [label for sample in samples for label in objective.document(sample).label_N.tolist()]
    assert sorted(labels) == sorted(expected)
    assert sum(batch.num_response_tokens for batch in batches) == sum(
        end - start for sample in samples for start, end in sample.responses
    )


def test_first_fit_decreasing() -> None:
    assert first_fit_decreasing([3, 9, 5, 2, 20, 5], 10) == [[4], [1], [2, 5], [0, 3]]
    assert first_fit_decreasing([], 10) == []


@given(lengths=st.lists(st.integers(1, 130), max_size=40), capacity=st.integers(1, 120))
def test_even_bins_hold_the_same_in_as_many_rows(lengths: list[int], capacity: int) -> None:
    bins, packed = even_bins(lengths, capacity), first_fit_decreasing(lengths, capacity)
    assert len(bins) == len(packed)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in members) for members in bins]
    assert all(load <= capacity or len(members) == 1 for load, members in zip(loads, bins, strict=True))
    assert max(loads, default=0) <= max((sum(lengths[i] for i in members) for members in packed), default=0)


def test_even_bins_leave_no_short_row() -> None:
    """First-fit-decreasing gives rows of 12, 12 and 3 here: a third of the batch would be padding."""
    assert [len(members) for members in first_fit_decreasing([3] * 9, 12)] == [4, 4, 1]
    assert [len(members) for members in even_bins([3] * 9, 12)] == [3, 3, 3]


def test_no_samples_pack_to_no_batches() -> None:
    assert fixed_cuts(3).pack([], row_tokens=10, micro_batch_rows=2) == []


def test_padding_sees_itself_only_and_is_seen_by_nobody() -> None:
    batches = fixed_cuts(3).pack(random_samples(5, seed=1), row_tokens=60, micro_batch_rows=5)
    batches.append(fixed_cuts(3).empty_batch())
    num_padding = 0
    for batch in batches:
        visible_BLL = dense_visibility(batch.places())[:, 0]
        is_padding_BL = batch.document_BL == -1
        num_padding += int(is_padding_BL.sum())
        own_BLL = torch.eye(visible_BLL.shape[1], dtype=torch.bool).expand_as(visible_BLL)
        assert torch.equal(visible_BLL[is_padding_BL], own_BLL[is_padding_BL])
        assert torch.equal(visible_BLL.mT[is_padding_BL], own_BLL[is_padding_BL])
        assert bool(visible_BLL.diagonal(dim1=1, dim2=2).all())
    assert num_padding > 1


def test_sliding_window_counts_positions_not_slots() -> None:
    (batch,) = fixed_cuts(3).pack(random_samples(3, seed=1), row_tokens=200, micro_batch_rows=1)
    full_LL = dense_visibility(batch.places())[0, 0]
    sliding_LL = dense_visibility(batch.places(), sliding_window=4)[0, 0]
    distance_LL = batch.position_ids_BL[0, :, None] - batch.position_ids_BL[0, None, :]
    assert torch.equal(sliding_LL, full_LL & (distance_LL < 4))
    assert bool((full_LL & ~sliding_LL).any())


def test_to_moves_every_tensor() -> None:
    (batch,) = fixed_cuts(3).pack(random_samples(2), row_tokens=200, micro_batch_rows=1)
    moved = batch.to("meta")
    assert {t.device.type for t in vars(moved).values() if isinstance(t, torch.Tensor)} == {"meta"}
    assert moved.num_response_tokens == batch.num_response_tokens
