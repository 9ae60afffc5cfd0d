"""How many of the picked tokens of a row are kept. All rows at once: a prefix of a cumulative product, never a loop.

Shapes: B rows, W picks of a row, K drafts (the picks behind the first), V vocabulary, E end tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.config import RowDecodingSettings


@dataclass(frozen=True)
class ThresholdBatch:
    """Tau settings of the rows of a group, on the device; the sets say which scores any row needs."""

    threshold_B: torch.Tensor
    is_margin_B: torch.Tensor
    is_entropy_B: torch.Tensor
    scores: frozenset[str]


def batch_thresholds(settings: Sequence[RowDecodingSettings], device: torch.device) -> ThresholdBatch:
    """Puts the tau settings of the rows into tensors."""
    return ThresholdBatch(
        threshold_B=torch.tensor(
            # A one-token row has one pick and so no drafts; the number only fills its place.
            [1.0 if row.threshold is None else row.threshold for row in settings],
            dtype=torch.float32,
            device=device,
        ),
        is_margin_B=torch.tensor([row.score == "margin" for row in settings], device=device),
        is_entropy_B=torch.tensor([row.score == "entropy" for row in settings], device=device),
        scores=frozenset(row.score for row in settings),
    )


def accepts_by_score(logits_BKV: torch.Tensor, draft_BK: torch.Tensor, batch: ThresholdBatch) -> torch.Tensor:
    """Whether each draft (B, K) passes its row's threshold.

    Scores are of the softmax at T = 1 with forbidden tokens at -inf, before top-k and top-p: the probability of the draft, the
    lead of the likeliest token over the next, or the entropy in nats. A threshold of 1.0 (0 for entropy) accepts nothing, even
    where a float32 softmax is exactly 1.0.
    """
    log_probability_BKV = logits_BKV.log_softmax(dim=-1)
    threshold_B1 = batch.threshold_B[:, None]
    draft_log_BK = log_probability_BKV.gather(-1, draft_BK[..., None]).squeeze(-1)
    score_BK = draft_log_BK.exp()
    if "margin" in batch.scores:
        top_BK2 = log_probability_BKV.topk(2, dim=-1).values.exp()
        score_BK = torch.where(batch.is_margin_B[:, None], top_BK2[..., 0] - top_BK2[..., 1], score_BK)
    is_accepted_BK = (score_BK >= threshold_B1) & (threshold_B1 < 1)
    if "entropy" in batch.scores:
        entropy_BK = torch.special.entr(log_probability_BKV.exp()).sum(dim=-1)
        is_low_BK = (entropy_BK <= threshold_B1) & (threshold_B1 > 0)
        is_accepted_BK = torch.where(batch.is_entropy_B[:, None], is_low_BK, is_accepted_BK)
    return is_accepted_BK


def count_kept(is_accepted_BK: torch.Tensor) -> torch.Tensor:
    """Kept tokens of each row: the first pick, and the drafts up to the first that is not accepted."""
    return 1 + is_accepted_BK.long().cumprod(dim=1).sum(dim=1)


def cut_at_end(token_BW: torch.Tensor, num_kept_B: torch.Tensor, end_ids_E: torch.Tensor) -> torch.Tensor:
    """Kept tokens of each row when nothing behind the first end token survives."""
    is_end_BW = (token_BW[..., None] == end_ids_E).any(dim=-1)
    # Places up to and with the first end token: those before which no end token stands.
    num_to_end_B = 1 + (~is_end_BW[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    return torch.minimum(num_kept_B, num_to_end_B)
