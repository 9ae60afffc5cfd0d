"""What the logits of a step say: the tokens that are certain, the drafts behind them, and how many of each are kept.

Two kinds of picks. Clean ones stand behind real tokens only: at a row's last token and at each of its drafts; they are the tokens
of one-token decoding, as far as the drafts before them are right. Proposals stand at placeholders, behind the last accepted draft:
tau mode keeps some of them by threshold, verified mode drafts with them in the next step.

Shapes: N query tokens, B rows that pick, M most drafts of a row, C = M + 1 clean picks, K most proposals of a row, W any number of
picks, D model width, V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.decoding.acceptance import accepts_by_score, batch_thresholds, count_accepted, count_matching
from workers.decoding.decoder_model import DecoderModel
from workers.decoding.logit_rules import LogitRules
from workers.decoding.row import Row
from workers.decoding.sampling import batch_sampling, log_probabilities, pick_tokens
from workers.decoding.strategies.mars import RowQuery


@dataclass(frozen=True)
class RowPicks:
    """What a row gets from a step.

    Attributes:
        token_ids: kept tokens, at least one.
        logprobs: of the kept tokens, when the row asks for them.
        num_accepted: drafts among the kept tokens that were in the forward as real tokens.
        drafts: proposals for the next step.
    """

    token_ids: list[int]
    logprobs: list[float]
    num_accepted: int
    drafts: list[int]


@dataclass(frozen=True, eq=False)
class _Picks:
    token_BW: Tensor
    logits_BWV: Tensor
    logprob_BW: Tensor | None


@dataclass(frozen=True, eq=False)
class PickPlan:
    """Where the picks of a step are read.

    Attributes:
        queries: of the rows.
        position_B: of the first pick in the answer.
        last_B: the place of each row's last real token among the N.
        num_drafts_B, draft_BM: drafts, with -1 behind those of a row.
        has_branches_B, length_B: of the runs of placeholders.
    """

    queries: Sequence[RowQuery]
    position_B: Tensor
    last_B: Tensor
    num_drafts_B: Tensor
    has_branches_B: Tensor
    length_B: Tensor
    draft_BM: Tensor

    def clean_lanes(self) -> Tensor:
        """Places (B, C) among the N: of the last token and of each draft; a row with fewer repeats its last one."""
        lane_C = torch.arange(self.draft_BM.shape[1] + 1, device=self.last_B.device)
        return (self.last_B - self.num_drafts_B)[:, None] + lane_C.minimum(self.num_drafts_B[:, None])

    def proposed_lanes(self, num_accepted_B: Tensor, num_proposals: int, last_lane: int) -> Tensor:
        """Places (B, K) among the N: of the placeholders behind the last accepted draft; a row with fewer repeats its last one."""
        run_B = num_accepted_B * self.has_branches_B
        lane_K = torch.arange(num_proposals, device=self.last_B.device).minimum(self.length_B[:, None] - 1)
        # A row without placeholders may point behind the last of all tokens; its picks are not read.
        return ((self.last_B + 1 + run_B * self.length_B)[:, None] + lane_K).clamp(max=last_lane)


class Picker:
    """Picks for one group of rows; its settings are on the device, so it is made anew only when the group changes.

    Args:
        rows: the group.
        mask_token_id: the placeholder, which nobody may say.
        end_ids: tokens that end an answer.
        vocab_size: V.
        device: of the model.
    """

    def __init__(
        self, rows: list[Row], *, mask_token_id: int, end_ids: Collection[int], vocab_size: int, device: torch.device
    ) -> None:
        self.rows = rows
        settings = [row.request.decoding for row in rows]
        self._device = device
        self._rules = LogitRules(
            rows, mask_token_id=mask_token_id, end_ids=sorted(end_ids), vocab_size=vocab_size, device=device
        )
        self._sampling = batch_sampling(settings, [row.seed for row in rows], vocab_size, device)
        self._thresholds = batch_thresholds(settings, device) if any(row.mode == "tau" for row in settings) else None
        self._has_logprobs = any(row.logprobs for row in settings)

    def plan(self, queries: Sequence[RowQuery], first_B: Tensor) -> PickPlan:
        """Where to read in a step, before its forward; one transfer to the device.

        Args:
            queries: of the rows.
            first_B: where each row's query begins among the N.
        """
        most_drafts = max(query.num_drafts for query in queries)
        numbers = []
        for row, query in zip(self.rows, queries, strict=True):
            drafts = query.token_ids[query.num_real - query.num_drafts : query.num_real]
            position = len(row.token_ids) - row.num_prompt
            numbers += [position, query.num_real, query.num_drafts, query.has_branches, query.run_length]
            numbers += drafts + [-1] * (most_drafts - len(drafts))
        numbers_BC = torch.tensor(numbers, dtype=torch.int64).to(self._device, non_blocking=True).view(len(queries), -1)
        position_B, num_real_B, num_drafts_B, has_branches_B, length_B = numbers_BC[:, :5].unbind(dim=1)
        return PickPlan(
            queries=queries,
            position_B=position_B,
            last_B=first_B + num_real_B - 1,
            num_drafts_B=num_drafts_B,
            has_branches_B=has_branches_B,
            length_B=length_B,
            draft_BM=numbers_BC[:, 5:],
        )

    def pick(self, model: DecoderModel, plan: PickPlan, hidden_ND: Tensor) -> list[RowPicks]:
        """Picks for all rows at once.

        Args:
            model: for the logits.
            plan: of the step.
            hidden_ND: of the step.
        """
        num_clean, num_proposals = plan.draft_BM.shape[1] + 1, max(query.run_length for query in plan.queries)
        last_lane = len(hidden_ND) - 1
        clean_BC = plan.clean_lanes()
        if any(query.has_branches for query in plan.queries):
            clean, num_accepted_B = self._pick_clean(model.logits(hidden_ND[clean_BC]), plan)
            logits_BKV = model.logits(hidden_ND[plan.proposed_lanes(num_accepted_B, num_proposals, last_lane)])
        else:
            # One product with the head, whose weights are a good part of a small model, instead of two.
            lanes_BK = plan.proposed_lanes(plan.num_drafts_B, num_proposals, last_lane)
            logits = model.logits(hidden_ND[torch.cat([clean_BC, lanes_BK], dim=1)])
            logits_BCV, logits_BKV = logits.split([num_clean, num_proposals], dim=1)
            clean, num_accepted_B = self._pick_clean(logits_BCV, plan)
        said = (clean.token_BW, num_accepted_B + 1)
        proposed = self._choose(logits_BKV, plan.position_B + num_accepted_B + 1, said=said)
        num_kept_B = self._count_kept(proposed, plan.length_B)
        numbers = torch.cat([num_accepted_B[:, None], num_kept_B[:, None], clean.token_BW, proposed.token_BW], dim=1)
        sent = model.fetch(numbers)  # host sync: the only one of a step
        logprobs = self._logprobs(model, clean, proposed)
        return [
            _row_picks(query, numbers, values, num_clean)
            for query, numbers, values in zip(plan.queries, sent, logprobs, strict=True)
        ]

    def _pick_clean(self, logits_BCV: Tensor, plan: PickPlan) -> tuple[_Picks, Tensor]:
        """The tokens of one-token decoding, and how many drafts are the same."""
        clean = self._choose(logits_BCV, plan.position_B, given_BM=plan.draft_BM)
        if plan.draft_BM.shape[1] == 0:
            return clean, plan.num_drafts_B
        return clean, count_matching(plan.draft_BM, clean.token_BW, plan.num_drafts_B)

    def _choose(
        self,
        logits_BWV: Tensor,
        position_B: Tensor,
        *,
        given_BM: Tensor | None = None,
        said: tuple[Tensor, Tensor] | None = None,
    ) -> _Picks:
        """Tokens for neighbouring positions.

        With a repetition penalty they are chosen from left to right, each knowing the tokens before it: those of the row, the
        first tokens of `said` (tokens, how many), and inside the window `given_BM` or else the picks themselves.
        """
        if logits_BWV.shape[1] == 0:
            nothing_B0 = position_B.new_zeros((len(position_B), 0))
            return _Picks(nothing_B0, logits_BWV, nothing_B0.float() if self._has_logprobs else None)
        self._rules.forbid(logits_BWV, position_B)
        if self._rules.has_penalties:
            seen_PV = self._rules.seen()
            if said is not None:
                for place in range(said[0].shape[1]):
                    self._rules.see(seen_PV, said[0][:, place], said[1] > place)
            for lane in range(logits_BWV.shape[1]):
                self._rules.penalise(logits_BWV[:, lane], seen_PV)
                if given_BM is None:
                    token_BW = pick_tokens(logits_BWV[:, lane : lane + 1], position_B + lane, self._sampling)
                    self._rules.see(seen_PV, token_BW[:, 0])
                elif lane < given_BM.shape[1]:
                    self._rules.see(seen_PV, given_BM[:, lane].clamp(min=0), given_BM[:, lane] >= 0)
        token_BW = pick_tokens(logits_BWV, position_B, self._sampling)
        logprob_BW = log_probabilities(logits_BWV, token_BW, self._sampling) if self._has_logprobs else None
        return _Picks(token_BW, logits_BWV, logprob_BW)

    def _count_kept(self, proposed: _Picks, length_B: Tensor) -> Tensor:
        """Proposals of each row that its threshold keeps; none in the other modes."""
        if self._thresholds is None or proposed.token_BW.shape[1] == 0:
            return torch.zeros_like(length_B)
        is_accepted_BK = accepts_by_score(proposed.logits_BWV, proposed.token_BW, self._thresholds)
        return count_accepted(is_accepted_BK).minimum(length_B)

    def _logprobs(self, model: DecoderModel, clean: _Picks, proposed: _Picks) -> list[list[float]]:
        if clean.logprob_BW is None or proposed.logprob_BW is None:
            return [[]] * len(self.rows)
        # host sync: a second one, only when somebody asks for log-probabilities
        return model.fetch(torch.cat([clean.logprob_BW, proposed.logprob_BW], dim=1))


def _row_picks(query: RowQuery, numbers: list[int], logprobs: list[float], num_clean: int) -> RowPicks:
    """Cuts a row's picks out of the numbers that came from the device."""
    num_accepted, num_kept, *tokens = numbers
    end = num_clean + num_kept
    is_at_placeholders = query.has_branches or num_accepted == query.num_drafts
    return RowPicks(
        token_ids=tokens[: num_accepted + 1] + tokens[num_clean:end],
        logprobs=logprobs[: num_accepted + 1] + logprobs[num_clean:end],
        num_accepted=num_accepted,
        drafts=tokens[num_clean : num_clean + query.run_length] if is_at_placeholders else [],
    )
