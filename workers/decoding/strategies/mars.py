"""MARS: what a row puts into a forward.

The query of a row is its tokens that have no keys yet, its drafts (verified mode), and placeholders behind them. The logits at the
last token and at each draft pick the tokens that one-token decoding would pick; placeholder j behind token t drafts the token at
t + j + 1 (arXiv 2604.07023). One-token decoding is the same without drafts and placeholders.

A row without branches has one run of placeholders, behind its last draft: a rejected draft leaves nothing for the next step. With
branches every point at which acceptance may end has a run of its own ("quadratic decoding", arXiv 2507.11851).
"""

from dataclasses import dataclass

from workers.decoding.scheduler import Turn


@dataclass(frozen=True)
class RowQuery:
    """Query tokens of one row: real tokens, of which the last `num_drafts` are drafts, and behind them `num_runs` runs of
    `run_length` placeholders each. `num_runs` is 1, or `num_drafts` + 1 with branches."""

    token_ids: list[int]
    num_real: int
    num_drafts: int = 0
    num_runs: int = 1
    run_length: int = 0

    @property
    def has_branches(self) -> bool:
        """Whether the placeholders stand behind every point of acceptance, and there is more than one."""
        return self.num_runs > 1


def lay_out(turn: Turn, mask_token_id: int, *, window: int, has_branches: bool) -> RowQuery:
    """The query of a row in a step. Nothing looks past the row's budget, or past the border of its cache block.

    Args:
        turn: the row, and how many of its pending tokens run.
        mask_token_id: the placeholder.
        window: W of this step: at most W - 1 drafts, and W - 1 placeholders behind each point of acceptance.
        has_branches: whether there is more than one such point.
    """
    row = turn.row
    pending = row.token_ids[row.num_cached : row.num_cached + turn.num_tokens]
    if not turn.picks:
        return RowQuery(pending, len(pending))
    if row.request.decoding.mode != "verified":
        run_length = min(window, row.room) - 1
        return RowQuery(pending + [mask_token_id] * run_length, len(pending), run_length=run_length)
    drafts = row.drafts[: min(window, row.room) - 1]
    # The step keeps at least one token, and the next one too: drafts for what is then left.
    run_length = max(min(window - 1, row.num_left - 2), 0)
    num_runs = len(drafts) + 1 if has_branches and run_length else 1
    return RowQuery(
        pending + drafts + [mask_token_id] * (num_runs * run_length),
        len(pending) + len(drafts),
        len(drafts),
        num_runs,
        run_length,
    )
