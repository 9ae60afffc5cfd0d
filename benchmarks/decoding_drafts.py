"""Drafts of an untrained model, replaced by ones that are right as often as one says.

A model with random weights drafts nothing useful, so its windows could be compared at no rate of acceptance but zero. Here every
draft is replaced, behind each commit, by the row's true next token with a given probability and by another token otherwise; as many
drafts stay as the model made, so steps cost what they cost. Whether the draft of a position is right is drawn from (seed, row,
position): the same for all windows, so that they are compared on the same luck. The true tokens are those of a one-token run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.decoding.engine import DecodingEngine
from workers.decoding.picks import RowPicks
from workers.decoding.request import Progress
from workers.decoding.scheduler import Turn
from workers.decoding.strategies.mars import RowQuery


@dataclass(frozen=True)
class Agreement:
    """The drafts of each row of a work, by their positions in its answer."""

    drafts: tuple[tuple[int, ...], ...]

    @classmethod
    def drawn(
        cls, answers: Sequence[tuple[int, ...]], probability: float, seed: int, mask_token_id: int
    ) -> "Agreement":
        """Each token of `answers` with this probability, else another one that is not the placeholder."""
        drafts = []
        for row, answer in enumerate(answers):
            is_right = np.random.default_rng([seed, row]).random(len(answer)) < probability
            others = [_other(token, mask_token_id) for token in answer]
            pairs = zip(is_right, answer, others, strict=True)
            drafts.append(tuple(token if right else other for right, token, other in pairs))
        return cls(tuple(drafts))


def _other(token: int, mask_token_id: int) -> int:
    return next(other for other in range(3) if other not in (token, mask_token_id))


class AgreeingEngine(DecodingEngine):
    """An engine whose drafts are those of its `agreement`; requests are named by the rows of that."""

    agreement: Agreement

    def _commit(self, turn: Turn, query: RowQuery, picks: RowPicks | None) -> Progress | None:
        progress = super()._commit(turn, query, picks)
        row = turn.row
        if row.drafts:
            assert isinstance(row.request.id, int)
            first = len(row.token_ids) - row.num_prompt
            replaced = self.agreement.drafts[row.request.id][first : first + len(row.drafts)]
            row.drafts = list(replaced)
        return progress
