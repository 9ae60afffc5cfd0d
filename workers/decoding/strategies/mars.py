"""MARS: what a row puts into a forward, and how many of the picks it keeps.

The query of a row is its tokens that have no keys yet, and W-1 placeholders behind them. The last token's logits give the first
pick, placeholder j gives pick j+1 (arXiv 2604.07023). One-token decoding is the same with W = 1.

Shapes: B rows, W picks of a row, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from workers.decoding.acceptance import ThresholdBatch, accepts_by_score, count_kept
from workers.decoding.scheduler import Row


@dataclass(frozen=True)
class RowQuery:
    """Query tokens of one row. The first `num_real` are tokens of the row, whose keys stay; picks are read at the last of them
    and at everything behind it."""

    token_ids: list[int]
    num_real: int

    @property
    def num_picks(self) -> int:
        """W: positions whose logits are read."""
        return len(self.token_ids) - self.num_real + 1


def lay_out(row: Row, mask_token_id: int) -> RowQuery:
    """The row's pending tokens and its placeholders. The window never looks past the row's budget."""
    pending = row.token_ids[row.num_cached :]
    window = min(row.window, row.num_left)
    return RowQuery(pending + [mask_token_id] * (window - 1), len(pending))


def keep(logits_BWV: Tensor, token_BW: Tensor, num_picks_B: Tensor, batch: ThresholdBatch) -> Tensor:
    """Kept picks of each row: the first, then left to right while the score passes the threshold, within the row's window."""
    num_rows, num_picks = token_BW.shape
    if num_picks == 1:
        return num_picks_B
    is_accepted_BK = accepts_by_score(logits_BWV[:, 1:], token_BW[:, 1:], batch)
    return count_kept(is_accepted_BK).minimum(num_picks_B)
