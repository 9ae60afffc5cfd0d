"""The decoding engine: one loop for all rows, whatever their prompts, windows, thresholds and budgets.

A step: the scheduler names the rows of a group -> the strategy lays out each row's query tokens -> one forward over the ragged
cache -> tokens are picked and the strategy says how many are kept -> end tokens, stop strings and budgets -> results.

Shapes: B rows of a group, Q query tokens of a row, W picks of a row, D model width, V vocabulary, E end tokens.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workers.config import RowDecodingSettings
from workers.decoding.acceptance import ThresholdBatch, batch_thresholds, cut_at_end
from workers.decoding.cache import RaggedCache, probe_layers, run_backbone, slot_length
from workers.decoding.request import FinishReason, Request, Result, allowed_window, failed_result, find_error, row_seed
from workers.decoding.sampling import SamplingBatch, batch_sampling, pick_tokens
from workers.decoding.scheduler import Row, Scheduler
from workers.decoding.statistics import RunStatistics
from workers.decoding.strategies import mars
from workers.decoding.text import decode, find_stop
from workers.decoding.visibility import Visibility
from workers.models.loading import backbone_and_head

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _GroupSettings:
    """Settings of the rows of a group as tensors; they change only when the group does."""

    rows: list[Row]
    sampling: SamplingBatch
    thresholds: ThresholdBatch


class DecodingEngine:
    """Decodes requests with one model, up to `num_slots` at a time.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: for the text of answers and for stop strings.
        mask_token_id: the placeholder; never generated.
        end_ids: tokens that end an answer.
        block_size: B of the checkpoint, the window of rows that name none; 1 for a model that was not trained with placeholders.
        num_slots: rows decoded at the same time.
        max_length: prompt and answer tokens of a row; None means as many as the model has positions.
        cache: `ragged`, or `none` to recompute everything at each step.
        run_seed: rows without a seed get one from this and their id.

    Raises:
        InputError: `max_length` beyond the model's positions, a cache larger than the free memory, or an attention that the engine
            cannot mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mask_token_id: int,
        end_ids: Collection[int],
        block_size: int,
        num_slots: int,
        max_length: int | None,
        cache: Literal["ragged", "none"],
        run_seed: int = 0,
    ) -> None:
        assert not model.training
        self._backbone, self._head, self._logit_transform = backbone_and_head(model)
        self._tokenizer = tokenizer
        self._mask_token_id = mask_token_id
        self._end_ids = frozenset(end_ids)
        self._block_size = block_size
        self._run_seed = run_seed
        self._device = model.device
        self._vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.max_length = slot_length(max_length, model.config)
        self._visibility = Visibility(model.config, model.dtype)
        self._end_ids_E = torch.tensor(sorted(self._end_ids), dtype=torch.int64, device=self._device)
        self._cache = self._make_cache(num_slots) if cache == "ragged" else None
        self._scheduler = Scheduler(num_slots)
        self._group: _GroupSettings | None = None
        self._num_submitted = 0
        self._warned_windows: set[int] = set()
        self.statistics = RunStatistics()

    @property
    def has_work(self) -> bool:
        """Whether any submitted request is unfinished."""
        return self._scheduler.has_work

    def generate(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results in order of finishing. Requests are taken as slots become free; a bad one gives a result with an error."""
        for _, result in self._run(requests):
            yield result

    def generate_all(self, requests: Iterable[Request]) -> list[Result]:
        """Results in the order of the requests."""
        return [result for _, result in sorted(self._run(requests), key=lambda finished: finished[0])]

    def submit(self, request: Request) -> tuple[int, Result | None]:
        """Takes one request into the queue.

        Returns:
            Its ticket, by which `step` names it, and at once a result if the request cannot be done.
        """
        ticket = self._num_submitted
        self._num_submitted += 1
        error = find_error(
            request, vocab_size=self._vocab_size, mask_token_id=self._mask_token_id, max_length=self.max_length
        )
        if error is not None:
            self.statistics.num_errors += 1
            return ticket, failed_result(request, error)
        num_prompt = len(request.prompt_ids)
        row = Row(
            request,
            ticket,
            seed=row_seed(request, self._run_seed),
            window=self._window(request.decoding),
            max_tokens=min(num_prompt + request.decoding.max_new_tokens, self.max_length),
            token_ids=list(request.prompt_ids),
        )
        self._scheduler.submit(row)
        return ticket, None

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Result]]:
        """One forward of one group of rows; tickets and results of the rows that it finished."""
        rows, moves = self._scheduler.next_group()
        assert rows, "no request to decode"
        if self._cache is not None:
            for move in moves:
                self._cache.move(move.source, move.target, move.num_cached)
        queries = [mars.lay_out(row, self._mask_token_id) for row in rows]
        plan_BC, num_lanes = self._plan(rows, queries)
        hidden_BWD, num_picks_B, position_B = self._forward(rows, queries, plan_BC, num_lanes)
        logits_BWV = self._logit_transform(self._head(hidden_BWD)).float()
        logits_BWV[..., self._mask_token_id] = -torch.inf
        group = self._group_settings(rows)
        token_BW = pick_tokens(logits_BWV, position_B, group.sampling)
        num_kept_B = mars.keep(logits_BWV, token_BW, num_picks_B, group.thresholds)
        num_kept_B = cut_at_end(token_BW, num_kept_B, self._end_ids_E)
        picked = torch.cat([num_kept_B[:, None], token_BW], dim=1).tolist()  # host sync: the only one of a step
        kept = [tokens[1 : 1 + tokens[0]] for tokens in picked]
        return self._commit(rows, queries, kept, num_cells=len(rows) * num_lanes)

    def _run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Submits requests as there is room and steps until all are done; yields (place in `requests`, result)."""
        assert not self.has_work, "another run of this engine is not finished"
        first_ticket = self._num_submitted
        source = iter(requests)
        is_open = True
        try:
            while is_open or self.has_work:
                while is_open and self._scheduler.num_waiting < self._scheduler.num_slots:
                    request = next(source, None)
                    if request is None:
                        is_open = False
                        break
                    ticket, result = self.submit(request)
                    if result is not None:
                        yield ticket - first_ticket, result
                if self.has_work:
                    for ticket, result in self.step():
                        yield ticket - first_ticket, result
        finally:
            # A caller that stops reading leaves nothing behind in the slots.
            self._scheduler.clear()

    def _plan(self, rows: list[Row], queries: list[mars.RowQuery]) -> tuple[Tensor, int]:
        """Everything that the device must know of a step, in one transfer: five numbers of each row, then its Q query tokens."""
        num_lanes = max(len(query.token_ids) for query in queries)
        plan = [
            [
                row.slot,
                row.num_cached,
                query.num_real,
                len(query.token_ids),
                row.num_cached + query.num_real - row.num_prompt,
                *query.token_ids,
                *[0] * (num_lanes - len(query.token_ids)),
            ]
            for row, query in zip(rows, queries, strict=True)
        ]
        return torch.tensor(plan, dtype=torch.int64).to(self._device, non_blocking=True), num_lanes

    def _forward(
        self, rows: list[Row], queries: list[mars.RowQuery], plan_BC: Tensor, num_lanes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the model without its head.

        Returns:
            Hidden states that predict (B, W, D), picks of each row (B), and the first pick's position in the response (B).
        """
        slot_B, start_B, num_real_B, num_query_B, position_B = plan_BC[:, :5].unbind(dim=1)
        lane_Q = torch.arange(num_lanes, device=self._device)
        is_query_BQ = lane_Q < num_query_B[:, None]
        # Padding stands at position 0, where it sees one token; nobody sees padding.
        place_BQ = torch.where(is_query_BQ, start_B[:, None] + lane_Q, 0)
        is_new = rows[0].num_cached == 0
        num_read = max(row.num_cached + len(query.token_ids) for row, query in zip(rows, queries, strict=True))
        if self._cache is not None:
            write_BQ = place_BQ.where(is_query_BQ, self._cache.trash_place)
            self._cache.prepare(slot_B, write_BQ, None if is_new else num_read)
        mask = self._visibility.masks(place_BQ, num_read)
        hidden_BQD = run_backbone(self._backbone, plan_BC[:, 5:], place_BQ, mask, self._cache)
        num_picks = max(query.num_picks for query in queries)
        lane_BW = num_real_B[:, None] - 1 + torch.arange(num_picks, device=self._device)
        lane_BW = lane_BW.minimum(num_query_B[:, None] - 1)
        row_B1 = torch.arange(len(rows), device=self._device)[:, None]
        return hidden_BQD[row_B1, lane_BW], num_query_B - num_real_B + 1, position_B

    def _commit(
        self, rows: list[Row], queries: list[mars.RowQuery], kept: list[list[int]], num_cells: int
    ) -> list[tuple[int, Result]]:
        """Appends the kept tokens to their rows; ends the rows that are done."""
        finished = []
        num_kept = []
        for row, query, tokens in zip(rows, queries, kept, strict=True):
            num_before = len(row.token_ids)
            row.token_ids += tokens
            row.num_forwards += 1
            row.num_query_tokens += len(query.token_ids)
            if self._cache is not None:
                row.num_cached += query.num_real
            ending = self._end(row, len(tokens))
            num_kept.append(len(row.token_ids) - num_before)
            row.kept_per_forward[num_kept[-1]] += 1
            if ending is not None:
                finished.append((row.ticket, _result(row, *ending)))
                self._scheduler.release(row)
        self.statistics.count_forward(num_kept, sum(len(query.token_ids) for query in queries), num_cells)
        self.statistics.num_rows += len(finished)
        return finished

    def _end(self, row: Row, num_new: int) -> tuple[str, FinishReason] | None:
        """Text and finish reason of a row that has reached an end token, a stop string or its budget; None while it goes on.

        Tokens behind the one that completes a stop string are taken off the row.
        """
        has_end = row.token_ids[-1] in self._end_ids
        stop = row.request.decoding.stop
        if not (has_end or row.num_left == 0 or stop):
            return None
        answer = row.token_ids[row.num_prompt :]
        # The end token is no text; a stop string before it comes first.
        text_ids = answer[:-1] if has_end else answer
        if stop:
            match = find_stop(self._tokenizer, text_ids, num_new - has_end, stop)
            if match is not None:
                del row.token_ids[row.num_prompt + match.num_tokens :]
                return match.text, "stop"
        if has_end or row.num_left == 0:
            return decode(self._tokenizer, text_ids), "stop" if has_end else "length"
        return None

    def _group_settings(self, rows: list[Row]) -> _GroupSettings:
        """The settings of the rows as tensors, kept while the group stays the same."""
        if self._group is None or self._group.rows != rows:
            settings = [row.request.decoding for row in rows]
            sampling = batch_sampling(settings, [row.seed for row in rows], self._vocab_size, self._device)
            self._group = _GroupSettings(list(rows), sampling, batch_thresholds(settings, self._device))
        return self._group

    def _window(self, decoding: RowDecodingSettings) -> int:
        window = allowed_window(decoding, self._block_size)
        if window > self._block_size and window not in self._warned_windows:
            self._warned_windows.add(window)
            logger.warning(
                "window %d is larger than the block size %d that the model was trained with", window, self._block_size
            )
        return window

    @torch.inference_mode()
    def _make_cache(self, num_slots: int) -> RaggedCache:
        mask = self._visibility.masks(torch.zeros((1, 1), dtype=torch.int64, device=self._device), 1)
        return RaggedCache(probe_layers(self._backbone, mask, self._device), num_slots, self.max_length)


def _result(row: Row, text: str, finish_reason: FinishReason) -> Result:
    return Result(
        id=row.request.id,
        token_ids=tuple(row.token_ids[row.num_prompt :]),
        text=text,
        finish_reason=finish_reason,
        num_prompt_tokens=row.num_prompt,
        num_forwards=row.num_forwards,
        num_query_tokens=row.num_query_tokens,
        kept_per_forward=row.kept_per_forward,
    )
