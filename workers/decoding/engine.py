"""The decoding engine: one loop for all rows, whatever their prompts, modes, windows, thresholds and budgets.

A step: the scheduler names the rows and how much of each runs -> the strategy lays out each row's query tokens -> one forward over
the slots of the cache -> tokens are picked, and how many are kept -> end tokens, stop strings and budgets -> results.
"""

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workers.config import RowDecodingSettings
from workers.decoding.cache import slot_length
from workers.decoding.decoder_model import DecoderModel
from workers.decoding.endings import end_of, up_to_end
from workers.decoding.picks import Picker, RowPicks
from workers.decoding.request import (
    Progress,
    Request,
    Result,
    failed_result,
    find_error,
    row_seed,
)
from workers.decoding.row import Row
from workers.decoding.scheduler import Scheduler, Turn
from workers.decoding.statistics import RunStatistics
from workers.decoding.step_groups import PlacedQuery
from workers.decoding.strategies.mars import RowQuery, lay_out
from workers.decoding.window_policy import WindowPolicy

_WIDEST_BRANCHED = 8


class DecodingEngine:
    """Decodes requests with one model, up to `num_slots` at a time.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: for the text of answers and for stop strings.
        mask_token_id: the placeholder; never generated.
        end_ids: tokens that end an answer.
        block_size: B of the checkpoint, the widest automatic window; 1 for a model that was not trained with placeholders.
        num_slots: rows decoded at the same time.
        max_length: prompt and answer tokens of a row; None means as many as the model has positions.
        cache: `ragged`; `block`, where rows wait for each other at the end of each `cache_block` tokens; or `none` to recompute
            everything at each step.
        cache_block: of the block cache.
        prefill_chunk: prompt tokens of a step.
        run_seed: rows without a seed get one from this and their id.

    Raises:
        InputError: `max_length` beyond the model's positions, a cache larger than the free memory, or an attention that the engine
            cannot do.
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
        cache: Literal["ragged", "block", "none"] = "ragged",
        cache_block: int = 32,
        prefill_chunk: int = 512,
        run_seed: int = 0,
    ) -> None:
        assert not model.training
        self._tokenizer = tokenizer
        self._mask_token_id = mask_token_id
        self._end_ids = frozenset(end_ids)
        self._block_size = block_size
        self._run_seed = run_seed
        self._cache_kind, self._cache_block = cache, cache_block
        self._widest_branched = max(block_size, _WIDEST_BRANCHED)
        self.max_length = slot_length(max_length, model.config)
        self._model = DecoderModel(
            model, num_slots=num_slots, max_length=self.max_length, num_spare=self._widest_branched**2
        )
        self._scheduler = Scheduler(
            num_slots,
            prefill_chunk=None if cache == "none" else prefill_chunk,
            cache_block=cache_block if cache == "block" else None,
            shares_prefixes=cache != "none",
        )
        self._picker: Picker | None = None
        self.statistics = RunStatistics()
        self._windows = WindowPolicy(
            block_size, self._model.measure, num_slots, lambda: self.statistics.engine_seconds_per_step
        )
        self._num_submitted = 0

    def check(self, model: PreTrainedModel) -> None:
        """Compares the engine's logits with those of the model as it is, while nothing runs.

        Raises:
            InputError: a model type that this engine decodes wrongly or not at all.
        """
        assert not self.has_work
        self._model.check(model)

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
        """Takes one request into the queue; between steps, from the thread that steps.

        Returns:
            Its ticket, by which `step` names it, and at once a result if the request cannot be done.
        """
        ticket = self._num_submitted
        self._num_submitted += 1
        error = find_error(
            request,
            vocab_size=self._model.vocab_size,
            mask_token_id=self._mask_token_id,
            end_ids=self._end_ids,
            max_length=self.max_length,
            widest_branched=self._widest_branched,
        )
        if error is not None:
            self.statistics.num_errors += 1
            return ticket, failed_result(request, error)
        num_prompt = len(request.prompt_ids)
        row = Row(
            request,
            ticket,
            seed=row_seed(request, self._run_seed),
            window=self._windows.window_of(request.decoding),
            max_tokens=min(num_prompt + request.decoding.max_new_tokens, self.max_length),
            token_ids=list(request.prompt_ids),
        )
        self._scheduler.submit(row)
        return ticket, None

    def cancel(self, ticket: int) -> bool:
        """Forgets a request; False if it is finished or unknown. Its slot is free for the next step."""
        return self._scheduler.cancel(ticket) is not None

    def set_threshold(self, ticket: int, threshold: float) -> bool:
        """Changes tau of a request in tau mode from the next step on; False if it is finished, unknown or in another mode."""
        row = self._scheduler.find(ticket)
        if row is None or row.request.decoding.mode != "tau":
            return False
        changed = RowDecodingSettings.model_validate(row.request.decoding.model_dump() | {"threshold": threshold})
        row.request = replace(row.request, decoding=changed)
        row.window = self._windows.window_of(changed)
        self._picker = None
        return True

    def clear(self) -> None:
        """Forgets all requests."""
        self._scheduler.clear()

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One forward of the model; what each row that got tokens has got."""
        began, seconds_before = time.perf_counter(), self._model.seconds
        turns, copies = self._scheduler.next_turns()
        assert turns, "no request to decode"
        self._model.copy_prefixes(copies)
        queries = [
            lay_out(turn, self._mask_token_id, window=choice.window, has_branches=choice.has_branches)
            for turn, choice in zip(turns, self._windows.choose(turns), strict=True)
        ]
        step = self._model.pack(
            [PlacedQuery(turn.row.slot, turn.row.num_cached, query) for turn, query in zip(turns, queries, strict=True)]
        )
        picking = [place for place, turn in enumerate(turns) if turn.picks]
        # All that goes to the device goes before the forward, which a GPU then runs while the host waits only once.
        plan = None
        if picking:
            picker = self._picker_for([turns[place].row for place in picking])
            plan = picker.plan([queries[place] for place in picking], step.first_of(picking))
        hidden_ND = self._model.forward(step)
        picks: list[RowPicks | None] = [None] * len(turns)
        if plan is not None:
            for place, row_picks in zip(picking, picker.pick(self._model, plan, hidden_ND), strict=True):
                picks[place] = row_picks
        counts = self.statistics
        counts.num_model_calls += 1
        counts.num_slot_steps += self._scheduler.num_slots
        counts.num_slots_in_use += self._scheduler.num_running
        progress = [
            each
            for turn, query, row_picks in zip(turns, queries, picks, strict=True)
            if (each := self._commit(turn, query, row_picks)) is not None
        ]
        counts.model_seconds += self._model.seconds - seconds_before
        counts.engine_seconds += time.perf_counter() - began - (self._model.seconds - seconds_before)
        return progress

    def _run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Submits requests as there is room and steps until all are done; yields (place in `requests`, result).

        Raises:
            RuntimeError: somebody else's requests are in the engine.
        """
        if self.has_work:
            raise RuntimeError("the engine has unfinished requests; use submit and step, or AsyncEngine, to mix them")
        places: dict[int, int] = {}
        source = enumerate(requests)
        is_open = True
        try:
            while is_open or places:
                while is_open and self._scheduler.num_waiting < self._scheduler.num_slots:
                    place, request = next(source, (0, None))
                    if request is None:
                        is_open = False
                        break
                    ticket, result = self.submit(request)
                    if result is None:
                        places[ticket] = place
                    else:
                        yield place, result
                if places:
                    for progress in self.step():
                        if progress.result is not None:
                            yield places.pop(progress.ticket), progress.result
        finally:
            # A caller that stops reading leaves nothing behind in the slots.
            for ticket in places:
                self.cancel(ticket)

    def _commit(self, turn: Turn, query: RowQuery, picks: RowPicks | None) -> Progress | None:
        """Gives a row what the step brought it, and ends the row when that is all."""
        row = turn.row
        row.num_query_tokens += len(query.token_ids)
        self.statistics.num_query_tokens += len(query.token_ids)
        self._advance_cache(row, query, 0 if picks is None else picks.num_accepted)
        if picks is None:
            return None
        self._windows.observe(turn, query, picks)
        tokens = up_to_end(picks.token_ids, self._end_ids)
        num_before = len(row.token_ids)
        row.token_ids += tokens
        row.logprobs += picks.logprobs[: len(tokens)]
        row.drafts = picks.drafts if row.request.decoding.mode == "verified" else []
        row.num_forwards += 1
        result = end_of(row, len(tokens), self._end_ids, self._tokenizer)
        num_kept = len(row.token_ids) - num_before
        row.kept_per_forward[num_kept] += 1
        self.statistics.count_kept(num_kept)
        if result is not None:
            self.statistics.num_rows += 1
            self._scheduler.release(row)
        return Progress(row.ticket, tuple(tokens[:num_kept]), result)

    def _advance_cache(self, row: Row, query: RowQuery, num_accepted: int) -> None:
        """What of the step's keys and values counts from now on; the next step overwrites the rest."""
        num_certain = query.num_real - query.num_drafts
        if self._cache_kind == "ragged":
            row.num_cached += num_certain + num_accepted
        elif self._cache_kind == "block" and (row.num_cached < row.num_prompt or num_certain == self._cache_block):
            row.num_cached += num_certain

    def _picker_for(self, rows: list[Row]) -> Picker:
        """The picker of a group of rows, kept while the group stays the same."""
        if self._picker is None or self._picker.rows != rows:
            self._picker = Picker(
                rows,
                mask_token_id=self._mask_token_id,
                end_ids=self._end_ids,
                vocab_size=self._model.vocab_size,
                device=self._model.device,
            )
        return self._picker
