"""How many of the picked tokens of a row are kept. All rows at once: a prefix of a cumulative product, never a loop.

Shapes: B rows, K drafts of a row, V vocabulary.
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
    scores = ["probability" if row.threshold is None else row.score for row in settings]
    return ThresholdBatch(
        threshold_B=torch.tensor(
            # What is not decoded by threshold accepts nothing by it.
            [1.0 if row.threshold is None else row.threshold for row in settings],
            dtype=torch.float32,
            device=device,
        ),
        is_margin_B=torch.tensor([score == "margin" for score in scores], device=device),
        is_entropy_B=torch.tensor([score == "entropy" for score in scores], device=device),
        scores=frozenset(scores),
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


def count_accepted(is_accepted_BK: torch.Tensor) -> torch.Tensor:
    """Drafts of each row up to the first that is not accepted."""
    return is_accepted_BK.long().cumprod(dim=1).sum(dim=1)


def count_matching(draft_BK: torch.Tensor, clean_BC: torch.Tensor, num_drafts_B: torch.Tensor) -> torch.Tensor:
    """Drafts of each row, out of its first `num_drafts_B`, up to the first that is not the token of one-token decoding.

    Draft k stands where clean pick k says what belongs there; there is one more clean pick than drafts.
    """
    lane_K = torch.arange(draft_BK.shape[1], device=draft_BK.device)
    is_right_BK = (draft_BK == clean_BC[:, : draft_BK.shape[1]]) & (lane_K < num_drafts_B[:, None])
    return count_accepted(is_right_BK)
