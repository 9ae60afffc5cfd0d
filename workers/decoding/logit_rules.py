"""What changes the logits of a row before a token is chosen: tokens that may not come, and tokens that have come already.

Shapes: B rows, W picks of a row, P rows with a repetition penalty, V vocabulary, F forbidden tokens of all rows, E end tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.decoding.row import Row


class LogitRules:
    """The rules of a group of rows.

    Args:
        rows: the group.
        mask_token_id: the placeholder, which nobody may say.
        end_ids: tokens that end an answer; they may not come before `min_new_tokens`.
        vocab_size: V.
        device: of the logits.
    """

    def __init__(
        self, rows: Sequence[Row], *, mask_token_id: int, end_ids: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        settings = [row.request.decoding for row in rows]
        self._rows, self._vocab_size, self._mask_token_id = rows, vocab_size, mask_token_id

        def on_device(numbers: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        forbidden = [(place, token) for place, row in enumerate(settings) for token in row.forbidden_ids]
        self._forbidden = (
            (on_device([p for p, _ in forbidden]), on_device([t for _, t in forbidden])) if forbidden else None
        )
        self._end_ids_E = on_device(end_ids)
        has_minimum = any(row.min_new_tokens for row in settings)
        self._min_new_B = on_device([row.min_new_tokens for row in settings]) if has_minimum else None
        self._places = [place for place, row in enumerate(settings) if row.repetition_penalty != 1]
        self._places_P = on_device(self._places)
        penalties = [[settings[place].repetition_penalty] for place in self._places]
        self._penalty_P1 = on_device(penalties, torch.float32)

    @property
    def has_penalties(self) -> bool:
        """Whether any row's logits depend on the tokens before."""
        return bool(self._places)

    def forbid(self, logits_BWV: Tensor, position_B: Tensor) -> None:
        """Sets what may not come to -inf, in place.

        Args:
            logits_BWV: of neighbouring positions.
            position_B: of the first of them in the answer.
        """
        logits_BWV[..., self._mask_token_id] = -torch.inf
        if self._forbidden is not None:
            place_F, token_F = self._forbidden
            logits_BWV[place_F, :, token_F] = -torch.inf
        if self._min_new_B is not None:
            lane_W = torch.arange(logits_BWV.shape[1], device=logits_BWV.device)
            is_early_BW = position_B[:, None] + lane_W < self._min_new_B[:, None]
            ends_BWE = logits_BWV[..., self._end_ids_E]
            logits_BWV[..., self._end_ids_E] = ends_BWE.masked_fill(is_early_BW[..., None], -torch.inf)

    def seen(self) -> Tensor:
        """Which tokens stand in prompt and answer of the rows with a penalty (P, V)."""
        seen_PV = torch.zeros((len(self._places), self._vocab_size), dtype=torch.bool, device=self._places_P.device)
        for number, place in enumerate(self._places):
            seen_PV[number, self._rows[place].token_ids] = True
        return seen_PV

    def see(self, seen_PV: Tensor, token_B: Tensor, is_said_B: Tensor | None = None) -> None:
        """Adds a token of each row, or only of some rows, to what has been seen; in place."""
        token_P1 = token_B[self._places_P, None]
        if is_said_B is None:
            seen_PV.scatter_(1, token_P1, True)
        else:
            is_seen_P1 = seen_PV.gather(1, token_P1) | is_said_B[self._places_P, None]
            seen_PV.scatter_(1, token_P1, is_seen_P1)

    def penalise(self, logits_BV: Tensor, seen_PV: Tensor) -> None:
        """Divides positive logits of seen tokens by the penalty and multiplies negative ones by it, in place."""
        logits_PV = logits_BV[self._places_P]
        punished_PV = torch.where(logits_PV > 0, logits_PV / self._penalty_P1, logits_PV * self._penalty_P1)
        logits_BV[self._places_P] = torch.where(seen_PV, punished_PV, logits_PV)
