"""Sampling is a function of (seed, position, logits), the same in any batch and window, and draws from the right distribution."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_decoding import NaiveAnswer, naive_gumbel, naive_pick

from workers.config import RowDecodingSettings
from workers.decoding.request import Request, row_seed
from workers.decoding.sampling import batch_sampling, gumbel_noise, pick_tokens, processed_logits

CPU = torch.device("cpu")
VOCAB_SIZE = 23


def sampling_of(*rows: RowDecodingSettings, seeds=None):
    return batch_sampling(rows, seeds or [row.seed for row in rows], VOCAB_SIZE, CPU)


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def test_noise_equals_the_integer_hash_in_plain_python():
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63)])[:, None]
    positions = torch.tensor([[0, 1, 511]])
    noise = gumbel_noise(seeds, positions, VOCAB_SIZE)
    assert noise.shape == (5, 3, VOCAB_SIZE)
    for row, seed in enumerate(seeds[:, 0].tolist()):
        for column, position in enumerate(positions[0].tolist()):
            expected = [naive_gumbel(seed % 2**64, position, token) for token in range(VOCAB_SIZE)]
            torch.testing.assert_close(noise[row, column], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_noise_values_are_pinned():
    """Changing the hash would change every sampled text of every user."""
    noise = gumbel_noise(torch.tensor([7]), torch.tensor([3]), 4)
    torch.testing.assert_close(noise[0], torch.tensor([2.3129, 2.5910, 0.6280, 1.1179]), atol=1e-4, rtol=0)


def test_noise_is_standard_gumbel_and_unrelated_between_neighbours():
    noise_PV = gumbel_noise(torch.tensor(11), torch.arange(400), 500)
    values = noise_PV.flatten().double().sort().values
    ranks = (torch.arange(len(values)) + 0.5) / len(values)
    distance = (torch.exp(-torch.exp(-values)) - ranks).abs().max()
    assert distance < 1.63 / math.sqrt(len(values))  # Kolmogorov-Smirnov at 1 %
    other_PV = gumbel_noise(torch.tensor(12), torch.arange(400), 500)
    for left, right in ((noise_PV[1:], noise_PV[:-1]), (noise_PV[:, 1:], noise_PV[:, :-1]), (noise_PV, other_PV)):
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(left.numel())


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(
        st.builds(
            RowDecodingSettings,
            temperature=st.sampled_from([0.0, 1e-30, 0.5, 1.0, 4.0]),
            top_k=st.sampled_from([0, 1, 2, 7, 500]),
            top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-60]),
            seed=st.integers(0, 2**64 - 1),
        ),
        min_size=1,
        max_size=5,
    ),
    position=st.integers(0, 2000),
    logits_seed=st.integers(0, 10**6),
)
def test_batch_equals_the_naive_pick(rows, position, logits_seed):
    logits_BWV = random_logits(len(rows), 3, seed=logits_seed)
    logits_BWV[..., 4] = -torch.inf
    tokens_BW = pick_tokens(logits_BWV, torch.full((len(rows),), position), sampling_of(*rows))
    for row, options in enumerate(rows):
        for place in range(3):
            answer = NaiveAnswer()
            expected = naive_pick(
                logits_BWV[row, place].double().numpy(), options, options.seed, position + place, answer
            )
            assert tokens_BW[row, place] == expected or answer.smallest_gap < 1e-5
            assert tokens_BW[row, place] != 4


def test_draws_follow_the_distribution():
    """Chi-square over 4000 positions of one seed, at the temperature and after top-k; a wrong temperature must fail it."""
    options = RowDecodingSettings(temperature=1.7, top_k=6, seed=5)
    logits_V = random_logits(seed=3)
    picks_BW = pick_tokens(logits_V.expand(1, 4000, -1), torch.zeros(1, dtype=torch.int64), sampling_of(options))
    counts = Counter(picks_BW[0].tolist())

    def chi_square(temperature: float) -> float:
        top = logits_V.topk(6)
        expected = (top.values / temperature).softmax(-1) * 4000
        assert set(counts) <= set(top.indices.tolist())
        return sum(
            (counts[token] - e) ** 2 / e for token, e in zip(top.indices.tolist(), expected.tolist(), strict=True)
        )

    assert chi_square(1.7) < 20.5  # 5 degrees of freedom, 0.1 %
    assert chi_square(1.3) > 20.5


def test_a_row_draws_the_same_in_any_batch_and_window():
    options = [RowDecodingSettings(temperature=1.0, seed=seed, top_k=seed) for seed in range(4)]
    logits_BWV = random_logits(4, 5)
    positions_B = torch.tensor([0, 3, 9, 9])
    together = pick_tokens(logits_BWV, positions_B, sampling_of(*options))
    for row in range(4):
        for place in range(5):
            alone = pick_tokens(
                logits_BWV[row : row + 1, place : place + 1],
                positions_B[row : row + 1] + place,
                sampling_of(options[row]),
            )
            assert alone[0, 0] == together[row, place]


def test_ties_go_to_the_lowest_ids():
    logits_PWV = torch.zeros(1, 1, VOCAB_SIZE)
    kept = processed_logits(logits_PWV, sampling_of(RowDecodingSettings(temperature=1.0, top_k=3, seed=0)))
    assert torch.isfinite(kept[0, 0]).nonzero().flatten().tolist() == [0, 1, 2]
    assert pick_tokens(logits_PWV, torch.zeros(1), sampling_of(RowDecodingSettings(), seeds=[0])).item() == 0


def test_seeds_of_rows_without_one_depend_on_run_and_id_alone():
    def seed(row_id, run_seed, own=None):
        return row_seed(Request(row_id, (1,), RowDecodingSettings(seed=own)), run_seed)

    assert seed("a", 0) == 7731914379788528535
    assert len({seed("a", 0), seed("b", 0), seed("a", 1), seed(1, 0), seed("1", 0)}) == 5
    assert seed("a", 0, own=9) == seed("b", 1, own=9) == 9


@pytest.mark.parametrize("big", [2**63, 2**64 - 1, 2**64, 2**80 + 1])
def test_seeds_of_any_size_are_taken(big):
    options = RowDecodingSettings(temperature=1.0, seed=big)
    small = RowDecodingSettings(temperature=1.0, seed=big % 2**64)
    logits_BWV = random_logits(1, 8)
    picks = [pick_tokens(logits_BWV, torch.zeros(1, dtype=torch.int64), sampling_of(row)) for row in (options, small)]
    assert torch.equal(*picks)
