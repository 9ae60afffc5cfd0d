"""Choosing tokens: greedy, or sampled so that the choice is a function of (seed, position in the response) alone.

The noise of a token is a counter-based integer hash of (seed, position, token id), so a row draws the same numbers in any batch,
window, cache and device. Order: forbidden tokens and penalties (`logit_rules`), division by the temperature, top-k, top-p, then
argmax(log-probability + Gumbel noise).

Shapes: B rows, W picks of a row, P rows that sample, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.config import RowDecodingSettings

# Constants of the 64-bit finalizers of splitmix64 and of MurmurHash3, as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_MURMUR_1 = 0xFF51AFD7ED558CCD - (1 << 64)
_MURMUR_2 = 0xC4CEB9FE1A85EC53 - (1 << 64)


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling settings of the rows of a group that sample, on the device. `rows_P` are their places; None if all are greedy."""

    rows_P: torch.Tensor | None
    temperature_P: torch.Tensor
    top_k_P: torch.Tensor
    top_p_P: torch.Tensor
    seed_P: torch.Tensor
    has_top_k: bool
    has_top_p: bool


def batch_sampling(
    settings: Sequence[RowDecodingSettings], seeds: Sequence[int], vocab_size: int, device: torch.device
) -> SamplingBatch:
    """Puts the settings of the rows into tensors."""
    places = [place for place, row in enumerate(settings) if row.temperature > 0]
    rows = [settings[place] for place in places]
    top_k = [min(row.top_k, vocab_size) if row.top_k else vocab_size for row in rows]
    return SamplingBatch(
        rows_P=torch.tensor(places, device=device) if places else None,
        temperature_P=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
        top_k_P=torch.tensor(top_k, dtype=torch.int64, device=device),
        top_p_P=torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
        seed_P=torch.tensor([_signed(seeds[place]) for place in places], dtype=torch.int64, device=device),
        has_top_k=any(k < vocab_size for k in top_k),
        has_top_p=any(row.top_p < 1 for row in rows),
    )


def pick_tokens(logits_BWV: torch.Tensor, first_position_B: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Tokens (B, W) for the positions `first_position_B`, +1, ... of the response. Forbidden tokens have the logit -inf.

    Ties go to the lowest token id.
    """
    token_BW = logits_BWV.argmax(dim=-1)
    if batch.rows_P is None:
        return token_BW
    scores_PWV = processed_logits(logits_BWV[batch.rows_P], batch)
    num_picks, vocab_size = logits_BWV.shape[1:]
    lane_W = torch.arange(num_picks, device=logits_BWV.device)
    position_PW = first_position_B[batch.rows_P, None] + lane_W
    scores_PWV = scores_PWV + gumbel_noise(batch.seed_P[:, None], position_PW, vocab_size)
    token_BW[batch.rows_P] = scores_PWV.argmax(dim=-1)
    return token_BW


def processed_logits(logits_PWV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits after temperature, top-k and top-p; what may not be drawn is -inf. The likeliest token always stays."""
    # The maximum goes first, so that a tiny temperature cannot overflow.
    shifted_PWV = logits_PWV - logits_PWV.amax(dim=-1, keepdim=True)
    scaled_PWV = shifted_PWV / batch.temperature_P[:, None, None]
    if not (batch.has_top_k or batch.has_top_p):
        return scaled_PWV
    # A stable sort: among equal logits the lowest token ids stay.
    sorted_PWV, order_PWV = scaled_PWV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_PWV.shape[-1], device=scaled_PWV.device)
    sorted_PWV = sorted_PWV.masked_fill(rank_V >= batch.top_k_P[:, None, None], -torch.inf)
    if batch.has_top_p:
        probability_PWV = sorted_PWV.softmax(dim=-1)
        before_PWV = probability_PWV.cumsum(dim=-1) - probability_PWV
        # 1.0 means all: the rounded sum may reach it too early.
        is_cut_PWV = (before_PWV >= batch.top_p_P[:, None, None]) & (batch.top_p_P[:, None, None] < 1)
        is_cut_PWV[..., 0] = False
        sorted_PWV = sorted_PWV.masked_fill(is_cut_PWV, -torch.inf)
    return torch.empty_like(scaled_PWV).scatter_(-1, order_PWV, sorted_PWV)


def log_probabilities(logits_BWV: torch.Tensor, token_BW: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Natural logarithm (B, W) of each token's share of the distribution that it was drawn from; the softmax of a greedy row."""
    chosen_BW1 = token_BW[..., None]
    logprob_BW = logits_BWV.log_softmax(dim=-1).gather(-1, chosen_BW1).squeeze(-1)
    if batch.rows_P is not None:
        drawn_PWV = processed_logits(logits_BWV[batch.rows_P], batch).log_softmax(dim=-1)
        logprob_BW[batch.rows_P] = drawn_PWV.gather(-1, chosen_BW1[batch.rows_P]).squeeze(-1)
    return logprob_BW


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise (..., V), float32, for int64 seeds and positions of broadcastable shape (...)."""
    key = _mix(_mix(seed + _GOLDEN) + position)
    token_V = _mix(torch.arange(vocab_size, device=position.device) + _GOLDEN)
    bits = (key[..., None] ^ token_V) * _MURMUR_1
    bits = (bits ^ _shift_right(bits, 33)) * _MURMUR_2
    # 53 bits: the largest noise comes from the smallest numbers, where float32 is fine-grained.
    uniform = (_shift_right(bits, 11).to(torch.float32) + 0.5) * 2.0**-53
    uniform = uniform.clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64: neighbouring numbers become unrelated ones. int64 products wrap."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical shift of int64, whose own shift keeps the sign."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(seed: int) -> int:
    """A seed of any size as the int64 with the same low 64 bits."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed
